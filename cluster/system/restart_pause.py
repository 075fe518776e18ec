"""How long a process that Ray started again waits before it loads anything. Pure.

Ray restarts an actor within a second, for ever. A worker that dies while it loads would so load for ever, at the cost
of its neighbours. Its starts are noted, and a life that follows too many short ones begins with a pause.
"""

from __future__ import annotations

import msgspec

SHORT_LIFE_S = 60.0
"""A process that ran longer than this was fine."""
FREE_STARTS = 2
"""Starts in a row without a pause: the first, and the first after a fault."""
MAX_PAUSE_S = 30.0


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of the lives of one process."""

    count: int = 0
    """Starts in a row that each followed a short life."""
    last: float = 0.0
    """When the last one began, after its pause; seconds of the wall clock, which outlives processes."""


def next_start(earlier: Starts, now: float) -> tuple[Starts, float]:
    """The record of a start that is about to begin, and the pause before it, in seconds."""
    is_short = 0.0 <= now - earlier.last < SHORT_LIFE_S
    count = earlier.count + 1 if is_short else 1
    pause_s = min(2.0 ** (count - FREE_STARTS - 1), MAX_PAUSE_S) if count > FREE_STARTS else 0.0
    return Starts(count=count, last=now + pause_s), pause_s
