"""Confidence intervals: the quantiles are Student's, and the intervals hold what they promise."""

import numpy as np
import pytest

from mamba3_lite.measure import stats

CONFIDENCE = 0.95


@pytest.mark.parametrize(
    ("confidence", "degrees", "table"),
    [
        (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 7, 2.365), (0.9, 10, 1.812),
        (0.99, 5, 4.032), (0.975, 4, 3.495), (0.95, 120, 1.980),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_table(confidence: float, degrees: int, table: float) -> None:
    assert stats.t_critical(confidence, degrees) == pytest.approx(table, abs=6e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9])
def test_the_share_within_t_is_that_of_drawn_values(degrees: int) -> None:
    drawn = np.random.default_rng(0).standard_t(degrees, 200_000)
    for t in (0.3, 1.0, 2.5):
        share = (np.abs(drawn) <= t).mean()
        assert stats.t_within(t, degrees) == pytest.approx(share, abs=4e-3)


def covered(intervals: list[stats.Estimate], truth: float) -> float:
    return float(np.mean([one.low <= truth <= one.high for one in intervals]))


@pytest.mark.parametrize("repeats", [2, 4, 10])
def test_intervals_over_repeats_hold_the_truth_as_often_as_they_say(repeats: int) -> None:
    values = 3 + np.random.default_rng(1).standard_normal((4000, repeats))
    intervals = [stats.over_repeats(list(v), confidence=CONFIDENCE) for v in values]
    assert covered(intervals, 3.0) == pytest.approx(CONFIDENCE, abs=0.012)
    # An error bar of one standard error would hold it far too seldom.
    error = 1 / stats.t_critical(CONFIDENCE, repeats - 1)
    bars = [
        stats.Estimate(i.mean, i.mean - m, i.mean + m)
        for i in intervals
        for m in [error * i.margin]
    ]
    assert covered(bars, 3.0) < 0.75


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_intervals_over_rows_that_resemble_their_neighbours(memory: float) -> None:
    rng = np.random.default_rng(2)
    series = np.zeros((500, 100))
    for i in range(1, 100):
        series[:, i] = memory * series[:, i - 1] + rng.standard_normal(500)
    found = [stats.over_blocks(list(one[20:]), confidence=CONFIDENCE) for one in series]
    assert covered(found, 0.0) > 0.93
    if memory:
        naive = [stats.over_repeats(list(one[20:]), confidence=CONFIDENCE) for one in series]
        assert covered(naive, 0.0) < 0.8


def test_a_difference_is_shown_where_zero_lies_outside() -> None:
    assert stats.Estimate(1.0, 0.1, 1.9).differs and stats.Estimate(-1.0, -1.9, -0.1).differs
    assert not stats.Estimate(1.0, -0.1, 2.1).differs
    assert not stats.over_repeats([0.0, 0.0], confidence=CONFIDENCE).differs
