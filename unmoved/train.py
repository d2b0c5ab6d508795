"""Algorithm 1: act, store, sample, update, evaluate; and everything that makes a run continue exactly."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

import unmoved
from unmoved import checkpoint
from unmoved.agent import Agent, stream_seed
from unmoved.compile import Acting, Updater
from unmoved.config import Config, differences
from unmoved.envs import backgrounds, canonical
from unmoved.envs.worker import EnvProcess
from unmoved.errors import Diverged, UserError
from unmoved.evaluate import TRAIN, Evaluation, Evaluator, Player, env_kwargs, pick_device
from unmoved.log import Display, Meter, Rows, console, jsonable, write_video
from unmoved.losses import Method
from unmoved.measure import Recorder
from unmoved.methods import make_method
from unmoved.replay import Replay
from unmoved.track import Trackers


def resolve(config: Config, device: torch.device) -> Config:
    """Settle what depends on the machine, so that the run's record says what was done. A run stays on its kind of
    device: random streams of a CPU and of a GPU are not the same."""
    config = replace(
        config,
        device=device.type,
        task=canonical(config.task),
        background=backgrounds.canonical(config.background),
        eval_backgrounds=tuple(dict.fromkeys(map(backgrounds.canonical, config.eval_backgrounds))),
    )
    for name in (config.background, *config.eval_backgrounds):
        backgrounds.describe(name, config.task, config.videos, config.intensity)  # refuses what cannot be shown
    if config.precision == "auto":
        config = replace(config, precision="bf16" if device.type == "cuda" else "fp32")
    if config.compile and device.type == "cpu":
        config = replace(config, compile=False)  # compiled code on a CPU saves less than it costs to make
    return config


def keep_memory(keep: bool = True) -> None:
    """Have glibc keep freed memory. By default it returns each large tensor to the system and has it zeroed again for
    the next one, which takes longer than a small convolution."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(-3, 1 << 30 if keep else 1 << 17)  # M_MMAP_THRESHOLD: no mapping of its own for what is smaller
    mallopt(-1, (1 << 31) - 1 if keep else 1 << 17)  # M_TRIM_THRESHOLD: nor shrink the heap


class Trainer:
    """One run. `run()` is the whole story; the rest are its sentences."""

    def __init__(self, config: Config, method: Method | None = None) -> None:
        self.device = pick_device(config.device)
        config = resolve(config, self.device)  # refuses unknown names before anything is written
        if self.device.type == "cpu":
            keep_memory()
        method = method or make_method(config)
        method.check_whole()
        self.config, self.folder = config, config.folder
        check_folder(config, method)
        Trackers.check(config)
        self.env = EnvProcess(**env_kwargs(config, TRAIN, config.background))
        try:
            self._prepare(method)
        except BaseException:
            self.env.close()
            raise

    def _prepare(self, method: Method) -> None:
        config, env = self.config, self.env
        if config.keep_states and not env.state_size:
            raise UserError(f"{config.task} cannot give its simulator's state: run without --keep-states")
        self.agent = Agent(config, method, env.obs_shape, env.action_dim, self.device)
        self.replay = Replay(
            config.capacity,
            env.obs_shape,
            env.action_dim,
            stack=config.stack,
            n_step=config.n_step,
            discount=config.discount,
            episode_steps=env.episode_steps,
            state_size=env.state_size if config.keep_states else 0,
            device=self.device,
        )
        self.acting = Acting(self.agent, env.obs_shape)
        self.sampling = torch.Generator(self.device).manual_seed(stream_seed(config.seed, "sampling"))
        self.exploring = np.random.default_rng(stream_seed(config.seed, "exploring"))  # the first, uniform actions
        self.evaluators: dict[str, Evaluator] = {}  # by background
        self.player = Player(self.agent)
        self.pool = ThreadPoolExecutor(1)
        self.evaluation: Future[list[tuple[dict[str, Any], Evaluation]]] | None = None  # the one that is being played
        self.steps = self.frames = self.updates = 0
        self.evaluated = -1  # agent steps at the last evaluation
        self.seconds_before, self.clock = 0.0, time.monotonic()
        self.obs: NDArray[np.uint8] | None = None  # None between episodes
        self.episode_return, self.last_return = 0.0, float("nan")
        self.meter = Meter(config.batch_size, self.device)
        self.updater = Updater(self.agent, self.replay, self.sampling, self.meter)
        self.stop = False
        self.recorder: Recorder | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder)
        self.trackers = Trackers(config, self.folder)
        write_config(config, method, self.device)
        self.train_rows, self.eval_rows = (Rows(self.folder / f"{n}.jsonl") for n in ("train", "eval"))
        self.restore()
        if config.diagnostics:
            self.recorder = Recorder(self.agent, self.replay, self.folder, bool(env.state_size))
            self.recorder.resume(self.steps)

    # -------------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        config = self.config
        total, eval_steps = config.total_steps, max(1, config.eval_every // config.action_repeat)
        checkpoint_steps = max(1, config.checkpoint_every // config.action_repeat) if config.checkpoint_every else 0
        self.display = display = Display(f"{config.preset}/{config.method} {config.task}", config.frames, self.frames)
        handlers = self._catch_signals()
        try:
            while self.steps < total and not self.stop:
                if self.steps % eval_steps == 0 and self.steps != self.evaluated:
                    self.evaluate(self.steps // eval_steps)
                if self.evaluation is not None and self.evaluation.done():
                    self.finish_evaluation()
                if self.recorder is not None and self.recorder.due(self.steps):
                    self.diagnose(self.recorder)
                if self.obs is None:
                    self.begin_episode()
                action = self.choose_action()
                self.env.send_step(action)  # physics and rendering go on while the agent learns
                self.acting.refresh()
                for gate in self.updates_due():
                    self.update(gate)
                self.observe(action)
                if self.steps % config.log_every == 0:
                    self.log()
                    display.update(self.frames)
                if checkpoint_steps and self.steps % checkpoint_steps == 0 and self.steps < total:
                    self.save()
            if not self.stop:
                self.evaluate(-(-total // eval_steps))
                if self.recorder is not None:
                    self.diagnose(self.recorder, last=True)
            self.save()
            if self.stop:
                console.print(f"stopped at {self.frames:,} frames; the same command continues {self.folder}")
        finally:
            display.close()
            self.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def begin_episode(self) -> None:
        self.obs = self.env.reset()
        self.replay.start(self.obs[-3:], self._simulator_state())
        self.episode_return = 0.0

    def choose_action(self) -> NDArray[np.float32]:
        if self.steps < self.config.random_steps:
            return self.exploring.uniform(-1, 1, self.env.action_dim).astype(np.float32)
        assert self.obs is not None
        action = self.acting(self.obs, self.config.std(self.steps))
        if not np.isfinite(action).all():
            self.check_finite()  # says which batch it was
            raise Diverged(f"the policy's action is not finite at {self.frames:,} frames")
        return action

    def updates_due(self) -> list[int]:
        """The updates of this step, each with the count that gates actor and target: as in the references the agent
        step (which stands still during a burst), or the update where a step has several."""
        c = self.config
        if self.steps < c.random_steps or len(self.replay) == 0:
            return []
        burst = [self.steps] * c.burst if self.steps == c.random_steps else []
        if self.steps % c.update_every:
            return burst
        if c.updates_per_step == 1:
            return [*burst, self.steps // c.update_every]
        done = self.updates + len(burst)
        return [*burst, *range(done, done + c.updates_per_step)]

    def update(self, gate: int) -> None:
        c = self.config
        self.updater(c.std(self.steps), actor=gate % c.actor_every == 0, target=gate % c.target_every == 0)
        self.updates += 1

    def observe(self, action: NDArray[np.float32]) -> None:
        obs, reward, terminated, truncated, info = self.env.receive()
        self.replay.add(action, reward, terminated, obs[-3:], self._simulator_state())
        self.obs = obs
        self.steps += 1
        self.frames += info["frames"]
        self.episode_return += reward
        if terminated or truncated:
            self.last_return, self.obs = self.episode_return, None

    def _simulator_state(self) -> NDArray[np.float64] | None:
        return self.env.state() if self.config.keep_states else None

    # -------------------------------------------------------------------------------------------- records

    def counters(self) -> dict[str, Any]:
        return {"frames": self.frames, "steps": self.steps, "seconds": round(self.seconds(), 3)}

    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.clock

    def log(self) -> None:
        means = self.check_finite()
        row = self.counters() | {"updates": self.updates} | jsonable({"episode_return": self.last_return, **means})
        self.train_rows.write(row)
        self.trackers.add("train", {k: v for k, v in row.items() if k not in ("frames", "steps")}, self.frames)
        self.meter.clear()

    def check_finite(self) -> dict[str, float]:
        """The means since the last reading; a loss that is not finite ends the run."""
        offence = self.meter.offence()
        if offence is None:
            return self.meter.read()
        batch = self.replay.gather(offence)
        summary = {
            **self.counters(),
            "updates": self.updates,
            "metrics": jsonable(self.meter.read()),
            "replay_index": offence.tolist(),
            **{f"{name}_{what}": float(getattr(getattr(batch, name).double(), what)())
               for name in ("obs", "action", "reward", "discount", "next_obs") for what in ("min", "mean", "max")},
        }  # fmt: skip
        path = self.folder / "diverged.json"
        path.write_text(json.dumps(summary, indent=1))
        kept = checkpoint.listed(self.folder)
        last = f"the last good checkpoint is {kept[0]}" if kept else "there was no checkpoint yet"
        raise Diverged(f"a loss is not finite at {self.frames:,} frames; {last}, the batch is described in {path}")

    def evaluate(self, index: int) -> None:
        """Play the evaluation's episodes with the policy as it is now; on a GPU, while training goes on."""
        self.finish_evaluation()
        self.evaluated = self.steps
        self.player.take()
        # Not while a graph is being captured: two threads would be at the same memory pool.
        if self.updater.settled and self.acting.settled and self.steps < self.config.total_steps:
            self.evaluation = self.pool.submit(self.play, index, self.counters())
        else:
            self.record(self.play(index, self.counters()))

    def diagnose(self, recorder: Recorder, last: bool = False) -> None:
        row = recorder.record(self.counters(), last)
        self.trackers.add("diagnostics", {k: v for k, v in row.items() if k not in self.counters()}, self.frames)

    def play(self, index: int, counters: dict[str, Any]) -> list[tuple[dict[str, Any], Evaluation]]:
        """One row per background, of the same episodes."""
        c, played = self.config, []
        for background in c.eval_backgrounds:
            if background not in self.evaluators:
                workers = min(c.eval_workers or os.cpu_count() or 1, c.eval_episodes)
                self.evaluators[background] = Evaluator(c, workers, background=background)
            result = self.evaluators[background].run(self.player, c.eval_episodes, first=index * c.eval_episodes)
            played.append((counters | result.row(), result))
        return played

    def finish_evaluation(self) -> None:
        if self.evaluation is not None:
            evaluation, self.evaluation = self.evaluation, None
            self.record(evaluation.result())

    def record(self, played: list[tuple[dict[str, Any], Evaluation]]) -> None:
        for row, result in played:
            suffix = "" if row["background"] == "train" else f"_{row['background']}"
            self.eval_rows.write(row)
            self.trackers.add(f"eval{suffix}", {"return_mean": row["return_mean"]}, row["frames"])
            if self.config.video:
                write_video(self.folder / "video" / f"{row['frames']}{suffix}.mp4", result.frames)
            self.display.evaluated(row)

    # -------------------------------------------------------------------------------------------- keeping

    def save(self) -> None:
        self.finish_evaluation()  # its rows belong to the steps before
        self.check_finite()  # a bad state never replaces a good one
        if not all(bool(p.isfinite().all()) for p in self.agent.nets.parameters()):
            raise Diverged(f"a parameter is not finite at {self.frames:,} frames")
        snapshot = self.env.snapshot()
        parts = {
            "agent": {
                "agent": self.agent.state(),
                "acting": self.acting.state(),
                "obs_shape": list(self.env.obs_shape),
                "action_dim": self.env.action_dim,
                "steps": self.steps,
                "frames": self.frames,
                "updates": self.updates,
                "evaluated": self.evaluated,
                "seconds": self.seconds(),
                "episode_return": self.episode_return,
                "last_return": self.last_return,
                "between_episodes": self.obs is None,
                "sampling": self.sampling.get_state(),
                "exploring": json.dumps(self.exploring.bit_generator.state),
                "env": {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in snapshot.items()},
                "rows": {r.path.name: r.length for r in (self.train_rows, self.eval_rows)},
                "meter": self.meter.state(),
            },
            "replay": self.replay.state(),
        }  # fmt: skip
        checkpoint.save(self.folder, self.steps, parts)

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, or start: rows written after it are cut off."""
        parts = checkpoint.load(self.folder, ("agent", "replay"), console.print)
        if parts is None:
            for rows in (self.train_rows, self.eval_rows):
                rows.keep(0)
            return
        state = parts["agent"]
        checkpoint.set_aside(self.folder, state["steps"])
        self.agent.load_state(state["agent"])
        self.acting.load_state(state["acting"])
        self.replay.load_state(parts["replay"])
        self.steps, self.frames, self.updates = state["steps"], state["frames"], state["updates"]
        self.evaluated, self.seconds_before = state["evaluated"], state["seconds"]
        self.episode_return, self.last_return = state["episode_return"], state["last_return"]
        self.sampling.set_state(state["sampling"].cpu())
        self.exploring.bit_generator.state = json.loads(state["exploring"])
        obs = self.env.restore({k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in state["env"].items()})
        self.obs = None if state["between_episodes"] else obs
        for rows in (self.train_rows, self.eval_rows):
            rows.keep(state["rows"][rows.path.name])
        self.meter.load_state(state["meter"])
        if self.steps < self.config.total_steps:
            console.print(f"continuing {self.folder} at {self.frames:,} frames")

    def _catch_signals(self) -> dict[int, Any]:
        """Ctrl-C and SIGTERM end the run at the next step, with a checkpoint; a second Ctrl-C ends it at once, and so
        does the first while updates are being compiled: the compiler's processes get the signal too, and an update
        would wait for them for ever. Returns the handlers that were in place."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.stop or self.updater.warming_up:
                raise KeyboardInterrupt
            self.stop = True

        if threading.current_thread() is not threading.main_thread():
            return {}  # Python allows handlers in the main thread only: the caller's business
        return {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.env.close()
        for evaluator in self.evaluators.values():
            evaluator.close()
        self.trackers.close()
        self.lock.close()


def lock(folder: Path) -> IO[str]:
    """Two processes must not write one run. The lock goes with the process, however it ends."""
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"{folder} is being trained by another process") from None
    return file


def check_folder(config: Config, method: Method) -> None:
    """An existing run must be this one."""
    if not (config.folder / "config.json").is_file():
        return
    changed = differences(Config.load(config.folder), config)
    recipe = config.folder / "recipe.txt"
    if recipe.is_file() and recipe.read_text() != f"{method}\n":
        changed.append(f"recipe:\n{recipe.read_text()}->\n{method}")
    if changed:
        raise UserError(
            f"{config.folder} was begun with another configuration:\n  " + "\n  ".join(changed)
            + "\nContinue it with its own options, choose another --seed or --runs, or remove the folder."
        )  # fmt: skip


def write_config(config: Config, method: Method, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    machine = {"unmoved": unmoved.__version__, "torch": torch.__version__, "python": platform.python_version(),
               "device": name}  # fmt: skip
    path = config.folder / "config.json"
    path.with_suffix(".tmp").write_text(json.dumps(config.to_json(), indent=1))
    path.with_suffix(".tmp").replace(path)
    (config.folder / "machine.json").write_text(json.dumps(machine, indent=1))
    (config.folder / "recipe.txt").write_text(f"{method}\n")


def train(config: Config, method: Method | None = None) -> Path:
    """Train, or continue, the run of a configuration; returns its folder. `method`: a recipe of one's own, whose name
    in the configuration is then only a name."""
    trainer = Trainer(config, method)
    if trainer.steps >= config.total_steps and trainer.evaluated == trainer.steps:
        console.print(f"{trainer.folder} is complete: {trainer.frames:,} frames")
        trainer.close()
    else:
        trainer.run()
    return trainer.folder
