"""How long it takes to load extents from a tier, and whether to load a prefix or to compute it. Pure.

    load = latency + extents * time of one         the latency is what the first extent of a load took more than others

A prefix is loaded only where that is quicker than computing it, by what this worker has measured of both. What was
learned counts until something newer was. A tier that was slow is not used, so no load would show that it is quick
again. Of a disk that was left alone for `TRIED_AGAIN_S` two files are read for which nobody waits (`trial_reads.py`).
Host memory is copied for sequences only: after that time it counts as being as fast as at its best, or as was assumed
at first (by a write), so that one load shows what it is like.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from disagg.proto.messages import EXTENT_TOKENS

TRIED_AGAIN_S = 30.0
"""Seconds without a load after which a tier is tried again, and a time that is lower than the mean counts at once."""
_WEIGHT = 1 / 8
"""Weight of the latest load of an extent in the mean."""


class LoadTimes:
    """The mean time to load an extent from one tier, and what the first one of a load takes beside that. Owner: the
    tier store.

    Args:
        first_ms: assumed until an extent was written or loaded.
        has_trials: whether extents are read for no sequence when the tier was left alone.
    """

    def __init__(self, first_ms: float, *, has_trials: bool = False) -> None:
        self._has_trials = has_trials
        self._mean_ms = first_ms
        self._best_ms = first_ms
        self._first_ms: float | None = None
        """Mean time of the first extent of a load."""
        self._has_later = False
        """Whether another one than a first extent was loaded; until then the mean is that of first ones."""
        self._seen_at = self._first_at = self._later_at = -math.inf

    def assume(self, ms: float) -> None:
        """An extent was written in so many milliseconds: until one was loaded, a load counts as taking no longer than
        the quickest write. A slow one tells little, and what counts as slow is not tried."""
        if self._first_ms is None and not self._has_later and ms > 0.0:
            self._mean_ms = self._best_ms = min(self._best_ms, ms)

    def observe(self, ms: float, now: float, *, is_first: bool = False) -> None:
        """An extent was loaded in so many milliseconds. `is_first`: of its load."""
        is_old = now > self._later_at + TRIED_AGAIN_S
        if is_first:
            self._first_ms = _mean(self._first_ms, ms, is_old=now > self._first_at + TRIED_AGAIN_S)
            self._first_at = now
            if not self._has_later:
                self._mean_ms = self._first_ms
            elif is_old:
                self._mean_ms = min(self._mean_ms, ms)  # what it takes without the latency is less
        else:
            self._mean_ms = _mean(self._mean_ms if self._has_later else None, ms, is_old=is_old)
            self._has_later, self._later_at = True, now
        self._best_ms = min(self._best_ms, self._mean_ms)
        self._seen_at = now

    def late(self, began: float, now: float) -> None:
        """A load that began at `began` ended before it was done, because it took too long. A tier that answered
        meanwhile, be it to other loads, is as quick as was measured; one that did not answer at all is left alone."""
        if self._seen_at < began:
            self._mean_ms *= 2.0
            self._seen_at = now

    @property
    def latency_ms(self) -> float:
        """Milliseconds that a load is expected to take beside those of its extents; 0 until a first extent and a later
        one were loaded, which tell both times apart."""
        return max(0.0, self._first_ms - self._mean_ms) if self._has_later and self._first_ms is not None else 0.0

    def ms(self, now: float) -> float:
        """Milliseconds that an extent is expected to take."""
        return self._best_ms if self.is_left_alone(now) and not self._has_trials else self._mean_ms

    def is_left_alone(self, now: float) -> bool:
        """Whether nothing was loaded for a while."""
        return now > self._seen_at + TRIED_AGAIN_S


def _mean(before: float | None, ms: float, *, is_old: bool) -> float:
    """A mean with one value more. A lower one replaces a mean that is old."""
    if before is None or (is_old and ms < before):
        return ms
    return before + _WEIGHT * (ms - before)


class Loadable(NamedTuple):
    """What tiers have of a prompt, in leading extents."""

    cached_tokens: int
    """Tokens in the device cache."""
    num_host: int
    num_disk: int
    host_ms: float
    """Milliseconds that an extent of each tier takes."""
    disk_ms: float
    num_ahead: int = 0
    """Extents that other sequences load first."""
    ahead_ms: float = 0.0
    """Milliseconds that their tiers take for them."""
    copy_ms: float = 0.0
    """Milliseconds between two copies at least, beside sequences that run."""
    disk_latency_ms: float = 0.0
    """Milliseconds that a load from disk takes beside those of its extents."""


class LoadPlan(NamedTuple):
    """Extents [start, end) are loaded: those before `host_end` from host memory, the others from disk."""

    start: int
    host_end: int
    end: int
    ms: float
    """Predicted milliseconds of the load, with what is loaded before it."""
    compute_ms: float
    """Predicted milliseconds to compute these tokens instead."""


def plan_load(has: Loadable, compute_ms: Callable[[int, int], float]) -> LoadPlan | None:
    """The load that makes a prompt ready soonest; None where computing alone does. `compute_ms(start, end)`: predicted
    milliseconds to compute tokens [start, end)."""
    start = has.cached_tokens // EXTENT_TOKENS
    best: LoadPlan | None = None
    best_gain = 0.0
    for end in sorted({has.num_host, max(has.num_host, has.num_disk)}):
        if end <= start:
            continue
        host_end = min(end, max(start, has.num_host))
        ms = has.ahead_ms + (host_end - start) * has.host_ms + (end - host_end) * has.disk_ms
        ms += has.disk_latency_ms if end > host_end else 0.0
        ms = max(ms, (has.num_ahead + end - start) * has.copy_ms)
        computing_ms = compute_ms(has.cached_tokens, end * EXTENT_TOKENS)
        if computing_ms - ms > best_gain:
            best_gain = computing_ms - ms
            best = LoadPlan(start, host_end, end, ms, computing_ms)
    return best
