"""Workers in the order of a number that changes with their books: kept sorted, so that the first few are at hand.

A changed worker is only noted; it is moved when somebody looks. So a worker that changes often between two looks costs
one move, and a look costs the workers that changed, not all there are.

Owner: a pool of the router's fleet.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Container
from operator import itemgetter

from disagg.proto.ids import WorkerId
from disagg.router.worker import Worker

_Entry = tuple[float, int, Worker]
_rank_of = itemgetter(0)


class Order:
    """See the module docstring. A worker whose rank is infinite is not to be had.

    Args:
        rank: the number; less is earlier. Equal workers stay in the order in which they came.
    """

    def __init__(self, rank: Callable[[Worker], float]) -> None:
        self._rank = rank
        self._entries: list[_Entry] = []
        self._entry_of: dict[Worker, _Entry] = {}
        self._changed: dict[Worker, None] = {}

    def touch(self, worker: Worker) -> None:
        """The worker is new, or its rank may have changed."""
        self._changed[worker] = None

    def remove(self, worker: Worker) -> None:
        """The worker is gone."""
        self._changed.pop(worker, None)
        entry = self._entry_of.pop(worker, None)
        if entry is not None:
            self._take_out(entry)

    def first(
        self, count: int, without: Container[WorkerId], start: Callable[[int], int] | None = None
    ) -> list[Worker]:
        """The first `count` that are to be had and not in `without`. With `start`, which is given how many are to be
        had, from that position on, going round."""
        if self._changed:
            self._refresh()
        entries = self._entries
        if start is not None:
            end = bisect_left(entries, math.inf, key=_rank_of)
            begin = start(end) if end else 0
            if begin:
                entries = entries[begin:end] + entries[:begin]
        found: list[Worker] = []
        for rank, _, worker in entries:
            if rank == math.inf or len(found) == count:
                break
            if worker.worker_id not in without:
                found.append(worker)
        return found

    def _refresh(self) -> None:
        entries, entry_of = self._entries, self._entry_of
        for worker in self._changed:
            rank = self._rank(worker)
            entry = entry_of.get(worker)
            if entry is not None:
                if entry[0] == rank:
                    continue
                self._take_out(entry)
            entry_of[worker] = entry = (rank, worker.position, worker)
            insort(entries, entry)
        self._changed.clear()

    def _take_out(self, entry: _Entry) -> None:
        position = bisect_left(self._entries, entry)
        assert self._entries[position] is entry, "a rank changed in place"
        del self._entries[position]
