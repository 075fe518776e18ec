"""The handling of the end of an attempt: the answer is complete, the request fails, or it goes back to the queue.

    stop, length            ──> finish ─────────────────────────────> Finish
    refused, preempted      ──> refused ──┐           ┌─ all tokens are there ──> Finish
    failed, a lost worker   ──> failed, ──┼─> lost_   ┼─ an error ──────────────> Fail
                                fault     │  attempt  └─ else ──────────────────> the queue
    cancel, a deadline      ──> fail ───────────────────────────────> Fail

Owner: the router core. All that a request held is released here, once.
"""

from __future__ import annotations

import logging

from disagg.proto.errors import ADAPTER_DETAIL, DeadlineError, DisaggError, SuspectRequestError, UnavailableError
from disagg.proto.ids import WorkerId
from disagg.proto.messages import End
from disagg.router.config import RouterConfig
from disagg.router.requests.admission import missing_worker
from disagg.router.requests.attempts import FAILURE_CODES, Attempts, failed_leg
from disagg.router.requests.core_state import CoreState
from disagg.router.requests.events import Command, Fail, Finish
from disagg.router.requests.migrations import Migrations
from disagg.router.requests.record import EndOfAnswer, HashBlocks, RequestRecord
from disagg.router.requests.retries import Retries
from disagg.router.requests.suspects import NO_CAUSE, Suspicion
from disagg.router.requests.waiting import Waiting
from disagg.router.states import RequestEvent, RequestState
from disagg.router.workers.circuit_breakers import Leg

logger = logging.getLogger(__name__)

MAX_ADAPTER_REFUSALS = 4
"""Attempts of a request that may be refused because a worker cannot load its adapter: others are tried, and waiting
does not help."""


class Endings:
    """Ends or requeues requests. Each method returns the commands to execute, in order.

    Args:
        config: pauses after failures.
        state: the state of the router core. A request that ends is removed from it.
        attempts, waiting, migrations: the other parts of the router core, which hold what a request gives back.
        hash_blocks: hashes the blocks of an answer that is to be continued.
    """

    def __init__(
        self,
        config: RouterConfig,
        state: CoreState,
        attempts: Attempts,
        waiting: Waiting,
        migrations: Migrations,
        hash_blocks: HashBlocks,
    ) -> None:
        self.retries = Retries(config)
        self._config = config
        self._requests = state.requests
        self._fleet = state.fleet
        self._tenants = state.tenants
        self._timers = state.timers
        self._telemetry = state.telemetry
        self._counters = state.counters
        self._attempts = attempts
        self._waiting = waiting
        self._migrations = migrations
        self._hash_blocks = hash_blocks

    def configure(self, config: RouterConfig) -> None:
        """Follow another configuration of pauses and retries."""
        self._config = self.retries.config = config

    # ---------------------------------------------------------------- an attempt

    def refused(self, record: RequestRecord, worker_id: WorkerId, end: End, now: float) -> list[Command]:
        """Handle an end that is no fault of the request: D has no room (P may report that, so D is the worker to
        avoid), the worker cannot load the adapter, the sequence was preempted, or the pair was not formed."""
        self._counters[end.reason] += 1
        leg: Leg = "transfer" if end.in_transfer else "decode"
        if end.in_transfer:
            self._counters["pair_refused"] += 1
            self._attempts.pair_refused(record, end, now)
        is_of_adapter = record.request.adapter is not None and end.detail.startswith(ADAPTER_DETAIL)
        can_wait = end.reason == "refused" and not (end.in_transfer or is_of_adapter) and self._attempts.refused(record)
        most = MAX_ADAPTER_REFUSALS if is_of_adapter else None
        error = self.retries.after_refusal(record, worker_id, end, can_wait=can_wait, most=most)
        if error is not None and is_of_adapter:
            error = UnavailableError(error.detail, "adapter_unavailable")
        if error is None:
            pause_s = self._config.refusal_pause_s * max(1, record.num_refusals)
            for to_avoid in [worker_id] if is_of_adapter else self._attempts.to_avoid(record.running, leg):
                self._avoid(record, to_avoid, pause_s, now)
        return self.lost_attempt(record, error, now)

    def failed(self, record: RequestRecord, worker_id: WorkerId, end: End, now: float) -> list[Command]:
        """Handle an attempt that a worker ended as failed."""
        self.retries.note_progress(record)
        leg = failed_leg(record.running, worker_id, end)
        is_free = self._attempts.failed(record, leg, end, now)
        for to_avoid in self._attempts.to_avoid(record.running, leg):
            self._avoid(record, to_avoid, self._config.failure_pause_s * (record.num_failures + 1), now)
        message = f"{end.reason} on {worker_id}: {end.detail}"
        return self.fault(record, message, FAILURE_CODES[leg], now, is_free=is_free)

    def fault(
        self,
        record: RequestRecord,
        message: str,
        code: str,
        now: float,
        *,
        is_free: bool = False,
        suspicion: Suspicion = NO_CAUSE,
    ) -> list[Command]:
        """Handle a failed attempt. While attempts are left, the next one continues after the released tokens."""
        self._counters[code] += 1
        error = self.retries.after_fault(record, message, code, is_free=is_free, suspicion=suspicion)
        if isinstance(error, SuspectRequestError):
            self._counters["suspect_requests"] += 1
            logger.warning("request %s of tenant %r ends: %s", record.request_id, record.tenant.name, error.detail)
        return self.lost_attempt(record, error, now)

    def lost_attempt(self, record: RequestRecord, error: DisaggError | None, now: float) -> list[Command]:
        """End the attempt: finish if all tokens of the answer are there, fail with `error`, or requeue."""
        if (reason := record.end_of_answer()) is not None:
            return self.finish(record, reason, now)
        if error is not None:
            return self.fail(record, error, now)
        commands = self._end_attempt(record, now)
        record.advance(RequestEvent.PUT_BACK)
        record.prepare_to_continue(self._hash_blocks)
        self._waiting.put_back(record, now)
        return commands

    # ---------------------------------------------------------------- a request

    def finish(self, record: RequestRecord, reason: EndOfAnswer, now: float) -> list[Command]:
        """Finish a request whose answer is complete."""
        commands = self._end_attempt(record, now)
        record.advance(RequestEvent.ANSWERED)
        if not record.is_pooled:
            self._attempts.answered(len(record.output.released))
        commands.append(Finish(record.request_id, record.completion(reason)))
        self._close(record, reason, now)
        return commands

    def fail(
        self,
        record: RequestRecord,
        error: DisaggError,
        now: float,
        event: RequestEvent = RequestEvent.FAILED,
        num_answered: int | None = None,
    ) -> list[Command]:
        """End a request with an error, in any state. `num_answered`: tokens that a client has that needs no more."""
        commands: list[Command] = []
        if record.attempt is None:
            self._waiting.remove(record.request_id)
        else:
            commands = self._end_attempt(record, now)
        record.advance(event)
        commands.append(Fail(record.request_id, error))
        record.trace.detail = error.detail
        self._close(record, error.code if num_answered is None else "stop", now, num_answered)
        return commands

    def wake(self, now: float) -> list[Command]:
        """Handle every request with a due timer: its deadline, the end of a pause or of the wait for a worker."""
        commands: list[Command] = []
        while (request_id := self._timers.pop_due(now)) is not None:
            record = self._requests.get(request_id)
            if record is None:
                continue
            if record.is_expired(now):
                error: DisaggError = DeadlineError(f"the deadline passed while {record.state.value}")
                commands += self.fail(record, error, now)
            elif record.state is RequestState.QUEUED and self._waiting.wake(record, now):
                commands += self.fail(record, self._no_capacity(record, now), now)
        return commands

    def _no_capacity(self, record: RequestRecord, now: float) -> UnavailableError:
        assert record.unservable_since is not None, "it waits for no worker"
        waited = f"for {now - record.unservable_since:.3g} s there was no"
        missing = "prefill" if record.is_pooled else self._fleet.missing_role()
        if missing is not None:
            return missing_worker(
                missing, f"{waited} {missing} worker that could take it", self._fleet, self._config, now
            )
        if record.version is not None and not self._fleet.has_only(record.version):
            message = f"{waited} worker with the version of the model with which its answer began"
            return UnavailableError(message, "no_version_capacity")
        return UnavailableError(f"{waited} decode worker that could take it", "no_decode_capacity")

    def _end_attempt(self, record: RequestRecord, now: float) -> list[Command]:
        self._migrations.attempt_ends(record.running, now)
        kv_tokens = record.running.kv_tokens
        commands: list[Command] = [*self._attempts.end(record, now)]
        self._tenants.stopped(record.tenant, kv_tokens, now)
        return commands

    def _close(self, record: RequestRecord, outcome: str, now: float, num_answered: int | None = None) -> None:
        del self._requests[record.request_id]
        self._tenants.left(record.tenant, record.kv_tokens)
        if not record.is_probe:
            tenant = record.tenant
            tenant.num_boosted -= record.is_boosted
            if tenant.tokens is not None:
                self._tenants.refund(tenant.name, record.cost - record.num_used, 0, now)
            self._waiting.settle(record, now)
        self._timers.forget(record.request_id)
        cached_tokens = record.cached_tokens or 0
        if num_answered is not None:
            num_answered -= len(record.request.resumed_token_ids)
        self._telemetry.ended(record.trace, outcome, now, cached_tokens=cached_tokens, num_answered=num_answered)
        self._counters.update(record.output.dropped)

    def _avoid(self, record: RequestRecord, worker_id: WorkerId, pause_s: float, now: float) -> None:
        until = now + min(pause_s, self._config.max_pause_s)
        record.avoid_until = {**record.avoid_until, worker_id: until}
        self._timers.add(until, record.request_id)
