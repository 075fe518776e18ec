"""The present workers, grouped so that a placement compares only a few of them.

    ModelGroup     workers with one model fingerprint and KV layout: each can use the KV of any other
    WorkerBucket   the workers of a group that have one role and one shape. The one with the most free blocks shows
                   whether any member has room, and those of least rank are compared

Owner: the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import get_args

from disagg.proto.block_hash import HASH_BLOCK_TOKENS, max_cached_tokens
from disagg.proto.ids import WorkerId
from disagg.proto.messages import HASHES_PER_EXTENT, PeerRef, TierName, WorkerInfo
from disagg.router.placement.forecast import openings
from disagg.router.placement.lazy_ranking import LazyRanking
from disagg.router.placement.placement import (
    Candidate,
    Demand,
    Policy,
    Shortlist,
    Version,
    decode_blocks,
    num_shared,
    prefill_blocks,
    version_of,
)
from disagg.router.workers.circuit_breakers import Exclusions
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.prefix_index import PrefixMatch, TierMatch, WorkerSet
from disagg.router.workers.worker import Worker, decodes_only, has_both_roles, longest_sequence, prefills_only

_Shape = tuple[int, ...]
_WITH_PARTNERS = 2
"""Number of top-ranked prefill workers for which the best already connected decode worker becomes a candidate too."""


class ModelGroup:
    """The workers of one model fingerprint and KV layout, in buckets by role and shape.

    Args:
        policy: ranks the workers.
        watermark: share of the blocks that is left free.
        pairs: which pairs are formed.
    """

    def __init__(self, policy: Policy, watermark: float, pairs: Pairs) -> None:
        self._policy = policy
        self._pairs = pairs
        self._watermark = watermark
        self._prefills: dict[_Shape, WorkerBucket] = {}
        self._decodes: dict[_Shape, WorkerBucket] = {}
        self._colocated: dict[_Shape, WorkerBucket] = {}
        self._elastic: dict[_Shape, WorkerBucket] = {}
        self._split_off: dict[_Shape, WorkerBucket] = {}
        """Elastic workers that take no prompts."""

    def bucket_for(self, worker: Worker) -> WorkerBucket:
        """The bucket for workers of this role and shape."""
        info = worker.info
        buckets = self._colocated
        if info.is_elastic:
            buckets = self._split_off if worker.is_split_off else self._elastic
        num_blocks = decode_blocks
        if prefills_only(info):
            buckets = self._prefills
            num_blocks = prefill_blocks
        elif decodes_only(info):
            buckets = self._decodes
        sizes = (info.num_blocks, info.block_size, info.max_num_seqs, info.token_budget, info.max_model_len)
        shape = (*sizes, info.decode_reserve_tokens, info.watermark_blocks)
        bucket = buckets.get(shape)
        if bucket is None:
            bucket = buckets[shape] = WorkerBucket(info, self._policy, self._watermark, num_blocks)
        return bucket

    def prefill_buckets(self) -> list[WorkerBucket]:
        """The buckets of workers that compute prompts; those of decode workers where there are no others."""
        buckets = [
            bucket
            for buckets in (self._prefills, self._colocated, self._elastic)
            for bucket in buckets.values()
            if bucket.members
        ]
        return buckets or list(self._decodes.values())

    def decode_buckets(self) -> list[WorkerBucket]:
        """The buckets whose workers decode."""
        return [
            bucket
            for buckets in (self._decodes, self._colocated, self._elastic, self._split_off)
            for bucket in buckets.values()
            if bucket.members
        ]

    def shortlist(
        self,
        demand: Demand,
        without: Collection[WorkerId],
        matched: PrefixMatch | None,
        may_prefill_locally: bool,
        excluded: Exclusions | None = None,
    ) -> Shortlist:
        """The few workers of each role that have room and are worth comparing. `without`: workers that this request
        avoids; `excluded`: workers and pairs behind an open circuit breaker."""
        if demand.is_pooled:
            return self._for_pooled(demand, without, matched, excluded)
        local = may_prefill_locally and self._policy.weighs_local
        if not local and (may_prefill_locally or demand.is_continued):
            local = next(_long_enough(self._prefills, demand.num_tokens), None) is None
        if excluded is not None:
            return self._without(excluded, demand, set(without), matched, local)
        prefills = _candidates(self._prefills, demand, without, matched)
        decodes = _candidates(self._decodes, demand, without, matched) if prefills or local else []
        partners = self._partners(prefills, decodes, demand, without, matched) if prefills else ()
        colocated = _candidates(self._colocated, demand, without, matched) if self._colocated else []
        if self._elastic:
            elastic, split_off = self._elastic_candidates(demand, without, matched)
            colocated = [*colocated, *elastic, *(decodes if local else ())]
            return Shortlist(prefills + elastic, decodes + elastic + split_off, colocated, False, (), partners)
        return Shortlist(prefills, decodes, colocated, local, (), partners)

    def _for_pooled(
        self,
        demand: Demand,
        without: Collection[WorkerId],
        matched: PrefixMatch | None,
        excluded: Exclusions | None,
    ) -> Shortlist:
        """The shortlist of a request without an answer: workers that compute prompts, each of them alone."""
        if excluded is not None:
            without = {*without, *excluded.prefills, *excluded.colocated}
        alone = _candidates(self._prefills, demand, without, matched) + _candidates(
            self._colocated, demand, without, matched
        )
        if self._elastic:
            alone += self._elastic_candidates(demand, without, matched)[0]
        return Shortlist([], [], alone, False)

    def _without(
        self, excluded: Exclusions, demand: Demand, without: set[WorkerId], matched: PrefixMatch | None, local: bool
    ) -> Shortlist:
        """The shortlist without the excluded workers. A decode worker may be excluded from pairs but not from computing
        both phases, so `decodes` and `colocated` differ."""
        prefills = _candidates(self._prefills, demand, without | excluded.prefills, matched)
        decodes = _candidates(self._decodes, demand, without | excluded.decodes, matched) if prefills else []
        alone = without | excluded.colocated
        colocated = _candidates(self._colocated, demand, alone, matched)
        if local:
            colocated += _candidates(self._decodes, demand, alone, matched)
        partners = self._partners(prefills, decodes, demand, without | excluded.decodes, matched)
        if self._elastic:
            prefills += self._elastic_candidates(demand, without | excluded.prefills, matched)[0]
            for each in self._elastic_candidates(demand, without | excluded.decodes, matched):
                decodes += each
            colocated += self._elastic_candidates(demand, alone, matched)[0]
        return Shortlist(prefills, decodes, colocated, False, excluded.pairs, partners)

    def _elastic_candidates(
        self, demand: Demand, without: Collection[WorkerId], matched: PrefixMatch | None
    ) -> tuple[list[Candidate], list[Candidate]]:
        """The elastic candidates that take prompts, and those that do not. If none of the former has room, the latter
        take prompts."""
        elastic = _candidates(self._elastic, demand, without, matched)
        split_off = _candidates(self._split_off, demand, without, matched) if self._split_off else []
        return (elastic, split_off) if elastic else (split_off, [])

    def _partners(
        self,
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        demand: Demand,
        without: Collection[WorkerId],
        matched: PrefixMatch | None,
    ) -> list[Candidate]:
        """For each of the best prefill workers that has no formed pair with any of `decodes`, the best decode worker
        with which it has one. In large clusters the best of each role seldom have a formed pair with each other."""
        if not self._policy.weighs_setup:
            return []
        found: list[Candidate] = []
        for prefill in prefills[:_WITH_PARTNERS]:
            name = prefill.worker.worker_id
            formed = self._pairs.formed_with(name)
            if _has_any(formed, decodes):
                continue
            least, best = math.inf, None
            partners = self._pairs.partners(name)
            for bucket in self._decodes.values():
                ranks = bucket.ranks()
                for partner in partners:
                    rank = ranks.get(partner, math.inf)  # Infinite where it is full, or in another bucket.
                    if rank < least and partner not in without:
                        least, best = rank, (bucket, bucket.members[partner])
            if best is not None and all(each.worker is not best[1] for each in found):
                candidate = best[0].candidate(demand, best[1], matched)
                if candidate is not None:
                    found.append(candidate)
        return found

    def decoders(self, num_tokens: int, may_prefill_locally: bool) -> Iterator[Worker]:
        """The workers that could decode a request of that length if they were empty."""
        yield from _long_enough(self._colocated, num_tokens)
        yield from _long_enough(self._elastic, num_tokens)
        yield from _long_enough(self._split_off, num_tokens)
        if may_prefill_locally or next(_long_enough(self._prefills, num_tokens), None) is not None:
            yield from _long_enough(self._decodes, num_tokens)

    def targets(self, demand: Demand, source: Worker, without: Collection[WorkerId]) -> list[Candidate]:
        """Workers with room for a sequence that decodes on `source`, without those on which its answer would end
        earlier."""
        avoided = {*without, source.worker_id}
        return [
            candidate
            for bucket in self.decode_buckets()
            if bucket.max_model_len >= source.info.max_model_len
            for candidate in bucket.candidates(demand, avoided, None)
        ]

    def prefills_for(self, num_tokens: int, decode: Worker) -> Iterator[Worker]:
        """The prefill workers that could compute a prompt of that length for this decode worker."""
        if decode.is_split_off:
            return _long_enough(self._elastic, num_tokens)
        return iter(()) if has_both_roles(decode.info) else _long_enough(self._prefills, num_tokens)

    @property
    def has_split_off(self) -> bool:
        """Whether any elastic worker takes no prompts."""
        return any(bucket.members for bucket in self._split_off.values())

    def elastic_workers(self) -> Iterator[Worker]:
        """All elastic workers, split off or not."""
        return chain(_members(self._elastic), _members(self._split_off))

    def pairs_with(self, worker: Worker) -> list[tuple[Worker, PeerRef]]:
        """The possible pairs (P, D) of this worker of the group."""
        if prefills_only(worker.info):
            return [(worker, decode.peer) for decode in _members(self._decodes)]
        if decodes_only(worker.info):
            return [(prefill, worker.peer) for prefill in _members(self._prefills)]
        if worker.info.is_elastic:
            others = [other for other in self.elastic_workers() if other is not worker]
            return [(worker, other.peer) for other in others] + [(other, worker.peer) for other in others]
        return []


def longest_of(infos: Collection[WorkerInfo], may_prefill_locally: bool) -> int:
    """Tokens of the longest sequence that a pair, a worker with both roles, or a decode worker that may prefill could
    hold; 0 if there are none of these."""
    longest = 0
    decodes: dict[Version, int] = {}
    for info in infos:
        if has_both_roles(info) or (may_prefill_locally and decodes_only(info)):
            longest = max(longest, longest_sequence(info))
        if decodes_only(info):
            group = version_of(info)
            decodes[group] = max(decodes.get(group, 0), longest_sequence(info))
    for info in filter(prefills_only, infos):
        longest = max(longest, min(longest_sequence(info), decodes.get(version_of(info), 0)))
    return longest


def longest_prompt(infos: Iterable[WorkerInfo]) -> int:
    """Tokens of the longest prompt that a worker which computes prompts could hold without an answer; 0 if there is
    none."""
    return max((longest_sequence(info) for info in infos if "prefill" in info.roles), default=0)


def _candidates(
    buckets: dict[_Shape, WorkerBucket], demand: Demand, without: Collection[WorkerId], matched: PrefixMatch | None
) -> list[Candidate]:
    if len(buckets) == 1:
        (bucket,) = buckets.values()
        return bucket.candidates(demand, without, matched)
    return [candidate for bucket in buckets.values() for candidate in bucket.candidates(demand, without, matched)]


def _has_any(worker_ids: Container[WorkerId], candidates: Iterable[Candidate]) -> bool:
    for candidate in candidates:  # noqa: SIM110 - `any` with a generator takes three times as long
        if candidate.worker.worker_id in worker_ids:
            return True
    return False


def _members(buckets: dict[_Shape, WorkerBucket]) -> Iterator[Worker]:
    for bucket in buckets.values():
        yield from bucket.members.values()


def _long_enough(buckets: dict[_Shape, WorkerBucket], num_tokens: int) -> Iterator[Worker]:
    for bucket in buckets.values():
        if num_tokens < bucket.longest:
            yield from bucket.members.values()


NUM_LOOKS = 3
"""Number of candidates of a bucket by rank."""
NUM_HOLDERS = 2
"""Number of further candidates of a bucket by cached prefix."""
NUM_TIER_HOLDERS = 1
"""Number of further candidates of a bucket by prefix in each kind of tier."""
NUM_ADAPTER_HOLDERS = 1
"""Number of further candidates of a bucket that have the request's adapter, by rank."""
NUM_TURNS = 1024
"""Number of placements after which the start among workers with equally long prefixes wraps around."""

_TIERS: tuple[TierName, ...] = get_args(TierName)

_Blocks = Callable[[Demand, WorkerInfo], int]


class WorkerBucket:
    """Workers of one model group, role and shape.

    Args:
        info: the info of the first worker; gives the shape.
        policy: gives the rank.
        watermark: share of the blocks that is left free.
        num_blocks: KV blocks that a request has in use on a worker of this shape, those of cached tokens included.

    On decode workers, only those blocks of a cached prefix that other sequences hold are subtracted from what a request
    takes: a decode worker refuses a request without room. A prefill worker lets it wait.
    """

    def __init__(self, info: WorkerInfo, policy: Policy, watermark: float, num_blocks: _Blocks) -> None:
        self.longest = longest_sequence(info)
        self.max_model_len = info.max_model_len
        self.members: dict[WorkerId, Worker] = {}
        self.mask: WorkerSet = 0
        """The members as a set of the prefix index."""
        self.host_mask: WorkerSet = 0
        """Their host memories as a set of the index of tiers."""
        self.num_open = 0
        """Number of members with a free prefill slot and a free decode place."""
        self.backlog_ms = 0.0
        """The sum of the members' backlogs."""
        self.used_blocks = 0
        """The sum of the members' KV blocks in use."""
        self._policy = policy
        self._room = info.num_blocks - max(int(info.num_blocks * watermark), info.watermark_blocks)
        self._decodes = "decode" in info.roles
        self._shape = info
        self._num_blocks = num_blocks
        self._by_rank = LazyRanking(policy.rank)
        self._by_room = LazyRanking(attrgetter("used_blocks"))

    def add(self, worker: Worker) -> None:
        """Add a worker, and rank it by cost and by room."""
        self.members[worker.worker_id] = worker
        self.mask |= worker.bit
        self.host_mask |= worker.host_bit
        self.num_open += worker.has_slot and not worker.is_full
        self.backlog_ms += worker.backlog_ms
        self.used_blocks += worker.used_blocks
        self._by_rank.changed[worker] = self._by_room.changed[worker] = None

    def remove(self, worker: Worker) -> None:
        """Remove a worker that is lost or takes no new requests."""
        del self.members[worker.worker_id]
        self.mask &= ~worker.bit
        self.host_mask &= ~worker.host_bit
        self.num_open -= worker.has_slot and not worker.is_full
        self.backlog_ms -= worker.backlog_ms
        self.used_blocks -= worker.used_blocks
        self._by_rank.remove(worker)
        self._by_room.remove(worker)

    def changed(self, worker: Worker) -> bool:
        """Update a worker whose assignments or reports changed. Returns whether it has a slot now and had none
        before."""
        self.backlog_ms -= worker.backlog_ms
        self.used_blocks -= worker.used_blocks
        was_open = worker.has_slot and not worker.is_full
        worker.refresh()
        self.backlog_ms += worker.backlog_ms
        self.used_blocks += worker.used_blocks
        self._by_rank.changed[worker] = self._by_room.changed[worker] = None
        is_open = worker.has_slot and not worker.is_full
        if is_open is was_open:
            return False
        self.num_open += is_open - was_open
        return is_open

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Number of tokens in the KV blocks that placement may use, of all members, and how many of these are in
        use."""
        block_size = self._shape.block_size
        return len(self.members) * self._room * block_size, self.used_blocks * block_size

    def fastest(self, without: Collection[WorkerId]) -> Worker | None:
        """The first in the ranking that is not in `without`; any member where all are full."""
        first = self._by_rank.first(1, without)
        return first[0] if first else next(iter(self.members.values()), None)

    def ranks(self) -> Mapping[WorkerId, float]:
        """The ranks of the members that are not full."""
        return self._by_rank.ranks()

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        workers = self.members.values()
        if self.used_blocks != sum(worker.used_blocks for worker in workers):
            return [f"bucket of {', '.join(self.members)}: {self.used_blocks} KV blocks are counted as used"]
        if self.num_open != sum(worker.has_slot and not worker.is_full for worker in workers):
            return [f"bucket of {', '.join(self.members)}: {self.num_open} workers are counted as open"]
        return []

    def candidates(self, demand: Demand, without: Collection[WorkerId], matched: PrefixMatch | None) -> list[Candidate]:
        """Members with room for the request: those of least rank and the holders of its longest prefixes. If none of
        these has room, the member with the most free blocks."""
        if demand.num_tokens - demand.is_pooled >= self.longest:  # an answer has at least one token
            return []
        policy, turn = self._policy, demand.turn
        begin = policy.start(turn, len(self._by_rank) or 1) if policy.draws else 0
        workers = self._by_rank.first(NUM_LOOKS, without, begin)
        if matched is not None and policy.uses_prefixes and len(workers) < len(self.members):
            for worker_id, _ in matched.best(NUM_HOLDERS, self.mask, turn % NUM_TURNS):
                worker = self.members[worker_id]
                if worker not in workers and worker_id not in without:
                    workers.append(worker)
            if matched.tiers is not None:
                self._add_tier_holders(workers, matched, matched.tiers, without, turn % NUM_TURNS)
        if demand.adapter and len(workers) < len(self.members):
            workers += self._adapter_holders(demand, workers, without)
        return self._with_room(demand, workers, matched) or self._with_room(
            demand, self._by_room.first(1, without), matched
        )

    def _add_tier_holders(
        self,
        workers: list[Worker],
        matched: PrefixMatch,
        tiers: TierMatch,
        without: Collection[WorkerId],
        turn: int,
    ) -> None:
        """Add further members whose tiers have more of the request than their device caches."""
        for tier in _TIERS:
            for worker_id, num_extents in tiers.best(tier, NUM_TIER_HOLDERS, self.host_mask, turn):
                worker = self.members[worker_id]
                is_known = worker_id in without or worker in workers
                if not is_known and num_extents * HASHES_PER_EXTENT > matched.blocks_of(worker.bit):
                    workers.append(worker)

    def _adapter_holders(
        self, demand: Demand, known: Collection[Worker], without: Collection[WorkerId]
    ) -> list[Worker]:
        """Further members that have the request's adapter, or load it now, and are not full; of least rank."""
        found = [
            worker
            for worker in self.members.values()
            if not worker.is_full
            and worker not in known
            and worker.worker_id not in without
            and worker.has_adapter(demand.adapter, demand.now)
        ]
        found.sort(key=lambda worker: (self._policy.rank(worker), worker.position))
        return found[:NUM_ADAPTER_HOLDERS]

    def candidate(self, demand: Demand, worker: Worker, matched: PrefixMatch | None = None) -> Candidate | None:
        """A member as a candidate if it has room, else None. Without `matched` nothing of the request is cached
        there."""
        fits = demand.num_tokens - demand.is_pooled < self.longest
        found = self._with_room(demand, [worker], matched) if fits else []
        return found[0] if found else None

    def openings(self, num_blocks: int, output_tokens: float, limit: int) -> tuple[list[float], float]:
        """When each of the first `limit` members can begin with more sequences of `num_blocks` blocks, see `openings`;
        and for how many milliseconds a sequence keeps its place."""
        workers = list(islice(self.members.values(), limit))
        found = [when for worker in workers for when in openings(worker, num_blocks, self._room, output_tokens)]
        return found, output_tokens * max((worker.token_ms for worker in workers), default=0.0)

    def wait_ms(self, demand: Demand, worker: Worker, output_tokens: float) -> float:
        """Milliseconds until a member can begin with a request of which it has nothing cached, if nothing else is
        placed on it until then."""
        found = openings(worker, self.num_blocks(demand), self._room, output_tokens)
        return next(found, math.inf)

    def num_blocks(self, demand: Demand) -> int:
        """Number of KV blocks of a request on a member."""
        return self._num_blocks(demand, self._shape)

    def _with_room(self, demand: Demand, workers: Iterable[Worker], matched: PrefixMatch | None) -> list[Candidate]:
        """The workers with room, as candidates. An empty worker takes every request that fits into it at all, else a
        request of nearly its size would wait for ever."""
        found = []
        shape, room, decodes = self._shape, self._room, self._decodes
        most, block_size = max_cached_tokens(demand.num_tokens), shape.block_size
        all_blocks = self._num_blocks(demand, shape)
        ends = () if matched is None else matched.ends
        for worker in workers:
            if worker.is_empty:
                limit: float = all_blocks
            elif worker.is_full:
                continue
            else:
                limit = room - worker.used_blocks
                if limit >= worker.refused_blocks:
                    limit = worker.refused_blocks - 1
            cached_blocks, bit = 0, worker.bit
            for length, holders in ends:  # `PrefixMatch.blocks_of`; this is done for every candidate
                if holders & bit:
                    cached_blocks = length
                    break
            if not cached_blocks:
                if all_blocks <= limit:
                    found.append(Candidate(worker, 0, all_blocks, all_blocks))
                continue
            cached = cached_blocks * HASH_BLOCK_TOKENS
            if cached > most:
                cached = most
            num_cached = cached // block_size
            num_blocks = all_blocks - num_cached
            if not decodes:
                if num_blocks <= limit:
                    found.append(Candidate(worker, cached, num_blocks, num_blocks, num_cached))
            elif all_blocks <= limit:  # There is room whatever is shared, so that is counted for the chosen one only.
                found.append(Candidate(worker, cached, num_blocks, all_blocks, None))
            else:
                assert matched is not None
                shared_blocks = num_shared(worker, matched.hashes, cached)
                if all_blocks - shared_blocks <= limit:
                    found.append(Candidate(worker, cached, num_blocks, all_blocks - shared_blocks, shared_blocks))
        return found
