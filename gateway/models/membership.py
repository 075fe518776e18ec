"""The gateway's connection to the controller: follows the membership of the cluster, and sends operators' requests.

    hello ──> Membership, changes ──> workers added, drained, removed ──break──> pause ──> resolve() ──> hello ...
          <── WorkerDrained, when this gateway has nothing left on a draining worker; a heartbeat twice a second
          <── MembershipRequest, when a change is missing
    GatewaySettings ──> routers, models ──> SettingsFollowed
    ServedAdapters ──> names of models ──> AdaptersFollowed
    ExpectedWorkers ──> routers, whose requests wait for those that are coming

While the controller is away the gateway continues to serve with its present workers. Each stream begins with all of the
membership, which replaces the earlier one, so that missed changes do not matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

import grpc.aio
import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import open_channel
from disagg.gateway.config import ModelSource
from disagg.proto.autoscaling import AutoscalerState, LoadReport
from disagg.proto.control import (
    HEARTBEAT_S,
    AdapterRequest,
    AdaptersFollowed,
    ControllerToGateway,
    ControlReply,
    ControlRequest,
    ExpectedWorkers,
    GatewayCounts,
    GatewayFailed,
    GatewayHeartbeat,
    GatewayHello,
    GatewaySettings,
    GatewayToController,
    Member,
    Membership,
    MembershipRequest,
    ServedAdapter,
    ServedAdapters,
    SettingsFollowed,
    WorkerDrained,
    WorkerIncarnation,
)
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.membership import MembershipCopy
from disagg.proto.messages import WorkerInfo, decoder, encode
from disagg.proto.services import CONTROL, FOLLOW
from disagg.router.config import RouterConfig

logger = logging.getLogger(__name__)

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
CALL_TIMEOUT_S = 5.0
ADAPTER_TIMEOUT_S = 90.0
"""The same while workers load an adapter."""
REPORT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds that the drain of a worker waits until other workers, which may replace it, are connected."""
IDLE_LOAD_S = 1.0
"""Seconds between two checks whether an autoscaler needs load reports."""

OnModels = Callable[[int, Sequence[ModelSource], Mapping[str, RouterConfig]], None]
"""Called with a generation, its models, and the configurations of their routers by key."""


class Workers(Protocol):
    """The servers of the routers, which follow the membership."""

    @property
    def on_drained(self) -> Callable[[WorkerId, Incarnation], None]:
        """Callback for when this gateway has nothing left on a draining worker."""
        ...

    @on_drained.setter
    def on_drained(self, value: Callable[[WorkerId, Incarnation], None]) -> None: ...

    async def add_worker(self, info: WorkerInfo) -> None:
        """Use this worker from now on, in place of an earlier one with its id."""
        ...

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Stop using a worker; its requests are requeued."""
        ...

    async def wait_until_connected(self, timeout_s: float) -> None:
        """Wait until every worker that does not drain can be used. Raises `TimeoutError` with the ids of the others."""
        ...

    def drain_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Place no further requests on this worker."""
        ...

    def configure(self, configs: Mapping[str, RouterConfig]) -> None:
        """Apply new router configurations, given by the models' keys."""
        ...

    def resume_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Use a drained worker again; does nothing for any other."""
        ...

    def expect_workers(self, in_s: Mapping[WorkerId, float]) -> None:
        """Set the workers that are expected to come, with the seconds until then. Replaces earlier expectations."""
        ...


class ControllerLink:
    """Owner of the connection's task and channel; runs on the router's event loop.

    Args:
        resolve: host:port of the controller now; may block, so it is called on a thread.
        workers: changed by the membership.
        secret: of the cluster.
        known: the workers at the start.
        name: of this process.
        counts: for the other gateways, sent with each heartbeat; None where there are none.
        load: what the autoscalers are to know of the load of each model, each `load_every_s`, which is None while
            there is none.
    """

    def __init__(
        self,
        gateway_id: GatewayId,
        resolve: Callable[[], str],
        workers: Workers,
        secret: ClusterSecret,
        known: Iterable[WorkerInfo] = (),
        *,
        name: str = "gateway",
        counts: Callable[[], GatewayCounts] | None = None,
        load: Callable[[], Sequence[LoadReport]] | None = None,
        load_every_s: float | None = 1.0,
    ) -> None:
        self._gateway_id, self._name = gateway_id, name
        self._resolve = resolve
        self._workers = workers
        self._secret = secret
        self._counts = counts
        self._load, self._load_every_s = load, load_every_s
        self.autoscaler: AutoscalerState | None = None
        """The autoscaler's state as the controller last sent it."""
        self._metadata = secret.metadata
        self.counters: Counter[str] = Counter()
        """Number of messages received, by kind (`snapshot`, `change`), and of gaps between changes (`gap`)."""
        self._copy = MembershipCopy()
        self._known = {info.worker_id: info for info in known}
        self._draining: set[tuple[WorkerId, Incarnation]] = set()
        """Draining workers of the latest membership; sent to the next controller."""
        self._drained: set[tuple[WorkerId, Incarnation]] = set()
        self._outbox: asyncio.Queue[GatewayToController | None] = asyncio.Queue()
        self._connected_to = ""
        """The controller's address while connected: to resolve it may take a minute without Ray's head."""
        self._task: asyncio.Task[None] | None = None
        workers.on_drained = self._on_drained
        self.on_models: OnModels = lambda generation, models, routers: self.followed(generation)
        """Called with the models that the cluster serves; the callee answers with `followed`. Set by the owner of the
        models."""
        self.on_adapters: Callable[[Sequence[ServedAdapter]], None] = lambda adapters: None
        """Called with all adapters that the cluster serves. Set by the owner of the models."""

    def start(
        self, address: str, pid: int, http_address: str = "", own_address: str = "", own_http_address: str = ""
    ) -> None:
        """Start following the controller, as the gateway that serves at these addresses, see `GatewayHello`."""
        hello = GatewayHello(
            gateway_id=self._gateway_id,
            address=address,
            pid=pid,
            http_address=http_address,
            name=self._name,
            own_address=own_address,
            own_http_address=own_http_address,
        )
        self._task = asyncio.create_task(self._run(hello), name="controller-link")

    async def stop(self) -> None:
        """Disconnect from the controller. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def report_failure(self, error: str) -> bool:
        """Report to the controller that the gateway cannot start. Returns whether that arrived within about
        `REPORT_TIMEOUT_S`."""
        message = GatewayFailed(gateway_id=self._gateway_id, error=error, name=self._name)
        try:
            async with open_channel(await self._address(), self._secret) as channel:
                follow = channel.stream_stream(FOLLOW, None, None)
                call = follow(_once(message), timeout=REPORT_TIMEOUT_S, metadata=self._metadata)
                async for _ in call:
                    pass
        except (grpc.aio.AioRpcError, UnavailableError) as failure:
            logger.warning("cannot report the failed start to the controller: %s", failure)
            return False
        return True

    async def call(self, request: ControlRequest) -> ControlReply:
        """Send an operator's request to the controller and return its reply. Raises `UnavailableError` if there is
        none."""
        try:
            address = self._connected_to or await self._address()
            async with open_channel(address, self._secret) as channel:
                control = channel.unary_unary(CONTROL, None, None)
                timeout_s = ADAPTER_TIMEOUT_S if isinstance(request, AdapterRequest) else CALL_TIMEOUT_S
                frame = await control(encode(request), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the controller does not answer: {error.details()}", "controller_away") from error
        reply: ControlReply = decoder(ControlReply).decode(frame)
        return reply

    async def _address(self) -> str:
        try:
            return await asyncio.to_thread(self._resolve)
        except Exception as error:  # whatever a launcher's lookup met
            raise UnavailableError(f"the controller cannot be found: {error!r}", "controller_away") from error

    # ------------------------------------------------------------ following

    async def _run(self, hello: GatewayHello) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            followed = False
            try:
                address = await self._address()
                async with open_channel(address, self._secret) as channel:
                    self._outbox, self._copy = asyncio.Queue(), MembershipCopy()
                    call = channel.stream_stream(FOLLOW, None, None)(self._frames(hello), metadata=self._metadata)
                    heartbeats = asyncio.create_task(self._send_heartbeats(self._outbox), name="heartbeats")
                    loads = asyncio.create_task(self._send_load(self._outbox), name="load-reports")
                    try:
                        async for frame in call:
                            followed, self._connected_to = True, address
                            await self.take(decoder(ControllerToGateway).decode(frame))
                    finally:
                        self._connected_to = ""
                        heartbeats.cancel()
                        loads.cancel()
                        # gRPC waits for our next frame for good when the controller ended the call.
                        self._outbox.put_nowait(None)
            except (grpc.aio.AioRpcError, UnavailableError, msgspec.MsgspecError) as error:
                logger.info(
                    "no connection to the controller, serving with the last membership and reconnecting: %s", error
                )
            except Exception:
                # A bug. It ends the connection only: the gateway goes on serving, the membership comes again.
                logger.exception(
                    "following the controller failed by a bug; serving with the last membership and reconnecting"
                )
            pause_s = MIN_PAUSE_S if followed else min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _frames(self, hello: GatewayHello) -> AsyncIterator[bytes]:
        outbox = self._outbox
        draining = tuple(
            WorkerIncarnation(worker_id=name, incarnation=number) for name, number in sorted(self._draining)
        )
        yield encode(msgspec.structs.replace(hello, draining=draining))
        while (message := await outbox.get()) is not None:
            yield encode(message)

    async def _send_heartbeats(self, outbox: asyncio.Queue[GatewayToController | None]) -> None:
        """Send heartbeats from the loop that serves clients. `HeartbeatConnection` sends others from a thread, also
        while the loop is blocked."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            outbox.put_nowait(GatewayHeartbeat(counts=None if self._counts is None else self._counts()))

    async def _send_load(self, outbox: asyncio.Queue[GatewayToController | None]) -> None:
        while self._load is not None:
            if self._load_every_s is not None:
                for report in self._load():
                    outbox.put_nowait(report)
            await asyncio.sleep(self._load_every_s or IDLE_LOAD_S)

    async def take(self, message: ControllerToGateway) -> None:
        """Apply a message of the controller; after a gap, request all of the membership."""
        if isinstance(message, AutoscalerState):
            self.autoscaler = message
            return
        if isinstance(message, ExpectedWorkers):
            self._workers.expect_workers(message.in_s)
            return
        if isinstance(message, GatewaySettings):
            self._load_every_s = message.load_every_s
            routers = msgspec.json.decode(message.routers, type=dict[str, RouterConfig])
            self._workers.configure(routers)
            models = msgspec.json.decode(message.models, type=tuple[ModelSource, ...])
            self.on_models(message.generation, models, routers)
            return
        if isinstance(message, ServedAdapters):
            self.on_adapters(message.adapters)
            self._outbox.put_nowait(AdaptersFollowed(revision=message.revision))
            return
        self.counters["snapshot" if isinstance(message, Membership) else "change"] += 1
        taken = self._copy.apply(message)
        if taken == "new":
            await self._apply(self._copy.members)
        elif taken == "gap":
            self.counters["gap"] += 1
            logger.warning(
                "membership revision before %d is missing: requesting all of the membership", message.revision
            )
            self._outbox.put_nowait(MembershipRequest())

    async def _apply(self, membership: tuple[Member, ...]) -> None:
        """Add, remove, drain and resume workers to match the membership."""
        members = {member.info.worker_id: member for member in membership}
        for worker_id in [worker_id for worker_id in self._known if worker_id not in members]:
            await self._workers.remove_worker(worker_id)
            del self._known[worker_id]
        for worker_id, member in members.items():
            if self._known.get(worker_id) != member.info:
                # In `_known` once it is added: if that fails, the next membership tries again.
                self._known.pop(worker_id, None)
                await self._workers.add_worker(member.info)
                self._known[worker_id] = member.info
        draining = [m.info for m in membership if m.state == "draining"]
        before, self._draining = self._draining, {(info.worker_id, info.incarnation) for info in draining}
        present = {(member.info.worker_id, member.info.incarnation) for member in membership}
        for worker in sorted(before & present - self._draining):
            self._workers.resume_worker(*worker)
        self._drained &= self._draining
        if self._draining - before:
            await self._connect_others(sorted(worker_id for worker_id, _ in self._draining - before))
        for info in draining:
            if (info.worker_id, info.incarnation) in self._drained:  # sent to an earlier controller
                self._on_drained(info.worker_id, info.incarnation)
            else:
                self._workers.drain_worker(info.worker_id, info.incarnation)

    async def _connect_others(self, leaving: Sequence[WorkerId]) -> None:
        """Wait until the other workers are connected before some are drained. New workers may replace those that leave;
        if these left first, a pool would have no worker, and requests would be refused."""
        try:
            await self._workers.wait_until_connected(CONNECT_TIMEOUT_S)
        except TimeoutError as error:
            logger.warning("draining %s although other workers are not connected: %s", ", ".join(leaving), error)

    def followed(self, generation: int) -> None:
        """Tell the controller that this gateway has applied the settings of a generation."""
        self._outbox.put_nowait(SettingsFollowed(generation=generation))

    def _on_drained(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self._drained.add((worker_id, incarnation))
        self._outbox.put_nowait(WorkerDrained(worker_id=worker_id, incarnation=incarnation))


async def _once(message: GatewayToController) -> AsyncIterator[bytes]:
    yield encode(message)
