"""The paper's figures and tables as lists of runs, and three experiments that it leaves out.

An experiment is data: tasks, and arms (a method with its settings). Arms that two experiments share are the same run in
the same folder, so it is trained once. An arm that changes settings has a folder of its own, named after the change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from unmoved.config import Config, Count, make_config
from unmoved.errors import UserError, unknown


@dataclass(frozen=True)
class Arm:
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""  # names the settings; the folder of these runs under --runs

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method


@dataclass(frozen=True)
class Experiment:
    shows: str  # figures and tables of the paper
    asks: str
    preset: str
    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    frames: int | None = None  # None: the preset's for each task


def arms(*methods: str) -> tuple[Arm, ...]:
    return tuple(map(Arm, methods))


def in_target(strong: str, updates: int = 1) -> Arm:
    """SVEA with its strong transformation also in the target."""
    settings: dict[str, Any] = {"strong": strong, "strong_in_target": True}
    if updates == 1:
        return Arm("svea", settings, f"{strong}_in_target")
    return Arm("svea", settings | {"updates_per_step": updates}, f"{strong}_in_target_{updates}_updates")


def with_strong(strong: str) -> Arm:
    return Arm("svea") if strong == "overlay" else Arm("svea", {"strong": strong}, strong)


def weighted(kl: float, tangent: float, default: tuple[float, float] = (0.1, 0.1)) -> Arm:
    if (kl, tangent) == default:
        return Arm("ours")
    return Arm("ours", {"kl_weight": kl, "tangent_weight": tangent}, f"kl_{kl:g}_tangent_{tangent:g}")


# The paper does not list its nine tasks: the eight of the authors' plots, and one of the two others they ran in full.
NINE = ("finger_spin", "reacher_easy", "ball_in_cup_catch", "cheetah_run", "walker_walk", "reacher_hard", "walker_run",
        "finger_turn_hard", "cartpole_swingup_sparse")  # fmt: skip
DDPG_TEN = ("quadruped_walk", "quadruped_run", "reach_duplo", "hopper_hop", "acrobot_swingup", "reacher_hard",
            "finger_turn_hard", "walker_run", "finger_spin", "cheetah_run")  # fmt: skip
DMGB_FIVE = ("walker_walk", "walker_stand", "cartpole_swingup", "ball_in_cup_catch", "finger_spin")
STRONG = ("overlay", "conv", "rotate", "blur")

EXPERIMENTS: dict[str, Experiment] = {
    "ablation": Experiment(
        "Figs. 1, 6, 7", "What does each part add?", "drq", NINE, arms("rad", "rad_plus", "drq", "drq_kl", "ours")
    ),
    "case_study": Experiment(
        "Figs. 2, 8, 12, Table 1",
        "What happens to the statistics and to the features?",
        "drq",
        ("walker_run",),
        arms("rad", "rad_plus", "drq", "drq_kl_fixed", "drq_kl", "ours"),
    ),
    "sample_efficiency": Experiment(
        "Figs. 3, 9", "How does it compare, on SAC?", "drq", NINE, arms("rad", "drq", "drac", "svea", "ours")
    ),
    "ddpg": Experiment("Figs. 3, 10", "How does it compare, on DDPG?", "drqv2", DDPG_TEN, arms("drqv2", "ours")),
    "generalization": Experiment(
        "Tables 2, 3, Figs. 11, 13", "Does it hold in unseen scenes?", "dmgb", DMGB_FIVE, arms("svea", "ours")
    ),
    "complexity": Experiment(
        "Table 4",
        "Which transformations are complex?",
        "dmgb",
        ("walker_walk",),
        tuple(map(with_strong, STRONG)),
        frames=100_000,
    ),
    "target_augmentation": Experiment(
        "Table 5, Figs. 4, 5",
        "What does a strong transformation do in the target?",
        "dmgb",
        ("walker_walk",),
        (*map(with_strong, STRONG), *map(in_target, STRONG), in_target("conv", 4), in_target("rotate", 4)),
    ),
    "kl_direction": Experiment(
        "not in the paper (App. D argues it)",
        "Which argument of the KL should hold still?",
        "drq",
        ("walker_run", "cheetah_run", "reacher_hard"),
        (
            Arm("drq_kl"),
            Arm("drq_kl", {"kl_stop": "second"}, "stop_second"),
            Arm("drq_kl", {"kl_stop": "none"}, "stop_none"),
        ),
    ),
    "components": Experiment(
        "not in the paper",
        "Tangent prop without KL, at original states; numbers of views M, K, J",
        "drq",
        ("walker_run", "cheetah_run", "reacher_hard"),
        (
            *arms("rad", "drq", "drq_kl", "drq_tp", "drq_tp_original", "ours", "rad_plus_shared"),
            Arm("drq", {"M": 1, "K": 2}, "M1_K2"),
            Arm("drq", {"M": 4, "K": 4}, "M4_K4"),
            Arm("drq", {"J": 2}, "J2"),
        ),
    ),
    "weights": Experiment(
        "not in the paper (App. G names the grids)",
        "How sensitive is it to its two weights?",
        "drq",
        ("walker_run",),
        tuple(weighted(kl, tangent) for kl in (0.1, 0.5, 1.0) for tangent in (0.1, 0.5, 1.0)),
    ),
    "weights_dmgb": Experiment(
        "not in the paper (App. G names the grid)",
        "The same in the generalisation benchmark",
        "dmgb",
        ("walker_walk",),
        tuple(weighted(0.1, tangent, default=(0.1, 0.5)) for tangent in (0.1, 0.5)),
    ),
}

# Tables 1, 3, 4 and 5 are statistics of these runs, so they are recorded whichever experiment trains them.
RECORDED: dict[tuple[str, str], dict[str, Any]] = {
    ("drq", "walker_run"): {"diagnostics": True},
    ("dmgb", "walker_walk"): {"diagnostics": True, "keep_states": True},
}


@dataclass(frozen=True)
class Selection:
    """An experiment, cut down where asked."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ""
    """See `unmoved experiments`."""
    tasks: tuple[str, ...] = ()
    """Instead of the experiment's."""
    methods: tuple[str, ...] = ()
    """Of the experiment's, by method or by variant."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    frames: Count | None = None
    """Instead of each run's own budget."""
    preset: str | None = None
    """Instead of the experiment's."""
    runs: Path = Path("runs")
    """Folder of all runs."""


@dataclass(frozen=True)
class ExperimentsArgs(Selection):
    """List the experiments, or the runs of one: how many, how long, and what they cost."""

    bench: Path = Path("results/bench/h200.json")
    """Figures of `unmoved bench --json`, for the estimate of hours."""


def find(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def chosen_arms(experiment: Experiment, names: tuple[str, ...]) -> list[Arm]:
    known = {word for arm in experiment.arms for word in (arm.method, arm.variant) if word}
    for name in names:
        if name not in known:
            unknown("method of this experiment", name, known)
    return [arm for arm in experiment.arms if not names or arm.method in names or arm.variant in names]


def runs_of(selection: Selection, options: list[str] | None = None) -> list[Config]:
    """The runs of an experiment, seed by seed, so that whatever is cut short has whole comparisons in it. `options`
    are those of `unmoved train`, for every run."""
    experiment = find(selection.name)
    if not selection.seeds or len(set(selection.seeds)) < len(selection.seeds):
        raise UserError("--seeds must name at least one seed, each once")
    preset = selection.preset or experiment.preset
    bases = []
    for task in selection.tasks or experiment.tasks:
        for arm in chosen_arms(experiment, selection.methods):
            config = make_config(
                task, preset=preset, method=arm.method, runs=selection.runs / arm.variant, **arm.settings
            )
            config = replace(config, **RECORDED.get((preset, config.task), {}))
            frames = selection.frames or experiment.frames
            if frames:
                config = replace(config, frames=frames)
            bases.append(with_options(config, options or []))
    return [replace(config, seed=seed) for seed in selection.seeds for config in bases]


def with_options(config: Config, options: list[str]) -> Config:
    """Options of `unmoved train` over a run's configuration. What says which run it is cannot be changed by them."""
    if not options:
        return config
    from unmoved.cli import parse

    changed = parse(Config, "train", [config.task, *options], config)
    for name in ("task", "method", "preset", "seed", "runs"):
        if getattr(changed, name) != getattr(config, name):
            raise UserError(f"--{name} belongs before the --: it says which runs are made")
    return changed


# ------------------------------------------------------------------------------------------------ what it costs


def read_bench(path: Path) -> dict[str, Any] | None:
    """What `unmoved bench --json` saved; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        figures = json.loads(path.read_text())
        loop = next(iter(figures["end_to_end"].items()))
        if loop[1]["agent_steps_per_s"] > 0 and all(row["ms"] > 0 for row in figures["updates"].values()):
            return dict(figures)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        pass
    raise UserError(f"{path} has no figures of `unmoved bench --json`: updates and the whole loop")


def gpu_hours(config: Config, bench: dict[str, Any]) -> float | None:
    """Updates at their measured time, and the measured loop's other time per agent step; evaluation episodes at the
    environment's pace. A recipe that was not measured counts as the dearest of its preset; None: no such preset."""
    updates = bench["updates"]
    of_preset = [row["ms"] for name, row in updates.items() if name.split("/")[0] == config.preset]
    if not of_preset:
        return None
    own = updates.get(f"{config.preset}/{config.method}")
    update = (own["ms"] if own else max(of_preset)) / 1e3
    key, loop = next(iter(bench["end_to_end"].items()))
    preset, _, method = key.split("/")
    step = 1 / loop["agent_steps_per_s"]
    other = max(0.0, step - updates[f"{preset}/{method}"]["ms"] / 1e3)
    steps = config.total_steps
    evaluations = (config.frames // config.eval_every + 1) * config.eval_episodes * len(config.eval_backgrounds)
    played = evaluations * 1_000 / config.action_repeat / loop.get("env_alone_per_s", loop["agent_steps_per_s"])
    return (steps * (config.updates_per_step / config.update_every * update + other) + played) / 3600


def total_hours(configs: list[Config], bench: dict[str, Any] | None) -> float | None:
    if bench is None:
        return None
    hours = [gpu_hours(config, bench) for config in configs]
    return None if None in hours else sum(h for h in hours if h is not None)


# ------------------------------------------------------------------------------------------------ listing


def show(args: ExperimentsArgs, options: list[str]) -> None:
    """All experiments, or one's runs."""
    from unmoved.log import console

    bench = read_bench(args.bench)
    if args.name:
        show_runs(args, options, bench)
    elif args.methods:
        raise UserError("--methods chooses among one experiment's: name it")
    else:
        show_all(args, options, bench)
    if bench is None:
        console.print(f"No estimate of hours: {args.bench} is missing. `unmoved bench --json {args.bench}` measures.")
    else:
        console.print(
            f"Hours: one run at a time on {bench.get('device', 'the measured machine')}, estimated from {args.bench}; "
            "a recipe that was not measured counts as the dearest of its preset.",
            soft_wrap=True,
        )


def show_all(args: ExperimentsArgs, options: list[str], bench: dict[str, Any] | None) -> None:
    from unmoved.cli import make_table
    from unmoved.log import console

    table = make_table("experiment", "shows", "asks", "preset", "tasks", "arms", "runs", "frames", "hours")
    for name, experiment in EXPERIMENTS.items():
        configs = runs_of(replace(args, name=name), options)
        table.add_row(
            name, experiment.shows, experiment.asks, configs[0].preset, str(len({c.task for c in configs})),
            str(len(experiment.arms)), str(len(configs)), million(sum(c.frames for c in configs)),
            hours_text(total_hours(configs, bench)),
        )  # fmt: skip
    everything = unique(c for name in EXPERIMENTS for c in runs_of(replace(args, name=name), options))
    console.print(table)
    console.print(
        f"Together {len(everything)} runs, {million(sum(c.frames for c in everything))} frames"
        + (f", {hours_text(total_hours(everything, bench))} hours" if bench else "")
        + ": what several experiments share is trained once. `unmoved experiments NAME` lists the runs of one.",
        soft_wrap=True,
    )


def show_runs(args: ExperimentsArgs, options: list[str], bench: dict[str, Any] | None) -> None:
    from unmoved.cli import make_table
    from unmoved.log import console

    experiment, configs = find(args.name), runs_of(args, options)
    console.print(f"[bold]{args.name}[/]  {experiment.shows}. {experiment.asks}\n", soft_wrap=True)
    table = make_table("task", "recipe", "settings", "seeds", "frames each", "hours each", "folder")
    labels = {(arm.method, str(args.runs / arm.variant)): arm for arm in experiment.arms}
    for config in (c for c in configs if c.seed == args.seeds[0]):
        arm = labels[config.method, str(config.runs)]
        settings = ", ".join(f"{k} {v}" for k, v in arm.settings.items()) or "-"
        hours = hours_text(gpu_hours(config, bench) if bench else None)
        table.add_row(config.task, f"{config.preset}/{config.method}", settings, " ".join(map(str, args.seeds)),
                      f"{config.frames:,}", hours, str(config.folder.parent))  # fmt: skip
    console.print(table)
    console.print(
        f"{len(configs)} runs, {million(sum(c.frames for c in configs))} frames (simulator steps)"
        + (f", {hours_text(total_hours(configs, bench))} hours" if bench else "")
    )


def unique(configs: Iterable[Config]) -> list[Config]:
    """One per folder, the longest."""
    found: dict[Path, Config] = {}
    for config in configs:
        known = found.get(config.folder)
        if known is None or known.frames < config.frames:
            found[config.folder] = config
    return list(found.values())


def million(frames: int) -> str:
    return f"{frames / 1e6:,.1f} M" if frames >= 100_000 else f"{frames:,}"


def hours_text(hours: float | None) -> str:
    if hours is None:
        return "-"
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}"
