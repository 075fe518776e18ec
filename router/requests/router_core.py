"""The router's decisions as one pure function, (event, now) -> commands: queue, assignments, prefix index, output
buffers.

    Submit ──> queue ──a slot is free──> Dispatch to P (with D) or to one worker that computes prompt and answer
    FromWorker: tokens ──> Emit, in index order, each once
                prefill done, handed over ──> P's assignment shrinks, or is closed
                end ──> Finish, or back to the queue (refused, preempted, failed), or Fail
    WorkerLost, WorkerSuspected
                 ──> every attempt on it fails at once and goes back to the queue with the tokens released so far

No clock, no I/O: `now` is the gateway's monotonic clock. The server (`router/shell/server.py`) calls `handle` for every
event, one at a time, executes the commands in order, and sends `Tick` at `next_wakeup()`.

Owner of the state (`core_state.py`): this object. When no request is in it, `holdings()` is zero throughout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from disagg.proto.block_hash import chain_hashes
from disagg.proto.errors import (
    ADAPTER_DETAIL,
    GRAMMAR_TOO_LARGE,
    AdapterRemovedError,
    DeadlineError,
    DisaggError,
    InvalidRequestError,
    LimitError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    UnsamplableError,
)
from disagg.proto.ids import AttemptKey, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import (
    End,
    Fetched,
    HandedOver,
    MigrationFailed,
    PrefillDone,
    TokenOut,
    WorkerInfo,
    WorkerReport,
)
from disagg.router.api import CallDemand, ClusterView, PlacementView, Quota, RateCharge, RequestTrace, TenantLimits
from disagg.router.config import Decodes, RouterConfig, num_split
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.placement import Draw, draw_of, uniform_draw, version_of
from disagg.router.placement.policies import create
from disagg.router.queueing.tenants import Tenants
from disagg.router.requests import events
from disagg.router.requests.admission import Trials, predicted_miss, queue_refusal, refusal
from disagg.router.requests.attempts import Attempts, note_answer, note_prefilled
from disagg.router.requests.core_state import CoreState
from disagg.router.requests.endings import Endings
from disagg.router.requests.events import Command, Event
from disagg.router.requests.inspection import cluster_view, integrity_problems, notes_on
from disagg.router.requests.migrations import Migrations
from disagg.router.requests.record import EndOfAnswer, HashBlocks, RequestRecord, new_record, new_trace
from disagg.router.requests.retries import MOVED
from disagg.router.requests.suspects import Suspects, has_passed
from disagg.router.requests.waiting import Waiting
from disagg.router.states import AttemptState, RequestEvent
from disagg.router.telemetry.telemetry import Telemetry
from disagg.router.workers.circuit_breakers import Leg
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs

logger = logging.getLogger(__name__)


class RouterCore:
    """All requests and workers of one router.

    Args:
        config: limits, pauses and the policy.
        gateway_id: sent with each dispatch.
        draw: settles ties among equal placements; by default a function of the counter, and with several gateways of
            the gateway's id.
        hash_blocks: hashes the blocks of an answer that is to be continued; all else is independent of token ids, but
            for stop ids.
    """

    def __init__(
        self,
        config: RouterConfig,
        gateway_id: GatewayId,
        draw: Draw | None = None,
        hash_blocks: HashBlocks = chain_hashes,
    ) -> None:
        self._config = config
        if draw is None:
            draw = draw_of(gateway_id) if config.num_gateways > 1 else uniform_draw
        self._draw = draw
        links = LinkModel()
        self._pairs = Pairs(config)
        policy = create(config.policy, config, links, self._pairs, draw)
        self._policy, self._links = policy, links
        self._fleet = fleet = Fleet(config, policy, links, self._pairs)
        self._tenants = Tenants(config, fleet.num_places, fleet.kv_room)
        self._telemetry = Telemetry(config.num_traces)
        state = CoreState(fleet=fleet, tenants=self._tenants, telemetry=self._telemetry)
        self._requests, self._timers = state.requests, state.timers
        self.counters = state.counters
        """Counts of failures and dropped messages, see `CoreState`."""
        self._trials = Trials()
        self._attempts = Attempts(config, gateway_id, state, policy, draw)
        self._waiting = Waiting(config, state, self._attempts)
        self._migrations = Migrations(config, state, policy, self._attempts)
        self._endings = Endings(config, state, self._attempts, self._waiting, self._migrations, hash_blocks)
        self._cancel_on_return: dict[WorkerId, tuple[Incarnation, list[AttemptKey]]] = {}
        """Attempts given up when a session broke. If the same incarnation reconnects, they are cancelled there."""
        self._num_submitted = 0
        self._out: list[Command] = []

    # ---------------------------------------------------------------- events, queries

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event; returns the commands to execute, in order. Raises `ValueError` for a request id in use."""
        match event:
            case events.FromWorker():
                self._on_update(event, now)
            case events.WorkerReported(report=report):
                self._on_report(report, now)
            case events.Submit():
                self._on_submit(event, now)
            case events.CancelRequest(request_id=request_id, num_answered=num_answered):
                self._on_cancel(request_id, num_answered, now)
            case events.WorkerUp(info=info):
                self._on_worker_up(info, now)
            case events.WorkerLost(worker_id=worker_id, incarnation=incarnation):
                self._on_worker_lost(worker_id, incarnation, now)
            case events.WorkerSuspected():
                self._on_worker_suspected(event, now)
            case events.WorkerRecovered() | events.DrainWorker() | events.ResumeWorker():
                self._on_worker_changed(event, now)
            case events.LimitsChanged(limits=limits):
                self._tenants.set_limits(limits, now)
                self._waiting.limits_changed()
            case events.WorkersExpected(in_s=in_s):
                self._fleet.expected.expect(in_s, now)
                self._waiting.expectations_changed(now)
            case events.SetDecodes(decodes=decodes):
                self._on_set_decodes(decodes)
            case events.ConfigChanged(config=config):
                self.configure(config)
            case events.AdapterRemoved(adapter=adapter):
                self._on_adapter_removed(adapter.name, now)
            case events.StoodStill(seconds=seconds):
                for record in self._requests.values():
                    if record.deadline is not None:
                        record.deadline -= seconds
                        self._timers.add(record.deadline, record.request_id)
            case events.Tick():
                pass
        fleet = self._fleet
        if fleet.breakers.tick(now):
            fleet.reopen()
        if self._timers.has_due(now):
            self._out += self._endings.wake(now)
        if self._waiting.needs_pass():
            self._out += self._waiting.place(now)
        if now >= self._migrations.next_wakeup():
            self._out += self._migrations.look(now)
        if fleet.to_drain:
            for drained in fleet.newly_drained():
                self._migrations.drain_ends(drained[0], now, "is empty")
                self._out.append(events.WorkerIsDrained(*drained))
        out, self._out = self._out, []
        return out

    def configure(self, config: RouterConfig) -> None:
        """Follow another configuration: policy, targets, queue, retries, reserves. Limits of circuit breakers, pairs,
        fairness, traces and sessions stay as they were at the start."""
        before, self._config = self._config, config
        if before == config:
            return
        if (before.policy, before.decodes) != (config.policy, config.decodes):
            self._policy = create(config.policy, config, self._links, self._pairs, self._draw)
        self._fleet.configure(config, self._policy)
        self._attempts.configure(config, self._policy)
        self._migrations.configure(config, self._policy)
        self._tenants.configure(config)
        self._endings.configure(config)
        self._waiting.configure(config)

    def admit(self, call: CallDemand, now: float) -> LimitError | None:
        """Charge a call to its tenant. Returns the error if all of it is refused."""
        error = self._tenants.admit(call, len(self._waiting), now)
        if error is not None:
            self._telemetry.refused(error)
        return error

    def refund(self, tenant: str, num_tokens: int, num_answers: int, now: float) -> None:
        """Return charged tokens, and admitted answers that were not submitted, to the tenant."""
        self._tenants.refund(tenant, num_tokens, num_answers, now)

    def remaining_quota(self, tenant: str, limits: TenantLimits, now: float) -> Quota:
        """What is left to a tenant whose calls bring `limits`. Changes nothing."""
        return self._tenants.remaining_quota(tenant, limits, now)

    def share_rates(self) -> None:
        """Record all charges from now on, for the routers of other models."""
        self._tenants.charges = []

    def take_charges(self) -> list[RateCharge]:
        """Return the charges recorded since the last call."""
        charges = self._tenants.charges
        if not charges:
            return []
        self._tenants.charges = []
        return charges

    def taken(self, now: float) -> list[RateCharge]:
        """The used part of all tenants' limits per minute."""
        return self._tenants.taken(now)

    def charged_elsewhere(self, charges: Sequence[RateCharge], now: float) -> None:
        """Take charges of another router of the gateway."""
        self._tenants.charged_elsewhere(charges, now)

    def next_wakeup(self) -> float | None:
        """When `Tick` is due at the latest; None if nothing is due."""
        due = self._fleet.breakers.next_of(self._timers.earliest())
        look_at = self._migrations.next_wakeup()
        return due if look_at == math.inf else look_at if due is None else min(due, look_at)

    def room_refusal(self) -> OverloadedError | None:
        """The error if every request is refused now, whatever its prompt."""
        return queue_refusal(len(self._waiting), self._config)

    def view(self, now: float) -> ClusterView:
        """The present state of the cluster."""
        events = {**self.counters, **self._fleet.breakers.changes}
        view = cluster_view(self._fleet, self._requests.values(), self._telemetry, events, now)
        policy, config = self._policy, self._config
        placement = PlacementView(policy.name, policy.decodes, config.admission, *self._links.typical())
        notes = notes_on(view.workers, view.counters, config.tpot_slo_s)
        return replace(view, tenants=self._tenants.in_flight(), placement=placement, notes=notes)

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        """The trace of a running or recent request."""
        return self._telemetry.traces.get(request_id)

    def recent(self, limit: int) -> list[RequestTrace]:
        """At most `limit` traces, the latest arrival first."""
        return self._telemetry.traces.latest(limit)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._waiting)

    def holdings(self) -> dict[str, int]:
        """Counts of requests, queue entries, admitted answers that are not submitted, and the sums of all assignments.
        All zero when nothing is in flight."""
        held = {"requests": len(self._requests), "queued": len(self._waiting), "admitted": self._tenants.num_admitted}
        return {**held, **self._fleet.assignments.holdings()}

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        problems = integrity_problems(self._requests, self._waiting, self._fleet, self._tenants.in_flight())
        return problems + self._tenants.check_integrity()

    # ---------------------------------------------------------------- clients

    def _on_submit(self, event: events.Submit, now: float) -> None:
        request = event.request
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        trace = new_trace(request, event.arrival, now, self._config)
        num_waiting = len(self._waiting)
        dispatch = None
        error = refusal(request, trace.num_prompt_tokens, self._fleet, num_waiting, self._config, now)
        if error is None:
            tenant = self._tenants.get(request.tenant, request.limits, now)
            record = new_record(request, trace, tenant, self._num_submitted, self._config)
            if request.pair is not None:  # an operator's probe: on this pair and at once, or refused
                dispatch, error = self._attempts.start_on(record, request.pair, now)
            else:
                if not tenant.is_unlimited:
                    error = self._tenants.refusal(tenant, record.cost, request.prepaid_tokens, num_waiting, now)
                if error is None and self._config.admission:
                    error = self._predicted_miss(record, now)
        if error is not None:
            if isinstance(error, LimitError):
                self._telemetry.refused(error)
            trace.detail = error.detail
            self._telemetry.ended(trace, error.code, now)
            self._out.append(events.Fail(request.request_id, error))
            return
        self._telemetry.arrived(trace)
        self._num_submitted += 1
        if request.prepaid_tokens is not None and tenant.num_admitted:
            self._tenants.submitted(tenant)
        self._endings.retries.request_came()
        self._requests[request.request_id] = record
        if record.deadline is not None:
            self._timers.add(record.deadline, request.request_id)
        self._tenants.entered(tenant, record.kv_tokens, now)
        if dispatch is None:
            if not tenant.is_unlimited:
                self._tenants.charge(tenant, record.cost, request.prepaid_tokens, now)
            tenant.num_boosted += record.is_boosted
            dispatch = self._waiting.add(record, now)
        else:
            self._tenants.started(tenant, record.running.kv_tokens)
        if dispatch is not None:
            self._out.append(dispatch)

    def _predicted_miss(self, record: RequestRecord, now: float) -> OverloadedError | None:
        queue, attempts = self._waiting.queue, self._attempts
        error = predicted_miss(record, self._fleet, queue, attempts, self._trials, self._config, now)
        if record.trace.trial:
            attempts.decisions["trial"] += 1
        return error

    def _on_cancel(self, request_id: RequestId, num_answered: int | None, now: float) -> None:
        record = self._requests.get(request_id)
        if record is None:
            return
        if num_answered is not None:
            self._attempts.answered(num_answered)
            if record.attempt is not None and record.attempt.state is AttemptState.DECODING:
                self._attempts.passed("decode", record.attempt, now)
        error = RequestCancelledError("the request was cancelled")
        self._out += self._endings.fail(record, error, now, RequestEvent.CANCELLED, num_answered)

    def _on_adapter_removed(self, name: str, now: float) -> None:
        """End the requests with any content of that name that were not placed yet. One that waits for another attempt
        goes on, as those that run do."""
        waiting = [record for record in self._requests.values() if not record.num_attempts]
        for record in waiting:
            if record.request.adapter is not None and record.request.adapter.name == name:
                self._out += self._endings.fail(record, AdapterRemovedError(name), now)

    # ---------------------------------------------------------------- workers

    def _on_worker_up(self, info: WorkerInfo, now: float) -> None:
        known = self._fleet.incarnation(info.worker_id)
        if known is not None and known != info.incarnation:
            self._on_worker_lost(info.worker_id, known, now)
        self._fleet.up(info, now)
        self._out.extend(
            events.ConnectPair(prefill_id, peer) for prefill_id, peer in self._fleet.pairs_to_form(info.worker_id)
        )
        incarnation, keys = self._cancel_on_return.pop(info.worker_id, (None, []))
        if incarnation == info.incarnation:
            self._out.extend(events.CancelOn(info.worker_id, key) for key in keys)
        self._waiting.workers_changed(now)
        self._migrations.changed()

    def _on_worker_lost(self, worker_id: WorkerId, incarnation: Incarnation, now: float) -> None:
        if not self._is_present(worker_id, incarnation):
            return
        is_moved = self._fleet.worker(worker_id).is_draining
        why, code = ("left", MOVED) if is_moved else ("was lost", "worker_lost")
        keys = self._move_all(worker_id, why, code, now)
        self._cancel_on_return[worker_id] = (incarnation, keys)
        if keys:
            level = logging.INFO if is_moved else logging.WARNING
            logger.log(level, "worker %s %s: requeueing its %d requests", worker_id, why, len(keys))
        self._migrations.drain_ends(worker_id, now, why)
        self._fleet.lost(worker_id)
        self._waiting.workers_changed(now)

    def _on_worker_suspected(self, event: events.WorkerSuspected, now: float) -> None:
        """Requeue the attempts on the worker. It also gets their cancels, and reads them before any new message if it
        resumes."""
        worker_id = event.worker_id
        if not self._is_present(worker_id, event.incarnation):
            return
        self.counters["suspicion"] += 1
        code = "worker_stuck" if event.is_stuck else "worker_suspected"
        keys = self._move_all(worker_id, event.why, code, now)
        logger.warning("worker %s %s: requeueing its %d requests", worker_id, event.why, len(keys))
        self._out.extend(events.CancelOn(worker_id, key) for key in keys)
        self._fleet.suspect(worker_id)
        self._waiting.workers_changed(now)

    def _move_all(self, worker_id: WorkerId, why: str, code: str, now: float) -> list[AttemptKey]:
        """Fail every attempt assigned to this worker; returns their keys."""
        keys = list(self._fleet.assignments.of_worker(worker_id).assignments)
        records = [self._requests[key.request_id] for key in keys]
        suspects = Suspects(self._fleet.worker(worker_id), records, is_silent=code == "worker_suspected")
        for record in records:
            self._attempts.leave(record.running, worker_id)
            if (stay := self._migrations.lost_target(record.running, worker_id)) is not None:
                self._out.append(stay)
            else:
                suspicion = suspects.suspicion(record)
                self._out += self._endings.fault(record, f"worker {worker_id} {why}", code, now, suspicion=suspicion)
        return keys

    def _on_worker_changed(
        self, event: events.WorkerRecovered | events.DrainWorker | events.ResumeWorker, now: float
    ) -> None:
        if self._is_present(event.worker_id, event.incarnation):
            match event:
                case events.WorkerRecovered():
                    self._fleet.clear_suspicion(event.worker_id)
                case events.DrainWorker():
                    self._fleet.drain(event.worker_id)
                    self._migrations.drain_begins(self._fleet.worker(event.worker_id), now)
                case events.ResumeWorker():
                    self._fleet.resume(event.worker_id)
                    self._migrations.drain_ends(event.worker_id, now, "drains no longer,")
            self._waiting.workers_changed(now)
            self._migrations.changed()

    def _on_set_decodes(self, decodes: Decodes) -> None:
        if self._policy.decodes in (None, decodes):
            return
        self._policy.decodes = decodes
        self._fleet.split(num_split(decodes))
        self._telemetry.stats.num_decodes_changes += 1
        self._waiting.costs_changed()

    def _on_report(self, report: WorkerReport, now: float) -> None:
        if self._is_present(report.worker_id, report.incarnation) and not self._fleet.report(report, now):
            self.counters["report_gap"] += 1
            self._out.append(events.WatchAgain(report.worker_id))
        self._migrations.reported(report.worker_id)

    def _on_update(self, event: events.FromWorker, now: float) -> None:
        worker_id, update = event.worker_id, event.update
        if not self._is_present(worker_id, event.incarnation):
            return
        self._fleet.worker(worker_id).heard_at = now
        for tokens in update.tokens:
            self._on_tokens(worker_id, tokens, now)
        for fetched in update.fetched:
            self._on_fetched(worker_id, fetched, now)
        for prefilled in update.prefilled:
            self._on_prefilled(worker_id, prefilled, now)
        for handed_over in update.handed_over:
            self._on_handed_over(worker_id, handed_over, now)
        for stayed in update.migrations_failed:
            self._on_migration_failed(worker_id, stayed, now)
        for end in update.ends:
            self._on_end(worker_id, end, now)

    def _is_present(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        if self._fleet.incarnation(worker_id) == incarnation:
            return True
        self.counters["stale_incarnation"] += 1
        return False

    def _find(
        self, worker_id: WorkerId, message: TokenOut | Fetched | PrefillDone | HandedOver | MigrationFailed | End
    ) -> RequestRecord | None:
        """The request of a worker's message, if the message is for the current attempt and from one of its workers."""
        record = self._requests.get(message.request_id)
        if record is None:
            self.counters["unknown_request"] += 1
            return None
        attempt = record.attempt
        if attempt is None or attempt.key.attempt != message.attempt:
            self.counters["stale_attempt"] += 1
        elif worker_id != attempt.decode and worker_id != attempt.prefill and worker_id not in attempt.live:
            self.counters["wrong_worker"] += 1
        else:
            return record
        return None

    def _on_tokens(self, worker_id: WorkerId, message: TokenOut, now: float) -> None:
        record = self._find(worker_id, message)
        if record is None:
            return
        attempt = record.running
        if attempt.prefill is None and attempt.state is AttemptState.PREFILLING:
            self._attempts.computed(attempt, worker_id, now)
        released = record.output.add(message.attempt, message.first_index, message.token_ids, message.logprobs)
        if released.token_ids:
            if record.version is None:
                record.version = record.trace.model_version = version_of(self._fleet.worker(worker_id).info)
            if attempt.awaited == worker_id:
                attempt.awaited = None
                self._telemetry.moved(record.trace, now)
            self._attempts.grew(attempt, len(released.token_ids), now)
            if record.is_isolated and has_passed(record):
                self._waiting.no_longer_isolated(record, now)
            self._telemetry.tokens(record.trace, len(released.token_ids), now)
            self._out.append(events.Emit(record.request_id, released))

    def _on_fetched(self, worker_id: WorkerId, message: Fetched, now: float) -> None:
        record = self._find(worker_id, message)
        if record is None:
            return
        attempt = record.running
        if worker_id != attempt.computes_prompt or attempt.fetch is None or attempt.fetch.source != message.source:
            self.counters["wrong_worker"] += 1
            return
        self._attempts.fetched(attempt, message, now)

    def _on_prefilled(self, worker_id: WorkerId, message: PrefillDone, now: float) -> None:
        record = self._find(worker_id, message)
        if record is None:
            return
        if worker_id != record.running.computes_prompt:
            self.counters["wrong_worker"] += 1
            return
        note_prefilled(record, message)
        self._attempts.computed(record.running, worker_id, now)

    def _on_handed_over(self, worker_id: WorkerId, message: HandedOver, now: float) -> None:
        record = self._find(worker_id, message)
        if record is None:
            return
        attempt = record.running
        move = attempt.move
        if move is not None and worker_id == move.target and worker_id in attempt.live and not move.has_arrived:
            self._migrations.arrived(record, move, message, now)
        elif attempt.prefill is None or worker_id != attempt.decode:
            self.counters["wrong_worker"] += 1
        elif worker_id not in attempt.live or attempt.state is AttemptState.DECODING:
            self.counters["late_hand_over"] += 1
        else:
            self._attempts.handed_over(record, message, now)

    def _on_migration_failed(self, worker_id: WorkerId, message: MigrationFailed, now: float) -> None:
        record = self._find(worker_id, message)
        if record is None:
            return
        move = record.running.move
        if move is None or worker_id != move.source or move.has_left:
            self.counters["wrong_worker"] += 1
        elif move.has_arrived:  # It is on both, which no worker does.
            self._out += self._endings.fault(
                record, f"{worker_id} and {move.target} have it: {message.detail}", "decode_failed", now
            )
        else:
            self._migrations.stayed(record, message, now)

    def _on_end(self, worker_id: WorkerId, end: End, now: float) -> None:
        record = self._find(worker_id, end)
        if record is None:
            return
        attempt = record.running
        if worker_id not in attempt.live:
            self.counters["late_end"] += 1
            return
        if self._migrations.awaits_tokens(attempt, end, worker_id, has_gap=record.output.has_gap):
            return
        self._attempts.leave(attempt, worker_id)
        record.trace.drafted_tokens += end.drafted_tokens
        record.trace.accepted_tokens += end.accepted_tokens
        move = attempt.move
        if move is not None and worker_id == move.target and not move.has_arrived:
            return  # It never came there; the source says the rest.
        match end.reason:
            case "moved":
                self._on_moved(record, worker_id, now)
            case "stop" | "length":
                self._on_answer(record, worker_id, end, end.reason, now)
            case "deadline":
                self._out += self._endings.fail(record, _deadline_passed(worker_id), now)
            case "refused" | "preempted":
                self._out += self._endings.refused(record, worker_id, end, now)
            case "cancelled" if worker_id == attempt.decode and attempt.live and move is None:
                # P gave the reservation up, and reports the reason itself.
                self.counters["decode_leg_cancelled"] += 1
            case "invalid":
                # The request is the cause: another worker would fail too, and no failure counts against one.
                self.counters["invalid"] += 1
                self._out += self._endings.lost_attempt(record, _invalid(end.detail), now)
            case "failed" | "cancelled":
                self._out += self._endings.failed(record, worker_id, end, now)

    def _on_moved(self, record: RequestRecord, worker_id: WorkerId, now: float) -> None:
        """Handle the end of a sequence on a worker that has handed it over and sent all its tokens."""
        attempt, move = record.running, record.running.move
        if move is None or worker_id != move.source:
            self._out += self._endings.fault(record, f"{worker_id} moved it to nowhere", "decode_failed", now)
        elif move.target not in attempt.live:
            self._out += self._endings.fault(record, f"worker {move.target} was lost", "worker_lost", now)
        else:
            self._migrations.left(attempt, move)
            if move.last_end is not None:
                self._on_end(move.target, move.last_end, now)

    def _on_answer(self, record: RequestRecord, worker_id: WorkerId, end: End, reason: EndOfAnswer, now: float) -> None:
        """Handle the end of an answer. A worker's stream has all tokens of its answer before the end, so that a gap is
        a fault of that worker."""
        if record.output.has_gap:
            self.counters["end_before_tokens"] += 1
            self._out += self._endings.failed(record, worker_id, end, now)
            return
        leg: Leg = "prefill" if record.running.is_before_hand_over(worker_id) else "decode"
        self._attempts.passed(leg, record.running, now)
        note_answer(record, worker_id, end)
        record.vector = end.vector
        self._out += self._endings.finish(record, reason, now)


def _deadline_passed(worker_id: WorkerId) -> DeadlineError:
    return DeadlineError("the deadline passed while the answer was computed", f"the deadline passed on {worker_id}")


def _invalid(detail: str) -> DisaggError:
    if detail.startswith(ADAPTER_DETAIL):
        return UnavailableError(detail, "adapter_unavailable")
    if detail == GRAMMAR_TOO_LARGE:
        return InvalidRequestError("structured", detail)
    return UnsamplableError("sampling", detail)
