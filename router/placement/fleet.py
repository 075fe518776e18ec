"""All workers of the router: which are up, what each reported, what is assigned to each, which prefix blocks it has,
how fast it is.

    up(info) ──> present ──drain──> draining ──lost(id)──> forgotten        a new incarnation: first lost, then up
                    └────────lost(id)────────────┘

A present or draining worker may be suspected of hanging for a while: nothing is placed on it then.

Every change of a worker goes through here, so that the rankings of the buckets, the sums and the count of free slots
follow.

Owner: the router core.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from disagg.proto.ids import AttemptKey, BlockHash, Incarnation, WorkerId
from disagg.proto.messages import (
    EXTENT_TOKENS,
    HASHES_PER_EXTENT,
    FetchFrom,
    PeerRef,
    RoleName,
    WorkerInfo,
    WorkerReport,
)
from disagg.router.api import RoutedRequest, WorkerView
from disagg.router.config import RouterConfig, num_split
from disagg.router.placement.fetches import MAX_HOLDERS, Source, best_sources, deepest_tokens, may_fetch, plan_fetch
from disagg.router.placement.forecast import wait_ms
from disagg.router.placement.model_groups import NUM_TURNS, ModelGroup, WorkerBucket, longest_of, longest_prompt
from disagg.router.placement.placement import Candidate, Demand, Policy, Shortlist, Version, version_of
from disagg.router.workers.adapter_loads import LoadTimes
from disagg.router.workers.assignments import Assignment, Assignments
from disagg.router.workers.circuit_breakers import (
    NO_EXCLUSIONS,
    CircuitBreakers,
    Exclusions,
    Leg,
    UsableWorkers,
    find_usable,
)
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.expected import ExpectedWorkers
from disagg.router.workers.fetch_links import FetchLinks
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.prefix_index import PrefixIndex, PrefixMatch, WorkerSet
from disagg.router.workers.tier_index import TierIndex
from disagg.router.workers.worker import Worker, decodes_only
from disagg.router.workers.worker_counts import WorkerCounts

FORECAST_S = 0.02
"""Seconds for which a forecast of decode places is kept."""
_AS_SOON = 1.25
"""Waits within this factor of each other count as equal: forecasts are not more exact."""
LEAST_FETCH_MS, FETCH_PATIENCE = 50.0, 2.0
"""A fetch may take that many times as long as predicted, and at least these milliseconds; and as long as the worker
would take to compute the same tokens: nobody loses by that."""
MAX_FORECAST = 8
"""Most workers of a bucket that a forecast of decode places computes; the others are assumed to be like them."""


class Fleet:
    """The state of all workers, by id; see the module docstring for their states."""

    def __init__(self, config: RouterConfig, policy: Policy, links: LinkModel, pairs: Pairs) -> None:
        self.assignments = Assignments()
        self.links = links
        self.pairs = pairs
        self.index = PrefixIndex()
        self.tiers = TierIndex()
        self.fetch_links = FetchLinks(config, links)
        self.counts = WorkerCounts()
        self.breakers = CircuitBreakers(config)
        self.num_openings = 0
        """Number of times that a worker got a free prefill slot or came up."""
        self.num_releases = 0
        """Number of events that may have freed capacity: closed assignments, reports, workers that came up."""
        self.computed_at = -math.inf
        """When a worker last computed a prompt."""
        self._config = config
        self._may_prefill_locally = config.local_prefill == "auto"
        self._policy = policy
        self._num_split = num_split(policy.decodes)
        """Number of elastic workers of each model group that take no prompts."""
        self._workers: dict[WorkerId, Worker] = {}
        self._groups: dict[Version, ModelGroup] = {}
        self._versions: frozenset[Version] | None = None
        """The model versions of the present workers; None until computed again."""
        self._sources: dict[Version, tuple[WorkerSet, WorkerSet]] | None = None
        """The workers of each model version that can give KV to others, and their host memories: draining ones, too,
        but none that is suspected, and none at all where the policy weighs no fetches. None until computed again."""
        self._with_other_ways: WorkerSet = 0
        """The workers that may get KV from their tiers or from others. Valid while `_sources` is not None."""
        self._arithmetics: dict[WorkerId, str] | None = None
        """The arithmetic of each present worker if there are several, else empty; see `WorkerInfo.arithmetic`. None
        until computed again."""
        self._bucket_of: dict[WorkerId, WorkerBucket] = {}
        """The bucket of each worker that is not draining."""
        self.to_drain: list[Worker] = []
        """Draining workers that `newly_drained` has not returned yet; read only."""
        self.lacking: dict[WorkerId, Worker] = {}
        """Workers that lack KV blocks for their running sequences, see `Worker.lacks_blocks`; read only."""
        self._num_came = 0
        self._longest: int | None = None
        self._longest_new: int | None = None
        self._longest_continued = 0
        self._longest_pooled = self._longest_new_pooled = 0
        """Tokens of the longest sequence that can be continued. Valid while `_longest_new` is not None."""
        self._num_places = 0
        """Sequences that the workers behind `_longest_new` can decode at a time."""
        self._openings: dict[int, tuple[list[float], float]] = {}
        """KV blocks of a request (rounded to three binary digits) -> when workers can begin with such requests, and for
        how long these keep their decode places. In milliseconds."""
        self._openings_until = -math.inf
        self._match: tuple[Sequence[BlockHash], float, PrefixMatch] | None = None
        """The latest result of the prefix index, until the index changes: chain, time, match."""
        self.expected = ExpectedWorkers()
        self._adapter_loads = LoadTimes()
        self._usable: tuple[int, UsableWorkers] | None = None
        """The usable workers, with the version of the circuit breakers at that time."""

    def configure(self, config: RouterConfig, policy: Policy) -> None:
        """Rank and weigh all workers again, by this policy."""
        self._config, self._policy = config, policy
        self._num_split = num_split(policy.decodes)
        self._may_prefill_locally = config.local_prefill == "auto"
        present = [self._workers[worker_id] for worker_id in self._bucket_of]
        for worker in present:
            self._leave_bucket(worker)
            worker.split_off(False)
        self._groups.clear()
        for worker in present:
            self._join_bucket(worker)
        self._longest = self._longest_new = self._sources = None
        self._match = None
        self._openings.clear()
        self.num_releases += 1

    # ---------------------------------------------------------------- up, lost, drained, suspected

    def up(self, info: WorkerInfo, now: float) -> None:
        """A worker is up. An earlier incarnation of it must have been removed by `lost` first; the same incarnation
        keeps its state."""
        self.expected.came(info.worker_id)
        worker = self._workers.get(info.worker_id)
        if worker is None:
            self.index.add_worker(info.worker_id, info.incarnation, has_windows=len(info.kv_layout.groups) > 1)
            self.tiers.add_worker(info.worker_id, info.incarnation, has_tiers=bool(info.tiers))
            slot_tokens = self._config.prefill_chunks * info.token_budget
            bit = self.index.bit(info.worker_id)
            load = self.assignments.of_worker(info.worker_id)
            worker = Worker(info, load, self._num_came, slot_tokens, bit, num_routers=self._config.num_gateways)
            self._num_came += 1
            self._workers[info.worker_id] = worker
        else:
            assert worker.info.incarnation == info.incarnation, "the earlier incarnation was not removed"
            self._leave_bucket(worker)
            worker.update_info(info)
            worker.is_suspected = False
        worker.reported_at = now
        if not worker.is_draining:
            self._join_bucket(worker)
        self._workers_changed()
        self.num_releases += 1

    def lost(self, worker_id: WorkerId) -> None:
        """Remove a worker; its assignments must have been closed."""
        worker = self._workers.pop(worker_id)
        self._leave_bucket(worker)
        self.assignments.forget(worker_id)
        self.index.remove_worker(worker_id)
        self.tiers.remove_worker(worker_id)
        self._match = None
        self.links.forget(worker_id)
        self.fetch_links.forget(worker_id)
        self.pairs.forget(worker_id)
        self.breakers.forget(worker_id)
        self.to_drain = [other for other in self.to_drain if other is not worker]
        self.lacking.pop(worker_id, None)
        self._workers_changed()

    def _workers_changed(self) -> None:
        """What is known of all workers together is computed again when it is needed."""
        self._longest = self._longest_new = self._versions = self._arithmetics = self._sources = None

    def drain(self, worker_id: WorkerId) -> None:
        """Place nothing new on a present worker from now on."""
        worker = self._workers[worker_id]
        if not worker.is_draining:
            self._leave_bucket(worker)
            worker.is_draining = True
            self.to_drain.append(worker)
            self._longest_new = None

    def resume(self, worker_id: WorkerId) -> None:
        """Place requests on a draining worker again."""
        worker = self._workers[worker_id]
        if not worker.is_draining:
            return
        worker.is_draining = False
        self.to_drain = [other for other in self.to_drain if other is not worker]
        if not worker.is_suspected:
            self._join_bucket(worker)
        self._longest_new = None
        self.num_releases += 1

    def suspect(self, worker_id: WorkerId) -> None:
        """Exclude a present worker from placement and from capacity until `clear_suspicion`."""
        worker = self._workers[worker_id]
        self._leave_bucket(worker)
        worker.is_suspected = True
        self._workers_changed()

    def clear_suspicion(self, worker_id: WorkerId) -> None:
        """Use a suspected worker like the others again."""
        worker = self._workers[worker_id]
        if not worker.is_suspected:
            return
        worker.is_suspected = False
        if not worker.is_draining:
            self._join_bucket(worker)
        self._workers_changed()
        self.num_releases += 1

    def split(self, number: int) -> None:
        """Let that many elastic workers of each model group take no prompts from now on. Running sequences stay."""
        self._num_split = number
        for group in self._groups.values():
            self._divide(group)
        self._openings.clear()
        self.num_releases += 1

    def newly_drained(self) -> list[tuple[WorkerId, Incarnation]]:
        """Draining workers to which nothing is assigned any more; each is returned once."""
        empty = [worker for worker in self.to_drain if not worker.assigned.assignments]
        self.to_drain = [worker for worker in self.to_drain if worker.assigned.assignments]
        return [(worker.worker_id, worker.info.incarnation) for worker in empty]

    def incarnation(self, worker_id: WorkerId) -> Incarnation | None:
        """The incarnation of the worker that is present, if any."""
        worker = self._workers.get(worker_id)
        return worker.info.incarnation if worker else None

    def worker(self, worker_id: WorkerId) -> Worker:
        """A present worker; to be changed only through the fleet."""
        return self._workers[worker_id]

    def pairs_with(self, worker_id: WorkerId) -> list[tuple[WorkerId, PeerRef]]:
        """The pairs (prefill worker, decode worker) that this worker makes possible."""
        worker = self._workers[worker_id]
        pairs = self._group(worker.info).pairs_with(worker)
        return [(prefill.worker_id, peer) for prefill, peer in pairs]

    def pairs_to_form(self, worker_id: WorkerId) -> list[tuple[WorkerId, PeerRef]]:
        """The pairs of this worker that are to be formed before a request needs them; see `Pairs`."""
        pairs = self.pairs_with(worker_id)
        others = [peer.worker_id if prefill == worker_id else prefill for prefill, peer in pairs]
        warm = self.pairs.warm_up(worker_id, list(dict.fromkeys(others)))
        return [pair for pair, other in zip(pairs, others, strict=True) if other in warm]

    # ---------------------------------------------------------------- changes

    def report(self, report: WorkerReport, now: float) -> bool:
        """Apply the report of a present incarnation. Returns False when its KV events have a gap, see
        `PrefixIndex.apply`."""
        worker = self._workers[report.worker_id]
        worker.take_report(report)
        for state in worker.adapters.report(report.adapters):
            self._adapter_loads.observe(state)
        worker.reported_at = worker.heard_at = now
        if worker.lacks_blocks:
            self.lacking[worker.worker_id] = worker
        else:
            self.lacking.pop(worker.worker_id, None)
        self.counts.take(report)
        self.num_releases += 1
        self._changed(worker)
        self._match = None
        self.tiers.apply(report)
        return self.index.apply(report)

    def adapter_ms(self, request: RoutedRequest) -> float:
        """Predicted milliseconds to load a request's adapter."""
        assert request.adapter is not None, "it has no adapter"
        return self._adapter_loads.predict_ms(request.adapter.fingerprint, request.adapter_bytes)

    def open(self, worker: Worker, key: AttemptKey, assignment: Assignment, turn: int) -> None:
        """Assign an attempt that is placed now, as placement number `turn`."""
        worker_id = worker.worker_id
        self.assignments.open(worker_id, key, assignment)
        worker.note_assigned(assignment.tokens, assignment.blocks)
        worker.last_turn = turn
        if self._openings:
            self._openings.clear()
        if self._bucket_of[worker_id].changed(worker):
            self.num_openings += 1

    def computed(self, worker_id: WorkerId, key: AttemptKey, now: float) -> None:
        """Note that the worker computed the attempt's prompt. Idempotent."""
        num_tokens = self.assignments.computed(worker_id, key)
        if num_tokens:
            self.computed_at = now
            worker = self._workers[worker_id]
            worker.note_returned(num_tokens)
            self._changed(worker)

    def close(self, worker_id: WorkerId, key: AttemptKey) -> None:
        """Close the assignment of an attempt for which the worker has nothing more to do."""
        assignment = self.assignments.close(worker_id, key)
        worker = self._workers[worker_id]
        if assignment.tokens:
            worker.note_returned(assignment.tokens)
        if assignment.marks:
            worker.note_closed(assignment)
        self.num_releases += 1
        self._changed(worker)

    def refused(self, worker_id: WorkerId, key: AttemptKey) -> bool:
        """A decode worker refused an attempt for lack of KV blocks. Returns whether another sequence was on it."""
        worker = self._workers[worker_id]
        assignment = worker.assigned.assignments.get(key)
        if assignment is None:  # The worker computes the prompt too, and lets it wait for blocks instead of refusing.
            return False
        worker.note_refused(assignment.blocks)
        return worker.num_sequences > 1 or worker.has_others

    def predict(self, worker: Worker, hashes: Sequence[BlockHash], now: float) -> None:
        """Note that the worker will compute a prompt with this chain of blocks."""
        known = self._match
        num_matched = known[2].blocks_of(worker.bit) if known is not None and known[0] is hashes else None
        self.index.predict(worker.worker_id, hashes, now, num_matched)
        self._match = None

    # ---------------------------------------------------------------- questions

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence (prompt and answer) that any placement on the present workers could hold."""
        if self._longest is None:
            infos = [w.info for w in self._workers.values() if not w.is_suspected]
            self._longest = longest_of(infos, self._may_prefill_locally)
            self._longest_pooled = longest_prompt(infos)
        return self._longest

    @property
    def longest_new_sequence(self) -> int:
        """Like `longest_sequence`, without the draining workers."""
        if self._longest_new is None:
            infos = [w.info for w in self._workers.values() if not (w.is_draining or w.is_suspected)]
            self._longest_new = longest_of(infos, self._may_prefill_locally)
            self._longest_continued = longest_of(infos, may_prefill_locally=True)
            self._longest_new_pooled = longest_prompt(infos)
            decoders = [info for info in infos if "decode" in info.roles]
            self._num_places = sum(info.max_num_seqs for info in decoders or infos)
        return self._longest_new

    @property
    def longest_continued_sequence(self) -> int:
        """Like `longest_new_sequence`, for a request whose answer has begun, see `Demand.is_continued`."""
        return max(self.longest_new_sequence, self._longest_continued)

    @property
    def longest_pooled(self) -> int:
        """Tokens of the longest prompt without an answer that a present worker could hold."""
        _ = self.longest_sequence  # both are computed at once
        return self._longest_pooled

    @property
    def longest_new_pooled(self) -> int:
        """Like `longest_pooled`, without the draining workers."""
        _ = self.longest_new_sequence  # both are computed at once
        return self._longest_new_pooled

    def has_only(self, version: Version) -> bool:
        """Whether all present workers have that version of the model."""
        if self._versions is None:
            self._versions = frozenset(version_of(worker.info) for worker in self._workers.values())
        return self._versions == {version}

    def longest_of_version(self, version: Version) -> int:
        """Tokens of the longest sequence that workers of that version could take over; 0 if all of them are draining or
        gone."""
        infos = [w.info for w in self._workers.values() if not (w.is_draining or w.is_suspected)]
        return longest_of([info for info in infos if version_of(info) == version], may_prefill_locally=True)

    def num_places(self) -> int:
        """Sequences that the workers which take new requests can decode at a time; without any that decode, those that
        they can compute."""
        return self._num_places if self.longest_new_sequence or self.longest_pooled else 0

    def kv_room(self) -> tuple[int, int]:
        """KV tokens of the workers that take new requests and decode, or compute prompts where none of their group
        decodes; and how many of these are in use."""
        total = used = 0
        for group in self._groups.values():
            for bucket in group.decode_buckets() or group.prefill_buckets():
                its_total, its_used = bucket.kv_tokens
                total += its_total
                used += its_used
        return total, used

    def missing_role(self) -> RoleName | None:
        """The role without a worker; None when requests can be served."""
        if self.longest_sequence:
            return None
        infos = [worker.info for worker in self._workers.values() if not worker.is_suspected]
        only_decodes = infos and all(map(decodes_only, infos))
        return "prefill" if only_decodes else "decode"

    @property
    def has_opening(self) -> bool:
        """Whether a worker that computes prompts has a free slot."""
        return any(bucket.num_open for bucket in self._prefill_buckets())

    def fastest(self) -> Worker | None:
        """The first in the ranking of the workers that compute prompts."""
        without = self._excluded_now.prefills | self._excluded_now.colocated
        firsts = [worker for bucket in self._prefill_buckets() if (worker := bucket.fastest(without)) is not None]
        return min(firsts, key=lambda worker: worker.backlog_ms) if firsts else None

    def backlog(self) -> tuple[float, int]:
        """The sum of the backlogs (in milliseconds) of all workers that compute prompts, and their number."""
        buckets = list(self._prefill_buckets())
        return sum(bucket.backlog_ms for bucket in buckets), sum(len(bucket.members) for bucket in buckets)

    def decode_wait_ms(self, demand: Demand, output_tokens: float, position: int, now: float) -> float:
        """Milliseconds for which a request waits for a decode place behind `position` others of its size, with answers
        of `output_tokens` tokens. The forecast of places is kept for `FORECAST_S`."""
        if now >= self._openings_until:
            self._openings.clear()
            self._openings_until = now + FORECAST_S
        buckets = [bucket for group in self._groups.values() for bucket in group.decode_buckets()]
        if not buckets:
            return 0.0
        num_workers = sum(len(bucket.members) for bucket in buckets)
        num_blocks = buckets[0].num_blocks(demand)
        size = num_blocks & -1 << max(0, num_blocks.bit_length() - 3)
        known = self._openings.get(size)
        if known is None:
            found = [bucket.openings(size, output_tokens, MAX_FORECAST) for bucket in buckets]
            known = sorted(chain.from_iterable(each for each, _ in found)), max(ms for _, ms in found)
            self._openings[size] = known
        num_seen = sum(min(len(bucket.members), MAX_FORECAST) for bucket in buckets)
        return wait_ms(known[0], position * num_seen // num_workers, known[1])

    def matched(self, hashes: Sequence[BlockHash], now: float) -> PrefixMatch:
        """The number of leading blocks of the chain that each worker has. Cached for the same request at the same
        time."""
        known = self._match
        if known is None or known[0] is not hashes or known[1] != now:
            self.index.expire(now)
            match = self.index.find(hashes)
            if self.tiers.is_used:
                if self._sources is None:
                    self._usable_sources()
                match.tiers = self.tiers.find(hashes, match.least(self._with_other_ways))
            self._match = known = (hashes, now, match)
        return known[2]

    def shortlists(
        self, demand: Demand, hashes: Sequence[BlockHash], without: Collection[WorkerId], now: float
    ) -> list[Shortlist]:
        """For each model group, the few candidates that have room and are worth comparing."""
        matched = self.matched(hashes, now) if hashes else None
        local = self._may_prefill_locally
        self.pairs.expire(now)
        excluded = None if self.breakers.is_clear else self._usable_workers().excluded_for(demand.num_tokens)
        lists = [group.shortlist(demand, without, matched, local, excluded) for _, group in self._groups_for(demand)]
        if matched is not None and self.has_other_ways:
            self._plan_fetches(demand, matched, lists)
        return lists

    @property
    def has_other_ways(self) -> bool:
        """Whether any worker gives KV to others, or has tiers: then a prompt need not be computed where it runs."""
        return self.tiers.is_used or bool(self._usable_sources() if self._sources is None else self._sources)

    def place_fetch(self, candidate: Candidate, now: float) -> FetchFrom | None:
        """Note that the candidate gets a prompt. Returns the fetch that it is to begin with, if any."""
        plan = candidate.asked
        source = None if plan is None else plan.source
        self.fetch_links.placed(source, candidate.worker.worker_id, now)
        if plan is None or source is None:
            return None
        peer = self._workers[source].peer
        if plan is candidate.trial:
            return FetchFrom(peer=peer, end_token=plan.tokens, timeout_ms=plan.ms)
        instead_ms = candidate.worker.backlog_ms + candidate.ways[0].prefill_ms - plan.prefill_ms
        timeout_ms = max(LEAST_FETCH_MS, FETCH_PATIENCE * plan.ms, instead_ms)
        return FetchFrom(peer=peer, end_token=plan.tokens, timeout_ms=timeout_ms)

    def of_other_arithmetic(self, arithmetic: str) -> Collection[WorkerId]:
        """Present workers with another arithmetic; see `WorkerInfo.arithmetic`."""
        if self._arithmetics is None:
            found = {worker_id: worker.info.arithmetic for worker_id, worker in self._workers.items()}
            self._arithmetics = found if len(set(found.values())) > 1 else {}
        return [worker_id for worker_id, other in self._arithmetics.items() if other != arithmetic]

    def has_other(self, leg: Leg, prefill: WorkerId | None, decode: WorkerId) -> bool:
        """Whether another healthy worker or pair could do this leg instead of these."""
        prefills, decodes, colocated, excluded = self._usable_workers()[:4]
        other_prefills = prefills - excluded.prefills - {prefill}
        if leg == "prefill":
            return bool(other_prefills)
        if leg == "transfer":
            return bool(other_prefills or decodes - excluded.decodes - {decode})
        return bool((decodes | colocated) - excluded.colocated - {decode})

    def reopen(self) -> None:
        """Note that an excluded worker or pair may be used again, so that waiting requests are tried."""
        self.num_openings += 1
        self.num_releases += 1

    def forms_pair(self, prefill_id: WorkerId, decode_id: WorkerId) -> bool:
        """Whether these two are present, not draining, a P and a D, and of one model group."""
        if prefill_id not in self._bucket_of or decode_id not in self._bucket_of:
            return False
        return any(p == prefill_id and peer.worker_id == decode_id for p, peer in self.pairs_with(prefill_id))

    def candidate(self, demand: Demand, worker_id: WorkerId) -> Candidate | None:
        """A present worker as a candidate, if it is not draining and has room for a request of which it has nothing
        cached."""
        return self._bucket_of[worker_id].candidate(demand, self._workers[worker_id])

    def targets(self, demand: Demand, source: Worker) -> list[Candidate]:
        """A few workers with room for a sequence that decodes on `source`, to which it could move."""
        excluded = self._excluded_now
        return self._group(source.info).targets(demand, source, excluded.colocated | excluded.decodes)

    def soonest_decode(self, demand: Demand, output_tokens: float) -> Worker | None:
        """The worker that can decode a request of that length soonest, by its decode places and blocks, with answers of
        `output_tokens` tokens; among those about as soon, the one with the least share of its blocks in use."""
        local = self._may_prefill_locally or demand.is_continued
        workers = [
            worker for _, group in self._groups_for(demand) for worker in group.decoders(demand.num_tokens, local)
        ]
        workers = [worker for worker in workers if not self.is_excluded(worker.worker_id)] or workers
        waits_ms = [self._bucket_of[each.worker_id].wait_ms(demand, each, output_tokens) for each in workers]
        limit_ms = min(waits_ms, default=0.0) * _AS_SOON
        return _emptiest([each for each, wait_ms in zip(workers, waits_ms, strict=True) if wait_ms <= limit_ms])

    def is_excluded(self, worker_id: WorkerId) -> bool:
        """Whether open circuit breakers keep new sequences from being decoded on a worker."""
        return worker_id in self._excluded_now.colocated or worker_id in self._excluded_now.decodes

    def emptiest_prefill(self, num_tokens: int, decode: Worker) -> Worker | None:
        """The prefill worker with the least share of its blocks in use that could compute a prompt of `num_tokens` for
        this decode worker."""
        workers = list(self._group(decode.info).prefills_for(num_tokens, decode))
        excluded = self._excluded_now.prefills
        return _emptiest([worker for worker in workers if worker.worker_id not in excluded] or workers)

    def views(self, now: float) -> tuple[WorkerView, ...]:
        """The views of the workers for an operator, by id."""
        open_breakers = self.breakers.describe(now)
        return tuple(
            WorkerView(
                worker.info,
                worker.load,
                worker.is_draining,
                max(0.0, now - worker.reported_at),
                worker.is_suspected,
                open_breakers.get(worker.worker_id, ()),
                worker.coefficients if worker.is_measured else None,
                worker.tiers,
            )
            for _, worker in sorted(self._workers.items())
        )

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        unknown = {worker_id for worker_id, _ in self.assignments.entries()} - self._workers.keys()
        problems = [f"assignments of {worker_id}, which is not present" for worker_id in sorted(unknown)]
        for bucket in set(self._bucket_of.values()):
            problems += bucket.check_integrity()
        problems += self.breakers.check_integrity()
        problems += self.tiers.check_integrity()
        return problems + self.assignments.check_integrity() + self.index.check_integrity()

    # ---------------------------------------------------------------- inside

    @property
    def _excluded_now(self) -> Exclusions:
        return NO_EXCLUSIONS if self.breakers.is_clear else self._usable_workers().excluded

    def _usable_workers(self) -> UsableWorkers:
        """The workers that take new requests and the exclusions among them; computed again after a change of either."""
        known, version = self._usable, self.breakers.version
        if known is None or known[0] != version:
            workers = [self._workers[worker_id] for worker_id in self._bucket_of]
            known = self._usable = version, find_usable(workers, self.breakers)
        return known[1]

    def _group(self, info: WorkerInfo) -> ModelGroup:
        key = version_of(info)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = ModelGroup(self._policy, self._config.watermark, self.pairs)
        return group

    def _groups_for(self, demand: Demand) -> Iterable[tuple[Version, ModelGroup]]:
        if demand.version is None:
            return self._groups.items()
        group = self._groups.get(demand.version)
        return () if group is None else ((demand.version, group),)

    def _usable_sources(self) -> dict[Version, tuple[WorkerSet, WorkerSet]]:
        if self._sources is None:
            self._sources, self._with_other_ways = {}, self.tiers.workers
            for worker in self._workers.values() if self._policy.weighs_fetches else ():
                if worker.fetches and not worker.is_suspected:
                    version = version_of(worker.info)
                    bits, hosts = self._sources.get(version, (0, 0))
                    self._sources[version] = bits | worker.bit, hosts | worker.host_bit
                    self._with_other_ways |= worker.bit
        return self._sources

    def _plan_fetches(self, demand: Demand, matched: PrefixMatch, lists: Sequence[Shortlist]) -> None:
        """Set what the candidates that would compute the prompt would load or fetch."""
        links, tiers = self.fetch_links, matched.tiers
        links.expire(demand.now)
        deepest = 0 if demand.is_pooled else deepest_tokens(demand, matched)
        for (version, _), each in zip(self._groups_for(demand), lists, strict=True):
            candidates = each.prefills + each.colocated if each.colocated else each.prefills
            lacking = [c for c in candidates if c.cached_tokens < deepest and may_fetch(demand, c, links)]
            sources: Sequence[Source] = ()
            if lacking:
                least = min([candidate.cached_tokens for candidate in candidates])
                sources = self._sources_of(matched, demand, version, least)
            if tiers is None:
                for candidate in lacking if sources else ():
                    plan_fetch(demand, candidate, None, sources, links)
                continue
            holders = tiers.holders()
            for candidate in candidates:
                own = tiers if candidate.worker.tier_bits & holders else None
                its_sources = sources if sources and candidate in lacking else ()
                if own is not None or its_sources:
                    plan_fetch(demand, candidate, own, its_sources, links)
            for candidate in each.decodes if each.local else ():  # Local prefill sends nothing, so it fetches nothing.
                if candidate.worker.tier_bits & holders:
                    plan_fetch(demand, candidate, tiers, (), links)

    def _sources_of(self, matched: PrefixMatch, demand: Demand, version: Version, least: int) -> Sequence[Source]:
        """The best workers of one version from which others could get what they lack of the request: they have more
        than `least` tokens."""
        among, hosts = self._usable_sources().get(version, (0, 0))
        turn, tiers = demand.turn % NUM_TURNS, matched.tiers
        if not among:
            return ()
        least_extents = least // EXTENT_TOKENS
        blocks = dict(matched.best(MAX_HOLDERS, among, turn, (least_extents + 1) * HASHES_PER_EXTENT - 1))
        in_host: dict[WorkerId, int] = {}
        if tiers is not None:
            in_host = dict(tiers.best("host", MAX_HOLDERS, hosts, turn, least_extents))
        holders = []
        for worker_id in {**blocks, **in_host} if in_host else blocks:
            worker = self._workers[worker_id]
            most = blocks.get(worker_id) or matched.blocks_of(worker.bit)
            num_reported = self.index.num_reported(worker_id, matched.hashes, most)
            holders.append((worker, num_reported, in_host.get(worker_id, 0)))
        return best_sources(demand, holders, self.fetch_links) if holders else ()

    def _prefill_buckets(self) -> Iterator[WorkerBucket]:
        for group in self._groups.values():
            yield from group.prefill_buckets()

    def _join_bucket(self, worker: Worker) -> None:
        self._usable = None
        group = self._group(worker.info)
        self._add_to_bucket(worker, group)
        self._divide(group)

    def _add_to_bucket(self, worker: Worker, group: ModelGroup) -> None:
        bucket = self._bucket_of[worker.worker_id] = group.bucket_for(worker)
        bucket.add(worker)
        self.num_openings += 1

    def _leave_bucket(self, worker: Worker) -> None:
        self._usable = None
        bucket = self._bucket_of.pop(worker.worker_id, None)
        if bucket is not None:
            bucket.remove(worker)
            self._divide(self._group(worker.info))

    def _divide(self, group: ModelGroup) -> None:
        """Split off as many elastic workers as the setting says, the first ones by name. At least one keeps taking
        prompts."""
        if not (self._num_split or group.has_split_off):
            return
        workers = sorted(group.elastic_workers(), key=_by_number)
        number = min(self._num_split, len(workers) - 1)
        for index, worker in enumerate(workers):
            if worker.is_split_off != (index < number):
                self._bucket_of[worker.worker_id].remove(worker)
                worker.split_off(index < number)
                self._add_to_bucket(worker, group)

    def _changed(self, worker: Worker) -> None:
        """Update what follows from the worker's assignments and reports."""
        bucket = self._bucket_of.get(worker.worker_id)
        if bucket is None:
            worker.refresh()
        elif bucket.changed(worker):
            self.num_openings += 1


def _by_number(worker: Worker) -> tuple[int, WorkerId]:
    """The sort key of workers by number: `workers-9` before `workers-10`."""
    return len(worker.worker_id), worker.worker_id


def _emptiest(workers: Iterable[Worker]) -> Worker | None:
    return min(workers, key=lambda worker: worker.used_blocks / worker.num_blocks, default=None)
