"""Settings compared under the same requests: the share of them whose targets each meets, and the difference's error.

Both settings replay the same arrivals (common random numbers), so what counts is the difference of each request. These
are not independent: a queue that only one setting has delays many requests. So the error is that of the means of ten
blocks of consecutive requests (batch means: A. Law and W. Kelton, Simulation Modeling and Analysis,
chapter on output data).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from disagg.router.config import Decodes

NUM_BLOCKS = 10
HYSTERESIS = 0.01
"""Share of requests by which another setting must be better, in addition to the error."""
SWITCHING = 0.005
"""Most that a change of the setting costs, as a share of the requests of a stationary phase: requests that were placed
by one setting decode beside those of the other."""


class Attained(msgspec.Struct, frozen=True):
    """The predicted attainment of one setting."""

    decodes: Decodes
    by_rate: tuple[tuple[float, float], ...]
    """Pairs (multiple of the measured rate, share of the requests that meet their targets)."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison and its decision."""

    at_s: float
    """Time of the comparison on the gateway's clock."""
    cause: str
    num_requests: int
    """Number of counted requests that had targets."""
    present: Decodes
    chosen: Decodes
    attained: tuple[Attained, ...]
    difference: float
    """Share of requests whose targets the best other setting meets, less that of the present one; mean over the
    rates."""
    error: float
    """Standard error of the difference."""
    reason: str
    measured: float | None = None
    """Share of the requests that met their targets in the cluster, of those that came and ended under the present
    setting; None where there are none. Its difference from the predicted share shows the simulator's error."""
    num_measured: int = 0

    @property
    def needed(self) -> float:
        """The least difference that changes the setting."""
        return self.error + HYSTERESIS

    @property
    def claim(self) -> float:
        """The most by which the chosen setting is worse than the best one, as long as the load stays the same."""
        return self.error + HYSTERESIS + SWITCHING

    @property
    def is_change(self) -> bool:
        """Whether the comparison changes the setting."""
        return self.chosen != self.present


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of differences in the order of their requests. The error is at least one request's share,
    and infinite where there are too few differences."""
    number = len(differences)
    if number < NUM_BLOCKS:
        return (sum(differences) / number if number else 0.0), math.inf
    ends = [number * block // NUM_BLOCKS for block in range(NUM_BLOCKS + 1)]
    means = [sum(differences[first:end]) / (end - first) for first, end in pairwise(ends)]
    mean = sum(differences) / number
    variance = sum((each - mean) ** 2 for each in means) / (NUM_BLOCKS - 1)
    return mean, max(math.sqrt(variance / NUM_BLOCKS), 1 / number)
