"""Virtual time: the event that is due next happens next, and takes no time itself.

Events that are due at the same time happen in the order in which they were planned, so a run is a function of the
events planned at its start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class EventLoop:
    """A clock in seconds from 0, with the planned events. Owner: the simulated cluster."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        """Number of events that have happened."""
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0
        self._is_stopped = False

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Call `what(*args)` at that time, or now if it has passed. A planned call cannot be cancelled: `what` itself
        has to check whether it still applies."""
        heapq.heappush(self._agenda, (when if when > self.now else self.now, self._num_planned, what, args))
        self._num_planned += 1

    def after(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        """Call `what(*args)` in `delay_s` seconds."""
        heapq.heappush(self._agenda, (self.now + delay_s, self._num_planned, what, args))
        self._num_planned += 1

    @property
    def next_due(self) -> float:
        """When the next event happens; infinite without one."""
        return self._agenda[0][0] if self._agenda else math.inf

    def run(self, until_s: float = math.inf) -> None:
        """Let events happen up to and including `until_s`, until none is planned or `stop` is called."""
        agenda, pop = self._agenda, heapq.heappop
        self._is_stopped = False
        while agenda and agenda[0][0] <= until_s:
            self.now, _, what, args = pop(agenda)
            self.num_events += 1
            what(*args)
            if self._is_stopped:
                break
        if not self._is_stopped and self.now < until_s < math.inf:
            self.now = until_s

    def stop(self) -> None:
        """End `run` after the present event."""
        self._is_stopped = True
