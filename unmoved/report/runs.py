"""Run folders as data: what can be compared, and what was left out and why."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from unmoved.config import FREE_TO_CHANGE, PRESETS, Config, make_config
from unmoved.errors import UserError
from unmoved.stats import Array
from unmoved.status import last_rows

# Settings of where and how long, not of what is learnt.
NOT_THE_METHOD = FREE_TO_CHANGE | {
    "task", "method", "preset", "seed", "device", "precision", "compile", "lag", "shadow_map", "eval_every", "overlay",
    "eval_episodes", "eval_backgrounds", "log_every", "keep_states", "videos", "intensity",
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Evaluations of one run in one background."""

    frames: Array
    seconds: Array
    score: Array  # mean return over the episodes
    episodes: int
    clips: str  # "", or what the videos were


@dataclass(frozen=True)
class Record:
    """One run. `settings`: what differs from its preset's method."""

    folder: Path
    config: Config
    settings: dict[str, Any]
    curves: dict[str, Curve]  # by background
    frames_per_second: float
    machine: str
    diagnostics: list[dict[str, Any]] = field(repr=False)
    label: str = ""

    @property
    def panel(self) -> tuple[str, str]:
        return self.config.preset, self.config.task


@dataclass
class Runs:
    records: list[Record]
    left_out: list[tuple[str, str]]  # path, why
    notes: list[tuple[str, str]]

    def groups(self) -> dict[tuple[str, str, str], list[Record]]:
        """By preset, task and label: what may be averaged."""
        found: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
        for record in self.records:
            found[(*record.panel, record.label)].append(record)
        order = {label: i for i, label in enumerate(self.labels())}
        return {key: found[key] for key in sorted(found, key=lambda k: (k[0], k[1], order[k[2]]))}

    def labels(self) -> list[str]:
        return ordered({r.label: r for r in self.records})

    def backgrounds(self) -> list[str]:
        found = {name for r in self.records for name in r.curves}
        return sorted(found, key=lambda name: (name != "train", name))


def ordered(by_label: dict[str, Record]) -> list[str]:
    """As the recipes are listed, the plain ones first: no augmentation, then RAD to ours."""
    order = ("sac", "rad", "drqv2", "rad_plus", "rad_plus_shared", "drq", "drac", "drac_printed", "svea",
             "drq_kl_fixed", "drq_kl", "drq_tp", "drq_tp_original", "ours_printed", "ours_pda", "ours")  # fmt: skip

    def key(label: str) -> tuple[int, int, str]:
        record = by_label[label]
        method = record.config.method
        return (order.index(method) if method in order else len(order), len(record.settings), label)

    return sorted(by_label, key=key)


@cache
def preset_default(task: str, preset: str, method: str) -> dict[str, Any]:
    return dataclasses.asdict(make_config(task, preset=preset, method=method))


def own_settings(config: Config) -> dict[str, Any]:
    """What of a configuration is not its preset's, where it bears on what is learnt."""
    if config.preset not in PRESETS:
        raise UserError(f"its preset '{config.preset}' is not known")
    plain = preset_default(config.task, config.preset, config.method)
    own = dataclasses.asdict(config)
    return {k: v for k, v in own.items() if k not in NOT_THE_METHOD and v != plain[k]}


def describe(settings: dict[str, Any]) -> str:
    words = []
    for name, value in settings.items():
        plain = name.replace("_", " ")
        words.append(plain if value is True else f"no {plain}" if value is False else f"{plain} {value}")
    return ", ".join(words)


def read_curves(folder: Path, config: Config) -> tuple[dict[str, Curve], int]:
    """Evaluations by background, and how many lines were no rows."""
    by_background: dict[str, list[dict[str, Any]]] = defaultdict(list)
    broken = 0
    path = folder / "eval.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
            values = [float(row[k]) for k in ("frames", "steps", "seconds", "return_mean")]
            if not all(map(math.isfinite, values)):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            broken += 1
            continue
        # An episode may end within a repeat, so frames can be a little fewer; agent steps taken for frames are not.
        frames, steps = row["frames"], row["steps"]
        if (
            not steps * config.action_repeat * 0.5 < frames + 0.5
            or frames > steps * config.action_repeat
            or (config.action_repeat > 1 and steps and frames == steps)
        ):
            raise UserError(f"its rows are in other units: {frames} frames at {steps} steps of {config.action_repeat}")
        by_background[str(row.get("background", "train"))].append(row)
    return {name: make_curve(rows) for name, rows in by_background.items()}, broken


def make_curve(rows: list[dict[str, Any]]) -> Curve:
    frames, seconds, score = (np.array([row[k] for row in rows], float) for k in ("frames", "seconds", "return_mean"))
    if (np.diff(frames) <= 0).any():
        raise UserError("its evaluations are not in order of frames")
    clips = {str(row["videos"]) for row in rows if "videos" in row}
    return Curve(frames, seconds, score, int(rows[-1].get("episodes", 1)), ", ".join(sorted(clips)))


def read_diagnostics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "diagnostics.jsonl"
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("frames"), int | float):
            rows.append(row)
    return sorted(rows, key=lambda row: row["frames"])


def read_run(folder: Path) -> tuple[Record, int]:
    config = Config.load(folder)
    curves, broken = read_curves(folder, config)
    if not curves:
        raise UserError("it has no evaluation yet")
    last = max((c.frames[-1], c.seconds[-1]) for c in curves.values())
    rows = last_rows(folder / "train.jsonl")
    if rows and rows[-1].get("seconds"):
        last = max(last, (float(rows[-1]["frames"]), float(rows[-1]["seconds"])))
    try:
        machine = str(json.loads((folder / "machine.json").read_text())["device"])
    except (OSError, ValueError, KeyError, TypeError):
        machine = "unknown"
    record = Record(folder, config, own_settings(config), curves, last[0] / last[1] if last[1] else math.nan, machine,
                    read_diagnostics(folder))  # fmt: skip
    return record, broken


def read_runs(root: Path) -> Runs:
    """Every run under a folder. What cannot be compared is named and left out."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder")
    runs = Runs([], [], [])
    for path in sorted(root.rglob("config.json")):
        folder = path.parent
        name = str(folder.relative_to(root))
        try:
            record, broken = read_run(folder)
        except (UserError, OSError, UnicodeError) as error:
            runs.left_out.append((name, str(error)))
            continue
        if broken:
            runs.notes.append((name, f"{broken} line(s) of eval.jsonl are no rows and were passed over"))
        runs.records.append(record)
    drop_twins(runs, root)
    name_arms(runs)
    note_mixtures(runs)
    return runs


def drop_twins(runs: Runs, root: Path) -> None:
    """Of two runs with the same task, method, settings and seed the longer one counts."""
    best: dict[Any, Record] = {}
    for record in runs.records:
        key = (*record.panel, record.config.method, describe(record.settings), record.config.seed)
        other = best.get(key)
        if other is None:
            best[key] = record
            continue
        longer, shorter = sorted((other, record), key=lambda r: -max(c.frames[-1] for c in r.curves.values()))
        best[key] = longer
        why = f"the same run as {longer.folder.relative_to(root)}"
        runs.left_out.append((str(shorter.folder.relative_to(root)), why))
    runs.records = list(best.values())


def name_arms(runs: Runs) -> None:
    """Label = method and the settings by which it stands out; what all runs of a preset share goes unsaid there."""
    shared: dict[str, set[str]] = {}
    for r in runs.records:
        settings = {json.dumps([k, v], default=str) for k, v in r.settings.items()}
        shared[r.config.preset] = shared.get(r.config.preset, settings) & settings
    named = []
    for r in runs.records:
        own = {k: v for k, v in r.settings.items() if json.dumps([k, v], default=str) not in shared[r.config.preset]}
        label = f"{r.config.method} ({describe(own)})" if own else r.config.method
        named.append(replace(r, label=label))
    runs.records = named
    for preset, settings in shared.items():
        if settings:
            words = describe(dict(sorted(json.loads(s) for s in settings)))
            runs.notes.append((f"all of {preset}", f"every run differs from the preset: {words}"))


def note_mixtures(runs: Runs) -> None:
    """Runs that are averaged although a machine or a source differed."""
    for (preset, task, label), group in runs.groups().items():
        for name in ("precision", "lag", "shadow_map", "compile", "device", "eval_episodes", "overlay"):
            values = sorted({str(getattr(r.config, name)) for r in group})
            if len(values) > 1:
                runs.notes.append((f"{preset}/{task}/{label}", f"seeds differ in {name}: {', '.join(values)}"))
        clips = {(b, c.clips) for r in group for b, c in r.curves.items()}
        for background in {b for b, _ in clips}:
            sources = sorted(c for b, c in clips if b == background)
            if len(sources) > 1:
                runs.notes.append((f"{preset}/{task}/{label}", f"seeds saw other clips in {background}: {sources}"))


# ------------------------------------------------------------------------------------------------ at which frames


def common_frames(records: list[Record], background: str) -> float:
    """The last evaluation that all of them have reached."""
    return min(r.curves[background].frames[-1] for r in records)


def last_mean(record: Record, background: str, frames: float, n: int) -> float:
    """Mean of the last n evaluations at or before these frames."""
    curve = record.curves[background]
    return float(curve.score[curve.frames <= frames][-n:].mean())


def statistic_at(record: Record, name: str, frames: float) -> float | None:
    """Of the last record at or before these frames that has it."""
    rows = [row for row in record.diagnostics if row["frames"] <= frames and row.get(name) is not None]
    return float(rows[-1][name]) if rows else None


def maximum_return(task: str) -> float | None:
    """1000 frames of reward at most 1 in the suite; None: not known, so no score."""
    from unmoved.envs.dmc import TASKS

    special = {"reach_duplo": 250.0, "toy_reach": 100.0, "toy_exit": 1.0}
    return special.get(task, 1000.0 if task in TASKS else None)
