"""Workers sorted by a number that changes with their assignments and reports.

A changed worker is only marked; it is moved at the next read. So a worker that changes often between two reads costs
one move, and a read costs as many moves as workers changed, not as many as there are.

Owner: a worker bucket of the fleet.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from operator import attrgetter

from disagg.proto.ids import WorkerId
from disagg.router.workers.worker import Worker

_position_of = attrgetter("position")


class LazyRanking:
    """Workers in ascending order of `rank`. A worker that is full or whose rank is infinite is not in it.

    Args:
        rank: the number. Workers of equal rank are in the order in which they came up.
    """

    def __init__(self, rank: Callable[[Worker], float]) -> None:
        self._rank = rank
        self._ranks = array("d")
        """Ranks of `_workers`, in one piece of memory for the binary search."""
        self._workers: list[Worker] = []
        """Ranked workers with a finite rank, in order."""
        self._rank_of: dict[WorkerId, float] = {}
        self.changed: dict[Worker, None] = {}
        """Workers that are new, or whose rank may have changed. Whoever changes a worker adds it."""

    def remove(self, worker: Worker) -> None:
        """Take a worker out of the ranking."""
        self.changed.pop(worker, None)
        rank = self._rank_of.pop(worker.worker_id, None)
        if rank is not None:
            self._take_out(rank, worker)

    def __len__(self) -> int:
        """Number of ranked workers."""
        if self.changed:
            self._refresh()
        return len(self._workers)

    def first(self, count: int, without: Collection[WorkerId], begin: int = 0) -> list[Worker]:
        """The first `count` workers that are not in `without`, from position `begin` on, wrapping around."""
        if self.changed:
            self._refresh()
        workers = self._workers
        if begin:
            workers = workers[begin:] + workers[:begin]
        if not without:
            return workers[:count]
        return list(islice((worker for worker in workers if worker.worker_id not in without), count))

    def ranks(self) -> Mapping[WorkerId, float]:
        """The ranks of the ranked workers, until the next change; read only."""
        if self.changed:
            self._refresh()
        return self._rank_of

    def _refresh(self) -> None:
        rank_of, rank_by, ranks, workers = self._rank_of, self._rank, self._ranks, self._workers
        for worker in self.changed:
            worker_id = worker.worker_id
            rank, before = math.inf if worker.is_full else rank_by(worker), rank_of.get(worker_id)
            if before is not None:
                if before == rank:
                    continue
                self._take_out(before, worker)
            if rank == math.inf:
                rank_of.pop(worker_id, None)
                continue
            rank_of[worker_id] = rank
            at = bisect_left(ranks, rank)
            if at < len(ranks) and ranks[at] == rank:
                at = self._place(rank, worker)
            ranks.insert(at, rank)
            workers.insert(at, worker)
        self.changed.clear()

    def _take_out(self, rank: float, worker: Worker) -> None:
        at = bisect_left(self._ranks, rank)
        if self._workers[at] is not worker:  # It shares its rank with others.
            at = self._place(rank, worker)
        assert self._workers[at] is worker, "a rank changed in place"
        del self._ranks[at], self._workers[at]

    def _place(self, rank: float, worker: Worker) -> int:
        """The position of a worker, ranked or not, among those of the same rank, at least one of which is ranked."""
        ranks = self._ranks
        at = bisect_left(ranks, rank)
        return bisect_left(self._workers, worker.position, at, bisect_right(ranks, rank, at), key=_position_of)
