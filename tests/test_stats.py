"""Aggregate scores: hand-computed cases, scipy, and what a bootstrap must do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from unmoved import stats


def scores(*tasks: list[float]) -> list[stats.Array]:
    return [np.array(task, float) for task in tasks]


HAND = scores([0.0, 0.2, 0.4, 0.6], [0.5, 0.7, 0.9, 1.3])  # task means 0.3 and 0.85


def test_hand_computed() -> None:
    assert stats.mean(HAND) == pytest.approx((0.3 + 0.85) / 2)
    assert stats.median(scores([0.0, 1.0], [0.2, 0.2], [0.9, 0.9])) == pytest.approx(0.5)  # of 0.5, 0.2, 0.9
    # sorted: 0 .2 | .4 .5 .6 .7 | .9 1.3
    assert stats.iqm(HAND) == pytest.approx((0.4 + 0.5 + 0.6 + 0.7) / 4)
    # shortfalls: 1 .8 .6 .4 and .5 .3 .1 0
    assert stats.optimality_gap(HAND) == pytest.approx((2.8 / 4 + 0.9 / 4) / 2)
    assert stats.optimality_gap(HAND, 0.5) == pytest.approx((0.5 + 0.3 + 0.1) / 4 / 2)
    assert stats.profile(HAND, [0.0, 0.4, 0.65, 1.3]).tolist() == [7 / 8, 5 / 8, 3 / 8, 0.0]  # strictly above


def test_probability_of_improvement_by_hand() -> None:
    x, y = scores([1.0, 2.0], [0.0]), scores([1.0, 0.5, 3.0], [0.0])
    # first task: 1 ties 1, beats .5, loses to 3; 2 beats 1 and .5, loses to 3: 3.5 of 6. second: a tie.
    assert stats.improvement(x, y) == pytest.approx((3.5 / 6 + 0.5) / 2)
    with pytest.raises(ValueError, match="2 tasks against 1"):
        stats.improvement(x, y[:1])


@pytest.mark.parametrize("runs", [3, 4, 5, 7, 50])
def test_against_scipy(runs: int) -> None:
    rng = np.random.default_rng(runs)
    x, y = rng.random((6, runs)), np.round(rng.random((6, runs + 2)), 1)
    assert stats.iqm(list(x)) == pytest.approx(scipy.stats.trim_mean(x, 0.25, axis=None))
    u = [scipy.stats.mannwhitneyu(a, b).statistic / (len(a) * len(b)) for a, b in zip(x, y, strict=True)]
    assert stats.improvement(list(x), list(y)) == pytest.approx(np.mean(u))
    assert stats.profile(list(x), [0.3]) == pytest.approx(1 - scipy.stats.percentileofscore(x.ravel(), 0.3) / 100)


def test_ragged_tasks_count_the_same() -> None:
    assert stats.mean(scores([1.0] * 9, [0.0])) == pytest.approx(0.5)
    assert stats.optimality_gap(scores([1.0] * 9, [0.0])) == pytest.approx(0.5)


def test_replicates_are_the_statistic_of_each_row() -> None:
    rng = np.random.default_rng(0)
    many = [rng.random((10, 4)), rng.random((10, 6))]
    for statistic in (*stats.AGGREGATES.values(), lambda s: stats.profile(s, [0.2, 0.8])):
        rows = [statistic([task[i] for task in many]) for i in range(10)]
        assert np.allclose(statistic(many), rows)


def test_strata_stay_apart() -> None:
    """Two tasks whose runs agree among themselves: resampling within a task changes nothing, across tasks it would."""
    assert stats.interval(stats.mean, scores([0.0] * 5, [1.0] * 5)) == stats.Interval(0.5, 0.5, 0.5)


def test_interval_covers_and_is_seeded() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for k in range(100):
        found = stats.interval(stats.mean, list(rng.normal(0.5, 0.1, (5, 10))), seed=k, replicates=300)
        hits += found.low < 0.5 < found.high
    assert 85 <= hits <= 99  # 95 % asked for; percentile intervals of ten runs are a little narrow
    smooth = list(rng.random((3, 5)))
    a, b, c = (stats.interval(stats.iqm, smooth, seed=s) for s in (3, 3, 4))
    assert a == b and a.low != c.low and a.value == c.value
    assert a.low < a.value < a.high


def test_interval_of_the_mean_against_scipy() -> None:
    x = np.random.default_rng(5).random(40)
    ours = stats.interval(stats.mean, [x], replicates=5_000)
    theirs = scipy.stats.bootstrap((x,), np.mean, method="percentile", n_resamples=5_000, rng=1).confidence_interval
    assert ours.low == pytest.approx(theirs.low, abs=0.01) and ours.high == pytest.approx(theirs.high, abs=0.01)


def test_a_single_run_has_no_interval() -> None:
    found = stats.interval(stats.iqm, scores([0.3], [0.5, 0.6]))
    assert math.isnan(found.low) and "[" not in str(found)
    assert np.isnan(stats.curve_band(np.ones((1, 3)))[1]).all()
    assert str(stats.Interval(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"


def test_bands_hold_their_centre() -> None:
    curves = np.random.default_rng(2).random((6, 4))
    centre, low, high = stats.curve_band(curves)
    assert np.allclose(centre, curves.mean(0)) and (low < centre).all() and (centre < high).all()
    value, low, high = stats.profile_band(HAND, [0.1, 0.45])
    assert value.tolist() == [7 / 8, 5 / 8] and (low <= value).all() and (value <= high).all()
    certain = stats.profile_band(HAND, [-1.0, 2.0])
    assert [v.tolist() for v in certain] == [[1.0, 0.0]] * 3


def test_improvement_interval_resamples_both_sides() -> None:
    x, y = scores([0.1, 0.9, 0.5]), scores([0.5, 0.5, 0.5])
    found = stats.improvement_interval(x, y)
    assert found.value == pytest.approx(0.5) and found.low < 0.2 and found.high > 0.8
    assert stats.improvement_interval(scores([1.0, 1.0]), scores([0.0, 0.5])) == stats.Interval(1.0, 1.0, 1.0)
