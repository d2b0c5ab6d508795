"""How fast this machine trains: updates against the plain eager fp32 path, rendering, and the whole loop."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unmoved
from unmoved import envs
from unmoved.agent import Agent
from unmoved.compile import Updater
from unmoved.config import Config, make_config
from unmoved.evaluate import TRAIN, env_kwargs, pick_device
from unmoved.log import Meter, console
from unmoved.methods import make_method
from unmoved.replay import Replay
from unmoved.train import Trainer, keep_memory, resolve

ON_GPU = ("drq/drq", "drq/ours", "drqv2/drqv2", "drqv2/ours", "dmgb/svea", "dmgb/ours")
ON_CPU = ("cpu/drq", "cpu/ours")  # the paper's batches take seconds per update there


@dataclass(frozen=True)
class BenchArgs:
    """Measure updates, rendering and the whole training loop on this machine."""

    recipes: tuple[str, ...] = ()
    """Such as drq/ours; by default the six of the paper on a GPU, the demo's on a CPU."""
    task: str = "walker_run"
    updates: int = 50
    """Timed updates per recipe, after a warm-up."""
    steps: int = 1_000
    """Agent steps of the whole loop; 0 leaves it out."""
    device: str = "auto"
    json: Path | None = None
    """Save the figures in this file."""


def bench(args: BenchArgs) -> dict[str, Any]:
    device = pick_device(args.device)
    gpu = device.type == "cuda"
    recipes = args.recipes or (ON_GPU if gpu else ON_CPU)
    versions = {"unmoved": unmoved.__version__, "torch": torch.__version__, "python": platform.python_version()}
    name = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    figures: dict[str, Any] = {"device": name, "versions": versions, "updates": {}, "render": {}, "end_to_end": {}}
    if not gpu:
        keep_memory()
    for recipe in recipes:
        preset, _, method = recipe.partition("/")
        config = make_config(args.task, preset=preset, method=method)
        with console.status(f"{recipe}: updates"):
            row = {
                "ms": time_updates(resolve(config, device), device, args.updates),
                "eager_fp32_ms": time_updates(replace(config, precision="fp32", compile=False), device, args.updates),
                "batch": config.batch_size,
            }
        if gpu:
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        figures["updates"][recipe] = row
        ratio = row["eager_fp32_ms"] / row["ms"]
        console.print(f"{recipe:<14} {row['ms']:8.2f} ms   eager fp32 {row['eager_fp32_ms']:8.2f} ms   {ratio:.1f} x")
    with console.status("rendering"):
        figures["render"] = time_render(args.task)
    for key, value in figures["render"].items():
        console.print(f"render {key:<22} {value:6.2f} ms")
    if args.steps:
        preset, _, method = recipes[0].partition("/")
        with console.status("the whole loop"):
            row = time_loop(make_config(args.task, preset=preset, method=method), device, args.steps)
        row["update_alone_per_s"] = 1e3 / figures["updates"][recipes[0]]["ms"]
        figures["end_to_end"][f"{preset}/{args.task}/{method}"] = row
        console.print("the whole loop: " + ", ".join(f"{k} {v:.0f}" for k, v in row.items()))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1))
        console.print(f"saved: {args.json}")
    return figures


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


def time_updates(config: Config, device: torch.device, n: int, action_dim: int = 6) -> float:
    """Sampling, augmentation, critic, actor and target steps, in the proportions of training."""
    shape = (3 * config.stack, config.image_size, config.image_size)
    agent = Agent(config, make_method(config), shape, action_dim, device)
    replay, rng = Replay(2_000, shape, action_dim, n_step=config.n_step, device=device), np.random.default_rng(0)
    frames = rng.integers(0, 256, (64, 3, *shape[1:]), dtype=np.uint8)
    replay.start(frames[0])
    for i in range(1_000):
        replay.add(rng.uniform(-1, 1, action_dim).astype(np.float32), float(rng.random()), False, frames[i % 64])
    updater = Updater(agent, replay, torch.Generator(device).manual_seed(0), Meter(config.batch_size, device))

    def work(i: int) -> None:
        updater(0.5, actor=i % config.actor_every == 0, target=i % config.target_every == 0)

    return milliseconds(work, n, device, warm_up=12 if updater.use_graphs else 3)


def time_render(task: str, n: int = 100) -> dict[str, float]:
    """One 84 x 84 image: dm_control's own way, the kept camera, and with a smaller shadow map."""
    cpu, out = torch.device("cpu"), {}
    for name, shadow_map in (("kept camera", None), ("shadow map 1024", 1024)):
        env = envs.make(task, shadow_map=shadow_map)
        env.reset()
        out[name] = milliseconds(lambda i, env=env: env.simulator.render(), n, cpu, 10)  # type: ignore[misc]
        physics = getattr(env.simulator, "physics", None)
        if physics is not None and shadow_map is None:
            out["Physics.render"] = milliseconds(lambda i, p=physics: p.render(84, 84, 0), n, cpu, 10)  # type: ignore[misc]
        env.close()
    return out


def time_loop(config: Config, device: torch.device, steps: int) -> dict[str, float]:
    """Agent steps per second of the environment alone and of training as a user runs it, evaluation left out."""
    with tempfile.TemporaryDirectory() as folder:
        total = config.random_steps + 2 * steps  # the first half of the updates warms up and compiles
        config = replace(config, runs=Path(folder), frames=total * config.action_repeat, log_every=steps,
                         checkpoint_every=0, device=str(device))  # fmt: skip
        trainer = Trainer(config)
        trainer.evaluate = lambda index: []  # type: ignore[method-assign]
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
    alone = milliseconds(lambda i: env.step(action), min(200, env.episode_steps - 11), torch.device("cpu"), 10)
    env.close()
    return {"agent_steps_per_s": steps / (clock[1] - clock[0]), "env_alone_per_s": 1e3 / alone}
