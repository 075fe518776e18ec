"""The streams of workers and gateways to the controller, and the calls of operators.

    Register, Follow ──> events          replies to workers, frames for gateways <── the controller's commands
    heartbeats ──> Supervisor            Control ──> the controller's reply

A gateway for which too many changes wait gets a snapshot of the membership instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

import grpc
import msgspec

from disagg.cluster.control.supervisor import ProcessIncarnation, Supervisor
from disagg.cluster.core import events
from disagg.proto.autoscaling import LoadReport
from disagg.proto.control import (
    AdaptersFollowed,
    ControllerToWorker,
    ControlReply,
    ControlRequest,
    ControlState,
    GatewayCounts,
    GatewayFailed,
    GatewayHeartbeat,
    GatewayHello,
    GatewayToController,
    Membership,
    MembershipChange,
    MembershipRequest,
    SettingsFollowed,
    WorkerDrained,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerHello,
    WorkerRejected,
    WorkerStarting,
    WorkerToController,
)
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import decoder, encode
from disagg.proto.services import CONTROL, CONTROLLER_SERVICE, FOLLOW, REGISTER, service_and_method

logger = logging.getLogger(__name__)

MAX_CHANGES_WAITING = 1024
"""Number of changes of the membership that may wait for one gateway."""

Context = grpc.aio.ServicerContext[Any, Any]
_WorkerKey = tuple[WorkerId, Incarnation]


class ControllerService:
    """Owner of the messages that wait to be sent to each worker and gateway; on the controller's event loop.

    Args:
        control: returns the answer to an operator's request.
        on_event: called with the events of workers and gateways.
        on_load: called with a gateway's reports for the autoscaler, and with None when it has left.
        supervisor: is informed of heartbeats.
        state: returns the present state of the cluster.
        lost_grace_s: seconds that a process that left may take to come back, for the log.
    """

    def __init__(
        self,
        control: Callable[[ControlRequest], Awaitable[ControlReply]],
        on_event: Callable[[events.Event], None],
        on_load: Callable[[GatewayId, LoadReport | None], None],
        supervisor: Supervisor,
        state: Callable[[], ControlState],
        lost_grace_s: float,
    ) -> None:
        self._control = control
        self._on_event = on_event
        self._on_load = on_load
        self._supervisor = supervisor
        self._state = state
        self._lost_grace_s = lost_grace_s
        self._workers: dict[_WorkerKey, asyncio.Queue[ControllerToWorker]] = {}
        self._followers: dict[GatewayId, asyncio.Queue[bytes]] = {}
        """Frames that wait for each gateway, encoded, so that a frame for several is encoded once."""
        self._counts: dict[GatewayId, GatewayCounts] = {}
        """The latest counts of each gateway."""
        self._adapters: dict[GatewayId, int] = {}
        """The revision of the adapters that each gateway serves."""
        self._followed = asyncio.Event()
        """Set when a gateway follows other adapters, or has left."""

    def reply(self, worker_id: WorkerId, incarnation: Incarnation, reply: ControllerToWorker) -> None:
        """Send a reply to that process of a worker, if it is connected."""
        if (replies := self._workers.get((worker_id, incarnation))) is not None:
            replies.put_nowait(reply)

    def tell_workers(self, message: ControllerToWorker) -> None:
        """Send a message to all workers that are connected."""
        for replies in self._workers.values():
            replies.put_nowait(message)

    def send(self, frame: bytes) -> None:
        """Send a frame to all gateways."""
        for frames in self._followers.values():
            frames.put_nowait(frame)

    def offer(self, frame: bytes) -> None:
        """Send a frame to the gateways for which few frames wait."""
        for frames in self._followers.values():
            if frames.qsize() < MAX_CHANGES_WAITING:
                frames.put_nowait(frame)

    def publish(
        self,
        change: MembershipChange | None,
        snapshot_for: Collection[GatewayId],
        membership: Callable[[], Membership],
        settings: Callable[[], Sequence[bytes]],
    ) -> None:
        """Send a change to all gateways, except those that need a snapshot of the membership or are late. With each
        snapshot the settings are sent, for a gateway that joined, or that missed a message."""
        frame = None if change is None else encode(change)
        snapshot: bytes | None = None
        for gateway_id, frames in self._followers.items():
            is_late = frames.qsize() >= MAX_CHANGES_WAITING
            if gateway_id in snapshot_for or is_late:
                while not frames.empty():
                    frames.get_nowait()
                snapshot = snapshot or encode(membership())
                frames.put_nowait(snapshot)
                for each in settings():
                    frames.put_nowait(each)
            elif frame is not None:
                frames.put_nowait(frame)

    async def adapters_followed(self, revision: int, timeout_s: float) -> list[GatewayId]:
        """Wait until all gateways serve the adapters of a revision, or later ones; returns those that are late."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._late(revision):
                    self._followed.clear()
                    await self._followed.wait()
        except TimeoutError:
            pass
        return self._late(revision)

    def _late(self, revision: int) -> list[GatewayId]:
        return [gateway_id for gateway_id in self._followers if self._adapters.get(gateway_id, 0) < revision]

    def with_counts(self, state: ControlState) -> ControlState:
        """The state with the counts of each gateway."""
        if not self._counts:
            return state
        gateways = (
            msgspec.structs.replace(record, counts=self._counts.get(record.gateway_id)) for record in state.gateways
        )
        return msgspec.structs.replace(state, gateways=tuple(gateways))

    # ------------------------------------------------------------ handlers

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Handlers of the methods Register, Follow and Control."""
        methods = {
            service_and_method(REGISTER)[1]: grpc.stream_stream_rpc_method_handler(self._register),
            service_and_method(FOLLOW)[1]: grpc.stream_stream_rpc_method_handler(self._follow),
            service_and_method(CONTROL)[1]: grpc.unary_unary_rpc_method_handler(self._call),
        }
        return grpc.method_handlers_generic_handler(CONTROLLER_SERVICE, methods)

    async def _register(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        message = await _decode(await anext(requests, b""), WorkerToController, context)
        if isinstance(message, WorkerFailed):
            self._on_event(events.WorkerStartFailed(message.worker_id, message.error, message.start_id))
            return
        if isinstance(message, WorkerStarting):
            self._on_event(events.WorkerStarting(message.worker_id, message.doing, message.start_id))
            return
        if not isinstance(message, WorkerHello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker begins with WorkerHello")
        info = message.info
        key = (info.worker_id, info.incarnation)
        replies = self._workers[key] = asyncio.Queue[ControllerToWorker]()
        watched = ProcessIncarnation(info.worker_id, info.incarnation, info.pid)
        self._supervisor.watch(watched)
        reader = asyncio.create_task(self._read_heartbeats(requests, watched), name=f"heartbeats-{info.worker_id}")
        try:
            self._on_event(events.WorkerRegistered(info, message.is_proven))
            while True:
                reply = await replies.get()
                yield encode(reply)
                if isinstance(reply, WorkerRejected):
                    return
        finally:
            reader.cancel()
            if self._workers.get(key) is replies:  # not a later stream of the same process
                del self._workers[key]
                self._supervisor.forget(watched)
                self._on_event(events.WorkerLeft(*key))
                self._log_if_lost(watched)

    def _log_if_lost(self, process: ProcessIncarnation) -> None:
        if any(worker.phase == "lost" and worker.worker_id == process.name for worker in self._state().workers):
            text = "%s (process %d) is lost: its connection broke; it is restarted unless it reconnects within %g s"
            logger.warning(text, process.name, process.pid, self._lost_grace_s)

    async def _read_heartbeats(self, requests: AsyncIterator[bytes], process: ProcessIncarnation) -> None:
        async for message in _messages(requests, WorkerToController, process.name):
            if isinstance(message, WorkerHeartbeat):
                self._supervisor.heartbeat(process, message.turn_s, message.doing, message.expected_s)

    async def _follow(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        hello = await _decode(await anext(requests, b""), GatewayToController, context)
        if isinstance(hello, GatewayFailed):
            self._on_event(events.GatewayStartFailed(hello.error, hello.name))
            return
        if isinstance(hello, GatewayHeartbeat):
            await self._read_gateway_heartbeats(hello, requests)
            return
        if not isinstance(hello, GatewayHello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a gateway begins with GatewayHello")
        frames = self._followers[hello.gateway_id] = asyncio.Queue[bytes]()
        self._adapters.pop(hello.gateway_id, None)
        watched = ProcessIncarnation(hello.name, hello.gateway_id, hello.pid)
        self._supervisor.watch(watched)
        reader = asyncio.create_task(self._read_follower(requests, hello, watched), name=f"follow-{hello.gateway_id}")
        try:
            draining = tuple((member.worker_id, member.incarnation) for member in hello.draining)
            self._on_event(
                events.GatewayJoined(
                    hello.gateway_id,
                    hello.address,
                    hello.pid,
                    hello.http_address,
                    draining,
                    hello.name,
                    hello.own_address,
                    hello.own_http_address,
                )
            )
            while True:
                yield await frames.get()
        finally:
            reader.cancel()
            if self._followers.get(hello.gateway_id) is frames:  # not a later stream of the same gateway
                del self._followers[hello.gateway_id]
                self._counts.pop(hello.gateway_id, None)
                self._adapters.pop(hello.gateway_id, None)
                self._followed.set()
                self._supervisor.forget(watched)
                self._on_load(hello.gateway_id, None)
                self._on_event(events.GatewayLeft(hello.gateway_id))

    async def _read_follower(
        self, requests: AsyncIterator[bytes], hello: GatewayHello, process: ProcessIncarnation
    ) -> None:
        async for message in _messages(requests, GatewayToController, f"gateway {hello.gateway_id}"):
            if isinstance(message, GatewayHeartbeat):
                self._supervisor.heartbeat(process)
                if message.counts is not None:
                    self._counts[hello.gateway_id] = message.counts
            elif isinstance(message, WorkerDrained):
                self._on_event(events.WorkerEmpty(hello.gateway_id, message.worker_id, message.incarnation))
            elif isinstance(message, LoadReport):
                self._on_load(hello.gateway_id, message)
            elif isinstance(message, SettingsFollowed):
                self._on_event(events.SettingsFollowed(hello.gateway_id, message.generation))
            elif isinstance(message, AdaptersFollowed):
                self._adapters[hello.gateway_id] = message.revision
                self._followed.set()
            elif isinstance(message, MembershipRequest):
                logger.info("gateway %s missed a change of the membership: sending a snapshot", hello.gateway_id)
                self._on_event(events.MembershipMissed(hello.gateway_id))

    async def _read_gateway_heartbeats(self, first: GatewayHeartbeat, requests: AsyncIterator[bytes]) -> None:
        """Read the heartbeats of a gateway's thread; they count while its other stream stands."""
        process = ProcessIncarnation(first.name, first.gateway_id, first.pid)
        self._supervisor.heartbeat(process, first.turn_s, first.doing)
        async for message in _messages(requests, GatewayToController, f"gateway {first.gateway_id}"):
            if isinstance(message, GatewayHeartbeat):
                self._supervisor.heartbeat(process, message.turn_s, message.doing)

    async def _call(self, frame: bytes, context: Context) -> bytes:
        return encode(await self._control(await _decode(frame, ControlRequest, context)))


async def _decode(frame: bytes, kind: Any, context: Context) -> Any:
    try:
        return decoder(kind).decode(frame)
    except msgspec.MsgspecError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a bad frame: {error}")
        raise


async def _messages(requests: AsyncIterator[bytes], kind: Any, name: str) -> AsyncIterator[Any]:
    """The messages of a stream, until it breaks or a frame cannot be decoded."""
    decode = decoder(kind).decode
    try:
        async for frame in requests:
            yield decode(frame)
    except msgspec.MsgspecError as error:
        logger.warning("%s sent a frame that cannot be decoded: %s; its later messages are ignored", name, error)
    except grpc.RpcError as error:
        logger.debug("the connection of %s broke: %s", name, error)
