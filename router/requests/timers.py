"""Timers of requests: a heap of times, with lazy removal.

The entries of a request that has ended stay in the heap as dead ones until they come to the top, or until dead entries
are more than the live ones: then the heap is rebuilt. So an operation costs O(log n) amortized, and memory stays in
proportion to what is in flight, however far away a deadline was.

Owner: the router core.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from disagg.proto.ids import RequestId

_MIN_DEAD = 64


@dataclass(slots=True)
class Timers:
    """A heap of (time, serial number, request)."""

    _heap: list[tuple[float, int, RequestId]] = field(default_factory=list)
    _entries: dict[RequestId, tuple[int, int]] = field(default_factory=dict)
    """For each live request: the serial number of its first entry, and the number of its entries in the heap."""
    _num_added: int = 0
    _num_dead: int = 0

    def __len__(self) -> int:
        """Number of entries in memory, including dead ones."""
        return len(self._heap)

    def add(self, when: float, request_id: RequestId) -> None:
        """Add a timer of the request."""
        self._num_added += 1
        heapq.heappush(self._heap, (when, self._num_added, request_id))
        first, count = self._entries.get(request_id, (self._num_added, 0))
        self._entries[request_id] = (first, count + 1)

    def forget(self, request_id: RequestId) -> None:
        """Mark the entries of an ended request as dead."""
        entries = self._entries.pop(request_id, None)
        if entries is not None:
            self._num_dead += entries[1]
            if self._num_dead > _MIN_DEAD and 2 * self._num_dead > len(self._heap):
                self._heap = [entry for entry in self._heap if self._is_live(entry)]
                heapq.heapify(self._heap)
                self._num_dead = 0

    def has_due(self, now: float) -> bool:
        """Whether the first entry, live or dead, is due."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop_due(self, now: float) -> RequestId | None:
        """Remove one due timer; returns its request, None when none is due."""
        due = self.earliest()
        if due is None or due > now:
            return None
        _, _, request_id = heapq.heappop(self._heap)
        first, count = self._entries[request_id]
        if count > 1:
            self._entries[request_id] = (first, count - 1)
        else:
            del self._entries[request_id]
        return request_id

    def earliest(self) -> float | None:
        """The time of the first entry."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][0] if self._heap else None

    def _is_live(self, entry: tuple[float, int, RequestId]) -> bool:
        entries = self._entries.get(entry[2])
        return entries is not None and entry[1] >= entries[0]
