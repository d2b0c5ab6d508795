"""Where a list of runs is executed: this machine, a Ray cluster, or Slurm.

Every run is a process of its own, `unmoved train …`. Runs are idempotent: what is finished is skipped, what was
interrupted continues from its checkpoint. The places differ in how a process is started; `supervise` is the same.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from unmoved.config import Config, make_config
from unmoved.errors import UserError
from unmoved.experiments import Selection, runs_of
from unmoved.status import State, locked, look, newest_checkpoint, summary, table

HOPELESS = {2: "bad input", 3: "diverged"}  # exit codes of `unmoved train` that a second try would repeat


@dataclass(frozen=True)
class SweepArgs(Selection):
    """Train all runs of an experiment. Options of `unmoved train`, for every run, go after a lone --."""

    jobs: int | None = None
    """Runs at once. By default one per GPU (several on one GPU are slower in sum), or one per two cores without one."""
    retries: int = 2
    """How often a failed run is tried again without coming further; it continues from its checkpoint."""
    shard: str | None = None
    """i/n: only every n-th run, from the i-th on (1 to n). For other schedulers: one shard per job."""
    ray: str | None = None
    """Address of a Ray cluster, or local. --runs must lie on storage that all nodes share."""
    slurm: str | None = None
    """Slurm partition, or local to try it without Slurm. --runs must lie on storage that all nodes share."""
    gpus: float = 1.0
    """Ray and Slurm: GPUs per run; Ray takes fractions."""
    cpus: int = 4
    """Ray and Slurm: cores per run."""
    hours: float = 24.0
    """Slurm: time limit of a job. A run that needs more continues in the next one."""
    dry: bool = False
    """Print the commands alone."""


# ------------------------------------------------------------------------------------------------ one run


def command(config: Config) -> list[str]:
    """`unmoved train` with the options that make this configuration."""
    plain = make_config(config.task, preset=config.preset)
    words = [config.task, "--preset", config.preset]
    for f in dataclasses.fields(Config):
        value = getattr(config, f.name)
        if f.name in ("task", "preset") or value == getattr(plain, f.name):
            continue
        option = f.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            words += [f"--{option}", *map(str, value)]
        else:
            words += [f"--{option}", str(value)]
    return [sys.executable, "-m", "unmoved.cli", "train", *words]


def die_with_parent() -> None:
    """Linux: a run whose launcher is gone gets SIGTERM, and so ends with a checkpoint."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def begin(config: Config, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a run; what it says is appended to log.txt in its folder."""
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "failed.json").unlink(missing_ok=True)
    with (config.folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command(config),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            start_new_session=True,  # Ctrl-C is the launcher's: it ends its runs by SIGTERM, once
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )


def work(values: dict[str, Any], patience: float = 120.0) -> int:
    """A whole run on another node: its exit code. A run whose node was lost may still be saving: wait for its lock."""
    config = Config.from_json(values)
    until = time.monotonic() + patience
    while locked(config.folder) and time.monotonic() < until:
        time.sleep(0.5)
    return begin(config).wait()


def last_lines(folder: Path, n: int = 8) -> list[str]:
    path = folder / "log.txt"
    return path.read_text(errors="replace").splitlines()[-n:] if path.is_file() else []


def shard(configs: list[Config], text: str) -> list[Config]:
    """'2/3': the second, fifth, … run."""
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise UserError(f"--shard {text} is not i/n with i from 1 to n, such as 1/4")
    return configs[int(i) - 1 :: int(n)]


# ------------------------------------------------------------------------------------------------ places


class Place(Protocol):
    jobs: int  # at once

    def start(self, config: Config) -> Any: ...

    def code(self, handle: Any) -> int | None:
        """Exit code; None while it runs. Negative: killed, or lost with its node."""

    def stop(self, handle: Any) -> None:
        """Ask it to save and end."""

    def close(self) -> None: ...


@dataclass
class Here:
    """Processes on this machine, each with its share of the cores and, where there are several, one GPU."""

    jobs: int
    gpus: list[str]  # as CUDA_VISIBLE_DEVICES names them
    busy: dict[int, int] = field(default_factory=dict)  # process id -> slot

    def start(self, config: Config) -> subprocess.Popen[bytes]:
        slot = min(set(range(self.jobs)) - set(self.busy.values()))
        environment = {}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        threads = str(max(1, cores() // self.jobs))
        for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS"):  # PyTorch's and the software renderer's
            if name not in os.environ:
                environment[name] = threads
        process = begin(config, environment)
        self.busy[process.pid] = slot
        return process

    def code(self, handle: subprocess.Popen[bytes]) -> int | None:
        code = handle.poll()
        if code is not None:
            self.busy.pop(handle.pid, None)
        return code

    def stop(self, handle: subprocess.Popen[bytes]) -> None:
        handle.terminate()

    def close(self) -> None:
        pass


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gigabytes(config: Config) -> float:
    """Roughly: the replay's frames, and the networks, batches and libraries beside them."""
    replay = min(config.capacity, config.total_steps) * 3 * config.image_size**2
    return replay / 1e9 + (4.0 if config.preset != "cpu" else 1.5)


def this_machine(configs: list[Config], jobs: int | None) -> Here:
    import torch

    gpu = torch.cuda.is_available() and any(c.device != "cpu" for c in configs)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))) if gpu else []
    if gpu:
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        memory = min(device.total_memory for device in devices) / 1e9 * len(gpus)
    else:
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    fit = max(1, int(memory / max(map(gigabytes, configs))))
    wanted = jobs or (len(gpus) if gpu else max(1, cores() // 2))
    return Here(max(1, min(wanted, fit, len(configs))), gpus)


class OnRay:
    """Tasks of a Ray cluster, placed by cores and (fractions of) GPUs."""

    def __init__(self, address: str, jobs: int, cpus: int, gpus: float) -> None:
        if find_spec("ray") is None:
            raise UserError("--ray needs Ray: pip install 'unmoved[ray]'")
        import ray

        self.ray, self.jobs = ray, jobs
        if not ray.is_initialized():
            ray.init(None if address == "local" else address, log_to_driver=False)
        if gpus and not ray.cluster_resources().get("GPU"):
            gpus = 0  # a cluster of CPUs
        # A lost worker is our business: a new attempt continues from the checkpoint.
        self.task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(work)

    def start(self, config: Config) -> Any:
        return self.task.remote(config.to_json())

    def code(self, handle: Any) -> int | None:
        done, _ = self.ray.wait([handle], timeout=0)
        if not done:
            return None
        try:
            return int(self.ray.get(handle))
        except self.ray.exceptions.RayError:
            return -1

    def stop(self, handle: Any) -> None:
        self.ray.cancel(handle, force=True)  # its run dies with it, by SIGTERM

    def close(self) -> None:
        self.ray.shutdown()


class OnSlurm:
    """Jobs of Slurm, through submitit; its own logs are under --runs/slurm."""

    def __init__(self, partition: str, folder: Path, jobs: int, cpus: int, gpus: float, hours: float) -> None:
        if find_spec("submitit") is None:
            raise UserError("--slurm needs submitit: pip install 'unmoved[slurm]'")
        import submitit

        self.jobs = jobs
        local = partition == "local"
        self.executor = submitit.AutoExecutor(folder=folder / "slurm", cluster="local" if local else "slurm")
        self.executor.update_parameters(
            timeout_min=int(hours * 60), cpus_per_task=cpus, gpus_per_node=0 if local else max(1, round(gpus)),
            name="unmoved", **({} if local else {"slurm_partition": partition}),
        )  # fmt: skip

    def start(self, config: Config) -> Any:
        return self.executor.submit(work, config.to_json())

    def code(self, handle: Any) -> int | None:
        if not handle.done():
            return None
        error = handle.exception()
        return -1 if error is not None else int(handle.result())

    def stop(self, handle: Any) -> None:
        handle.cancel()

    def close(self) -> None:
        pass


def find_place(args: SweepArgs, configs: list[Config]) -> Place:
    if args.ray and args.slurm:
        raise UserError("--ray or --slurm, not both")
    if args.ray:
        return OnRay(args.ray, args.jobs or len(configs), args.cpus, args.gpus)
    if args.slurm:
        return OnSlurm(args.slurm, args.runs, args.jobs or len(configs), args.cpus, args.gpus, args.hours)
    return this_machine(configs, args.jobs)


# ------------------------------------------------------------------------------------------------ supervision


@dataclass
class Run:
    config: Config
    handle: Any = None
    attempts: int = 0
    fruitless: int = 0  # attempts since the last one that left a new checkpoint
    kept: int | None = None  # agent steps of the checkpoint that this attempt began with
    outcome: str = ""  # "", finished, failed, elsewhere, interrupted

    def state(self) -> State:
        return look(self.config.folder, self.config, running=self.handle is not None)


class Stopped(Exception):
    """SIGINT or SIGTERM reached the launcher."""


def supervise(runs: list[Run], place: Place, retries: int, poll: float = 1.0) -> None:
    """Start, watch, retry. Returns when nothing is left to do; every run then has an outcome."""
    from rich.console import Group
    from rich.live import Live

    from unmoved.log import console

    def stop(number: int, frame: Any) -> None:
        raise Stopped

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    states = {run.config.folder: run.state() for run in runs}

    def picture() -> Group:
        named = {str(folder): s for folder, s in states.items()}
        return Group(table(named, max(3, console.height - 4)), summary(named))

    try:
        with Live(picture(), console=console, auto_refresh=False, transient=True) as live:
            while not all(run.outcome for run in runs):
                for run in runs:
                    before = run.outcome
                    advance(run, runs, place, retries)
                    if run.handle is not None or run.outcome != before:
                        states[run.config.folder] = run.state()
                if console.is_terminal:
                    live.update(picture(), refresh=True)
                if not all(run.outcome for run in runs):
                    time.sleep(poll)
    except Stopped:
        console.print("stopping: the runs save a checkpoint each and end")
        end(runs, place)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        place.close()


def advance(run: Run, runs: list[Run], place: Place, retries: int) -> None:
    """One look at one run: start it where there is room, note its end, try again."""
    from unmoved.log import console

    folder = run.config.folder
    if run.outcome:
        return
    if run.handle is None:
        if sum(r.handle is not None for r in runs) >= place.jobs:
            return
        if run.attempts == 0 and locked(folder):  # later: what is left of our own last attempt, which may be saving
            run.outcome = "elsewhere"
            return
        run.attempts += 1
        run.kept = newest_checkpoint(folder)
        run.handle = place.start(run.config)
        again = f" (attempt {run.attempts})" if run.attempts > 1 else ""
        console.print(f"{time.strftime('%H:%M:%S')}  started   {folder}{again}", soft_wrap=True)
        return
    code = place.code(run.handle)
    if code is None:
        return
    run.handle = None
    state = run.state()
    if state.name == "finished":
        run.outcome = "finished"
        score = "" if state.score is None else f"  return {state.score:.1f}"
        console.print(f"{time.strftime('%H:%M:%S')}  finished  {folder}{score}", soft_wrap=True)
        return
    # A job that met its time limit, or a node that was lost after an hour's work, is no failure of the run.
    run.fruitless = run.fruitless + 1 if newest_checkpoint(folder) == run.kept else 0
    if code in HOPELESS or run.fruitless > retries:
        run.outcome = "failed"
        lines = last_lines(folder)
        record = {"exit_code": code, "attempts": run.attempts, "last_lines": lines}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failed.json").write_text(json.dumps(record, indent=1))
        console.print(f"{time.strftime('%H:%M:%S')}  failed    {folder}, exit code {code}", style="red", soft_wrap=True)
    else:
        line = f"{time.strftime('%H:%M:%S')}  ended     {folder}, exit code {code}; it will be tried again"
        console.print(line, style="yellow", soft_wrap=True)


def end(runs: list[Run], place: Place, patience: float = 120.0) -> None:
    """Ask every run to save and end, and wait for it."""
    going = [run for run in runs if run.handle is not None]
    for run in going:
        place.stop(run.handle)
    until = time.monotonic() + patience
    while any(place.code(run.handle) is None for run in going) and time.monotonic() < until:
        time.sleep(0.1)
    for run in runs:
        run.handle = None
        run.outcome = run.outcome or ("finished" if run.state().name == "finished" else "interrupted")


def sweep(args: SweepArgs, options: list[str]) -> int:
    """Train all runs of an experiment; returns the exit code: 0 all finished, 1 some not, 130 interrupted."""
    from unmoved.log import console

    if (args.jobs is not None and args.jobs < 1) or args.retries < 0:
        raise UserError("--jobs must be at least 1, --retries not negative")
    configs = runs_of(replace(args, runs=args.runs.absolute()) if args.ray or args.slurm else args, options)
    if args.shard:
        configs = shard(configs, args.shard)
    if args.dry:
        for config in configs:
            print(" ".join(["unmoved", *command(config)[3:]]))
        return 0
    runs = [Run(config) for config in configs]
    for run in runs:
        if look(run.config.folder, run.config, running=False).name == "finished":
            run.outcome = "finished"
    todo = [run for run in runs if not run.outcome]
    console.print(f"{len(runs)} runs, {len(runs) - len(todo)} of them finished before")
    if todo:
        place = find_place(args, [run.config for run in todo])
        where = "on Ray" if args.ray else "on Slurm" if args.slurm else "here"
        console.print(f"{min(place.jobs, len(todo))} at once, {where}")
        supervise(todo, place, args.retries)
    return conclude(runs, args)


def conclude(runs: list[Run], args: SweepArgs) -> int:
    from unmoved.log import console

    for run in runs:
        if run.outcome == "failed":
            console.print(
                f"\n{run.config.folder} failed after {run.attempts} attempts; its last lines:", soft_wrap=True
            )
            console.print(
                "\n".join(f"  {line}" for line in last_lines(run.config.folder)), markup=False, soft_wrap=True
            )
    counts = {
        name: sum(run.outcome == name for run in runs) for name in ("finished", "failed", "interrupted", "elsewhere")
    }
    words = {"elsewhere": "being trained by another process"}
    console.print(", ".join(f"{n} {words.get(name, name)}" for name, n in counts.items() if n))
    if counts["interrupted"]:
        console.print("the same command continues")
        return 130
    if counts["finished"] == len(runs):
        console.print(f"unmoved report {args.runs} -o report")
        return 0
    return 1
