"""When to look at which request again.

An entry of a request that has ended stays in the heap as a husk until it comes to the top, or until husks are more than
the entries of requests that live: then the heap is built anew. So an operation costs O(log n) amortized, and memory
stays in proportion to what is in flight, however far away a deadline was.

Owner: the router core.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from disagg.proto.ids import RequestId

_MIN_HUSKS = 64


@dataclass(slots=True)
class Timers:
    """A heap of (time, serial number, request)."""

    _heap: list[tuple[float, int, RequestId]] = field(default_factory=list)
    _entries: dict[RequestId, tuple[int, int]] = field(default_factory=dict)
    """Of the requests that live: the serial number of the first entry, and how many are in the heap."""
    _num_added: int = 0
    _num_husks: int = 0

    def __len__(self) -> int:
        """Entries in memory, husks included."""
        return len(self._heap)

    def add(self, when: float, request_id: RequestId) -> None:
        """Look at the request at `when`."""
        self._num_added += 1
        heapq.heappush(self._heap, (when, self._num_added, request_id))
        first, count = self._entries.get(request_id, (self._num_added, 0))
        self._entries[request_id] = (first, count + 1)

    def forget(self, request_id: RequestId) -> None:
        """The request has ended; its entries count no longer."""
        entries = self._entries.pop(request_id, None)
        if entries is not None:
            self._num_husks += entries[1]
            if self._num_husks > _MIN_HUSKS and 2 * self._num_husks > len(self._heap):
                self._heap = [entry for entry in self._heap if self._lives(entry)]
                heapq.heapify(self._heap)
                self._num_husks = 0

    def has_due(self, now: float) -> bool:
        """Whether the time of the first entry, or husk, has come."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop_due(self, now: float) -> RequestId | None:
        """Take out one request whose time has come; None when there is none."""
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
        while self._heap and not self._lives(self._heap[0]):
            heapq.heappop(self._heap)
            self._num_husks -= 1
        return self._heap[0][0] if self._heap else None

    def _lives(self, entry: tuple[float, int, RequestId]) -> bool:
        entries = self._entries.get(entry[2])
        return entries is not None and entry[1] >= entries[0]
