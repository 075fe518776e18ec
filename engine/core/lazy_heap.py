"""A priority queue whose entries can be taken back in O(1): the waiting queue and the deadlines of a worker.

An entry that was discarded stays in the heap, stale, until it comes to the top, or until most entries are stale and the
heap is rebuilt. So every operation costs O(log n) amortized, and memory stays in proportion to the live entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SortKey = tuple[float, ...]
"""Smaller comes first; equal ones leave in the order in which they came."""

_MIN_STALE = 64


class LazyHeap(Generic[K]):
    """Items in the order of their `SortKey`. Owner: whoever made it; not safe for threads."""

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, int, K]] = []
        self._serial_of: dict[K, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serial_of)

    def __contains__(self, item: K) -> bool:
        return item in self._serial_of

    def push(self, order: SortKey, item: K) -> None:
        """Add `item`, or give it a new place."""
        self._serial_of[item] = self._next_serial
        heapq.heappush(self._heap, (order, self._next_serial, item))
        self._next_serial += 1
        self._rebuild_if_mostly_stale()

    def discard(self, item: K) -> None:
        """Take `item` out; nothing happens where it is not in."""
        self._serial_of.pop(item, None)

    def peek(self) -> tuple[SortKey, K] | None:
        """The first entry, or None when empty."""
        while self._heap:
            order, serial, item = self._heap[0]
            if self._serial_of.get(item) == serial:
                return order, item
            heapq.heappop(self._heap)
        return None

    def _rebuild_if_mostly_stale(self) -> None:
        if len(self._heap) > 2 * len(self._serial_of) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self._serial_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
