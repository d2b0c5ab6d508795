"""What the runs at hand lack to be the paper's full experiments."""

from __future__ import annotations

import json
from collections import defaultdict

from unmoved.config import Config
from unmoved.experiments import EXPERIMENTS, Selection, runs_of
from unmoved.report.runs import Record, Runs, own_settings
from unmoved.report.tables import Table

Arm = tuple[str, str, str, str]  # preset, task, method, settings


def arm_of(config: Config) -> Arm:
    settings = json.dumps(own_settings(config), sort_keys=True, default=str)
    return config.preset, config.task, config.method, settings


def reached(record: Record) -> float:
    return float(max(c.frames[-1] for c in record.curves.values()))


def lacks(wanted: dict[Arm, Config], begun: dict[Arm, list[Record]]) -> list[str]:
    out = []
    if len(begun) < len(wanted):
        out.append(f"{len(wanted) - len(begun)} of {len(wanted)} pairs of task and method")
    few = [records for records in begun.values() if len(records) < 5]
    if few:
        out.append(f"seeds: {min(map(len, few))} instead of 5 in {len(few)} of {len(begun)} pairs")
    short = [r for arm, records in begun.items() for r in records if reached(r) < wanted[arm].frames]
    if short:
        out.append(f"frames: {len(short)} runs are short, the shortest has {min(map(reached, short)):,.0f}")
    records = [r for group in begun.values() for r in group]
    if any("generated" in c.clips for r in records for c in r.curves.values()):
        out.append("the benchmark's videos: clips were generated")
    if any(r.config.overlay is None for r in records if shows_overlay(r.config)):
        out.append("photographs for overlay (the paper: Places365): images were generated")
    return out


def shows_overlay(config: Config) -> bool:
    strong = config.method == "svea" or (config.method == "ours" and config.policy == "tanh_dmgb")
    return strong and config.strong == "overlay"


def missing_table(runs: Runs) -> Table:
    have: dict[Arm, list[Record]] = defaultdict(list)
    for r in runs.records:
        have[arm_of(r.config)].append(r)
    rows = []
    for name, experiment in EXPERIMENTS.items():
        wanted = {arm_of(c): c for c in runs_of(Selection(name, seeds=(1,)))}
        begun = {arm: have[arm] for arm in wanted if arm in have}
        if begun:
            rows.append([name, experiment.shows, "; ".join(lacks(wanted, begun)) or "nothing"])
    if not rows:
        rows = [["-", "-", "no run here belongs to an experiment of the paper: other presets, tasks or settings"]]
    caption = "What these runs lack to be the paper's full experiments (5 seeds, full budgets, original images)."
    return Table("missing", "What is missing", caption, ["experiment", "shows", "missing"], rows)
