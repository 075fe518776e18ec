"""Begins and ends attempts, so that a request, its attempt and the books always tell the same story.

    choose ──> start: one booking per worker            leave: a worker did its part, its booking is closed
                                                         end: the bookings that are left are closed, their workers
                                                         told to stop

Owner: the router core.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.proto import messages
from disagg.proto.ids import AttemptKey, GatewayId, WorkerId
from disagg.router.config import RouterConfig
from disagg.router.events import CancelOn, Dispatch
from disagg.router.fleet import Fleet
from disagg.router.placement import Choice, Demand, Policy, decode_booking, prefill_booking
from disagg.router.record import Attempt, RequestRecord
from disagg.router.states import AttemptEvent, AttemptState, RequestEvent


@dataclass(slots=True)
class Attempts:
    """See the module docstring."""

    config: RouterConfig
    gateway_id: GatewayId
    policy: Policy
    fleet: Fleet
    num_started: int = 0

    def try_start(self, record: RequestRecord, now: float) -> Dispatch | None:
        """Place a queued request if somebody has room for it now; the caller takes it out of the queue."""
        demand = self._demand(record)
        candidates = self.fleet.candidates(record.block_hashes, demand.num_tokens, without=record.avoided(now))
        choice = self.policy(demand, candidates)
        return None if choice is None else self._start(record, choice, demand, now)

    def computed(self, attempt: Attempt, worker_id: WorkerId) -> None:
        """The worker computed the prompt: P waits for the hand-over, a worker alone decodes on. Idempotent."""
        if attempt.state is AttemptState.PREFILLING:
            here = attempt.prefill is None
            attempt.advance(AttemptEvent.PREFILLED_HERE if here else AttemptEvent.PREFILLED)
        if worker_id in attempt.live:
            self.fleet.books.computed(worker_id, attempt.key)

    def leave(self, attempt: Attempt, worker_id: WorkerId) -> None:
        """The worker owes the attempt nothing more."""
        attempt.live.remove(worker_id)
        self.fleet.books.close(worker_id, attempt.key)

    def end(self, record: RequestRecord) -> list[CancelOn]:
        """Whatever the end: the books get everything back, and the workers that still owe something are to be told."""
        attempt = record.running
        cancels = [CancelOn(worker_id, attempt.key) for worker_id in attempt.live]
        for cancel in cancels:
            self.leave(attempt, cancel.worker_id)
        record.end_attempt()
        return cancels

    def _demand(self, record: RequestRecord) -> Demand:
        left = record.request.sampling.max_tokens - len(record.ledger.released)
        return Demand(
            num_tokens=record.num_tokens,
            reserve_tokens=min(left, self.config.decode_reserve_tokens),
            turn=self.num_started,
        )

    def _start(self, record: RequestRecord, choice: Choice, demand: Demand, now: float) -> Dispatch:
        decode, prefill = choice.decode, choice.prefill
        key = AttemptKey(record.request_id, record.num_attempts)
        live = [decode.worker_id] if prefill is None else [prefill.worker_id, decode.worker_id]
        attempt = Attempt(key, prefill.worker_id if prefill else None, decode.worker_id, live)
        books = self.fleet.books
        books.open(decode.worker_id, key, decode_booking(demand, decode, computes_prompt=prefill is None))
        if prefill is not None:
            books.open(prefill.worker_id, key, prefill_booking(demand, prefill))
        self.num_started += 1
        record.attempt = attempt
        record.num_attempts += 1
        record.ledger.begin(key.attempt)
        record.advance(RequestEvent.PLACED)
        _trace_start(record, attempt, now)
        peer = self.fleet.peer(decode.worker_id) if prefill else None
        message = messages.Dispatch(spec=record.spec(key, self.gateway_id, now), decode_peer=peer)
        return Dispatch(live[0], message)


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


def _trace_start(record: RequestRecord, attempt: Attempt, now: float) -> None:
    trace = record.trace
    trace.prefill_worker, trace.decode_worker = attempt.prefill, attempt.decode
    trace.prefill_cached_tokens = trace.decode_cached_tokens = trace.kv_bytes = 0
    trace.transport = ""
    trace.attempts = record.num_attempts
    trace.stages.setdefault("route", now)
