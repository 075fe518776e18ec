"""Begins and ends attempts, so that a request, its attempt and the books always tell the same story.

    choose ──> start: one booking per worker            leave: a worker did its part, its booking is closed
                                                         end: the bookings that are left are closed, their workers
                                                         told to stop

Owner: the router core.
"""

from __future__ import annotations

import enum
import math

from disagg.proto import messages
from disagg.proto.ids import AttemptKey, GatewayId, WorkerId
from disagg.proto.messages import HandedOver
from disagg.router.api import Decision
from disagg.router.config import RouterConfig
from disagg.router.draw import Draw
from disagg.router.events import CancelOn, Dispatch
from disagg.router.fleet import Fleet
from disagg.router.placement import Choice, Demand, Policy, choose, decode_booking, prefill_booking
from disagg.router.record import Attempt, RequestRecord
from disagg.router.running_mean import RunningMean
from disagg.router.states import AttemptEvent, AttemptState, RequestEvent


class Blocked(enum.Enum):
    """Why a request was not placed."""

    NO_ROOM = "nobody has room"
    WAITS = "the best worker has no slot just now"


class Attempts:
    """See the module docstring."""

    def __init__(self, config: RouterConfig, gateway_id: GatewayId, fleet: Fleet, policy: Policy, draw: Draw) -> None:
        self._lengths = RunningMean(config.expected_output_tokens)
        """Of output tokens."""
        self._reuse = RunningMean(0.0)
        """Of the share of a prompt that was cached where it was placed."""
        self._config = config
        self._gateway_id = gateway_id
        self._fleet = fleet
        self._policy = policy
        self._draw = draw
        self._num_started = 0

    def try_start(self, record: RequestRecord, now: float) -> Dispatch | Blocked:
        """Place a queued request if somebody has room for it now; the caller takes it out of the queue."""
        demand = self._demand(record, now)
        shortlists = self._fleet.shortlists(demand, record.block_hashes, record.avoided(now), now)
        choice = choose(self._policy, demand, shortlists, self._draw)
        if choice is None:
            return Blocked.NO_ROOM
        return self._start(record, choice, demand, now) if choice.has_slot else Blocked.WAITS

    def computed(self, attempt: Attempt, worker_id: WorkerId, now: float) -> None:
        """The worker computed the prompt: P waits for the hand-over, a worker alone decodes on. Idempotent."""
        if attempt.state is AttemptState.PREFILLING:
            here = attempt.prefill is None
            attempt.advance(AttemptEvent.PREFILLED_HERE if here else AttemptEvent.PREFILLED)
            attempt.prefilled_at = now
        if worker_id in attempt.live:
            self._fleet.computed(worker_id, attempt.key)

    def handed_over(self, record: RequestRecord, message: HandedOver, now: float) -> None:
        """D owns the sequence now, and P nothing more."""
        attempt = record.running
        attempt.advance(AttemptEvent.HANDED_OVER)
        prefill = attempt.prefill
        if prefill is not None:
            if prefill in attempt.live:
                self.leave(attempt, prefill)
            exposed_s = 0.0 if attempt.prefilled_at is None else max(0.0, now - attempt.prefilled_at)
            self._fleet.links.observe(prefill, attempt.decode, message.kv_bytes, exposed_s * 1000)
        trace = record.trace
        trace.kv_bytes = message.kv_bytes
        trace.decode_cached_tokens = message.cached_tokens
        trace.transport = message.transport
        trace.stages["kv_transfer"] = now

    def grew(self, attempt: Attempt, num_tokens: int) -> None:
        """The answer got longer."""
        if attempt.decode in attempt.live:
            self._fleet.books.grow(attempt.decode, attempt.key, num_tokens)

    def answered(self, num_tokens: int) -> None:
        """An answer ended after so many tokens: what later ones are expected to have."""
        self._lengths.observe(num_tokens)

    def leave(self, attempt: Attempt, worker_id: WorkerId) -> None:
        """The worker owes the attempt nothing more."""
        attempt.live.remove(worker_id)
        self._fleet.close(worker_id, attempt.key)

    def end(self, record: RequestRecord) -> list[CancelOn]:
        """Whatever the end: the books get everything back, and the workers that still owe something are to be told."""
        attempt = record.running
        cancels = [CancelOn(worker_id, attempt.key) for worker_id in attempt.live]
        for cancel in cancels:
            self.leave(attempt, cancel.worker_id)
        record.end_attempt()
        return cancels

    def _demand(self, record: RequestRecord, now: float) -> Demand:
        num_released = len(record.ledger.released)
        left = record.request.sampling.max_tokens - num_released
        ttft_left_ms = math.inf
        if record.ttft_slo_s is not None and not num_released:
            ttft_left_ms = (record.trace.arrival + record.ttft_slo_s - now) * 1000
        return Demand(
            num_tokens=len(record.request.prompt_token_ids) + num_released,
            reserve_tokens=min(left, self._config.decode_reserve_tokens),
            output_tokens=max(1.0, min(left, self._lengths.value)),
            ttft_left_ms=ttft_left_ms,
            tpot_ms=math.inf if record.tpot_slo_s is None else record.tpot_slo_s * 1000,
            reuse=self._reuse.value,
            turn=self._num_started,
        )

    def _start(self, record: RequestRecord, choice: Choice, demand: Demand, now: float) -> Dispatch:
        fleet, turn = self._fleet, self._num_started
        key = AttemptKey(record.request.request_id, record.num_attempts)
        decode = choice.decode.worker
        fleet.open(decode, key, decode_booking(demand, choice.decode, computes_prompt=choice.prefill is None), turn)
        if choice.prefill is None:
            first, peer, live = decode, None, [decode.worker_id]
        else:
            first, peer = choice.prefill.worker, decode.peer
            live = [first.worker_id, decode.worker_id]
            fleet.open(first, key, prefill_booking(demand, choice.prefill), turn)
        fleet.predict(first, record.block_hashes, now)
        self._reuse.observe((choice.prefill or choice.decode).cached_tokens / demand.num_tokens)
        self._num_started += 1
        record.attempt = Attempt(key, None if peer is None else first.worker_id, decode.worker_id, live)
        record.num_attempts += 1
        record.ledger.begin(key.attempt)
        record.advance(RequestEvent.PLACED)
        _trace_start(record, record.attempt, explain(self._policy, choice), now)
        spec = record.spec(key, self._gateway_id, now)
        return Dispatch(first.worker_id, messages.Dispatch(spec=spec, decode_peer=peer))


def explain(policy: Policy, choice: Choice) -> Decision:
    """Why this was chosen, for the trace."""
    decode = choice.decode_weight
    prefill = choice.prefill_weight or decode
    both = prefill is not decode
    knows_times = decode.step_ms > 0
    return Decision(
        policy=policy.name,
        num_options=choice.num_options,
        ttft_ms=prefill.wait_ms + prefill.prefill_ms if knows_times else None,
        tpot_ms=decode.step_ms if knows_times else None,
        cost=(prefill.cost if both else 0.0) + decode.cost + choice.link_ms,
        wait_ms=prefill.wait_ms,
        prefill_ms=prefill.prefill_ms,
        transfer_ms=choice.link_ms,
        decode_ms=decode.decode_ms,
        delay_ms=decode.delay_ms,
        barrier_ms=decode.barrier_ms + (prefill.barrier_ms if both else 0.0),
    )


def blame(attempt: Attempt, worker_id: WorkerId) -> tuple[str, WorkerId]:
    """Which part of the journey broke when `worker_id` failed, and whom the next attempt should avoid."""
    if attempt.prefill is None or attempt.state is AttemptState.DECODING:
        return "decode_failed", worker_id
    if attempt.state is AttemptState.TRANSFERRING or worker_id == attempt.decode:
        return "kv_transfer_failed", attempt.decode
    return "prefill_failed", attempt.prefill


def note_cached(record: RequestRecord, num_tokens: int) -> None:
    """The worker that computes the prompt had this many of its tokens."""
    attempt = record.running
    attempt.note_cached(num_tokens)
    if attempt.prefill is None:
        record.trace.decode_cached_tokens = attempt.cached_tokens or 0
    else:
        record.trace.prefill_cached_tokens = attempt.cached_tokens or 0


def _trace_start(record: RequestRecord, attempt: Attempt, decision: Decision, now: float) -> None:
    trace = record.trace
    trace.prefill_worker, trace.decode_worker = attempt.prefill, attempt.decode
    trace.prefill_cached_tokens = trace.decode_cached_tokens = trace.kv_bytes = 0
    trace.transport = ""
    trace.attempts = record.num_attempts
    trace.decision = decision
    trace.stages.setdefault("route", now)
