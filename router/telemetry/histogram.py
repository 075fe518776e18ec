"""A histogram of plain numbers, cheap enough for every token: what Prometheus calls a histogram, before it is exposed.

Owner: whoever observes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts values by interval, and adds them up.

    Args:
        bounds: upper ends of the intervals, rising; each belongs to its interval, and one more has no upper end.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Values in each interval."""
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float, times: int = 1) -> None:
        """A value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_observed(self) -> int:
        """Values so far."""
        return sum(self.counts)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """One histogram of what these have seen; they must have the same intervals, and there must be one."""
    first, *others = histograms
    result = Histogram(first.bounds)
    for histogram in (first, *others):
        assert histogram.bounds == result.bounds, "histograms of different intervals cannot be added"
        result.counts = [a + b for a, b in zip(result.counts, histogram.counts, strict=True)]
        result.total += histogram.total
    return result
