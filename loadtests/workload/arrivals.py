"""Due times of requests: an open loop, planned before the run begins, from a seed.

Nothing here waits for an answer. A rate is that of the arrivals, not of the answers; a server that falls behind gets a
growing queue, as in practice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, islice, takewhile
from typing import Annotated, Literal

import msgspec

from disagg.loadtests.workload.randomness import Stream

ArrivalKind = Literal["poisson", "gamma", "burst", "uniform", "trace"]

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1)]

MICROSECONDS = 6
"""Number of digits that due times are rounded to, so that they do not depend on the last bit of a machine's
logarithm."""


class ArrivalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An arrival process; `ValueError` for an invalid one.

    - `poisson`: independent exponential gaps.
    - `gamma`: independent gamma gaps with a chosen coefficient of variation: above 1 burstier than `poisson`, which
      has 1, below 1 more even.
      Of both kinds, `num_requests` gaps are stretched together to last exactly `num_requests / rate_per_s`: chance
      places the requests but does not change the rate, and another rate is the same pattern at another pace.
    - `burst`: `burst_size` requests at once, every `burst_size / rate_per_s` seconds, the first at 0.
    - `uniform`: equal gaps.
    - `trace`: the times of a trace; the workload must be one. `rate_per_s`, if set, rescales them to that mean rate.
    """

    kind: ArrivalKind = "poisson"
    rate_per_s: Positive | None = None
    """Mean requests per second over the whole run; needed by all kinds but `trace`."""
    seed: int = 0
    """Seed of the gaps. Prompts and lengths have a seed of their own in the workload."""
    duration_s: Positive | None = None
    """Duration in seconds; requests that would be due at this time or later are left out."""
    num_requests: Count | None = None
    """Number of requests. With `duration_s` too, the plan ends at whichever is reached first."""
    cv: Annotated[float, msgspec.Meta(ge=0.01, le=20)] = 1.0
    """Coefficient of variation for `gamma`: standard deviation of a gap over its mean."""
    burst_size: Count = 1
    """Number of requests at once, for `burst`."""

    def __post_init__(self) -> None:
        for field in ("rate_per_s", "duration_s", "num_requests", "burst_size"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field}: expected a number above 0; got {value}")
        if self.kind != "trace":
            if self.rate_per_s is None:
                raise ValueError(f"rate_per_s: needed for arrivals of kind {self.kind}")
            if self.duration_s is None and self.num_requests is None:
                raise ValueError("duration_s: one of duration_s and num_requests is needed, or the plan has no end")
        if self.kind != "gamma" and self.cv != 1.0:
            raise ValueError(f"cv: only arrivals of kind gamma have one, not {self.kind}")
        if self.kind != "burst" and self.burst_size != 1:
            raise ValueError(f"burst_size: only arrivals of kind burst have one, not {self.kind}")


def due_times(arrivals: ArrivalConfig, trace_times_s: Sequence[float] = ()) -> list[float]:
    """Due time of each request, in seconds from the start, ascending, in whole microseconds.

    Args:
        arrivals: the process.
        trace_times_s: for kind `trace`: the times of its requests, ascending.

    Raises:
        ValueError: if a trace is to be rescaled to a rate and spans no time.
    """
    times = _trace(arrivals, trace_times_s) if arrivals.kind == "trace" else _generated(arrivals)
    rounded = (round(time, MICROSECONDS) for time in times)
    duration_s = arrivals.duration_s
    bounded = rounded if duration_s is None else takewhile(lambda time: time < duration_s, rounded)
    return list(islice(bounded, arrivals.num_requests))


def window_s(arrivals: ArrivalConfig, due_s: Sequence[float]) -> float:
    """Duration that a plan's arrivals stand for, in seconds: the divisor of goodput.

    It is `duration_s` where that ended the plan; else requests over rate; else, for a trace at its own pace, the time
    of the last request. The time that late answers take after it is not counted: an open loop does not stop for them.

    Raises:
        ValueError: for a plan without requests, and for a trace of no duration.
    """
    if not due_s:
        raise ValueError("arrivals: no request is due; raise rate_per_s, duration_s or num_requests")
    reached = arrivals.num_requests is not None and len(due_s) >= arrivals.num_requests
    if arrivals.duration_s is not None and not reached:
        return arrivals.duration_s
    if arrivals.rate_per_s is not None:
        return len(due_s) / arrivals.rate_per_s
    if due_s[-1] <= 0:
        raise ValueError("arrivals: all requests of the trace are due at once; set rate_per_s or duration_s")
    return due_s[-1]


def _generated(arrivals: ArrivalConfig) -> Iterator[float]:
    """Endless times of a process, or `num_requests` times that span `num_requests / rate_per_s`."""
    assert arrivals.rate_per_s is not None
    times = accumulate(_gaps(arrivals))
    if arrivals.kind not in ("poisson", "gamma") or arrivals.num_requests is None:
        return times
    chosen = list(islice(times, arrivals.num_requests))
    last = chosen[-1] or 1.0  # gaps of a large cv can all be too small for a float
    span_s = arrivals.num_requests / arrivals.rate_per_s
    return (time / last * span_s for time in chosen)


def _gaps(arrivals: ArrivalConfig) -> Iterator[float]:
    """Endless gaps between arrivals, in seconds; the first one counts from the start of the run."""
    assert arrivals.rate_per_s is not None
    gap_s = 1 / arrivals.rate_per_s
    draws = Stream("arrivals", arrivals.seed)
    if arrivals.kind == "uniform":
        return (gap_s for _ in count())
    if arrivals.kind == "burst":
        pause_s = gap_s * arrivals.burst_size
        return (pause_s if index and index % arrivals.burst_size == 0 else 0.0 for index in count())
    if arrivals.kind == "gamma":
        shape = arrivals.cv**-2
        return (draws.gamma(shape) * gap_s / shape for _ in count())
    return (draws.exponential() * gap_s for _ in count())


def _trace(arrivals: ArrivalConfig, times_s: Sequence[float]) -> Iterator[float]:
    """Times of a trace from 0, at its own pace or rescaled to `rate_per_s`."""
    chosen = times_s[: arrivals.num_requests]
    if not chosen:
        return iter(())
    start = chosen[0]
    if arrivals.rate_per_s is None:
        return (time - start for time in chosen)
    span = chosen[-1] - start
    if span <= 0 or math.isinf(span):
        raise ValueError("rate_per_s: the trace spans no time, so that it cannot be rescaled to a rate")
    factor = len(chosen) / arrivals.rate_per_s / span
    return ((time - start) * factor for time in chosen)
