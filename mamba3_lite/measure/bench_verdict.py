"""Is a time better, worse, or the same within noise? From the repeats of two measurements.

A measurement is several repeats, blocks of calls spread over the whole run; what a repeat says is
the median of its calls. Two measurements are compared by the difference of the mean logarithms of
those, that is by the ratio of times. The two may scatter differently: the standard errors add up in
squares, and Student's quantile has the degrees of freedom of the smaller measurement, which claims
too little rather than too much. The intervals of all cases of one comparison hold at once with 95 %
(Bonferroni). A verdict is given where the whole interval lies beyond a threshold: what two
processes differ by, such as where their memory happens to lie, is in no repeat of either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mamba3_lite.measure.stats import Estimate, t_critical

CONFIDENCE = 0.95
LEAST_PERCENT = 2.0


@dataclass(frozen=True)
class Verdict:
    """``word`` is better, worse or noise; ``percent`` of time, more is positive."""

    word: str
    percent: Estimate

    @property
    def words(self) -> str:
        """Such as "worse, 7.1 % more time [6.4, 7.9]"."""
        mean, low, high = self.percent.mean, self.percent.low, self.percent.high
        if self.word == "noise":
            return f"noise, {mean:+z.1f} % [{low:z.1f}, {high:z.1f}]"
        if self.word == "worse":
            return f"worse, {mean:.1f} % more time [{low:.1f}, {high:.1f}]"
        return f"better, {-mean:.1f} % less time [{-high:.1f}, {-low:.1f}]"


def judge(
    old_ms: Sequence[float], new_ms: Sequence[float], *, cases: int, least: float = LEAST_PERCENT
) -> Verdict:
    """Compares the repeats of two measurements, two or more each.

    Args:
        cases: of the whole comparison.
        least: percent that a difference must be shown to exceed.
    """
    found = percent_more(old_ms, new_ms, confidence=1 - (1 - CONFIDENCE) / cases)
    if found.low > least:
        return Verdict("worse", found)
    return Verdict("better" if found.high < -least else "noise", found)


def percent_more(
    old_ms: Sequence[float], new_ms: Sequence[float], *, confidence: float
) -> Estimate:
    """By how many percent the new times are longer: an interval of the mean logarithms."""
    old, new = (np.log(np.asarray(times, dtype=np.float64)) for times in (old_ms, new_ms))
    error = math.sqrt(sum(float(one.var(ddof=1)) / one.size for one in (old, new)))
    margin = t_critical(confidence, min(old.size, new.size) - 1) * error
    mean = float(new.mean() - old.mean())
    return Estimate(*(100 * math.expm1(end) for end in (mean, mean - margin, mean + margin)))
