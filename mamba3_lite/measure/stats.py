"""Means and their confidence intervals: of repeats, and of a series whose neighbours are alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Fewer block means than this say little about their own spread.
FEWEST_BLOCKS = 8


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether zero lies outside the interval: as a difference, it is shown."""
        return not self.low <= 0 <= self.high

    @property
    def margin(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2


def standard_error(values: np.ndarray) -> float:
    """Of the mean of a series whose neighbours are alike, from the means of blocks.

    The estimate grows with the block until blocks are independent: the largest counts (Flyvbjerg
    and Petersen, 1989). ``values`` (n,), n >= 2.
    """
    found, length = [], 1
    while length == 1 or values.size // length >= FEWEST_BLOCKS:
        count = values.size // length
        means = values[values.size - count * length :].reshape(count, length).mean(1)
        found.append(float(means.std(ddof=1)) / math.sqrt(count))
        length *= 2
    return max(found)


def t_within(t: float, degrees: int) -> float:
    """P(|T| <= t) of Student's T with so many (whole) degrees of freedom.

    The finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine_squared, odd = math.cos(angle) ** 2, degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine_squared * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def t_critical(confidence: float, degrees: int) -> float:
    """The t with ``t_within(t, degrees) == confidence``."""
    low, high = 0.0, math.pi / 2
    # In the angle of t_within the interval is finite, and 60 halvings leave nothing of it.
    for _ in range(60):
        middle = (low + high) / 2
        if t_within(math.tan(middle) * math.sqrt(degrees), degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def over_repeats(values: Sequence[float], *, confidence: float) -> Estimate:
    """Of independent values, two at least: Student's interval of their mean."""
    found = np.asarray(values, dtype=np.float64)
    error = float(found.std(ddof=1)) / math.sqrt(found.size)
    return _around(float(found.mean()), t_critical(confidence, found.size - 1) * error)


def over_blocks(values: Sequence[float], *, confidence: float) -> Estimate:
    """Of the rows of one run, two at least, which need not be independent of each other."""
    found = np.asarray(values, dtype=np.float64)
    degrees = min(found.size, FEWEST_BLOCKS) - 1
    return _around(float(found.mean()), t_critical(confidence, degrees) * standard_error(found))


def _around(mean: float, margin: float) -> Estimate:
    return Estimate(mean, mean - margin, mean + margin)
