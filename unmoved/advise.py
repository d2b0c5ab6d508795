"""`unmoved advise TASK`: the paper's criterion for complex transformations as a tool.

A transformation is complex for a task where, early in training, it moves the features of an agent trained with it more
than the weak transformation (shift) does. The paper's remedy is to keep it out of the target, or to update more. As in
its Table F, one short SVEA run is trained per candidate, and the two cosine similarities are compared in that agent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from unmoved.agent import Agent, stream_seed
from unmoved.config import Config, make_config
from unmoved.diagnose import Loaded, load_run, parse_transforms
from unmoved.diagnostics import pair_cosine, unit_features
from unmoved.envs import canonical
from unmoved.errors import UserError
from unmoved.log import Rows, console, jsonable
from unmoved.measure import weak_family
from unmoved.methods import make_transform
from unmoved.train import train
from unmoved.transforms import Transformation

HEADS = ("actor", "critic")
DRAWS = 16  # of the candidate: 120 pairs per state
SURE = 2.0  # standard errors that a verdict needs
# Where the paper measured the same (Table F: walker_walk, SVEA, 100k frames): shift and candidate, actor and critic.
PAPER = {
    "blur": ((0.919, 0.998), (0.938, 0.998)),
    "overlay": ((0.911, 0.906), (0.942, 0.939)),
    "conv": ((0.910, 0.854), (0.922, 0.883)),
    "rotate": ((0.936, 0.536), (0.962, 0.660)),
}


@dataclass(frozen=True)
class Similarity:
    """Cosine similarity of one head's features under the weak transformation and under the candidate."""

    weak: float
    candidate: float
    difference: float  # candidate - weak
    error: float  # its standard error: over the same states, or over seeds where there are several


@dataclass(frozen=True)
class Advice:
    transform: str
    heads: dict[str, Similarity]
    margin: float
    frames: int  # of training behind it

    @property
    def verdict(self) -> str:
        """complex: clearly lower in a head, by more than the margin. simple: clearly not, in both."""
        highest = {h: s.difference + SURE * s.error for h, s in self.heads.items()}
        lowest = {h: s.difference - SURE * s.error for h, s in self.heads.items()}
        if any(value < -self.margin for value in highest.values()):
            return "complex"
        return "simple" if all(value > -self.margin for value in lowest.values()) else "unclear"

    @property
    def advice(self) -> str:
        return {
            "simple": "safe in the target; no more updates needed",
            "complex": "only in nu (views of s), or in the target with more updates (--updates-per-step 4)",
            "unclear": "near the margin: train longer or with more seeds; until then keep it out of the target",
        }[self.verdict]


def compare(
    agent: Agent, obs: Tensor, weak: Transformation, candidate: Transformation, generator: Generator
) -> dict[str, tuple[Tensor, Tensor]]:
    """Per head, the similarity of each state under the weak and under the candidate transformation, (B,) each. Two
    draws of the candidate see the same image, without a shift before it."""
    held = unit_features(agent, obs, weak, generator, DRAWS)
    moved = unit_features(agent, obs, candidate, generator, DRAWS)
    exact = [family.support() is not None for family in (weak, candidate)]
    return {h: (pair_cosine(held[h], exact[0]), pair_cosine(moved[h], exact[1])) for h in HEADS}


def similarity(runs: list[tuple[Tensor, Tensor]]) -> Similarity:
    """Over states, paired; over seeds where there are several."""
    means = torch.stack([torch.stack([w.mean(), c.mean()]) for w, c in runs]).double()  # (seeds, 2)
    weak, candidate = means.mean(0).tolist()
    if len(runs) > 1:
        error = float((means[:, 1] - means[:, 0]).std()) / math.sqrt(len(runs))
    else:
        apart = (runs[0][1] - runs[0][0]).double()
        error = float(apart.std()) / math.sqrt(len(apart))
    return Similarity(weak, candidate, candidate - weak, error)


def measured(loaded: Loaded, candidate: Transformation, batch: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    generator = Generator(loaded.agent.device).manual_seed(stream_seed(seed, "advise"))
    obs = loaded.replay.sample(batch, generator).obs
    return compare(loaded.agent, obs, weak_family(loaded.agent), candidate, generator)


def short(config: Config) -> Config:
    """A run that is only measured at its end: the replay never wraps, and evaluations are few."""
    steps = max(config.total_steps, config.batch_size)
    every = max(config.eval_every, config.frames)
    return replace(config, method="svea", capacity=min(config.capacity, steps), eval_every=every, eval_episodes=3,
                   checkpoint_every=max(config.frames // 4, 1))  # fmt: skip


def candidate_config(base: Config, name: str, seed: int) -> Config:
    """A run of its own per candidate, so that an interrupted command goes on where it was."""
    folder = base.runs / "advise" / name.replace(":", "-")
    return replace(base, strong=name, seed=seed, runs=folder)


def advise(
    task: str,
    *,
    transforms: str = "blur,overlay,conv,rotate",
    frames: int = 100_000,
    seeds: int = 1,
    run: Path | None = None,
    quick: bool = False,
    margin: float = 0.02,
    batch: int = 256,
    preset: str = "dmgb",
    overlay: Path | None = None,
    runs: Path = Path("runs"),
    device: str = "auto",
) -> list[Advice]:
    """Train (or with `quick` only measure), print the table, and leave a picture and rows."""
    names = [name.strip() for name in transforms.split(",") if name.strip()]
    if not names:
        raise UserError("name at least one transformation, such as --transforms blur,conv")
    if batch < 2 or seeds < 1 or margin < 0:
        raise UserError("--batch must be at least 2, --seeds at least 1, --margin not negative")
    if quick != (run is not None):
        raise UserError("--quick measures on the checkpoint of a run: give both --quick and --run RUN, or neither")
    if run is not None:
        found, folder = on_one_run(task, run, names, margin, batch, device), run
    else:
        base = short(make_config(task, preset=preset, frames=frames, overlay=overlay, runs=runs, device=device))
        parse_transforms(transforms, base)  # a wrong name shows before anything is trained
        found, folder = trained(base, names, seeds, margin, batch), runs / "advise"
    folder.mkdir(parents=True, exist_ok=True)
    report(found, canonical(task), quick, folder)
    return found


def on_one_run(task: str, run: Path, names: list[str], margin: float, batch: int, device: str) -> list[Advice]:
    config = Config.load(run)
    if config.task != canonical(task):
        raise UserError(f"{run} was trained on {config.task}, not on {canonical(task)}")
    families = {name: make_transform(name, config) for name in names}
    with console.status(f"loading {run}"):
        loaded = load_run(run, device)
    frames = loaded.steps * config.action_repeat
    out = []
    for name, family in families.items():
        with console.status(name):
            heads = {h: similarity([pair]) for h, pair in measured(loaded, family, batch, config.seed).items()}
        out.append(Advice(name, heads, margin, frames))
    return out


def trained(base: Config, names: list[str], seeds: int, margin: float, batch: int) -> list[Advice]:
    out = []
    for name in names:
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {h: [] for h in HEADS}
        for seed in range(1, seeds + 1):
            config = candidate_config(base, name, seed)
            console.print(f"[bold]{name}[/], seed {seed}: {config.folder}", soft_wrap=True)
            loaded = load_run(train(config), base.device)
            for h, pair in measured(loaded, make_transform(name, config), batch, seed).items():
                pairs[h].append(pair)
        heads = {h: similarity(p) for h, p in pairs.items()}
        out.append(Advice(name, heads, margin, loaded.steps * base.action_repeat))
    return out


# ------------------------------------------------------------------------------------------------ what is shown


def report(found: list[Advice], task: str, quick: bool, folder: Path) -> None:
    from rich.table import Table

    title = f"{task}: cosine similarity of features, shift → candidate, after {found[0].frames:,} frames"
    if quick:
        title += "\nquick: all on one agent, not trained with the candidates: another quantity than Table F's"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in ("transformation", "actor", "difference", "critic", "difference", "verdict", "advice"):
        table.add_column(column, header_style="bold")
    colour = {"simple": "green", "complex": "red", "unclear": "yellow"}
    rows = Rows(folder / "advice.jsonl")
    for a in found:
        cells = []
        for h in HEADS:
            s = a.heads[h]
            cells += [f"{s.weak:.3f} → {s.candidate:.3f}", f"{s.difference:+.3f} ± {s.error:.3f}"]
        table.add_row(a.transform, *cells, f"[{colour[a.verdict]}]{a.verdict}[/]", a.advice)
        rows.write({"task": task, "transform": a.transform, "frames": a.frames, "quick": quick, "verdict": a.verdict,
                    "margin": a.margin, **as_numbers(a)})  # fmt: skip
    console.print(table)
    console.print(f"complex: lower than under shift by more than {found[0].margin:g} in one of the two, with two "
                  "standard errors to spare; simple: in neither", soft_wrap=True)  # fmt: skip
    picture = folder / f"advice_{task}.png".replace("/", "-").replace(":", "-")
    draw(found, title.split("\n")[0], picture, PAPER if task == "walker_walk" and not quick else {})
    console.print(f"picture: {picture}", soft_wrap=True)


def as_numbers(a: Advice) -> dict[str, float | None]:
    return jsonable({f"{h}_{key}": value for h, s in a.heads.items() for key, value in vars(s).items()})


def draw(found: list[Advice], title: str, path: Path, paper: dict[str, Any]) -> None:
    """Candidate against shift, one panel per head; the paper's values where it measured the same."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), dpi=150, layout="constrained", sharey=True)
    for k, (axis, head) in enumerate(zip(axes, HEADS, strict=True)):  # actor, critic
        bars(axis, found, head, {name: pairs[k] for name, pairs in paper.items()})
        axis.set_title(f"{head}'s features", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("cosine similarity")
    axes[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=3, frameon=False)  # below the bars
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def bars(axis: Any, found: list[Advice], head: str, paper: dict[str, tuple[float, float]]) -> None:
    at = range(len(found))
    sims = [a.heads[head] for a in found]
    axis.bar([i - 0.2 for i in at], [s.weak for s in sims], 0.38, color="0.7", label="shift")
    axis.bar([i + 0.2 for i in at], [s.candidate for s in sims], 0.38, yerr=[s.error for s in sims], color="#3b6fb6",
             label="candidate")  # fmt: skip
    known = [(i, paper[a.transform]) for i, a in enumerate(found) if a.transform in paper]
    points = [(i + dx, value) for i, pair in known for dx, value in zip((-0.2, 0.2), pair, strict=True)]
    if points:
        axis.scatter(*zip(*points, strict=True), marker="_", s=120, color="black", zorder=3,
                     label="paper")  # fmt: skip
    axis.set_xticks(list(at), [f"{a.transform}\n{a.verdict}" for a in found], fontsize=8)
