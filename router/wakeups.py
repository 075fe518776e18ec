"""When to look at which request again. An entry of a request that has ended is dropped when its time comes, or when
it is on top.

Owner: the router core.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass, field

from disagg.proto.ids import RequestId


@dataclass(slots=True)
class Wakeups:
    """A heap of (time, tie-break, request)."""

    _heap: list[tuple[float, int, RequestId]] = field(default_factory=list)
    _num_added: int = 0

    def add(self, when: float, request_id: RequestId) -> None:
        """Look at the request at `when`."""
        self._num_added += 1
        heapq.heappush(self._heap, (when, self._num_added, request_id))

    def has_due(self, now: float) -> bool:
        """Whether `pop_due` would find something."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop_due(self, now: float) -> RequestId | None:
        """Take out one request whose time has come; None when there is none."""
        if self._heap and self._heap[0][0] <= now:
            return heapq.heappop(self._heap)[2]
        return None

    def earliest(self, alive: Container[RequestId]) -> float | None:
        """The time of the first entry of a request in `alive`."""
        while self._heap and self._heap[0][2] not in alive:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
