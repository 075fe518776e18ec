"""Begins and ends attempts, and keeps a request, its attempt and the workers' assignments consistent.

    choose ──> start: one assignment per worker          leave: a worker did its part, its assignment is closed
                                                         end: the remaining assignments are closed, their workers get
                                                         a cancel

Owner: the router core.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from disagg.proto import messages
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import AttemptKey, GatewayId, WorkerId
from disagg.proto.messages import End, Fetched, HandedOver, PrefillDone
from disagg.router.api import AttemptMarks, Path
from disagg.router.config import RouterConfig
from disagg.router.placement.placement import (
    Candidate,
    Choice,
    Demand,
    Draw,
    Policy,
    Shortlist,
    choose,
    choose_pair,
    count_shared,
    decode_assignment,
    prefill_assignment,
)
from disagg.router.queueing.tenants import Tenant
from disagg.router.requests.core_state import CoreState
from disagg.router.requests.events import CancelOn, Dispatch
from disagg.router.requests.explain import Placed
from disagg.router.requests.record import Attempt, RequestRecord
from disagg.router.states import AttemptEvent, AttemptState, RequestEvent
from disagg.router.statistics import RunningMean
from disagg.router.workers.circuit_breakers import Leg
from disagg.router.workers.worker import Worker

MIN_PAIR_TIMEOUT_S = 0.25
LINK_TRIAL = "of the transfer, which took long, and which nothing had confirmed lately"
TRIAL_TOKENS = 32
"""Tokens of an answer after which the trial of a decode worker counts as passed; its end may be minutes away."""


MayHave = Callable[[Tenant, int], bool]
"""The signature of `Tenants.may_have`."""


class Blocked(enum.Enum):
    """Why a request was not placed."""

    NO_ROOM = "no worker has room"
    WAITS = "the best worker has no free slot just now"
    OVER_SHARE = "its tenant has as many KV blocks as it may"


class Attempts:
    """Places requests on workers. Counts attempts, and keeps the means by which demands are made."""

    def __init__(
        self, config: RouterConfig, gateway_id: GatewayId, state: CoreState, policy: Policy, draw: Draw
    ) -> None:
        self._lengths = RunningMean(config.expected_output_tokens)
        """Mean number of output tokens of an answer."""
        self._recent_lengths = RunningMean(config.expected_output_tokens, weight=0)
        """Like `_lengths`, without the prior once an answer was seen: for forecasts, which a wrong prior would
        mislead."""
        self._reuse = RunningMean(0.0)
        """Mean share of a prompt that was cached on the workers of its placement."""
        self._config = config
        self._gateway_id = gateway_id
        self._fleet = state.fleet
        self._policy = policy
        self._draw = draw
        self.late_last = policy.late_last
        """The value of `Policy.late_last`."""
        self._num_started = 0
        self.decisions = state.telemetry.stats.decisions
        """Outcomes of placements: pair, local_prefill, local_fallback (no prefill worker could take it),
        colocated, pooled, probe; no_room, no_slot and no_share left the request in the queue."""

    def configure(self, config: RouterConfig, policy: Policy) -> None:
        """Follow another configuration and policy from the next placement on."""
        self._config, self._policy = config, policy
        self.late_last = policy.late_last

    def try_start(
        self, record: RequestRecord, now: float, queued_ms: float, kept: Collection[WorkerId], may_have: MayHave
    ) -> Dispatch | Blocked:
        """Place a queued request if a worker has room for it now; the caller takes it out of the queue. For `queued_ms`
        see `Demand`; `kept`: workers that are held for another request; `may_have`: whether its tenant may have that
        many more KV tokens."""
        demand = self.demand(record, now, queued_ms)
        avoided: Collection[WorkerId] = record.avoided(now)
        if kept:
            avoided = {*avoided, *kept}
        choice, shortlists = self._choose(record, demand, avoided, now)
        if choice is None:
            self.decisions["no_room"] += 1
            return Blocked.NO_ROOM
        if not choice.has_slot:
            self.decisions["no_slot"] += 1
            return Blocked.WAITS
        if not record.tenant.is_unlimited:
            count_shared(choice.decode, record.block_hashes)
            if not may_have(record.tenant, _kv_tokens(choice.decode.worker, choice.decode.assigned_blocks)):
                self.decisions["no_share"] += 1
                return Blocked.OVER_SHARE
        self.decisions["pooled" if demand.is_pooled else _reason(choice, shortlists)] += 1
        return self._start(record, choice, demand, now)

    def _choose(
        self, record: RequestRecord, demand: Demand, avoided: Collection[WorkerId], now: float
    ) -> tuple[Choice | None, list[Shortlist]]:
        """The choice for a request, and the shortlists that it was made from. An answer that has begun continues bit
        for bit, if workers of its arithmetic have room and a slot; if not both of a pair have that arithmetic, then the
        one that decodes."""
        tiers = [avoided]
        if demand.is_continued and record.arithmetic and (others := self._fleet.of_other_arithmetic(record.arithmetic)):
            others_decode = (each for each in others if self._fleet.worker(each).decodes)
            tiers = [(*avoided, *others), (*avoided, *others_decode), avoided]
        for without in tiers:
            shortlists = self._fleet.shortlists(demand, record.block_hashes, without, now)
            choice = choose(self._policy, demand, shortlists, self._draw)
            if choice is not None and choice.has_slot:
                break
        return choice, shortlists

    def ttft_ms(self, record: RequestRecord, now: float, queued_ms: float) -> float | None:
        """Predicted milliseconds from now to the first token of a request if it were placed now; None if no worker has
        room, or the policy predicts no times."""
        demand = self.demand(record, now, queued_ms)
        choice, _ = self._choose(record, demand, record.avoided(now), now)
        if choice is None or not choice.decode_weight.step_ms:
            return None
        first = choice.prefill_weight or choice.decode_weight
        return first.wait_ms + first.prefill_ms

    def room_needed(self, record: RequestRecord) -> int:
        """Number of tokens that must fit into the KV cache of the worker that decodes, without those that it has
        cached."""
        left = record.request.sampling.max_tokens - len(record.output.released)
        return record.num_tokens + min(left, self._config.decode_reserve_tokens)

    def has_room_for_half(self, record: RequestRecord, now: float) -> bool:
        """Whether there would be room for a request of half the size."""
        demand = self.demand(record, now)
        half = Demand(
            num_tokens=max(1, demand.num_tokens // 2),
            reserve_tokens=demand.reserve_tokens // 2,
            is_pooled=demand.is_pooled,
            version=demand.version,
        )
        lists = self._fleet.shortlists(half, (), record.avoided(now), now)
        return any(each.colocated or (each.decodes and (each.prefills or each.local)) for each in lists)

    def start_on(
        self, record: RequestRecord, pair: tuple[WorkerId, WorkerId], now: float
    ) -> tuple[Dispatch | None, UnavailableError | None]:
        """Place a new request on this pair, regardless of cost and free slots. Returns the error if that is impossible
        now."""
        if not self._fleet.forms_pair(*pair):
            return None, UnavailableError(f"{pair[0]} and {pair[1]} form no pair now", "no_such_pair")
        demand = self.demand(record, now)
        prefill, decode = (self._fleet.candidate(demand, worker_id) for worker_id in pair)
        if prefill is None or decode is None:
            full = pair[0] if prefill is None else pair[1]
            return None, UnavailableError(f"{full} has no room now", "no_room")
        self.decisions["probe"] += 1
        return self._start(record, choose_pair(self._policy, demand, prefill, decode), demand, now), None

    def computed(self, attempt: Attempt, worker_id: WorkerId, now: float) -> None:
        """Note that the worker computed the prompt: P waits for the hand-over, a worker alone continues with the
        decodes. Idempotent."""
        if attempt.state is AttemptState.PREFILLING:
            here = attempt.prefill is None
            attempt.advance(AttemptEvent.PREFILLED_HERE if here else AttemptEvent.PREFILLED)
            attempt.marks.computed = now
            if not here:
                self.passed("prefill", attempt, now)
        if worker_id in attempt.live:
            self._fleet.computed(worker_id, attempt.key, now)

    def handed_over(self, record: RequestRecord, message: HandedOver, now: float) -> None:
        """Note that D owns the sequence now, and close P's assignment."""
        attempt = record.running
        if attempt.state is AttemptState.PREFILLING:  # D's message came before P's
            attempt.marks.computed = now
            self.passed("prefill", attempt, now)
        attempt.advance(AttemptEvent.HANDED_OVER)
        self.passed("transfer", attempt, now)
        prefill = attempt.prefill
        if prefill is not None:
            if prefill in attempt.live:
                self.leave(attempt, prefill)
            exposed_s = 0.0 if attempt.marks.computed is None else max(0.0, now - attempt.marks.computed)
            self._fleet.links.observe(prefill, attempt.decode, message.kv_bytes, exposed_s * 1000, now)
        trace = record.trace
        trace.kv_bytes = message.kv_bytes
        trace.decode_cached_tokens = message.cached_tokens
        trace.transport = message.transport
        trace.stages["kv_transfer"] = attempt.marks.handed_over = now
        attempt.marks.transfer_s = message.transfer_s

    def fetched(self, attempt: Attempt, message: Fetched, now: float) -> None:
        """Note the end of the attempt's fetch. One that was late would have taken at least its time for all of it."""
        plan = attempt.fetch
        assert plan is not None
        assert plan.source is not None
        attempt.fetch = None
        attempt.marks.fetched = message
        kv_bytes, ms = message.kv_bytes, message.transfer_s * 1000
        if message.outcome == "late":
            kv_bytes, ms = plan.kv_bytes, max(ms, plan.ms)
        transfer_ms = max(0.0, ms - plan.before_ms)
        self._fleet.fetch_links.ended(plan.source, attempt.computes_prompt, message.outcome, kv_bytes, transfer_ms, now)

    def grew(self, attempt: Attempt, num_tokens: int, now: float) -> None:
        """Note that the answer got longer."""
        if attempt.decode in attempt.live:
            self._fleet.assignments.grow(attempt.decode, attempt.key, num_tokens, now)
        if attempt.is_trial:
            attempt.num_trial_tokens += num_tokens
            if attempt.num_trial_tokens >= TRIAL_TOKENS and attempt.state is AttemptState.DECODING:
                self.passed("decode", attempt, now)
                attempt.is_trial = False

    def passed(self, leg: Leg, attempt: Attempt, now: float) -> None:
        """Note that a leg of the attempt succeeded."""
        breakers = self._fleet.breakers
        if not breakers.is_clear and breakers.passed(leg, attempt.prefill, attempt.decode, attempt.marks.placed, now):
            self._fleet.reopen()

    def failed(self, record: RequestRecord, leg: Leg, end: End, now: float, *, at_once: bool = False) -> bool:
        """Note that a leg of the attempt failed; for `at_once` see `CircuitBreakers.failed`. Returns whether the
        failure is not counted for the request: its workers are excluded now, or it was not the decode leg, and others
        are healthy."""
        attempt, fleet = record.running, self._fleet
        is_first = not record.num_failures and not record.num_free
        workers, placed = (attempt.prefill, attempt.decode), attempt.marks.placed
        if leg == "transfer" and attempt.prefill is not None:
            fleet.pairs.failed(attempt.prefill, attempt.decode)
        is_blocked = fleet.breakers.failed(leg, *workers, placed, now, end.detail, is_first=is_first, at_once=at_once)
        return (is_blocked or leg != "decode") and fleet.has_other(leg, attempt.prefill, attempt.decode)

    def pair_refused(self, record: RequestRecord, end: End, now: float) -> None:
        """The pair of the attempt was not formed in time. Its breaker opens at once, because all further requests would
        wait for it; where this request waited for less than `pair_timeout_s`, once the pair has not been formed for
        that long."""
        attempt, pair_timeout_s = record.running, self._config.pair_timeout_s
        placed, timeout_s = attempt.marks.placed, attempt.pair_timeout_s
        if (
            attempt.prefill is not None
            and timeout_s is not None
            and timeout_s < pair_timeout_s
            and now - placed >= timeout_s
            and not self._fleet.breakers.pair_timed_out(attempt.prefill, attempt.decode, placed, now, pair_timeout_s)
        ):
            return
        self.failed(record, "transfer", end, now, at_once=True)

    def to_avoid(self, attempt: Attempt, leg: Leg) -> list[WorkerId]:
        """The workers that the next attempt of the request should avoid after this leg failed. Of a transfer both ends,
        where there are others, because the cause may be either; the decode worker where there are no others."""
        if attempt.prefill is None or leg == "decode":
            return [attempt.decode]
        if leg == "prefill":
            return [attempt.prefill]
        has_other = self._fleet.has_other
        ends = [attempt.prefill] if has_other("prefill", attempt.prefill, attempt.decode) else []
        if not ends or has_other("decode", None, attempt.decode):
            ends.append(attempt.decode)
        return ends

    def answered(self, num_tokens: int) -> None:
        """Observe the length of an answer, for the expected length of later ones."""
        self._lengths.observe(num_tokens)
        self._recent_lengths.observe(num_tokens)

    @property
    def answer_tokens(self) -> float:
        """Mean number of tokens of recent answers."""
        return max(1.0, self._recent_lengths.value)

    def decode_wait_ms(self, record: RequestRecord, position: int, now: float) -> float:
        """Milliseconds that a request at a position of the queue waits for a decode place."""
        return self._fleet.decode_wait_ms(self.demand(record, now), self.answer_tokens, position, now)

    def refused(self, record: RequestRecord) -> bool:
        """Note that D refused for lack of KV blocks. Returns whether waiting may help: with nothing else on it, it
        would refuse later too."""
        attempt = record.running
        return self._fleet.refused(attempt.decode, attempt.key)

    def refused_by(self, attempt: Attempt, worker_id: WorkerId) -> None:
        """Note that the target of a move has no room."""
        self._fleet.refused(worker_id, attempt.key)

    def open_target(self, record: RequestRecord, target: Candidate, demand: Demand, now: float) -> None:
        """Open an assignment of a decoding attempt on the worker to which it moves."""
        attempt, worker = record.running, target.worker
        assignment = decode_assignment(demand, target, computes_prompt=False)
        assignment.num_before = len(record.output.released)
        assignment.first_at = record.trace.stages.get("first_token") or math.inf
        self._fleet.open(worker, attempt.key, assignment, self._num_started)
        if demand.adapter:
            worker.adapters.order(demand.adapter, demand.adapter_ms, now)
        self._fleet.pairs.used(attempt.decode, worker.worker_id, now)
        self._num_started += 1
        attempt.live.append(worker.worker_id)

    def leave(self, attempt: Attempt, worker_id: WorkerId) -> None:
        """Close the assignment of a worker that is done with the attempt."""
        attempt.live.remove(worker_id)
        self._fleet.close(worker_id, attempt.key)

    def end(self, record: RequestRecord, now: float) -> list[CancelOn]:
        """Close the remaining assignments of the attempt. Returns cancels for their workers."""
        attempt = record.running
        cancels = [CancelOn(worker_id, attempt.key) for worker_id in attempt.live]
        for cancel in cancels:
            self.leave(attempt, cancel.worker_id)
        if attempt.is_trial and self._fleet.breakers.attempt_ended(attempt.key):
            self._fleet.reopen()
        attempt.marks.ended = now
        record.end_attempt()
        return cancels

    def demand(self, record: RequestRecord, now: float, queued_ms: float = 0.0) -> Demand:
        """What a placement of the request must provide for."""
        num_released = len(record.output.released)
        left, trace = record.request.sampling.max_tokens - num_released, record.trace
        adapter = record.request.adapter
        reserve_tokens, output_tokens = self._config.decode_reserve_tokens, self._lengths.value
        ttft_left_ms = math.inf
        if trace.ttft_slo_s is not None and not num_released:
            ttft_left_ms = (trace.arrival + trace.ttft_slo_s - now) * 1000
        return Demand(
            num_tokens=trace.num_prompt_tokens + num_released,
            reserve_tokens=reserve_tokens if reserve_tokens < left else left,
            most_output_tokens=left,
            output_tokens=max(1.0, output_tokens if output_tokens < left else left),
            ttft_left_ms=ttft_left_ms,
            tpot_ms=math.inf if trace.tpot_slo_s is None else trace.tpot_slo_s * 1000,
            queued_ms=queued_ms,
            reuse=self._reuse.value,
            is_continued=num_released > 0,
            turn=self._num_started,
            now=now,
            answer_tokens=self.answer_tokens,
            is_pooled=record.is_pooled,
            adapter=adapter.fingerprint if adapter else "",
            adapter_ms=self._fleet.adapter_ms(record.request) if adapter else 0.0,
            version=record.version,
        )

    def _start(self, record: RequestRecord, choice: Choice, demand: Demand, now: float) -> Dispatch:
        fleet, turn = self._fleet, self._num_started
        key = AttemptKey(record.request.request_id, record.num_attempts)
        hashes, prefill, decode = record.block_hashes, choice.prefill, choice.decode.worker
        decode_id = decode.worker_id
        if not (demand.is_continued and record.arithmetic):
            record.arithmetic = decode.info.arithmetic
        first_side = prefill or choice.decode
        fetch = fleet.place_fetch(first_side, now) if fleet.has_other_ways else None
        if demand.is_pooled:
            assignment = prefill_assignment(demand, choice.decode)
        else:
            assignment = decode_assignment(demand, choice.decode, hashes, computes_prompt=prefill is None)
        assignment.num_before = len(record.output.released)
        assignment.first_at = record.trace.stages.get("first_token") or math.inf
        fleet.open(decode, key, assignment, turn)
        if prefill is None:
            first, peer, prefill_id, live = decode, None, None, [decode_id]
            cached_tokens = choice.decode.cached_tokens
        else:
            first, peer, cached_tokens = prefill.worker, decode.peer, prefill.cached_tokens
            prefill_id = first.worker_id
            live = [prefill_id, decode_id]
            fleet.pairs.used(prefill_id, decode_id, now)
            fleet.open(first, key, prefill_assignment(demand, prefill), turn)
        if demand.adapter:
            decode.adapters.order(demand.adapter, demand.adapter_ms, now)
            first.adapters.order(demand.adapter, demand.adapter_ms, now)
        if fleet.links.placed(prefill_id, decode_id, now):
            self.decisions["link_trial"] += 1
            record.trace.trial = LINK_TRIAL
        fleet.predict(first, hashes, now)
        self._reuse.observe(cached_tokens / demand.num_tokens)
        self._num_started += 1
        marks = _begin_marks(record, prefill_id, decode, now)
        spec = record.spec(key, self._gateway_id, demand.answer_tokens, now)
        pair_timeout_s = None if peer is None else pair_timeout(self._config.pair_timeout_s, demand, spec.timeout_s)
        record.attempt = attempt = Attempt(
            *(key, prefill_id, decode_id, live, marks),
            num_before=len(record.output.released),
            pair_timeout_s=pair_timeout_s,
            kv_tokens=_kv_tokens(decode, assignment.blocks),
            fetch=None if fetch is None else first_side.asked,
        )
        if not fleet.breakers.is_clear:
            attempt.is_trial = fleet.breakers.placed(key, prefill_id, decode_id)
        record.num_attempts += 1
        record.output.begin(key.attempt)
        record.advance(RequestEvent.PLACED)
        _trace_start(record, marks, now)
        record.trace.placement = Placed(self._policy, demand, choice)
        message = messages.Dispatch(spec=spec, decode_peer=peer, pair_timeout_s=pair_timeout_s, fetch=fetch)
        return Dispatch(first.worker_id, message)


def _kv_tokens(worker: Worker, num_blocks: int) -> int:
    return num_blocks * worker.info.block_size


FAILURE_CODES: Mapping[Leg, str] = MappingProxyType(
    {"prefill": "prefill_failed", "transfer": "kv_transfer_failed", "decode": "decode_failed"}
)


def failed_leg(attempt: Attempt, worker_id: WorkerId, end: End) -> Leg:
    """The leg that failed if `worker_id` ended the attempt with `end`."""
    if attempt.prefill is None or attempt.state is AttemptState.DECODING:
        return "decode"
    if end.in_transfer or attempt.state is AttemptState.TRANSFERRING or worker_id == attempt.decode:
        return "transfer"
    return "prefill"


def pair_timeout(most_s: float, demand: Demand, timeout_s: float | None) -> float:
    """Seconds for which an attempt may wait for its pair, see `RouterConfig.pair_timeout_s`."""
    if timeout_s is None and demand.ttft_left_ms == math.inf:
        return most_s
    left_s = min(demand.ttft_left_ms / 1000, math.inf if timeout_s is None else timeout_s)
    return min(most_s, max(MIN_PAIR_TIMEOUT_S, left_s / 2))


def note_cached(record: RequestRecord, num_tokens: int) -> None:
    """Note how many tokens the worker that computes the prompt had cached."""
    attempt = record.running
    attempt.note_cached(num_tokens)
    if attempt.prefill is None and not record.is_pooled:
        record.trace.decode_cached_tokens = attempt.cached_tokens or 0
    else:
        record.trace.prefill_cached_tokens = attempt.cached_tokens or 0


def note_prefilled(record: RequestRecord, message: PrefillDone) -> None:
    """Note the message of the worker that has computed the prompt."""
    note_cached(record, message.cached_tokens)
    marks = record.running.marks
    marks.alloc_wait_s = message.alloc_wait_s if marks.prefill_worker else None
    marks.queue_s = message.queue_s


def note_answer(record: RequestRecord, worker_id: WorkerId, end: End) -> None:
    """Note the end of the attempt by the worker that sampled the last token: D, or the one that computed the prompt. A
    sequence that moved away from there and back was ended by D."""
    attempt, marks = record.running, record.running.marks
    if attempt.prefill is None or attempt.is_before_hand_over(worker_id):
        note_cached(record, end.cached_tokens)
        marks.queue_s = end.queue_s
    else:
        marks.decode_queue_s = end.queue_s
    if attempt.is_before_hand_over(worker_id):
        record.trace.decode_worker = None


def _begin_marks(record: RequestRecord, prefill_id: WorkerId | None, decode: Worker, now: float) -> AttemptMarks:
    trace = record.trace
    path: Path = "pd" if prefill_id is not None else "colocated" if decode.is_for_prompts else "local"
    if record.is_pooled:
        path = "pooled"
    queued = trace.marks[-1].ended if trace.marks else trace.stages["tokenize"]
    assert queued is not None, "the earlier attempt was ended"
    marks = AttemptMarks(
        path=path, prefill_worker=prefill_id, decode_worker=decode.worker_id, queued=queued, placed=now
    )
    trace.marks.append(marks)
    return marks


def _trace_start(record: RequestRecord, marks: AttemptMarks, now: float) -> None:
    trace = record.trace
    trace.prefill_worker, trace.decode_worker = marks.prefill_worker, marks.decode_worker
    if record.is_pooled:
        trace.prefill_worker, trace.decode_worker = marks.decode_worker, None
    trace.attempts = record.num_attempts
    if record.num_attempts > 1:
        trace.prefill_cached_tokens = trace.decode_cached_tokens = trace.kv_bytes = 0
        trace.transport = ""
    trace.stages.setdefault("route", now)


def _reason(choice: Choice, shortlists: Sequence[Shortlist]) -> str:
    if choice.prefill is not None:
        return "pair"
    if choice.decode.worker.is_for_prompts:
        return "colocated"
    return "local_prefill" if any(shortlist.prefills for shortlist in shortlists) else "local_fallback"
