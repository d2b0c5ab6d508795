"""Figures of a report, each as PNG and SVG. Every axis says its unit, every caption the number of seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from unmoved import stats
from unmoved.report.panels import Panel, Suite, labels_of
from unmoved.report.references import Reference
from unmoved.report.runs import Record, Runs
from unmoved.report.tables import STATISTICS, slug

# Told apart by colour-blind readers too; ours always has the first.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5539", "#444444", "#9467bd", "#bcbd22")
STYLES = ("-", "--", ":", "-.")
LOOK: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "legend.fontsize": 8.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.6,
    "svg.hashsalt": "unmoved", "svg.fonttype": "path", "figure.dpi": 100, "savefig.dpi": 160, "axes.axisbelow": True,
    "legend.frameon": False,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    caption: str
    png: Path
    svg: Path
    width: int  # CSS pixels at which its text is as large as the page's


@dataclass(frozen=True)
class Style:
    colour: str
    line: str


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """One look per label throughout a report."""
    names = sorted(labels, key=lambda label: label != "ours")
    return {
        label: Style(PALETTE[i % len(PALETTE)], STYLES[i // len(PALETTE) % len(STYLES)])
        for i, label in enumerate(names)
    }


def save(figure: Any, folder: Path, name: str, title: str, caption: str) -> Figure:
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = (folder / f"{name}.{suffix}" for suffix in ("png", "svg"))
    figure.savefig(png)
    figure.savefig(svg, metadata={"Date": None})
    plt.close(figure)
    return Figure(name, title, caption, png, svg, round(100 * figure.get_size_inches()[0]))


def grid(n: int, width: float = 3.2, height: float = 2.45, most: int = 3, legend: float = 0.0) -> tuple[Any, list[Any]]:
    """n axes in rows of at most `most`; `legend`: inches kept free above."""
    columns = min(n, most)
    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(width * columns, 4.6), height * rows + legend), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[n:]:
        axis.set_axis_off()
    return figure, flat[:n]


def add_legend(figure: Any, axes: list[Any]) -> None:
    fullest = sorted(axes, key=lambda axis: -len(axis.get_legend_handles_labels()[1]))
    handles = {label: h for axis in fullest for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    width = max(1, int(figure.get_size_inches()[0] * 11 / (4 + max(map(len, handles), default=1))))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), width))


def thousands(axis: Any) -> None:
    def text(value: float, _: Any) -> str:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"

    axis.xaxis.set_major_formatter(FuncFormatter(text))


def curve_grid(records: list[Record], background: str) -> tuple[stats.Array, stats.Array, stats.Array]:
    """Evaluations that all seeds have: frames, mean seconds, scores (n, points)."""
    curves = [r.curves[background] for r in records]
    shared = curves[0].frames
    for c in curves[1:]:
        shared = np.intersect1d(shared, c.frames)
    at = [np.searchsorted(c.frames, shared) for c in curves]
    seconds = np.mean([c.seconds[i] for c, i in zip(curves, at, strict=True)], 0)
    return shared, seconds, np.stack([c.score[i] for c, i in zip(curves, at, strict=True)])


def curve_figures(
    panels: list[Panel], looks: dict[str, Style], references: list[Reference], folder: Path
) -> list[Figure]:
    out = []
    for preset, background in dict.fromkeys((p.preset, p.background) for p in panels):
        here = [p for p in panels if (p.preset, p.background) == (preset, background)]
        for axis_name in ("frames", "hours"):
            out.append(draw_curves(here, looks, references if axis_name == "frames" else [], axis_name, folder))
    return out


def draw_curves(
    panels: list[Panel], looks: dict[str, Style], references: list[Reference], over: str, folder: Path
) -> Figure:
    figure, axes = grid(len(panels), legend=0.5)
    trained = max(r.curves[p.background].seconds[-1] for p in panels for g in p.groups.values() for r in g)
    unit, scale = ("frames (simulator steps)", 1) if over == "frames" else time_unit(trained)
    for axis, p in zip(axes, panels, strict=True):
        longest = 0.0
        for label, records in p.groups.items():
            frames, seconds, scores = curve_grid(records, p.background)
            if not len(frames):
                continue
            x = frames if over == "frames" else seconds / scale
            longest = max(longest, float(x[-1]))
            centre, low, high = stats.curve_band(scores)
            look = looks[label]
            if len(records) > 1:
                axis.fill_between(x, low, high, color=look.colour, alpha=0.16, lw=0)
            marker = "o" if len(x) < 8 else None
            axis.plot(x, centre, color=look.colour, ls=look.line, lw=1.6, marker=marker, ms=3, label=label)
        if p.background == "train":
            for reference in references:
                if reference.task == p.task:
                    draw_reference(axis, reference, longest)
        if over == "frames":
            thousands(axis)
        axis.set_title(f"{p.task} ({seeds_text(p.groups.values())})")
        axis.set(xlabel=unit, ylabel="return")
        axis.set_xlim(left=0)
    add_legend(figure, axes)
    first = panels[0]
    scenes = ", ".join(sorted({p.scene for p in panels}))
    against = "frames" if over == "frames" else "wall-clock"
    caption = (
        f"Mean return over seeds against {against}; preset {first.preset}, background {scenes}, "
        f"{' or '.join(sorted({p.episodes for p in panels}))} episodes per point. Bands: 95 % bootstrap over seeds; "
        "one seed has none. A curve ends where its shortest seed does."
    )
    if over == "hours":
        caption += " Methods cost differently per update; machines and their load are as they were (see Wall-clock)."
    title = f"Learning curves over {against}: {first.preset}, {first.background}"
    return save(figure, folder, slug("curves", first.preset, first.background, over), title, caption)


def time_unit(seconds: float) -> tuple[str, int]:
    return ("hours of training", 3600) if seconds >= 3600 else ("minutes of training", 60)


def draw_reference(axis: Any, reference: Reference, longest: float) -> None:
    inside = reference.frames <= longest * 1.02
    x, mean, std = reference.frames[inside], reference.mean[inside], reference.std[inside]
    axis.fill_between(x, mean - std, mean + std, color="0.6", alpha=0.15, lw=0)
    axis.plot(
        x, mean, color="0.45", ls=(0, (4, 2)), lw=1.2, label=f"{reference.name}, published ({reference.seeds} seeds)"
    )


def seeds_text(groups: Iterable[list[Record]]) -> str:
    counts = sorted({len(g) for g in groups})
    words = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{words} seed{'s' if counts != [1] else ''}"


def aggregate_figures(suites: list[Suite], looks: dict[str, Style], folder: Path) -> list[Figure]:
    out = []
    for k, s in enumerate(suites, 1):
        labels = list(s.scores)[::-1]
        figure, axes = plt.subplots(
            1,
            4,
            figsize=(9.6 + 0.05 * max(map(len, labels)), 0.75 + 0.34 * len(labels)),
            sharey=True,
            layout="constrained",
            squeeze=False,
        )
        for axis, (name, statistic) in zip(axes[0], stats.AGGREGATES.items(), strict=True):
            for y, label in enumerate(labels):
                found, look = stats.interval(statistic, s.scores[label]), looks[label]
                if not math.isnan(found.low):
                    axis.barh(y, found.high - found.low, 0.55, found.low, color=look.colour, alpha=0.35, lw=0)
                axis.plot([found.value] * 2, [y - 0.28, y + 0.28], color=look.colour, lw=2.2, solid_capstyle="butt")
            axis.set_title(name + (" (less is better)" if name == "optimality gap" else ""))
            axis.set_yticks(range(len(labels)), labels)
            axis.grid(axis="y", visible=False)
            axis.use_sticky_edges = False  # bars would otherwise begin at the frame
            axis.margins(x=0.08)
            axis.set_xlabel("score")
        caption = (
            f"Background {s.scene}; at {s.frames} frames, {s.runs} seeds per task. Bars: 95 % stratified bootstrap "
            "intervals; lines alone where a task has a single seed."
        )
        name = slug("aggregate", s.preset, s.background, str(k))
        out.append(save(figure, folder, name, f"Aggregate scores: {s.title}", caption))
        out.append(draw_profiles(s, looks, k, folder))
    return out


def draw_profiles(s: Suite, looks: dict[str, Style], k: int, folder: Path) -> Figure:
    figure, (axis,) = grid(1, 5.2, 3.0, legend=0.4)
    top = max(float(task.max()) for scores in s.scores.values() for task in scores)
    thresholds = np.linspace(0, min(1.0, max(0.05, 1.1 * top)), 201)
    for label, scores in s.scores.items():
        value, low, high = stats.profile_band(scores, thresholds)
        axis.plot(thresholds, value, color=looks[label].colour, ls=looks[label].line, lw=1.6, label=label)
        if min(map(len, scores)) > 1:
            axis.fill_between(thresholds, low, high, color=looks[label].colour, alpha=0.14, lw=0)
    axis.set(xlabel="score τ (return / maximum)", ylabel="fraction of runs with score > τ", ylim=(0, 1.02))
    axis.set_xlim(0, thresholds[-1])
    add_legend(figure, [axis])
    caption = f"Background {s.scene}; at {s.frames} frames, {s.runs} seeds per task. Bands: 95 % stratified bootstrap."
    return save(
        figure, folder, slug("profile", s.preset, s.background, str(k)), f"Performance profile: {s.title}", caption
    )


OVER_TRAINING = {
    **{k: v for k, v in STATISTICS.items() if not k.startswith("bias")},
    "cosine_actor_shift": "cosine, actor's features",
    "cosine_critic_shift": "cosine, critic's features",
    "tsne_actor": "t-SNE distance, actor's features",
    "tsne_critic": "t-SNE distance, critic's features",
    "tangent_norm": "|dQ/dτ|",
    "bias_mse": "bias of target, mean square",
}


def statistics_figures(runs: Runs, looks: dict[str, Style], folder: Path) -> list[Figure]:
    """What diagnostics.jsonl recorded, over training."""
    out = []
    for preset, task in dict.fromkeys(r.panel for r in runs.records if r.diagnostics):
        groups = {k[2]: g for k, g in runs.groups().items() if k[:2] == (preset, task)}
        groups = {label: [r for r in g if r.diagnostics] for label, g in groups.items()}
        groups = {label: g for label, g in groups.items() if g}
        names = [n for n in OVER_TRAINING if any(has(r, n) for g in groups.values() for r in g)]
        if not names:
            continue
        figure, axes = grid(len(names), 3.0, 2.2, legend=0.4)
        for axis, name in zip(axes, names, strict=True):
            for label, records in groups.items():
                draw_statistic(axis, [r for r in records if has(r, name)], name, label, looks[label])
            axis.set_title(OVER_TRAINING[name])
            axis.set(xlabel="frames (simulator steps)", xlim=(0, None))
            thousands(axis)
        add_legend(figure, axes)
        caption = (
            f"Statistics under the weak transformation while training, {preset}/{task}, {seeds_text(groups.values())}. "
            "Mean over seeds; bands: lowest to highest seed."
        )
        out.append(save(figure, folder, slug("statistics", preset, task), f"Over training: {preset}/{task}", caption))
    return out


def has(record: Record, name: str) -> bool:
    return any(row.get(name) is not None for row in record.diagnostics)


def draw_statistic(axis: Any, records: list[Record], name: str, label: str, look: Style) -> None:
    series = [{row["frames"]: row[name] for row in r.diagnostics if row.get(name) is not None} for r in records]
    if not series:
        return
    x = sorted(set.intersection(*map(set, series)))
    y = np.array([[s[f] for f in x] for s in series])
    if len(series) > 1 and x:
        axis.fill_between(x, y.min(0), y.max(0), color=look.colour, alpha=0.15, lw=0)
    if x:
        axis.plot(
            x, y.mean(0), color=look.colour, ls=look.line, lw=1.4, marker="o" if len(x) < 8 else None, ms=3, label=label
        )


def background_figures(panels: list[Panel], looks: dict[str, Style], folder: Path) -> list[Figure]:
    """Returns by background, where a preset has several."""
    out = []
    for preset in dict.fromkeys(p.preset for p in panels):
        here = [p for p in panels if p.preset == preset]
        names = list(dict.fromkeys(p.background for p in here))
        if len(names) < 2:
            continue
        tasks = list(dict.fromkeys(p.task for p in here))
        figure, axes = grid(len(tasks), 3.3, 2.5, legend=0.4)
        for axis, task in zip(axes, tasks, strict=True):
            of_task = {p.background: p for p in here if p.task == task}
            labels = labels_of(list(of_task.values()))
            width = 0.8 / len(labels)
            for k, label in enumerate(labels):
                for i, name in enumerate(names):
                    if name in of_task and label in of_task[name].groups:
                        values = of_task[name].returns(label)
                        at = i + (k - (len(labels) - 1) / 2) * width
                        first = i == min(j for j, n in enumerate(names) if n in of_task and label in of_task[n].groups)
                        axis.bar(at, np.mean(values), width * 0.9, color=looks[label].colour, alpha=0.75,
                                 label=label if first else None)  # fmt: skip
                        axis.scatter([at] * len(values), values, s=9, color="k", zorder=3, lw=0, alpha=0.7)
            axis.set_xticks(range(len(names)), [n.replace("_", "\n") for n in names])
            axis.grid(axis="x", visible=False)
            axis.set_title(f"{task} ({seeds_text(g for p in of_task.values() for g in p.groups.values())})")
            axis.set(ylabel="return")
        add_legend(figure, axes)
        scenes = ", ".join(sorted({p.scene for p in here}))
        reached = ", ".join(sorted({f"{p.frames:,.0f}" for p in here}))
        caption = f"Return by background: {scenes}; at {reached} frames. Bars: mean over seeds; dots: seeds."
        out.append(
            save(figure, folder, slug("backgrounds", preset), f"Generalisation by background: {preset}", caption)
        )
    return out
