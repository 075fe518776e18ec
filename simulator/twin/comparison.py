"""Settings compared under the same requests: the share of them whose targets each meets, and the difference's error.

Both settings replay the same arrivals (common random numbers), so what counts is the difference of each request. These
are not independent: a queue that one setting has and the other has not goes on for many requests. So the error is that
of the means of ten blocks of consecutive requests (batch means: A. Law and W. Kelton, Simulation Modeling and Analysis,
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
"""By so much more than its error another setting must be better."""
SWITCHING = 0.005
"""What a change costs at most, as a share of the requests of a stationary phase: those that were placed by the one
setting and decode beside those of the other."""


class Attained(msgspec.Struct, frozen=True):
    """What one setting is predicted to attain."""

    decodes: Decodes
    by_rate: tuple[tuple[float, float], ...]
    """(multiple of the rate that was seen, share of the requests that meet their targets)."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and what follows."""

    at_s: float
    """On the gateway's clock."""
    cause: str
    num_requests: int
    """That had targets and were counted."""
    present: Decodes
    chosen: Decodes
    attained: tuple[Attained, ...]
    difference: float
    """The share of requests that the best other setting meets the targets of, less that of the present one; mean over
    the rates."""
    error: float
    """Standard error of the difference."""
    reason: str
    measured: float | None = None
    """The share of requests that met their targets in the cluster, of those that came and ended under the present
    setting; None where there are none. Beside the predicted one it shows how far the simulator is off."""
    num_measured: int = 0

    @property
    def needed(self) -> float:
        """What the difference must exceed."""
        return self.error + HYSTERESIS

    @property
    def claim(self) -> float:
        """The chosen setting is at most so much worse than the best one, as long as the load stays as it is."""
        return self.error + HYSTERESIS + SWITCHING

    @property
    def is_change(self) -> bool:
        """Whether the setting is changed."""
        return self.chosen != self.present


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of differences in the order of their requests; never less than one request's share. Of
    none: no difference, with an infinite error."""
    number = len(differences)
    if number < NUM_BLOCKS:
        return (sum(differences) / number if number else 0.0), math.inf
    ends = [number * block // NUM_BLOCKS for block in range(NUM_BLOCKS + 1)]
    means = [sum(differences[first:end]) / (end - first) for first, end in pairwise(ends)]
    mean = sum(differences) / number
    variance = sum((each - mean) ** 2 for each in means) / (NUM_BLOCKS - 1)
    return mean, max(math.sqrt(variance / NUM_BLOCKS), 1 / number)
