"""How fast this machine trains: updates against the plain eager fp32 path, how they grow, rendering, the whole loop."""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

import unmoved
from unmoved import envs
from unmoved.agent import Agent
from unmoved.compile import Updater
from unmoved.config import Config, make_config
from unmoved.errors import UserError
from unmoved.evaluate import TRAIN, env_kwargs, pick_device
from unmoved.log import Meter, console
from unmoved.methods import make_method
from unmoved.replay import Replay
from unmoved.train import Trainer, keep_memory, resolve

PAPER = ("drq/drq", "drq/ours", "drqv2/drqv2", "drqv2/ours", "dmgb/svea", "dmgb/ours")
REST = ("drq/sac", "drq/rad", "drq/rad_plus", "drq/drac", "drq/drq_kl_fixed", "drq/drq_kl", "drq/drq_tp")
ON_CPU = ("cpu/rad", "cpu/drq", "cpu/ours")  # the paper's batches take seconds per update there
RENDERED = ("walker_walk", "cartpole_swingup", "finger_spin", "reacher_easy", "ball_in_cup_catch")
ACTION_DIM = 6


@dataclass(frozen=True)
class BenchArgs:
    """Measure updates, rendering and the whole training loop on this machine."""

    recipes: tuple[str, ...] = ()
    """Such as drq/ours; `all`; by default the six of the paper on a GPU, the demo's on a CPU."""
    task: str = "walker_run"
    """Task of the whole loop."""
    updates: int = 50
    """Timed updates per recipe, after a warm-up."""
    growth: bool = True
    """Also measure how an update grows with batch, M, K and the replay."""
    steps: int = 1_000
    """Agent steps of the whole loop; 0 leaves it out."""
    device: str = "auto"
    json: Path | None = None
    """Save the figures in this file."""


def bench(args: BenchArgs) -> dict[str, Any]:
    device = pick_device(args.device)
    gpu = device.type == "cuda"
    chosen = PAPER + REST if args.recipes == ("all",) else args.recipes or (PAPER if gpu else ON_CPU)
    configs = {recipe: recipe_config(recipe) for recipe in chosen}  # refuses unknown names before anything is measured
    versions = {"unmoved": unmoved.__version__, "torch": torch.__version__, "python": platform.python_version()}
    name = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    figures: dict[str, Any] = {"device": name, "versions": versions}
    console.print(f"{name}, torch {torch.__version__}")

    def save() -> None:  # after every part: a long bench that is cut off leaves what it has
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(figures, indent=1) + "\n")

    figures["updates"] = {}
    for recipe, config in configs.items():
        with console.status(f"{recipe}: updates"):
            figures["updates"][recipe] = compare(config, device, args.updates)
        save()
    console.print(update_table(figures["updates"]))
    with console.status("rendering"):
        figures["render"] = {task: time_render(task) for task in RENDERED}
    save()
    console.print(render_table(figures["render"]))
    first = next(iter(configs))
    if args.steps:
        with console.status(f"the whole loop, {first} on {args.task}"):
            preset, method = first.split("/")
            row = time_loop(make_config(args.task, preset=preset, method=method), device, args.steps)
        row["update_alone_per_s"] = 1e3 / figures["updates"][first]["ms"]
        figures["end_to_end"] = {f"{preset}/{args.task}/{method}": row}
        save()
        console.print("the whole loop: " + ", ".join(f"{k} {v:.0f}" for k, v in row.items()))
    if args.growth:
        figures["growth"] = {}
        for part, values in growth(configs[first], device, figures["updates"][first]["ms"]).items():
            with console.status(f"{first}: {part}"):
                figures["growth"][part] = {key: measure() for key, measure in values.items()}
            save()
            console.print(f"{part}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in figures["growth"][part].items()))
    if args.json:
        console.print(f"saved: {args.json}")
    return figures


def recipe_config(recipe: str) -> Config:
    """Of the table that the issue of speed is measured by: no task's own batch size."""
    preset, _, method = recipe.partition("/")
    if not method:
        raise UserError(f"a recipe is a preset and a method, such as drq/ours, not '{recipe}'")
    config = make_config("cheetah_run", preset=preset, method=method)
    make_method(config)
    return config


# ------------------------------------------------------------------------------------------------ updates


def compare(config: Config, device: torch.device, n: int) -> dict[str, Any]:
    """One recipe, as this machine runs it and plainly: eager, fp32, images and memory as they come."""
    gpu = device.type == "cuda"
    plain = replace(config, precision="fp32", compile=False)
    keep_memory(False)
    slow = time_updates(plain, device, max(5, n // 5), plainly=True)
    keep_memory()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    row = {"ms": time_updates(resolve(config, device), device, n), "eager_fp32_ms": slow, "batch": config.batch_size}
    return row | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if gpu else {})


def time_updates(
    config: Config, device: torch.device, n: int, *, capacity: int = 2_000, fill: int = 1_000, plainly: bool = False
) -> float:
    """Sampling, augmentation, critic, actor and target steps, in the proportions of training: mean milliseconds."""
    agent = Agent(config, make_method(config), shape(config), ACTION_DIM, device)
    if plainly:
        agent.nets.encoder.channels_last = agent.nets.target.encoder.channels_last = False
    replay = filled(config, device, capacity, fill)
    updater = Updater(agent, replay, torch.Generator(device).manual_seed(0), Meter(config.batch_size, device))

    def work(i: int) -> None:
        updater(0.5, actor=i % config.actor_every == 0, target=i % config.target_every == 0)

    return milliseconds(work, n, device, warm_up=12 if updater.use_graphs else 3)


def shape(config: Config) -> tuple[int, int, int]:
    return 3 * config.stack, config.image_size, config.image_size


def filled(config: Config, device: torch.device, capacity: int, fill: int) -> Replay:
    replay = Replay(capacity, shape(config), ACTION_DIM, n_step=config.n_step, device=device)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (64, 3, *shape(config)[1:]), dtype=np.uint8)
    replay.start(frames[0])
    for i in range(fill):
        replay.add(rng.uniform(-1, 1, ACTION_DIM).astype(np.float32), float(rng.random()), False, frames[i % 64])
    return replay


def growth(config: Config, device: torch.device, known: float) -> dict[str, dict[str, Callable[[], float]]]:
    """What is measured, by what grows: updates, and sampling alone for the replay. known: an update as it is, in ms."""
    n = config.batch_size

    def update(**changes: Any) -> Callable[[], float]:
        return lambda: time_updates(resolve(replace(config, **changes), device), device, 10)

    def sampling(fill: int) -> Callable[[], float]:
        def measure() -> float:
            replay, generator = filled(config, device, 50_000, fill), torch.Generator(device)
            return milliseconds(lambda i: replay.sample(config.batch_size, generator), 50, device, warm_up=5)

        return measure

    return {
        "batch": {str(n // 4): update(batch_size=n // 4), str(n): lambda: known, str(4 * n): update(batch_size=4 * n)},
        "M": {"as it is": lambda: known, "4": update(M=4), "8": update(M=8)},
        "K": {"as it is": lambda: known, "4": update(K=4), "8": update(K=8)},
        "sampling, transitions held": {f"{n:,}": sampling(n) for n in (1_000, 10_000, 50_000)},
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[int], object], n: int, device: torch.device, warm_up: int = 0) -> float:
    """Mean time of work(i)."""
    for i in range(warm_up):
        work(i)
    wait(device)
    start = time.perf_counter()
    for i in range(n):
        work(i)
    wait(device)
    return (time.perf_counter() - start) / n * 1e3


def update_table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table("recipe", "batch", "ms per update", "plain eager fp32, ms", "times faster", "peak GiB")
    for recipe, r in rows.items():
        peak = f"{r['peak_gib']:.1f}" if "peak_gib" in r else "-"
        ratio = f"{r['eager_fp32_ms'] / r['ms']:.1f}"
        table.add_row(recipe, str(r["batch"]), f"{r['ms']:.2f}", f"{r['eager_fp32_ms']:.2f}", ratio, peak)
    return table


# ------------------------------------------------------------------------------------------------ rendering, the loop


def time_render(task: str, n: int = 60) -> dict[str, float]:
    """One 84 x 84 image, in ms: dm_control's own way, the kept camera, and with a smaller shadow map. In turns, so that
    other work on the machine slows all three alike."""
    cpu = torch.device("cpu")
    kept, small = (envs.make(task, shadow_map=size) for size in (None, 1024))
    plain = envs.make(task)
    for env in (kept, small, plain):
        env.reset()
    physics = getattr(plain.simulator, "physics")  # noqa: B009, not of every simulator
    ways: dict[str, Callable[[int], object]] = {
        "Physics.render": lambda i: physics.render(84, 84, 0),
        "kept camera": lambda i: kept.simulator.render(),
        "shadow map 1024": lambda i: small.simulator.render(),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(6):
        for name, way in ways.items():
            times[name].append(milliseconds(way, n // 6, cpu, warm_up=3 if turn == 0 else 1))
    for env in (kept, small, plain):
        env.close()
    return {name: float(np.median(t)) for name, t in times.items()}


def render_table(rows: dict[str, dict[str, float]]) -> Table:
    table = Table("rendering, ms", *next(iter(rows.values())))
    for task, times in rows.items():
        table.add_row(task, *(f"{t:.2f}" for t in times.values()))

    def gain(way: str) -> str:
        logs = [math.log(t["Physics.render"] / t[way]) for task, t in rows.items() if task != "ball_in_cup_catch"]
        return f"{math.exp(sum(logs) / len(logs)):.2f} x"

    table.add_row("geometric mean of the first four", *(gain(way) for way in next(iter(rows.values()))))
    return table


def time_loop(config: Config, device: torch.device, steps: int) -> dict[str, float]:
    """Agent steps per second of the environment alone and of training as a user runs it, evaluation left out."""
    with tempfile.TemporaryDirectory() as folder:
        total = config.random_steps + 2 * steps  # the first half of the updates warms up and compiles
        config = replace(config, runs=Path(folder), frames=total * config.action_repeat, log_every=steps,
                         checkpoint_every=0, device=str(device))  # fmt: skip
        trainer = Trainer(config)
        trainer.evaluate = lambda index: None  # type: ignore[method-assign]
        trainer.save = lambda: None  # type: ignore[method-assign]
        clock: list[float] = []
        observe = trainer.observe

        def timed(action: Any) -> None:
            observe(action)
            if trainer.steps in (config.random_steps + steps, total):
                wait(device)
                clock.append(time.perf_counter())

        trainer.observe = timed  # type: ignore[method-assign]
        trainer.run()
    env = envs.make(**env_kwargs(config, TRAIN))
    env.reset()
    action = env.action_space.sample()
    step = partial(env.step, action)
    alone = milliseconds(lambda i: step(), min(200, env.episode_steps - 11), torch.device("cpu"), 10)
    env.close()
    return {"agent_steps_per_s": steps / (clock[1] - clock[0]), "env_alone_per_s": 1e3 / alone}
