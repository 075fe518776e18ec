"""The present workers, grouped so that a placement looks at a few of them: by group (whose KV means the same), role and
shape.

Within a bucket all workers have one shape. So the one with the most free blocks tells whether anybody in the bucket has
room, and the least rank who is worth a look.

Owner: the router's fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from disagg.proto.block_hash import HASH_BLOCK_TOKENS, max_cached_tokens
from disagg.proto.ids import WorkerId
from disagg.proto.messages import WorkerInfo
from disagg.router.placement.lazy_ranking import LazyRanking
from disagg.router.placement.placement import Candidate, Demand, Policy
from disagg.router.workers.assignments import num_held
from disagg.router.workers.openings import openings
from disagg.router.workers.prefix_match import PrefixMatch, WorkerSet
from disagg.router.workers.worker import Worker, longest_sequence

NUM_LOOKS = 3
"""Workers of a bucket that are looked at because of their rank."""
NUM_HOLDERS = 2
"""Workers of a bucket that are looked at because of their prefixes."""
NUM_TURNS = 1024
"""Where among equal holders to begin goes round in this many placements."""

_Blocks = Callable[[Demand, WorkerInfo], int]


class WorkerBucket:
    """Workers of one group, role and shape.

    Args:
        info: of the first worker; gives the shape.
        policy: gives the rank.
        watermark: share of the blocks that is left free.
        num_blocks: KV blocks that a request has in use on a worker of this shape, those of cached tokens included.

    Where requests decode, of a cached prefix only the blocks that other sequences hold are left out of what a request
    takes: a decode worker refuses what it has no room for. A prefill worker lets it wait.
    """

    def __init__(self, info: WorkerInfo, policy: Policy, watermark: float, num_blocks: _Blocks) -> None:
        self.longest = longest_sequence(info)
        self.members: dict[WorkerId, Worker] = {}
        self.mask: WorkerSet = 0
        """The members, as the prefix index counts them."""
        self.num_open = 0
        """Members that take another prompt now."""
        self.backlog_ms = 0.0
        """The sum of the members' backlogs."""
        self._policy = policy
        self._room = info.num_blocks - max(int(info.num_blocks * watermark), info.watermark_blocks)
        self._decodes = "decode" in info.roles
        self._shape = info
        self._num_blocks = num_blocks
        self._by_rank = LazyRanking(self._rank)
        self._by_room = LazyRanking(self._used)

    def add(self, worker: Worker) -> None:
        """A worker came."""
        self.members[worker.worker_id] = worker
        self.mask |= worker.bit
        self.num_open += worker.has_slot and not worker.is_full
        self.backlog_ms += worker.backlog_ms
        self._by_rank.touch(worker)
        self._by_room.touch(worker)

    def remove(self, worker: Worker) -> None:
        """A worker went, or gets nothing new."""
        del self.members[worker.worker_id]
        self.mask &= ~worker.bit
        self.num_open -= worker.has_slot and not worker.is_full
        self.backlog_ms -= worker.backlog_ms
        self._by_rank.remove(worker)
        self._by_room.remove(worker)

    def changed(self, worker: Worker) -> bool:
        """The books or the reports of a worker changed. Returns whether it takes prompts now and did not before."""
        self.backlog_ms -= worker.backlog_ms
        was_open = worker.has_slot and not worker.is_full
        worker.refresh()
        self.backlog_ms += worker.backlog_ms
        is_open = worker.has_slot and not worker.is_full
        self.num_open += is_open - was_open
        self._by_rank.touch(worker)
        self._by_room.touch(worker)
        return is_open and not was_open

    def fastest(self, without: Collection[WorkerId]) -> Worker | None:
        """The one that would be looked at first, but for some; where none is to be had now, any."""
        first = self._by_rank.first(1, without)
        return first[0] if first else next(iter(self.members.values()), None)

    def check_integrity(self) -> list[str]:
        """What does not add up; empty when all is well."""
        workers = self.members.values()
        if self.num_open != sum(worker.has_slot and not worker.is_full for worker in workers):
            return [f"bucket of {', '.join(self.members)}: {self.num_open} workers are said to be open"]
        return []

    def candidates(self, demand: Demand, without: Collection[WorkerId], matched: PrefixMatch | None) -> list[Candidate]:
        """Those worth a look that have room: holders of a prefix, the least ranks, and, if none of these has room, the
        one with the most free blocks."""
        if demand.num_tokens >= self.longest:
            return []
        policy, turn = self._policy, demand.turn
        workers = self._by_rank.first(NUM_LOOKS, without, lambda count: policy.start(turn, count))
        if matched is not None and policy.uses_prefixes:
            for worker_id, _ in matched.best(NUM_HOLDERS, self.mask, turn % NUM_TURNS):
                worker = self.members[worker_id]
                if worker not in workers and worker_id not in without:
                    workers.append(worker)
        return self._with_room(demand, workers, matched) or self._with_room(
            demand, self._by_room.first(1, without), matched
        )

    def candidate(self, demand: Demand, worker: Worker, matched: PrefixMatch | None = None) -> Candidate | None:
        """A member if it has room, as one that has nothing of the request where `matched` does not say; else None."""
        found = self._with_room(demand, [worker], matched) if demand.num_tokens < self.longest else []
        return found[0] if found else None

    def openings(self, num_blocks: int, output_tokens: float, limit: int) -> tuple[list[float], float]:
        """When the first `limit` members can begin with more sequences of so many blocks, see `openings`; and how long
        a place is kept."""
        workers = list(islice(self.members.values(), limit))
        found = [when for worker in workers for when in openings(worker, num_blocks, self._room, output_tokens)]
        return found, output_tokens * max((worker.around_ms for worker in workers), default=0.0)

    def wait_ms(self, demand: Demand, worker: Worker, output_tokens: float) -> float:
        """When a member can begin with a request of which it has nothing, if it gets nothing else until then."""
        found = openings(worker, self.num_blocks(demand), self._room, output_tokens)
        return next(found, math.inf)

    def num_blocks(self, demand: Demand) -> int:
        """KV blocks of a request there."""
        return self._num_blocks(demand, self._shape)

    def _with_room(self, demand: Demand, workers: Iterable[Worker], matched: PrefixMatch | None) -> list[Candidate]:
        """An empty worker takes whatever fits into it at all; else a request near its size would wait forever."""
        found = []
        most, block_size, room = max_cached_tokens(demand.num_tokens), self._shape.block_size, self._room
        all_blocks = self._num_blocks(demand, self._shape)
        for worker in workers:
            cached = 0 if matched is None else matched.blocks_of(worker.bit) * HASH_BLOCK_TOKENS
            if cached > most:
                cached = most
            shared = cached
            if cached and self._decodes:
                assert matched is not None
                shared = num_held(matched.hashes, cached // HASH_BLOCK_TOKENS, worker.assigned.held) * HASH_BLOCK_TOKENS
            shared_blocks = shared // block_size
            assigned_blocks = all_blocks - shared_blocks
            if worker.takes(assigned_blocks, room) or worker.is_empty:
                num_blocks = all_blocks - cached // block_size
                found.append(Candidate(worker, cached, num_blocks, assigned_blocks, shared_blocks))
        return found

    def _rank(self, worker: Worker) -> float:
        return math.inf if worker.is_full else self._policy.rank(worker)

    def _used(self, worker: Worker) -> float:
        return math.inf if worker.is_full else worker.used_blocks
