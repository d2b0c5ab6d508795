"""The command line. Heavy imports wait until a command needs them, so that help is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from unmoved.config import PRESETS, Config, Count, make_config
from unmoved.errors import Diverged, UserError, unknown

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")


def parse(kind: type[T], command: str, args: list[str], default: T | None = None) -> T:
    """A dataclass from arguments; its docstring is the help."""
    extra: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=f"unmoved {command}", args=args, config=(tyro.conf.HelptextFromCommentsOff,), **extra)


def parse_config(command: str, args: list[str], task: str = "") -> Config:
    """Twice: the task and the preset, once known, decide the defaults of everything else."""
    preset = "drq"
    for i, word in enumerate(args):
        if word == "--preset" and i + 1 < len(args):
            preset = args[i + 1]
        elif word.startswith("--preset="):
            preset = word.split("=", 1)[1]
    first = parse(Config, command, args, replace(make_config(preset=preset), task=task))
    if not first.task:
        raise UserError(f"name a task, such as: unmoved {command} walker_walk. `unmoved tasks` lists them.")
    default = make_config(first.task, preset=preset)
    return replace(parse(Config, command, args, default), task=default.task)


def train(args: list[str]) -> None:
    """Train a method on a task, or continue a run."""
    config = parse_config("train", args)
    from unmoved.train import train as run

    run(config)


@dataclass(frozen=True)
class EvaluateArgs:
    """Play episodes with a trained policy, in one or more scenes, and save every return in RUN/evaluations.jsonl."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, such as runs/drq/walker_run/ours/1."""
    background: tuple[str, ...] = ("train",)
    """Scenes: train, color_easy, color_hard, video_easy, video_hard, distracting."""
    videos: Path | None = None
    """Folder of clips for video_easy, video_hard and distracting (default: the run's, else generated clips)."""
    intensity: float | None = None
    """Of background distracting, 0 to 1 (default: the run's)."""
    episodes: int = 10
    """Per background."""
    first: int = 1_000_000
    """Number of the first episode; training's own evaluations count from 0."""
    workers: int = 1
    """Processes that render."""
    video: bool = False
    """Write the first episode to RUN/video/evaluation.mp4, or evaluation_BACKGROUND.mp4."""
    device: str = "cpu"


def evaluate(args: list[str]) -> None:
    """Play episodes with a trained policy."""
    a = parse(EvaluateArgs, "evaluate", args)
    if a.episodes < 1 or a.workers < 1:
        raise UserError("--episodes and --workers must be at least 1")
    import torch

    from unmoved.envs import backgrounds
    from unmoved.evaluate import Evaluator, deterministic, load_agent
    from unmoved.log import Rows, console, write_video

    torch.set_num_threads(max(1, (os.cpu_count() or 1) - a.workers))  # the simulators need the other cores
    agent, config, steps = load_agent(a.run, console.print, a.device)
    intensity = config.intensity if a.intensity is None else a.intensity
    config = replace(config, videos=a.videos or config.videos, intensity=intensity)
    scenes = list(dict.fromkeys(backgrounds.canonical(name) for name in a.background))
    for scene in scenes:  # what cannot be shown is refused before anything is played
        backgrounds.describe(scene, config.task, config.videos, config.intensity)
    console.print(f"{config.task}  {config.preset}/{config.method}  seed {config.seed}  "
                  f"at {steps * config.action_repeat:,} frames, {a.episodes} episodes")  # fmt: skip
    table = make_table("background", "return", "std", "lowest", "highest", "clips")
    for scene in scenes:
        evaluator = Evaluator(config, min(a.workers, a.episodes), background=scene)
        try:
            with console.status(f"{a.episodes} episodes with background {scene}"):
                result = evaluator.run(deterministic(agent), a.episodes, a.first)
        finally:
            evaluator.close()
        row = {"frames": steps * config.action_repeat, "steps": steps, "first": a.first} | result.row()
        Rows(a.run / "evaluations.jsonl").write(row)
        numbers = (row["return_mean"], row["return_std"], min(result.returns), max(result.returns))
        clips = f"{row['videos']} ({row['clips']})" if "videos" in row else "-"
        table.add_row(scene, *(f"{n:.1f}" for n in numbers), clips)
        if a.video:
            path = a.run / "video" / ("evaluation.mp4" if scene == "train" else f"evaluation_{scene}.mp4")
            write_video(path, result.frames)
            console.print(f"video: {path}")
    console.print(table)
    console.print(f"every return: {a.run / 'evaluations.jsonl'}", soft_wrap=True)


def explain(args: list[str]) -> None:
    """Print the two losses of a method with a configuration's numbers."""
    if not args or args[0].startswith("-"):
        print("usage: unmoved explain [PRESET/]METHOD [TASK] [OPTIONS of unmoved train]\n\nPrint the two losses.")
        return
    preset, _, method = args[0].rpartition("/")
    rest = [*args[1:], "--method", method, *(["--preset", preset] if preset else [])]
    config = parse_config("explain", rest, task="walker_walk")
    from unmoved.log import console
    from unmoved.methods import find_recipe, make_method

    recipe = make_method(config)
    summary = " ".join((find_recipe(config).__doc__ or "").split())
    console.print(f"[bold]{config.preset}/{method}[/]  {summary}\n")
    console.print(str(recipe), markup=False, soft_wrap=True)
    bonus = "" if config.policy == "clipped" else " - alpha log pi(a'|f(s'))"
    gamma = f"{config.discount:g}" if config.n_step == 1 else f"{config.discount:g}^{config.n_step}"
    y = f"y(f(s')) = r + {gamma} (min(Q_bar1,Q_bar2)(f(s'), a'){bonus})"
    console.print(f"\nwhere   {y}", markup=False, soft_wrap=True)
    console.print(
        f"batch {config.batch_size}, lr {config.lr:g}, target rates: encoder {config.polyak_encoder:g}, head "
        f"{config.polyak_head:g}, Q {config.polyak_q:g}; actor every {config.actor_every}, target every "
        f"{config.target_every}; weak = {config.weak} (pad {config.pad})"
        + (f", strong = {config.strong}" if "strong" in str(recipe) else "")
    )


def methods(args: list[str]) -> None:
    """List the methods, each with its recipe in one line."""
    parse(NoArgs, "methods", args)
    from unmoved.log import console
    from unmoved.methods import METHODS

    table = make_table("method", "what it is")
    for name, recipe in METHODS.items():
        table.add_row(name, " ".join((recipe.__doc__ or "").split()))
    console.print(table)
    console.print("`unmoved explain METHOD` prints the losses; presets: " + ", ".join(PRESETS))


def tasks(args: list[str]) -> None:
    """List the tasks."""
    parse(NoArgs, "tasks", args)
    from unmoved import envs
    from unmoved.log import console

    table = make_table("task", "|A|", "camera", "note")
    for row in envs.tasks():
        table.add_row(row.name, str(row.action_dim), "-" if row.camera is None else str(row.camera), row.note)
    console.print(table)
    console.print("Also: any Gymnasium id with image observations and a Box action space, or module:function.")


@dataclass(frozen=True)
class NoArgs:
    """This command takes no options."""


def make_table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, header_style="bold")
    return table


def demo(args: list[str]) -> None:
    """Train on a real task on this machine, in minutes, and show what was learnt."""
    from unmoved.demo import DemoArgs
    from unmoved.demo import demo as run

    run(parse(DemoArgs, "demo", args))


def bench(args: list[str]) -> None:
    """Measure how fast this machine updates, renders and trains."""
    from unmoved.bench import BenchArgs
    from unmoved.bench import bench as run

    run(parse(BenchArgs, "bench", args))


@dataclass(frozen=True)
class DiagnoseArgs:
    """Measure why an augmentation helps, or not, on a checkpoint: a table, a row in RUN/diagnose.jsonl and
    RUN/diagnose.png; of several runs also the paper's Table B and whether its orderings hold. docs/why_it_works.md
    explains the numbers."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folders, such as runs/drq/walker_run/ours/1."""
    checkpoint: int | None = None
    """Agent steps of the checkpoint; None: the newest."""
    transforms: str = ""
    """More transformations whose feature similarity is measured, such as blur,conv or mymodule:MyTransformation."""
    batch: int = 256
    """States."""
    tsne: bool = True
    rollouts: int = 0
    """Transitions whose returns are played out, twice each, for the targets' bias; 0: none."""
    workers: int = 2
    """Processes that play them."""
    seed: int = 0
    device: str = "cpu"


def diagnose(args: list[str]) -> None:
    """Measure why an augmentation helps, or not, on a checkpoint of a run."""
    a = parse(DiagnoseArgs, "diagnose", args)
    if not a.runs:
        raise UserError("name a run folder, such as runs/drq/walker_run/ours/1")
    from unmoved.compare import compare
    from unmoved.diagnose import diagnose as measure

    options = {k: v for k, v in vars(a).items() if k != "runs"}
    configs = [Config.load(run) for run in a.runs]  # a wrong folder shows before the first is measured
    rows = [(config.method, measure(run, **options)) for run, config in zip(a.runs, configs, strict=True)]
    if len(rows) > 1:
        compare(rows, ", ".join(sorted({f"{c.preset}, {c.task}" for c in configs})))


@dataclass(frozen=True)
class AdviseArgs:
    """Say which transformations are safe in the target of a task: trains one short SVEA run per candidate and compares
    the similarity of its features under the candidate with that under shift (the paper's Table F). Repeating the
    command continues what was interrupted."""

    task: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")]
    transforms: str = "blur,overlay,conv,rotate"
    """Candidates; one's own as mymodule:MyTransformation."""
    frames: Count = 100_000
    """Of training, per candidate."""
    seeds: int = 1
    """Runs per candidate; with several, errors are over seeds."""
    run: Path | None = None
    """With --quick: the run whose checkpoint is measured."""
    quick: bool = False
    """Train nothing: measure all candidates on one run, a different quantity."""
    margin: float = 0.02
    """Difference in similarity that counts as lower; the paper's overlay is at .005, its conv at .04 and .06."""
    batch: int = 256
    """States."""
    preset: str = "dmgb"
    overlay: Path | None = None
    """Folder of photographs for overlay."""
    runs: Path = Path("runs")
    """Runs, table and picture go to <runs>/advise."""
    device: str = "auto"


def advise(args: list[str]) -> None:
    """Say which transformations are safe in a task's target, by short training runs."""
    a = parse(AdviseArgs, "advise", args)
    from unmoved.advise import advise as run

    run(**vars(a))


@dataclass(frozen=True)
class VerifyArgs:
    """Evaluate both sides of the paper's lemma, propositions and bounds (misprints corrected) in float64. Exits with 1
    if one does not hold."""

    run: Path | None = None
    """Use the networks and states of this run; without one, random ones."""
    transform: str = ""
    """Transformation, such as shift, rotate or mymodule:MyTransformation; by default the run's weak one, or shift."""
    states: int = 4
    seed: int = 0


def verify(args: list[str]) -> None:
    """Evaluate the paper's lemma, propositions and bounds in numbers."""
    a = parse(VerifyArgs, "verify", args)
    if a.states < 1:
        raise UserError("--states must be at least 1")
    from unmoved.verify import verify as run

    if not run(**vars(a)):
        sys.exit(1)


def doctor(args: list[str]) -> None:
    """Check this machine: versions, GPU, rendering, memory, write access."""
    from unmoved.doctor import DoctorArgs
    from unmoved.doctor import doctor as run

    if not run(parse(DoctorArgs, "doctor", args)):
        sys.exit(1)


def show(args: list[str]) -> None:
    """Draw a picture sheet of a task: transformations, tangents and backgrounds."""
    from unmoved.show import ShowArgs
    from unmoved.show import show as run

    run(parse(ShowArgs, "show", args))


def split_options(args: list[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and after a lone -- the options of `unmoved train` for every run."""
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at + 1 :]


def experiments(args: list[str]) -> None:
    """List the paper's experiments, or the runs of one, with their cost."""
    from unmoved.experiments import ExperimentsArgs
    from unmoved.experiments import show as run

    own, options = split_options(args)
    run(parse(ExperimentsArgs, "experiments", own), options)


def sweep(args: list[str]) -> None:
    """Train all runs of an experiment: here, on Ray, on Slurm, or one shard of them."""
    from unmoved.launch import SweepArgs
    from unmoved.launch import sweep as run

    own, options = split_options(args)
    code = run(parse(SweepArgs, "sweep", own), options)
    if code:
        sys.exit(code)


@dataclass(frozen=True)
class StatusArgs:
    """Where the runs under a folder stand: progress, return, time left, failures."""

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")


def status(args: list[str]) -> None:
    """Say where runs stand."""
    a = parse(StatusArgs, "status", args)
    from unmoved.status import status as run

    if not run(a.runs):
        sys.exit(1)


def report(args: list[str]) -> None:
    """Make tables, figures and one page of what was trained."""
    from unmoved.report import ReportArgs
    from unmoved.report import report as run

    run(parse(ReportArgs, "report", args))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "evaluate": evaluate,
    "explain": explain,
    "methods": methods,
    "tasks": tasks,
    "diagnose": diagnose,
    "advise": advise,
    "verify": verify,
    "demo": demo,
    "bench": bench,
    "doctor": doctor,
    "show": show,
    "experiments": experiments,
    "sweep": sweep,
    "status": status,
    "report": report,
}


def overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.__doc__}" for name, command in COMMANDS.items())
    return (
        "unmoved: image-based reinforcement learning with data augmentation\n\n"
        "  unmoved train walker_run --method ours --seed 1 --frames 500k --preset drq\n"
        "  unmoved evaluate runs/drq/walker_run/ours/1 --episodes 10 --video\n"
        "  unmoved explain dmgb/ours\n"
        "  unmoved diagnose runs/drq/walker_run/ours/1\n\n"
        f"{rows}\n\n`unmoved COMMAND --help` lists a command's options."
    )


def main(argv: list[str] | None = None) -> None:
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return
    if args[0] == "--version":
        from unmoved import __version__

        print(__version__)
        return
    # PyTorch's threads would wait for the next product by spinning, on the cores that the environments need. Must be
    # said before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if args[0] not in COMMANDS:
            unknown("command", args[0], COMMANDS)
        COMMANDS[args[0]](args[1:])
    except UserError as error:
        print(f"unmoved: {error}", file=sys.stderr)
        sys.exit(2)
    except Diverged as error:
        print(f"unmoved: {error}", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
