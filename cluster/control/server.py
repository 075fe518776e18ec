"""The shell around the controller's core: sockets, clock, and one thread for the launcher.

    Register, Follow, Control ──┐                    ┌──> replies to workers, membership to gateways
    launcher: exited, pending ──┼──> ControlCore ────┤
    time ───────────────────────┘                    └──> launcher: start, stop (one thread, in order)
    heartbeats on Register, Follow ──> Supervisor ──────> launcher: kill

Everything but the launcher runs on one event loop. While the controller is away the processes serve on, unchanged; they
reconnect when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import grpc
import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.cluster.control.adapter_link import AdapterCalls
from disagg.cluster.control.adapters import AdapterControl
from disagg.cluster.control.autoscaler_runner import pool_limits
from disagg.cluster.control.autoscalers import Autoscalers
from disagg.cluster.control.launcher import Launcher, LauncherThread
from disagg.cluster.control.plan import ClusterPlan, gateway_config, router_configs
from disagg.cluster.control.plans import Plans, SavedState, refusal_of
from disagg.cluster.control.probe_link import Prober
from disagg.cluster.control.service import ControllerService
from disagg.cluster.control.supervisor import ProcessIncarnation, Supervisor
from disagg.cluster.core import events
from disagg.cluster.core.core import ControlCore, Settings
from disagg.cluster.core.forgotten import is_old
from disagg.cluster.core.gateways import gateway_names, is_gateway
from disagg.cluster.core.probes import Probe
from disagg.cluster.core.rollout import Desired
from disagg.cluster.core.state_diff import gateway_address
from disagg.connections.addresses import join_address
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import add_port
from disagg.connections.shell.guard import ClusterGuard
from disagg.proto.autoscaling import AutoscalerState, LoadReport
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.control import (
    AdapterRequest,
    ApplyRequest,
    ControlReply,
    ControlRequest,
    ControlState,
    DrainRequest,
    ExpectedWorkers,
    ForgetRequest,
    ForgetTenants,
    GatewaySettings,
    PoolName,
    ScaleRequest,
    ServedAdapters,
    WorkerProven,
    WorkerRejected,
    WorkerWelcome,
)
from disagg.proto.errors import ConfigError
from disagg.proto.ids import GatewayId, Incarnation, WorkerId, model_of
from disagg.proto.messages import WorkerInfo, encode
from disagg.proto.services import SERVER_OPTIONS

logger = logging.getLogger(__name__)

LOST_GRACE_S = 10.0
"""Seconds that a process may take to come back after it left, if its end was not reported."""
RESTART_GRACE_S = 180.0
"""The same time if the launcher itself restarts processes: long enough to load a model."""
LAUNCHER_POLL_S = 0.2
CLOSE_GRACE_S = 0.5
FOLLOW_TIMEOUT_S = 5.0
"""Seconds that gateways may take to serve an adapter, or to refuse it, before the operator is answered."""

_OPTIONS = (
    *SERVER_OPTIONS,
    # A node that vanished sends no end: its workers are lost when they do not answer pings.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class Companion(Protocol):
    """A process that the controller keeps running beside the cluster, such as a twin. Called on the launcher's thread;
    raises nothing."""

    def tick(self, now: float, address: str) -> None:
        """Start it where that is due. Called periodically. `address`: the gateway's address; empty while there is
        none."""
        ...

    def stop(self) -> None:
        """End the companion process. Idempotent."""
        ...


class Controller:
    """Runs on one event loop, that of `start`. Owner of the core, its server and the launcher's thread.

    Args:
        plan: the cluster's plan.
        launcher: starts and ends the processes; called on one thread.
        secret: the cluster's secret; calls without it are refused.
        host, port: where to listen; port 0 takes any.
        saved: the desired state that an earlier controller saved; without one, that of the plan.
        companion: a process beside the cluster, which its owner need not watch.
        on_saved: called with the desired state whenever it changes, on the launcher's thread, before anything is
            started or stopped for it.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        launcher: Launcher,
        secret: ClusterSecret,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        saved: SavedState | None = None,
        companion: Companion | None = None,
        on_saved: Callable[[SavedState], None] | None = None,
    ) -> None:
        self._plans = Plans(plan, saved)
        self._saved = saved
        self._launcher = launcher
        self._secret = secret
        self._guard = ClusterGuard(secret)
        self._host = host
        self._port = port
        self._on_saved = on_saved
        self._saving: Future[None] | None = None
        """The latest save; it never raises."""
        self._companion = companion
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        self._state = ControlState(pools=(), workers=(), gateways=())
        self._core: ControlCore | None = None
        self._launcher_thread: LauncherThread | None = None
        self._server: grpc.aio.Server | None = None
        self._poller: asyncio.Task[None] | None = None
        self._supervisor = Supervisor(plan.config.recovery, launcher, self._on_hung)
        self._prober = Prober(secret, self._on_probed)
        self._timer: asyncio.TimerHandle | None = None
        self._lost_grace_s = RESTART_GRACE_S if launcher.restarts else LOST_GRACE_S
        self._service = ControllerService(
            self.control, self._handle, self._on_load, self._supervisor, self.state, self._lost_grace_s
        )
        self._adapters_revision = 1
        """Number of the list of served adapters."""
        self._adapters = AdapterControl(
            self._plans.adapters,
            AdapterCalls(secret),
            lambda: self._plans.bases,
            self._ready_workers,
            self._save_adapters,
            self._publish_adapters,
        )
        self._stopping = False
        self._autoscaler: Autoscalers | None = None
        self._autoscaling: asyncio.Task[None] | None = None
        self._make_autoscaler(self._plans.present.config)

    # ------------------------------------------------------------ start and stop

    async def start(self) -> str:
        """Listen, and begin to start the cluster; returns host:port at once. `state` shows the progress.

        Raises:
            RuntimeError: if the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        running = await loop.run_in_executor(self._executor, self._launcher.running)
        config = self._plans.present.config
        settings = Settings(
            drain_timeout_s=config.controller.drain_timeout_s,
            lost_grace_s=self._lost_grace_s,
            gateways=config.gateway.replicas,
            probes=config.controller.probes,
        )
        desired = Desired(target=self._plans.target(1)) if self._saved is None else self._saved.desired
        self._core = ControlCore({}, settings, running, controller_id=uuid.uuid4().hex[:8], desired=desired)
        if desired.plan is not None:
            logger.warning("%s", desired.plan.going_on)
        server = grpc.aio.server(interceptors=(self._guard,), options=_OPTIONS)
        server.add_generic_rpc_handlers((self._service.handlers(),))
        address = join_address(self._host, add_port(server, join_address(self._host, self._port), self._secret))
        await server.start()
        self._server = server
        self._launcher_thread = LauncherThread(self._plans, self._launcher, self._executor, address, self._handle)
        self._handle(events.Tick())
        if not running:
            self._launcher_thread.prepare_gateways(gateway_names(config.gateway.replicas))
        self._poller = asyncio.create_task(self._poll(self._launcher_thread), name="launcher-poll")
        self._supervisor.start()
        self._run_autoscaler()
        self._adapters.start()
        return address

    async def stop(self) -> None:
        """End the gateway, then the workers, then the server. Idempotent."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            self._poller = None
        if self._autoscaling is not None:
            self._autoscaling.cancel()
            await asyncio.gather(self._autoscaling, return_exceptions=True)
            self._autoscaling = None
        await self._adapters.stop()
        await self._supervisor.stop()
        await self._prober.stop()
        if self._companion is not None:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._companion.stop)
        if self._launcher_thread is not None and self._core is not None:
            await self._launcher_thread.stop(self._core.worker_ids)
        if self._server is not None:
            await self._server.stop(CLOSE_GRACE_S)
            self._server = None
        self._executor.shutdown()

    def state(self) -> ControlState:
        """The present state of the cluster; may be called on any thread."""
        return self._state

    async def control(self, request: ControlRequest) -> ControlReply:
        """Reply to one `Control` call."""
        assert self._core is not None, "the controller has not started"
        if isinstance(request, AdapterRequest):
            return await self._adapters.control(request)
        if (refused := self._core.refusal(request)) is not None:
            return refused
        if isinstance(request, ApplyRequest):
            return await self._apply(request, self._core)
        if isinstance(request, ScaleRequest):
            await self._resize(request.sizes)
        elif isinstance(request, DrainRequest):
            self._handle(events.Drain(request.worker_id, request.deadline_s))
        elif isinstance(request, ForgetRequest):
            await self._forget(request.tenant_tag)
        self._observe(self._core)
        return self._service.with_counts(self._state)

    async def _apply(self, request: ApplyRequest, core: ControlCore) -> ControlReply:
        """Begin to apply a configuration, unless it is refused."""
        try:
            reply, plan, new = await self._plans.plan_present(request, core)
        except ConfigError as error:
            return refusal_of(error)
        if (refused := core.refusal(request)) is not None:  # another one came meanwhile
            return refused
        if request.dry_run or (not reply.changes and not plan.is_needed):
            return msgspec.structs.replace(reply, generation=core.target.generation)
        self._plans.add(plan.new.generation, new)
        logger.info(
            "generation %d of the configuration is applied: %s; workers change in: %s",
            plan.new.generation,
            ", ".join(change.field for change in reply.changes) or "nothing differs",
            ", ".join(reply.pools) or "no pool",
        )
        self._handle(events.Apply(plan))
        await self._flush()
        return reply

    async def _forget(self, tenant_tag: bytes) -> None:
        """Tell all workers that are registered, and note it for the others."""
        self._service.tell_workers(ForgetTenants(tenant_tags=(tenant_tag,)))
        self._handle(events.Forget(tenant_tag, time.time()))
        await self._flush()

    async def _resize(self, sizes: Mapping[PoolName, int]) -> None:
        """Set the sizes of these pools, 0 or more."""
        self._handle(events.Scale(sizes))
        await self._flush()

    async def _autoscale(self, sizes: Mapping[PoolName, int]) -> None:
        """Set the sizes of these pools, except for those whose size a rollout controls."""
        assert self._core is not None, "the controller has not started"
        free = {pool: size for pool, size in sizes.items() if not self._core.is_changing(pool)}
        if free:
            await self._resize(free)

    async def _flush(self) -> None:
        """Wait until pending saves are done."""
        if self._saving is not None:
            await asyncio.wrap_future(self._saving)

    def _make_autoscaler(self, config: ClusterConfig) -> None:
        self._autoscaler = None
        if config.autoscaler.enabled:
            clock = process_clock().now
            self._autoscaler = Autoscalers(config, self.state, self._autoscale, self._publish_scaling, clock)

    def _configure(self, generation: int) -> None:
        """Apply those settings of a generation that need no restart of a process."""
        before = self._plans.present.config
        self._plans.configured = generation
        config = self._plans.present.config
        if (before.autoscaler, pool_limits(before)) != (config.autoscaler, pool_limits(config)):
            if self._autoscaling is not None:
                self._autoscaling.cancel()
            self._make_autoscaler(config)
            self._run_autoscaler()
        self._service.send(self._settings_frame())
        self._adapters.follow_file()

    def _run_autoscaler(self) -> None:
        self._autoscaling = None
        if self._autoscaler is not None:
            self._autoscaling = asyncio.create_task(self._autoscaler.run(), name="autoscaler")

    def _settings_frame(self) -> bytes:
        plan = self._plans.present
        ready = [worker.info for worker in self._state.workers if worker.phase == "ready" and worker.info is not None]
        return encode(
            GatewaySettings(
                generation=self._plans.configured,
                routers=msgspec.json.encode(router_configs(plan.config)),
                models=msgspec.json.encode(gateway_config(plan.config, plan.model_paths, ready).models),
                load_every_s=plan.load_every_s,
            )
        )

    def _settings_frames(self) -> Sequence[bytes]:
        return self._settings_frame(), self._adapters_frame()

    def _adapters_frame(self) -> bytes:
        return encode(ServedAdapters(adapters=self._plans.adapters.served, revision=self._adapters_revision))

    async def _publish_adapters(self) -> Sequence[str]:
        self._adapters_revision += 1
        self._service.send(self._adapters_frame())
        late = await self._service.adapters_followed(self._adapters_revision, FOLLOW_TIMEOUT_S)
        return [f"{gateway_id} did not follow within {FOLLOW_TIMEOUT_S:g} s; it will" for gateway_id in late]

    async def _save_adapters(self) -> None:
        assert self._core is not None, "the controller has not started"
        self._save(self._core)
        await self._flush()

    def _ready_workers(self, key: str) -> list[WorkerInfo]:
        """The ready workers of a model."""
        return [
            worker.info
            for worker in self._state.workers
            if worker.phase == "ready" and worker.info is not None and model_of(worker.worker_id) == key
        ]

    def _save(self, core: ControlCore) -> None:
        """Save the desired state, and the generations that it needs."""
        desired = core.saved()
        targets = [desired.target] if desired.plan is None else [desired.target, desired.plan.old, desired.plan.new]
        if self._plans.keep({target.generation for target in targets}) and self._launcher_thread is not None:
            self._launcher_thread.keep_only()
        if self._on_saved is not None:
            self._saving = self._executor.submit(self._save_now, self._on_saved, self._plans.saved(desired))

    def _save_now(self, on_saved: Callable[[SavedState], None], state: SavedState) -> None:
        try:
            on_saved(state)
        except Exception:
            # Of the store. The next controller would go on from the state before; the cluster itself goes on.
            logger.exception("the desired state could not be saved")

    def _publish_scaling(self, state: AutoscalerState) -> None:
        """Publish the autoscaler's state to the gateways, for their metrics, and to operators."""
        self._state = msgspec.structs.replace(self._state, autoscaler=state)
        self._service.offer(encode(state))

    # ------------------------------------------------------------ events and commands

    def _handle(self, event: events.Event) -> None:
        if self._stopping:
            return
        assert self._core is not None, "the controller has not started"
        try:
            commands = self._core.handle(event, process_clock().now())
        except Exception:
            # A bug here. This is the exception boundary: one event is lost; its effect shows again with time, or with
            # the next message of the process.
            logger.exception("the controller could not handle %s; the event is dropped", event)
            commands = []
        self._observe(self._core)
        for command in commands:
            self._execute(command, self._core)
        self._set_timer(self._core.next_wakeup())

    def _observe(self, core: ControlCore) -> None:
        self._state = core.state(process_clock().now())
        if self._autoscaler is not None:
            self._autoscaler.observe(self._state)
            self._state = msgspec.structs.replace(self._state, autoscaler=self._autoscaler.snapshot())

    def _execute(self, command: events.Command, core: ControlCore) -> None:
        match command:
            case events.Save():
                self._save(core)
            case events.Configure(generation=generation):
                self._configure(generation)
            case events.Accept(worker_id=worker_id, incarnation=incarnation, forget=forget):
                self._service.reply(worker_id, incarnation, WorkerWelcome())
                if tags := tuple(note.tenant_tag for note in forget if not is_old(note, time.time())):
                    self._service.reply(worker_id, incarnation, ForgetTenants(tenant_tags=tags))
            case events.Proven(worker_id=worker_id, incarnation=incarnation):
                self._service.reply(worker_id, incarnation, WorkerProven())
            case events.Reject(worker_id=worker_id, incarnation=incarnation, reason=reason):
                logger.warning("%s (incarnation %s) is rejected and will stop: %s", worker_id, incarnation, reason)
                self._service.reply(worker_id, incarnation, WorkerRejected(reason=reason))
            case events.StartProbe(probe=probe):
                self._prober.start(probe)
            case events.Publish(change=change, snapshot_for=snapshot_for):
                self._service.publish(change, snapshot_for, core.membership, self._settings_frames)
            case events.Expect(in_s=in_s):
                self._service.send(encode(ExpectedWorkers(in_s=dict(in_s))))
            case _:
                assert self._launcher_thread is not None, "the controller has not started"
                self._launcher_thread.put(command)

    def _on_load(self, gateway_id: GatewayId, report: LoadReport | None) -> None:
        if self._autoscaler is None:
            return
        if report is None:
            self._autoscaler.forget(gateway_id)
        else:
            self._autoscaler.report(gateway_id, report)

    def _on_hung(self, process: ProcessIncarnation, why: str) -> None:
        if not is_gateway(process.name):  # its end is reported anyway
            self._handle(events.WorkerHung(WorkerId(process.name), Incarnation(process.incarnation), why))

    def _on_probed(self, probe: Probe, error: str, is_refusal: bool) -> None:
        self._handle(events.ProbeEnded(probe.number, error, is_refusal))

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay_s = max(0.0, due - process_clock().now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, events.Tick())

    async def _poll(self, launcher_thread: LauncherThread) -> None:
        """Poll the launcher for processes that ended or wait, until the controller stops."""
        pending: Mapping[str, str] = {}
        while True:
            await asyncio.sleep(LAUNCHER_POLL_S)
            exited, now_pending = await launcher_thread.poll()
            for name, why in exited.items():
                logger.warning("%s ended by itself: %s", name, why)
                self._handle(events.ProcessExited(name, why))
            if now_pending != pending:
                pending = now_pending
                self._handle(events.StartsPending(pending))
            if self._companion is not None:
                address = gateway_address(self._state)
                await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._companion.tick, process_clock().now(), address
                )
