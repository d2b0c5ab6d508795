"""Aggregate scores with stratified bootstrap intervals, to the definitions of Agarwal et al. (2021), "Deep RL at the
Edge of the Statistical Precipice".

Scores are one array per task, whose last axis is the task's runs; tasks may have different numbers of runs. Leading
axes are replicates: a statistic maps arrays (..., n_task) to (...). A score is a return divided by the task's maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Scores = Sequence[Array]
Statistic = Callable[[Scores], Array]


def task_means(scores: Scores) -> Array:
    """(..., tasks)"""
    return np.stack([task.mean(-1) for task in scores], -1)


def mean(scores: Scores) -> Array:
    """Of the tasks' means, so that a task counts the same whatever its number of runs."""
    return task_means(scores).mean(-1)


def median(scores: Scores) -> Array:
    """Of the tasks' means."""
    return np.median(task_means(scores), -1)


def iqm(scores: Scores) -> Array:
    """Interquartile mean: of all runs of all tasks, without the lowest and the highest quarter."""
    runs = np.concatenate(list(scores), -1)
    cut = runs.shape[-1] // 4
    return np.sort(runs, -1)[..., cut : runs.shape[-1] - cut].mean(-1)


def optimality_gap(scores: Scores, threshold: float = 1.0) -> Array:
    """By how much scores fall short of the threshold; what lies above it makes up for nothing."""
    return threshold - mean([np.minimum(task, threshold) for task in scores])


def improvement(x: Scores, y: Scores) -> Array:
    """Probability that a run of x beats a run of y, ties counted half, averaged over the tasks they share in order."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} tasks against {len(y)}")
    wins = [np.sign(a[..., :, None] - b[..., None, :]).mean((-2, -1)) for a, b in zip(x, y, strict=True)]
    return (1 + np.stack(wins, -1)).mean(-1) / 2


def profile(scores: Scores, thresholds: ArrayLike) -> Array:
    """Fraction of all runs with a score above each threshold: (..., thresholds)."""
    runs = np.sort(np.concatenate(list(scores), -1), -1)
    flat = runs.reshape(-1, runs.shape[-1])
    below = np.stack([np.searchsorted(row, np.asarray(thresholds), side="right") for row in flat])
    return 1 - below.reshape(*runs.shape[:-1], -1) / runs.shape[-1]


AGGREGATES: dict[str, Statistic] = {"IQM": iqm, "median": median, "mean": mean, "optimality gap": optimality_gap}


@dataclass(frozen=True)
class Interval:
    """A statistic with its percentile interval; nan bounds where a task has a single run, which has no spread."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def resample(scores: Scores, replicates: int, rng: np.random.Generator) -> list[Array]:
    """Runs drawn with replacement within each task (a stratum): (replicates, n_task) each."""
    return [task[rng.integers(len(task), size=(replicates, len(task)))] for task in scores]


def percentiles(values: Array, level: float) -> Array:
    """Lower and upper bound over replicates, the first axis."""
    return np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)


def interval(
    statistic: Statistic, scores: Scores, *, seed: int = 0, replicates: int = 2_000, level: float = 0.95
) -> Interval:
    value = float(statistic(scores))
    if min(map(len, scores)) < 2:
        return Interval(value, math.nan, math.nan)
    low, high = percentiles(statistic(resample(scores, replicates, np.random.default_rng(seed))), level)
    return Interval(value, float(low), float(high))


def improvement_interval(
    x: Scores, y: Scores, *, seed: int = 0, replicates: int = 2_000, level: float = 0.95
) -> Interval:
    """Both sides are resampled."""
    joined, n = [*x, *y], len(x)
    return interval(lambda s: improvement(s[:n], s[n:]), joined, seed=seed, replicates=replicates, level=level)


def profile_band(
    scores: Scores, thresholds: ArrayLike, *, seed: int = 0, replicates: int = 500, level: float = 0.95
) -> tuple[Array, Array, Array]:
    """Profile, lower and upper bound at each threshold."""
    at = partial(profile, thresholds=thresholds)
    low, high = percentiles(at(resample(scores, replicates, np.random.default_rng(seed))), level)
    return at(scores), low, high


def curve_band(
    curves: Array, *, seed: int = 0, replicates: int = 1_000, level: float = 0.95
) -> tuple[Array, Array, Array]:
    """Mean over runs (n, points) and its interval at each point; whole curves are resampled. One run: nan bounds."""
    centre = curves.mean(0)
    if len(curves) < 2:
        return centre, np.full_like(centre, math.nan), np.full_like(centre, math.nan)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(curves), np.full(len(curves), 1 / len(curves)), size=replicates) / len(curves)
    low, high = percentiles(weights @ curves, level)
    return centre, low, high
