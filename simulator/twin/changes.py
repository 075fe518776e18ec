"""Whether the load has changed: CUSUM (E. S. Page, Continuous Inspection Schemes, Biometrika 1954) on what requests are
like, two-sided, of five values each: the time since the arrival before, the lengths of prompt and answer, the targets.

Values are logarithms, in standard deviations of the earlier ones, and at most three of these: neither the scale of a
length nor a single long one matters. A sum grows by what a value is off, less `DRIFT`, and never falls below 0; a
change is reported when it exceeds `LIMIT`, and dated by when the sum was 0 last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from disagg.router.telemetry.recent_load import Arrival

DRIFT = 0.3
LIMIT = 12.0
"""With both, Poisson arrivals of a constant rate with log-normal prompts are reported once in some 1,000; twice the
rate is reported after some 45 arrivals, twice the length of such prompts (sigma 0.6) after 15, other fixed targets
after 5."""
CLIP = 3.0
LEAST_DEVIATION = 0.1
"""Least standard deviation, a tenth, which values that are all equal have too."""
LEAST_BEFORE = 40
"""Number of earlier values that their mean and deviation need."""
_LEAST_GAP_S = 1e-3


class Change(NamedTuple):
    """A change of the load."""

    at_s: float
    """When the change began, by the estimate."""
    what: str
    """A description such as `prompts are longer`."""


class _Value(NamedTuple):
    """One property of requests that is watched, with the words for its changes."""

    of: Callable[[Arrival], float | None]
    more: str
    less: str


_VALUES = (
    _Value(lambda each: each.ttft_s, "TTFT targets are looser", "TTFT targets are tighter"),
    _Value(lambda each: each.tpot_s, "TPOT targets are looser", "TPOT targets are tighter"),
    _Value(lambda each: each.prompt_tokens, "prompts are longer", "prompts are shorter"),
    _Value(lambda each: each.output_tokens if each.is_complete else None, "answers are longer", "answers are shorter"),
)
_GAPS = _Value(lambda each: None, "requests come at a lower rate", "requests come at a higher rate")


def find_change(before: Sequence[Arrival], after: Sequence[Arrival]) -> Change | None:
    """The earliest change within `after`, which follows `before`; None if there is none, or `before` is too short. Of
    two that begin with the same arrival, a change of targets comes first, then one of lengths, then one of the rate."""
    found = [_detect(value, _points(value, before), _points(value, after)) for value in _VALUES]
    found.append(_detect(_GAPS, _gaps(before), _gaps([*before[-1:], *after])))
    changes = [change for change in found if change is not None]
    return min(changes, key=lambda change: change.at_s) if changes else None


_Point = tuple[float, float]
"""The arrival time, and the logarithm of the value."""


def _points(value: _Value, arrivals: Sequence[Arrival]) -> list[_Point]:
    seen = [(each.at_s, value.of(each)) for each in arrivals]
    return [(at_s, math.log(what)) for at_s, what in seen if what]


def _gaps(arrivals: Sequence[Arrival]) -> list[_Point]:
    return [(b.at_s, math.log(max(_LEAST_GAP_S, b.at_s - a.at_s))) for a, b in pairwise(arrivals)]


def _detect(value: _Value, before: Sequence[_Point], after: Sequence[_Point]) -> Change | None:
    if len(before) < LEAST_BEFORE:
        return None
    mean = sum(what for _, what in before) / len(before)
    variance = sum((what - mean) ** 2 for _, what in before) / (len(before) - 1)
    deviation = max(LEAST_DEVIATION, math.sqrt(variance))
    more = less = 0.0
    more_since = less_since = math.inf
    for at_s, what in after:
        off = min(CLIP, max(-CLIP, (what - mean) / deviation))
        if not more:
            more_since = at_s
        if not less:
            less_since = at_s
        more, less = max(0.0, more + off - DRIFT), max(0.0, less - off - DRIFT)
        if more > LIMIT:
            return Change(more_since, value.more)
        if less > LIMIT:
            return Change(less_since, value.less)
    return None
