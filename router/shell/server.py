"""The server around the router core: sockets, clock and tasks. Decisions are the core's.

    RouterServer   passes every event to the core, executes its commands, sends its ticks;
                   detects workers that are connected and silent                              one per gateway
    WorkerLink     one worker: channel, session, report stream; reconnects after a break      one per worker

Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.failure_detector import SWEEP_S, FailureDetector, limit
from disagg.proto.autoscaling import MAX_REQUEST_SAMPLES, LoadReport
from disagg.proto.block_hash import tenant_tag
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import Adapter, AuditReport, WorkerInfo
from disagg.router.api import (
    CallDemand,
    ClusterView,
    Quota,
    RateCharge,
    RequestHandle,
    RequestTrace,
    RoutedRequest,
    Router,
    TenantLimits,
)
from disagg.router.config import Decodes, RecordingOptions, RouterConfig
from disagg.router.recording.recorded_core import RecordedCore
from disagg.router.requests.events import (
    AdapterRemoved,
    CancelMigration,
    CancelOn,
    CancelRequest,
    Command,
    ConfigChanged,
    ConnectPair,
    Dispatch,
    DrainWorker,
    Emit,
    Event,
    Fail,
    Finish,
    FromWorker,
    LimitsChanged,
    Migrate,
    ResumeWorker,
    SetDecodes,
    StoodStill,
    Submit,
    Tick,
    WatchAgain,
    WorkerIsDrained,
    WorkerLost,
    WorkerRecovered,
    WorkerReported,
    WorkersExpected,
    WorkerSuspected,
    WorkerUp,
)
from disagg.router.requests.router_core import RouterCore
from disagg.router.shell import wire
from disagg.router.shell.handle import Handle
from disagg.router.shell.recorder import start_recording
from disagg.router.shell.tracing import Tracer
from disagg.router.shell.worker_link import WorkerLink
from disagg.router.telemetry.load_report import load_report

logger = logging.getLogger(__name__)

_FLUSH_S = 0.5
"""Seconds for which `RouterServer.stop` lets the last cancels go out."""


class RouterServer(Router):
    """Owner of the core and of all links; runs on one event loop.

    Raises (at construction):
        ValueError: if two workers have one id.
    """

    def __init__(
        self,
        config: RouterConfig,
        gateway_id: GatewayId,
        workers: Sequence[WorkerInfo],
        secret: ClusterSecret,
        clock: Callable[[], float] | None = None,
        recording: RecordingOptions | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._gateway_id = gateway_id
        self._secret = secret
        self._clock = clock = process_clock().now if clock is None else clock
        self._tracer = tracer
        self._recorder = None if recording is None else start_recording(recording, config, gateway_id, clock())
        self._core = (
            RouterCore(config, gateway_id)
            if self._recorder is None
            else RecordedCore(config, gateway_id, self._recorder)
        )
        self._initial = {info.worker_id: info for info in workers}
        if len(self._initial) != len(workers):
            raise ValueError("two workers have one id")
        self._links: dict[WorkerId, WorkerLink] = {}
        self._draining: dict[WorkerId, Incarnation] = {}
        self.on_drained: Callable[[WorkerId, Incarnation], None] = lambda worker_id, incarnation: None
        """Called when this router has nothing left on a draining worker; set by the owner of the membership."""
        self._handles: dict[RequestId, Handle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._detector: FailureDetector[tuple[WorkerId, Incarnation]] = FailureDetector(
            limit(config.silent_after_s), limit(config.stuck_after_s)
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._on_stood_still: Callable[[float], None] = lambda seconds: None
        self._link_came_up = asyncio.Event()
        self._stopped = False
        self._others: tuple[RouterServer, ...] = ()
        """Routers of the gateway's other models, which take the charges of this one."""

    # ---------------------------------------------------------------- start, stop, membership

    async def start(self) -> None:
        """Begin to connect to the workers; returns at once. See `wait_until_connected`."""
        loop = asyncio.get_running_loop()

        def stood_still(seconds: float) -> None:
            loop.call_soon_threadsafe(self._handle_event, StoodStill(seconds))

        self._on_stood_still = stood_still
        process_clock().on_stood_still.append(stood_still)
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep")
        for info in self._initial.values():
            await self.add_worker(info)

    async def wait_until_connected(self, timeout_s: float) -> None:
        """Wait until every worker that does not drain has a session. Raises `TimeoutError` with the ids of those
        without."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._not_connected():
                    self._link_came_up.clear()
                    await self._link_came_up.wait()
        except TimeoutError:
            raise TimeoutError(f"no session with {', '.join(self._not_connected())} after {timeout_s:g} s") from None

    def _not_connected(self) -> list[WorkerId]:
        """The workers that do not drain and have no session."""
        return sorted(name for name, link in self._links.items() if not link.is_up and name not in self._draining)

    async def stop(self) -> None:
        """Fail all running requests, send the workers their cancels, and end every task."""
        for handle in list(self._handles.values()):
            handle.fail(UnavailableError("the router is stopping", "shutting_down"))
            self._cancel(handle.request_id)
        self._stopped = True
        if self._on_stood_still in process_clock().on_stood_still:
            process_clock().on_stood_still.remove(self._on_stood_still)
        if self._timer is not None:
            self._timer.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(link.stop(_FLUSH_S) for link in self._links.values()))
        self._links.clear()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def add_worker(self, info: WorkerInfo) -> None:
        """Connect to a worker from now on; a link to the same worker id (an earlier address) is replaced."""
        await self.remove_worker(info.worker_id)
        link = WorkerLink(info, self._gateway_id, self._secret, self._config, self._handle_event)
        self._links[info.worker_id] = link
        link.start()

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Disconnect from a worker; its requests are requeued. Does nothing for an unknown one."""
        link = self._links.get(worker_id)
        if link is not None:
            # First the core, which must not dispatch to a removed link.
            self._handle_event(WorkerLost(worker_id, link.info.incarnation))
            del self._links[worker_id]
            self._draining.pop(worker_id, None)
            await link.stop(flush_s=0)

    def expect_workers(self, in_s: dict[WorkerId, float]) -> None:
        """Expect these workers, in that many seconds, and no others."""
        self._handle_event(WorkersExpected(in_s))

    def drain_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Place nothing new on that incarnation of a worker; `on_drained` is called when nothing is left there."""
        link = self._links.get(worker_id)
        if link is None or self._draining.get(worker_id) == incarnation:
            return
        self._draining[worker_id] = incarnation
        if link.is_up and link.info.incarnation == incarnation:
            self._handle_event(DrainWorker(worker_id, incarnation))
        else:
            self.on_drained(worker_id, incarnation)

    def configure(self, config: RouterConfig) -> None:
        """Follow another configuration, as far as `RouterCore.configure` does."""
        if config != self._config:
            self._config = config
            self._handle_event(ConfigChanged(config))

    def resume_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Use that incarnation of a worker again, if it is draining; else does nothing."""
        if self._draining.get(worker_id) != incarnation:
            return
        del self._draining[worker_id]
        logger.info("worker %s: drain revoked; placing requests on it again", worker_id)
        self._handle_event(ResumeWorker(worker_id, incarnation))

    def share_rates(self, others: Sequence[RouterServer]) -> None:
        """Share the limits per minute between this router and `others`, which run on the same event loop."""
        self._others = tuple(others)
        if self._others:
            self._core.share_rates()

    def join_rates(self, other: RouterServer) -> None:
        """Begin with the used part of the limits per minute at another router, as if it had been charged here."""
        if charges := other._core.taken(self._clock()):
            self.charged_elsewhere(charges)

    def charged_elsewhere(self, charges: Sequence[RateCharge]) -> None:
        """Take charges of another router."""
        self._core.charged_elsewhere(charges, self._clock())

    # ---------------------------------------------------------------- api.Router

    @override
    def admit(self, call: CallDemand) -> None:
        error = self._core.admit(call, self._clock())
        self._pass_on()
        if error is not None:
            raise error

    @override
    def refund(self, tenant: str, num_tokens: int, num_answers: int) -> None:
        self._core.refund(tenant, num_tokens, num_answers, self._clock())
        self._pass_on()

    @override
    def remaining_quota(self, tenant: str, limits: TenantLimits) -> Quota:
        return self._core.remaining_quota(tenant, limits, self._clock())

    @override
    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        self._handle_event(LimitsChanged(limits))

    @override
    def set_decodes(self, decodes: Decodes) -> None:
        self._handle_event(SetDecodes(decodes))

    @override
    def forget(self, tenant: str) -> dict[WorkerId, bool]:
        for link in self._links.values():
            if link.is_up:
                link.send(wire.forget(tenant_tag(tenant)))
        return {worker_id: link.is_up for worker_id, link in self._links.items()}

    @override
    def remove_adapter(self, adapter: Adapter) -> None:
        self._handle_event(AdapterRemoved(adapter))

    @override
    def submit(self, request: RoutedRequest, arrival: float) -> RequestHandle:
        if self._stopped:
            raise UnavailableError("the router is stopping", "shutting_down")
        handle = Handle(request.request_id, self._cancel)
        if self._handles.setdefault(request.request_id, handle) is not handle:
            raise ValueError(f"request id {request.request_id} is in use")
        try:
            self._handle_event(Submit(request, arrival))
        except Exception:
            self._drop(request.request_id)
            raise
        if handle.error is not None:
            raise handle.error
        return handle

    @override
    def check_queue_capacity(self) -> None:
        if (error := self._core.room_refusal()) is not None:
            raise error

    @override
    def view(self) -> ClusterView:
        missing = tuple(link.info for _, link in sorted(self._links.items()) if not link.is_up)
        traces = {} if self._tracer is None else dict(self._tracer.counts)
        return replace(self._core.view(self._clock()), unreachable=missing, exported_traces=traces)

    def load_report(self, model: str = "") -> LoadReport:
        """The load report for the controller's autoscaler of the model with that key."""
        now = self._clock()
        return load_report(self._core.view(now), self._core.recent(MAX_REQUEST_SAMPLES), now, model)

    @override
    def trace(self, request_id: RequestId) -> RequestTrace | None:
        return self._core.trace(request_id)

    @override
    def recent(self, limit: int) -> list[RequestTrace]:
        return self._core.recent(limit)

    # ---------------------------------------------------------------- for operators and tests

    def holdings(self) -> dict[str, int]:
        """What the core holds, by name; all zero when nothing is in flight."""
        return self._core.holdings()

    def check_integrity(self) -> list[str]:
        """Inconsistencies of the core's state; empty when there are none."""
        return self._core.check_integrity()

    def counters(self) -> dict[str, int]:
        """Counts of failures and dropped messages so far, by name."""
        return dict(self._core.counters)

    async def audit(self, timeout_s: float = 5.0) -> list[AuditReport]:
        """The holdings of every worker. Raises `UnavailableError` if one does not answer, after all calls have
        ended."""
        found = await asyncio.gather(*(link.audit(timeout_s) for link in self._links.values()), return_exceptions=True)
        reports: list[AuditReport] = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            reports.append(each)
        return reports

    # ---------------------------------------------------------------- events and commands

    def _cancel(self, request_id: RequestId) -> None:
        handle = self._handles.get(request_id)
        self._handle_event(CancelRequest(request_id, None if handle is None else handle.num_answered))

    def _drop(self, request_id: RequestId) -> None:
        """Release all that a request holds whose submission failed by a bug: its client gets no handle."""
        try:
            self._handle_event(CancelRequest(request_id))
        except Exception:
            logger.exception(
                "request %s: failed by a bug while it was accepted; what it holds could not be released", request_id
            )
        self._handles.pop(request_id, None)

    def _handle_event(self, event: Event) -> None:
        if self._stopped:
            return
        if isinstance(event, WorkerUp):
            self._link_came_up.set()
        self._listen(event)
        commands = self._core.handle(event, self._clock())
        self._pass_on()
        for command in commands:
            self._execute(command)
        self._set_timer()
        self._keep_draining(event)

    def _pass_on(self) -> None:
        if charges := self._core.take_charges():  # none where no other one ever was there
            for other in self._others:
                other.charged_elsewhere(charges)

    def _listen(self, event: Event) -> None:
        """Update the failure detector by an event. Any message of a worker is a heartbeat; a report also has the time
        that its engine has been in its step."""
        match event:
            case WorkerUp(info=info):
                self._detector.watch((info.worker_id, info.incarnation), self._clock())
            case WorkerLost(worker_id=worker_id, incarnation=incarnation):
                self._detector.forget((worker_id, incarnation))
            case FromWorker(worker_id=worker_id, incarnation=incarnation):
                self._heartbeat((worker_id, incarnation), None)
            case WorkerReported(report=report):
                self._heartbeat((report.worker_id, report.incarnation), report.turn_s, report.expected_s)

    def _heartbeat(
        self, incarnation: tuple[WorkerId, Incarnation], turn_s: float | None, expected_s: float = 0.0
    ) -> None:
        if self._detector.heartbeat(incarnation, self._clock(), turn_s, expected_s=expected_s):
            logger.info("worker %s responds again: placing requests on it", incarnation[0])
            self._handle_event(WorkerRecovered(*incarnation))

    async def _sweep(self) -> None:
        """Look for workers that hang, periodically."""
        while True:
            try:
                for incarnation, why, is_stuck in self._detector.sweep(self._clock()):
                    self._handle_event(WorkerSuspected(*incarnation, why, is_stuck))
            except Exception:
                # A bug. The loop must go on: without it no worker that hangs is ever detected.
                logger.exception("looking for workers that hang failed; next try in %g s", SWEEP_S)
            await asyncio.sleep(SWEEP_S)

    def _keep_draining(self, event: Event) -> None:
        """Handle draining workers: one counts as drained when its session breaks, and drains again when it
        reconnects."""
        if isinstance(event, WorkerLost) and self._draining.get(event.worker_id) == event.incarnation:
            self.on_drained(event.worker_id, event.incarnation)
        elif isinstance(event, WorkerUp) and self._draining.get(event.info.worker_id) == event.info.incarnation:
            self._handle_event(DrainWorker(event.info.worker_id, event.info.incarnation))

    def _execute(self, command: Command) -> None:
        match command:
            case Emit(request_id=request_id, batch=batch):
                self._handles[request_id].put(batch)
            case Dispatch(worker_id=worker_id, message=message):
                self._links[worker_id].send(message)
            case CancelOn(worker_id=worker_id, key=key):
                self._links[worker_id].send(wire.cancel(key))
            case Migrate(worker_id=worker_id, message=migrate):
                self._links[worker_id].send(migrate)
            case CancelMigration(worker_id=worker_id, key=key):
                self._links[worker_id].send(wire.cancel_migration(key))
            case ConnectPair(prefill_id=prefill_id, decode_peer=peer):
                self._links[prefill_id].send(wire.connect(peer))
            case Finish(request_id=request_id, completion=completion):
                self._handles.pop(request_id).finish(completion)
                self._export(request_id)
            case Fail(request_id=request_id, error=error):
                self._handles.pop(request_id).fail(error)
                self._export(request_id)
            case WatchAgain(worker_id=worker_id):
                self._links[worker_id].watch_again()
            case WorkerIsDrained(worker_id=worker_id, incarnation=incarnation):
                self.on_drained(worker_id, incarnation)

    def _export(self, request_id: RequestId) -> None:
        if self._tracer is not None and (trace := self._core.trace(request_id)) is not None:
            self._tracer.ended(trace)

    def _set_timer(self) -> None:
        due = self._core.next_wakeup()
        if due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due, self._timer = due, None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_due = None
        self._handle_event(Tick())
