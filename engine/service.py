"""The sockets of a worker: sessions with gateways, report streams for routers, audits for operators.

Frames are msgpack structs (proto/messages.py); the handlers are generic, there is no protobuf inside the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import msgspec

from disagg.engine.mailbox import Mailbox
from disagg.proto.ids import GatewayId
from disagg.proto.messages import (
    AuditRequest,
    GatewayToWorker,
    KvEvent,
    Load,
    SessionHello,
    StepUpdate,
    WatchRequest,
    WorkerReport,
    decoder,
    encode,
)
from disagg.proto.services import (
    AUDIT,
    GATEWAY_ID_METADATA,
    SERVER_OPTIONS,
    SESSION,
    WATCH,
    WORKER_SERVICE,
    service_and_method,
)

if TYPE_CHECKING:
    from disagg.engine.worker import Worker

logger = logging.getLogger(__name__)

MAX_PENDING_UPDATES = 10_000
"""A gateway that is this many steps behind is lost: its session is closed and its sequences are cancelled."""


class _Watch:
    """One report stream: KV events wait here until the next report."""

    def __init__(self) -> None:
        self.kv_events: list[KvEvent] = []
        self.changed = asyncio.Event()


class WorkerService:
    """Owner of the worker's gRPC server. All methods run on the asyncio thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sessions: dict[GatewayId, Mailbox[StepUpdate]] = {}
        self._watches: set[_Watch] = set()
        self._load = Load()
        self._from_gateway = decoder(GatewayToWorker)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)

    async def bind(self, host: str, port: int, role_handlers: Sequence[Any]) -> int:
        """Listen; the port that was bound. Raises `RuntimeError` when the address cannot be bound."""
        methods = {
            service_and_method(SESSION)[1]: grpc.stream_stream_rpc_method_handler(self._session),
            service_and_method(WATCH)[1]: grpc.unary_stream_rpc_method_handler(self._watch),
            service_and_method(AUDIT)[1]: grpc.unary_unary_rpc_method_handler(self._audit),
        }
        handler = grpc.method_handlers_generic_handler(WORKER_SERVICE, methods)
        self._server.add_generic_rpc_handlers((handler, *role_handlers))
        bound_port = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return bound_port

    async def close(self) -> None:
        """End all sessions and the server."""
        for session in self._sessions.values():
            session.close()
        await self._server.stop(grace=0.5)

    def send(self, gateway_id: GatewayId, update: StepUpdate) -> None:
        """Queue an update for a gateway; dropped when it has no session, because its requests were cancelled then."""
        session = self._sessions.get(gateway_id)
        if session is not None:
            session.put(update)

    def publish(self, load: Load, kv_events: Sequence[KvEvent]) -> None:
        """Note the load and the KV events of one engine turn for the report streams."""
        changed = bool(kv_events) or load != self._load
        self._load = load
        if not changed:
            return
        for watch in self._watches:
            watch.kv_events += kv_events
            watch.changed.set()

    # ------------------------------------------------------------ handlers

    async def _session(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        gateway_id = GatewayId(str(dict(context.invocation_metadata() or ()).get(GATEWAY_ID_METADATA, "")))
        if not gateway_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"metadata {GATEWAY_ID_METADATA} is missing")
        if (earlier := self._sessions.get(gateway_id)) is not None:
            earlier.close()
        session = self._sessions[gateway_id] = Mailbox[StepUpdate](MAX_PENDING_UPDATES)
        yield encode(SessionHello(info=self._worker.info))
        reader = asyncio.create_task(self._read_session(requests, gateway_id, session), name=f"session-{gateway_id}")
        try:
            async for update in session:
                yield encode(update)
        finally:
            reader.cancel()
            if self._sessions.get(gateway_id) is session:
                del self._sessions[gateway_id]
                self._worker.on_gateway_lost(gateway_id)

    async def _read_session(
        self, requests: AsyncIterator[bytes], gateway_id: GatewayId, session: Mailbox[StepUpdate]
    ) -> None:
        try:
            async for frame in requests:
                self._worker.on_message(self._from_gateway.decode(frame))
        except msgspec.MsgspecError as error:
            logger.warning("closing the session of gateway %s: bad frame: %s", gateway_id, error)
        except grpc.RpcError as error:
            logger.debug("session of gateway %s broke: %s", gateway_id, error)
        finally:
            session.close()

    async def _watch(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        await _decode_or_abort(frame, WatchRequest, context)
        config, info = self._worker.config, self._worker.info
        watch = _Watch()
        # Registered before the snapshot is taken: events that are in both are harmless (each one sets an absolute
        # state), events in neither would be lost.
        self._watches.add(watch)
        try:
            snapshot, self._load = await self._worker.prefix_snapshot()
            watch.kv_events.insert(0, snapshot)
            sequence = 0
            while True:
                events, watch.kv_events = tuple(watch.kv_events), []
                watch.changed.clear()
                yield encode(
                    WorkerReport(
                        worker_id=info.worker_id,
                        incarnation=info.incarnation,
                        sequence=sequence,
                        load=self._load,
                        kv_events=events,
                    )
                )
                sequence += 1
                await asyncio.sleep(config.report_interval_s)
                try:
                    async with asyncio.timeout(config.report_idle_s):
                        await watch.changed.wait()
                except TimeoutError:
                    continue  # An idle heartbeat.
        finally:
            self._watches.discard(watch)

    async def _audit(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await _decode_or_abort(frame, AuditRequest, context)
        return encode(await self._worker.audit())


async def _decode_or_abort(frame: bytes, kind: type[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    try:
        decoder(kind).decode(frame)
    except msgspec.MsgspecError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.__name__}: {error}")
