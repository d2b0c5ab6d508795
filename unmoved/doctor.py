"""What this machine has against what a run needs, one line per question, each with what to do."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from unmoved import envs
from unmoved.config import Config, make_config
from unmoved.errors import UserError

Status = Literal["ok", "warning", "failed"]
SOFTWARE = ("llvmpipe", "softpipe", "swrast", "software")  # in the names of OpenGL's renderers
ACTION_DIM = {row.name: row.action_dim for row in envs.tasks()}
GL_SECONDS = 120  # a driver that hangs is broken too


@dataclasses.dataclass(frozen=True)
class DoctorArgs:
    """Check this machine: versions, GPU, rendering, memory and write access. Exit code 1 if a run cannot work."""

    task: str = "walker_walk"
    """Whose run is to fit into memory."""
    preset: str = "drq"
    device: str = "auto"
    """Where it would train: auto, cpu, cuda, cuda:1, …"""
    runs: Path = Path("runs")
    """Folder for the runs."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    status: Status
    found: str
    advice: str = ""  # what to do, where it is not ok


def doctor(args: DoctorArgs) -> bool:
    """Print every check; whether a run can work."""
    config = make_config(args.task, preset=args.preset, runs=args.runs, device=args.device)
    if config.task not in ACTION_DIM:
        raise UserError(f"how large a run of {config.task} is cannot be known: name a task that `unmoved tasks` lists.")
    checks = []
    for check in examine(config):
        checks.append(check)
        if not args.json:
            show(check)
    if args.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    return all(check.status != "failed" for check in checks)


def show(check: Check) -> None:
    colour = {"ok": "green", "warning": "yellow", "failed": "red"}[check.status]
    console = Console(highlight=False)  # not log's: that module needs torch, which may be what is broken
    console.print(f"[{colour}]{check.status:<8}[/] {check.name:<12} {escape(check.found)}", soft_wrap=True)
    if check.advice:
        console.print(f"{'':<21} -> {escape(check.advice)}", soft_wrap=True)


def examine(config: Config) -> Iterator[Check]:
    """All checks. One that breaks is reported as failed, and the others follow."""
    steps: dict[str, Callable[[], Iterator[Check]]] = {
        "python": python,
        "packages": packages,
        "device": lambda: device(config),
        "OpenGL": lambda: opengl(probe_gl()),
        "memory": lambda: memory(config),
        "runs": lambda: folder(config),
        "cores": cores,
    }
    for name, step in steps.items():
        try:
            yield from step()
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield Check(name, "failed", found, "reinstall the packages; if that does not help, report it")


def python() -> Iterator[Check]:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info < (3, 13)
    advice = "" if good else "use Python 3.11 or 3.12: dm_control needs labmaze, which has no wheels for others"
    yield Check("python", "ok" if good else "warning", f"{version}, {sys.executable}", advice)


def packages() -> Iterator[Check]:
    """The installed versions against the windows that pyproject.toml allows."""
    found, wrong = [], []
    for requirement in map(Requirement, metadata.requires("unmoved") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
        elif requirement.specifier:
            found.append(f"{requirement.name} {version}")
    if wrong:
        yield Check("packages", "failed", ", ".join(wrong), "pip install -U unmoved -c constraints.txt")
    else:
        yield Check("packages", "ok", ", ".join(found))


def device(config: Config) -> Iterator[Check]:
    """The device that trains, and whether the replay fits on it."""
    import torch

    from unmoved.evaluate import pick_device

    try:
        place = pick_device(config.device)
    except UserError as error:
        yield Check("device", "failed", str(error), "choose another --device, or install a CUDA build of PyTorch")
        return
    if place.type == "cpu":
        built = f"torch {torch.__version__} " + ("finds no GPU" if torch.version.cuda else "is a build without CUDA")
        yield Check("device", "warning", f"CPU only: {built}", "train with --preset cpu, or on a machine with a GPU")
        return
    name, capability = torch.cuda.get_device_name(place), torch.cuda.get_device_capability(place)
    bf16 = capability >= (8, 0)
    yield Check(
        "device",
        "ok" if bf16 else "warning",
        f"{place} of {torch.cuda.device_count()}: {name}, CUDA {torch.version.cuda}",
        "" if bf16 else "this GPU has no fast bf16: train with --precision fp32",
    )
    free, total = torch.cuda.mem_get_info(place)
    found = f"{gigabytes(free)} of {gigabytes(total)} free"
    yield fits("GPU memory", replay_bytes(config), free, found, "a smaller --capacity")


def opengl(gl: dict[str, Any]) -> Iterator[Check]:
    if "error" in gl:
        yield Check("OpenGL", "failed", "the control suite does not render", gl["error"])
        return
    hardware = not any(word in gl["renderer"].lower() for word in SOFTWARE)
    kind = "hardware" if hardware else "software"
    text = f"{gl['backend']}, {kind}: {gl['renderer']} ({gl['vendor']}), {gl['ms']:.1f} ms per 84 x 84 image"
    cuda = gpus() > 0
    slow = not hardware and cuda
    advice = "let the container see the GPU's OpenGL: NVIDIA_DRIVER_CAPABILITIES=all, MUJOCO_GL=egl" if slow else ""
    yield Check("OpenGL", "warning" if slow else "ok", text, advice)
    if cuda and hardware:
        yield egl_device(gl["cuda_device"])


def egl_device(renders: int | None) -> Check:
    """EGL and CUDA count GPUs apart: rendering may land on a GPU where somebody else trains."""
    if renders is None:
        return Check("EGL device", "ok", "the driver does not say which CUDA device renders")
    import torch

    trains = torch.cuda.current_device()
    if renders == trains:
        return Check("EGL device", "ok", f"CUDA device {renders} renders and trains")
    advice = "set MUJOCO_EGL_DEVICE_ID so that both are one, unless this is meant"
    return Check("EGL device", "warning", f"CUDA device {renders} renders, {trains} trains", advice)


def gpus() -> int:
    try:
        import torch
    except Exception:  # said by another check
        return 0
    return torch.cuda.device_count()


def memory(config: Config) -> Iterator[Check]:
    """The host holds the replay when it trains on a CPU, and a copy of it while a checkpoint is written otherwise."""
    free = free_memory()
    found = f"{gigabytes(free)} free on the host"
    yield fits("memory", replay_bytes(config), free, found, "a smaller --capacity or the preset cpu")


def folder(config: Config) -> Iterator[Check]:
    """Whether runs can be written, and whether the checkpoints fit, with the replay in each: two, and a third while
    it is written."""
    place = runs = config.runs.resolve()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        yield Check("runs", "failed", f"{place} cannot be written: {error.strerror}", "choose another --runs")
        return
    yield Check("runs", "ok", f"{runs} can be written")
    free = shutil.disk_usage(place).free
    needed, remedy = 3 * replay_bytes(config), "another --runs or a smaller --capacity"
    yield fits("disk", needed, free, f"{gigabytes(free)} free", remedy, "three checkpoints")


def cores() -> Iterator[Check]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = "" if count > 1 else "rendering and learning share one core: give it two or more"
    yield Check("cores", "ok" if count > 1 else "warning", str(count), advice)


def fits(name: str, needed: int, free: int, found: str, remedy: str, what: str = "the replay") -> Check:
    text = f"{found}, {what} {'take' if what.endswith('s') else 'takes'} {gigabytes(needed)}"
    if needed > free:
        return Check(name, "failed", text, f"choose {remedy}")
    if needed > 0.8 * free:
        return Check(name, "warning", text, f"little is left for all else: choose {remedy}")
    return Check(name, "ok", text)


def gigabytes(n: int) -> str:
    return f"{n / 1e9:.1f} GB"


def replay_bytes(config: Config) -> int:
    """What the run's Replay would hold. It is made on the device "meta", which has shapes and no memory."""
    from unmoved.replay import Replay

    shape, dim = (3 * config.stack, config.image_size, config.image_size), ACTION_DIM[config.task]
    return Replay(config.capacity, shape, dim, stack=config.stack, n_step=config.n_step, device="meta").nbytes


def free_memory() -> int:
    """Bytes that can be had without swapping: the machine's, or what is left of a container's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(stat["inactive_file"]))  # the kernel gives its file cache back
    except (OSError, ValueError, KeyError):  # no such limit ("max" is no number), or another system
        return free


def probe_gl() -> dict[str, Any]:
    """What draws, read from a real context. In a process of its own: a bad driver may crash or hang."""
    words = [sys.executable, "-c", "from unmoved.doctor import describe_gl; describe_gl()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GL_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"rendering hangs: the driver gave no image in {GL_SECONDS} s. Try MUJOCO_GL=egl or osmesa."}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return {"error": f"rendering crashed (exit code {done.returncode}): {last}. Try MUJOCO_GL=egl or osmesa."}


def describe_gl() -> None:
    """The child of `probe_gl`: its last line is JSON."""
    try:
        env = envs.make("cartpole_swingup")
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return
    from dm_control import _render
    from OpenGL import GL

    env.reset(seed=0)
    start, images = time.perf_counter(), 20
    for _ in range(images):
        env.simulator.render()
    ms = (time.perf_counter() - start) / images * 1e3
    simulator: Any = env.simulator
    with simulator.physics.contexts.gl.make_current() as context:
        vendor, renderer = (context.call(GL.glGetString, name).decode() for name in (GL.GL_VENDOR, GL.GL_RENDERER))
    row = {"backend": _render.BACKEND, "vendor": vendor, "renderer": renderer, "ms": ms}
    print(json.dumps(row | {"cuda_device": egl_cuda_device() if _render.BACKEND == "egl" else None}))


def egl_cuda_device() -> int | None:
    """The CUDA number of the GPU behind dm_control's EGL display (EGL_EXT_device_query, EGL_NV_device_cuda)."""
    from dm_control._render.pyopengl.egl_renderer import EGL_DISPLAY

    EGL_DEVICE_EXT, EGL_CUDA_DEVICE_NV = 0x322C, 0x323A
    egl = ctypes.CDLL("libEGL.so.1")
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    attribute = ctypes.c_ssize_t()

    def query(function: bytes, thing: Any, name: int) -> int | None:
        address = egl.eglGetProcAddress(function)
        if not address:
            return None
        kind = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))
        return attribute.value if kind(address)(thing, name, ctypes.byref(attribute)) else None

    shown_on = query(b"eglQueryDisplayAttribEXT", EGL_DISPLAY, EGL_DEVICE_EXT)
    return None if shown_on is None else query(b"eglQueryDeviceAttribEXT", shown_on, EGL_CUDA_DEVICE_NV)
