"""How often a worker tells the tokens of running answers. Pure.

    first tokens, ends, hand-overs, before a prompt is computed     at once, with all that waits
    further tokens                                                  those of an interval together

A message costs the worker, the gateway and the client far more than the token in it, and they take that time from the
cores that compute where they share them. A step of a small model takes a few milliseconds, and nobody reads a hundred
messages a second. Steps that take longer than half the interval are told one by one.

Owner: the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from disagg.engine.commands import Event, TokenSampled


class Pacing:
    """Says whether what a step came to may wait for the next step.

    Args:
        interval_s: tokens of steps that end within this time are told together; 0 tells each step's at once.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told_at = -math.inf

    def told(self, now: float) -> None:
        """All that was there to tell was told."""
        self._told_at = now

    def may_wait(self, events: Sequence[Event], step_s: float, now: float) -> bool:
        """Whether `events` may be told after the next step, if that takes `step_s` like the one before: it would end
        within the interval, and nobody waits for one of them."""
        if now + step_s > self._told_at + self._interval_s:
            return False
        return all(isinstance(event, TokenSampled) and event.index > 0 for event in events)
