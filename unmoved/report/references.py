"""Published curves in the CSV forms of DrQ and DrQ-v2, to be laid over ours."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unmoved.errors import UserError
from unmoved.stats import Array

# Either form's names for the same column. Both count simulator frames.
COLUMNS = {"frames": ("frame", "frames", "step"), "score": ("episode_reward",), "task": ("env",), "name": ("agent",)}
TASKS = {"cup_catch": "ball_in_cup_catch"}


@dataclass(frozen=True)
class Reference:
    task: str
    name: str
    frames: Array
    mean: Array
    std: Array  # over seeds
    seeds: int


def read_reference(path: Path) -> list[Reference]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            known = {
                k: next((n for n in names if n in (reader.fieldnames or ())), None) for k, names in COLUMNS.items()
            }
            if None in known.values() or "seed" not in (reader.fieldnames or ()):
                raise UserError(f"{path} is not a CSV of DrQ's or DrQ-v2's form: env, agent, seed, step or frame, "
                                "episode_reward")  # fmt: skip
            points: dict[tuple[str, str], dict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
            for row in reader:
                frames, score = float(row[str(known["frames"])]), float(row[str(known["score"])])
                if math.isfinite(score):
                    task = TASKS.get(row[str(known["task"])], row[str(known["task"])])
                    points[task, row[str(known["name"])]][frames][row["seed"]] = score
    except (OSError, ValueError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return [summarise(task, name, by_frame) for (task, name), by_frame in points.items()]


def summarise(task: str, name: str, by_frame: dict[float, dict[str, float]]) -> Reference:
    """Points that at least half of the seeds have, so that the mean is always of about the same ones."""
    seeds = len({seed for scores in by_frame.values() for seed in scores})
    kept = sorted((f, list(scores.values())) for f, scores in by_frame.items() if 2 * len(scores) >= seeds)
    frames = np.array([f for f, _ in kept])
    mean, std = (np.array([how(values) for _, values in kept]) for how in (np.mean, np.std))
    return Reference(task, name, frames, mean, std, seeds)
