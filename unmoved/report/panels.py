"""What is compared with what: runs of one preset, task and background, at frames that all of them have reached."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unmoved.report.runs import Record, Runs, common_frames, last_mean, maximum_return, statistic_at
from unmoved.stats import Array, Scores


@dataclass(frozen=True)
class Mean:
    """Over seeds. std: of the sample (n - 1); nan for one seed."""

    value: float
    std: float
    n: int

    @staticmethod
    def of(values: Iterable[float]) -> Mean:
        x = np.array(list(values))
        return Mean(float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else math.nan, len(x))

    @property
    def error(self) -> float:
        return self.std / math.sqrt(self.n)

    def text(self, digits: int = 1) -> str:
        spread = "" if math.isnan(self.std) else f" ± {self.std:.{digits}f}"
        return f"{self.value:.{digits}f}{spread} ({self.n})"


@dataclass(frozen=True)
class Panel:
    preset: str
    task: str
    background: str
    frames: float  # at which scores are taken
    groups: dict[str, list[Record]]  # by label

    @property
    def clips(self) -> str:
        """What the videos were, to be said wherever a number of theirs is shown."""
        return ", ".join(sorted({r.curves[self.background].clips for g in self.groups.values() for r in g} - {""}))

    @property
    def scene(self) -> str:
        return f"{self.background} ({self.clips})" if self.clips else self.background

    @property
    def episodes(self) -> str:
        return " or ".join(
            map(str, sorted({r.curves[self.background].episodes for g in self.groups.values() for r in g}))
        )

    def returns(self, label: str, last: int = 1) -> list[float]:
        """Of each seed: mean of the last evaluations at or before the panel's frames."""
        return [last_mean(r, self.background, self.frames, last) for r in self.groups[label]]


def make_panels(runs: Runs, frames: int | None = None) -> list[Panel]:
    """Where `frames` are asked for, runs that have not reached them are left out and named."""
    labels, panels = runs.labels(), []
    short: dict[str, str] = {}
    for background in runs.backgrounds():
        keys = sorted({r.panel for r in runs.records if background in r.curves})
        for preset, task in keys:
            records = [r for r in runs.records if r.panel == (preset, task) and background in r.curves]
            if frames is not None:
                for r in records:
                    if r.curves[background].frames[-1] < frames:
                        short[str(r.folder)] = f"it has not reached {frames:,} frames"
                records = [r for r in records if r.curves[background].frames[-1] >= frames]
            if not records:
                continue
            groups = {label: [r for r in records if r.label == label] for label in labels}
            at = frames if frames is not None else common_frames(records, background)
            panels.append(Panel(preset, task, background, at, {k: v for k, v in groups.items() if v}))
            longest = max(r.curves[background].frames[-1] for r in records)
            if frames is None and longest > at:
                slow = [str(r.folder) for r in records if r.curves[background].frames[-1] == at]
                why = f"compared at {at:,.0f} frames although some runs have {longest:,.0f}: {slow[0]} has no more"
                runs.notes.append((f"{preset}/{task} in {background}", why))
    runs.left_out += short.items()
    return panels


def labels_of(panels: list[Panel]) -> list[str]:
    """In their usual order: every panel has it, the fullest one most of it."""
    fullest = sorted(panels, key=lambda p: -len(p.groups))
    return list(dict.fromkeys(label for p in fullest for label in p.groups))


@dataclass(frozen=True)
class Suite:
    """Labels that have all of a set of tasks, in one preset and background."""

    preset: str
    background: str
    scene: str
    tasks: tuple[str, ...]
    frames: str
    scores: dict[str, Scores]  # by label, one array per task

    @property
    def title(self) -> str:
        return f"{self.preset}, {self.scene}, {len(self.tasks)} task{'s' if len(self.tasks) > 1 else ''}"

    @property
    def runs(self) -> str:
        counts = sorted({len(task) for scores in self.scores.values() for task in scores})
        return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def make_suites(panels: list[Panel]) -> list[Suite]:
    """Aggregates over different tasks are not comparable: one suite per set of tasks that some label has, with every
    label that has at least these."""
    suites = []
    for preset, background in dict.fromkeys((p.preset, p.background) for p in panels):
        known = {
            p.task: p
            for p in panels
            if (p.preset, p.background) == (preset, background) and maximum_return(p.task) is not None
        }
        labels = labels_of(list(known.values()))
        sets = {tuple(t for t, p in known.items() if label in p.groups) for label in labels}
        if len(sets) > 1:  # one task is a suite only where there is no larger one
            sets = {s for s in sets if len(s) > 1} or sets
        for tasks in sorted(sets, key=lambda s: (-len(s), s)):
            scores: dict[str, Scores] = {
                label: [scores_of(known[t], label) for t in tasks]
                for label in labels
                if all(label in known[t].groups for t in tasks)
            }
            if len(scores) < 2:
                continue
            at = sorted({known[t].frames for t in tasks})
            frames = f"{at[0]:,.0f}" if len(at) == 1 else f"{at[0]:,.0f} to {at[-1]:,.0f}"
            clips = ", ".join(sorted({known[t].scene for t in tasks}))
            suites.append(Suite(preset, background, clips, tasks, frames, scores))
    return suites


def scores_of(panel: Panel, label: str) -> Array:
    top = maximum_return(panel.task)
    assert top is not None
    return np.array(panel.returns(label)) / top


def statistic(records: list[Record], name: str, frames: float | None = None) -> tuple[Mean, float] | None:
    """Mean over seeds of a recorded statistic, at frames that all of them have; None where one has none."""
    ends = [max((r["frames"] for r in rec.diagnostics if r.get(name) is not None), default=None) for rec in records]
    known = [end for end in ends if end is not None]
    if not records or len(known) < len(records):
        return None
    at = min(known) if frames is None else min(frames, *known)
    values = [statistic_at(rec, name, at) for rec in records]
    found = [v for v in values if v is not None]
    return (Mean.of(found), at) if len(found) == len(records) else None
