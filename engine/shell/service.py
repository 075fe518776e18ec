"""The sockets of a worker: sessions with gateways, report streams for routers, audits for operators.

Frames are msgpack structs (proto/messages.py); the handlers are generic, there is no protobuf inside the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import grpc
import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import add_port
from disagg.connections.shell.guard import ClusterGuard
from disagg.engine.adapters.folder import AdapterError
from disagg.engine.config import WorkerConfig
from disagg.engine.core.reports import StepSampler, WorkerCounters
from disagg.engine.io.mailbox import Mailbox
from disagg.engine.shell.engine_thread import Batch, EngineStoppedError
from disagg.proto.ids import GatewayId
from disagg.proto.messages import (
    Adapter,
    AdapterLoaded,
    AdapterState,
    AdapterUnloaded,
    AuditReport,
    AuditRequest,
    BlocksSnapshot,
    GatewayToWorker,
    KvEvent,
    Load,
    LoadAdapter,
    Message,
    SessionHello,
    StepSample,
    StepUpdate,
    TransferCount,
    UnloadAdapter,
    WatchRequest,
    WorkerInfo,
    WorkerMetrics,
    WorkerReport,
    decoder,
    encode,
)
from disagg.proto.services import (
    AUDIT,
    GATEWAY_ID_METADATA,
    LOAD_ADAPTER,
    SERVER_OPTIONS,
    SESSION,
    UNLOAD_ADAPTER,
    WATCH,
    WORKER_SERVICE,
    service_and_method,
)

logger = logging.getLogger(__name__)

MAX_PENDING_UPDATES = 10_000
"""A gateway that is this many steps behind is lost: its session is closed and its sequences are cancelled."""

MAX_PENDING_KV_EVENTS = 10_000
"""A router that is this many KV events behind gets a snapshot instead of them."""


class ServedWorker(Protocol):
    """What a worker does for its sessions and streams. Owner: the event loop, except `turn_s` and
    `expected_s`."""

    config: WorkerConfig

    @property
    def info(self) -> WorkerInfo:
        """What gateways get of this worker."""
        ...

    def on_message(self, message: GatewayToWorker, gateway_id: GatewayId) -> None:
        """A message of a gateway."""
        ...

    def on_gateway_lost(self, gateway_id: GatewayId) -> None:
        """A gateway's session broke: it will place its requests elsewhere, so theirs here end. Idempotent."""
        ...

    def transfers(self) -> tuple[TransferCount, ...]:
        """What was sent to each decode worker since the start."""
        ...

    def num_served_fetches(self) -> int:
        """Fetches of other workers for which KV was given, since the start."""
        ...

    def num_pending_prompt_tokens(self) -> int:
        """Tokens of dispatched prompts that the engine does not count yet."""
        ...

    def turn_s(self) -> float:
        """Duration of the engine's current turn so far, or of its wait for a copy of KV; 0 where it waits for nothing
        of its own. Any thread."""
        ...

    def expected_s(self) -> float:
        """Predicted duration of the engine's current turn; 0 where no turn lasts long. Any thread."""
        ...

    async def prefix_snapshot(self) -> BlocksSnapshot:
        """All cached prefix blocks, taken between two steps. Raises `EngineStoppedError`."""
        ...

    async def audit(self) -> AuditReport:
        """Everything that this worker holds. Raises `EngineStoppedError`."""
        ...

    async def load_adapter(self, adapter: Adapter) -> AdapterLoaded:
        """Check an adapter, and load it where there is a slot. Raises `AdapterError` and `EngineStoppedError`."""
        ...

    async def unload_adapter(self, fingerprint: str) -> AdapterUnloaded:
        """Have an adapter leave once nobody uses it. Raises `EngineStoppedError`."""
        ...


class _Watch:
    """One report stream: KV events and some measured steps wait here until the next report."""

    def __init__(self) -> None:
        self.kv_events: list[KvEvent] = []
        self.steps = StepSampler()
        self.needs_snapshot = True
        self.snapshot: asyncio.Future[BlocksSnapshot] | None = None
        """Snapshot that the engine is to take."""
        self.changed = asyncio.Event()

    def note(
        self, kv_events: Sequence[KvEvent], steps: Sequence[StepSample], idle_step: StepSample | None = None
    ) -> None:
        """Add KV events and steps to the next update."""
        for step in steps:
            self.steps.offer(step)
        if idle_step is not None:
            self.steps.add(idle_step)
        if len(self.kv_events) + len(kv_events) > MAX_PENDING_KV_EVENTS:
            self.needs_snapshot = True
        else:
            self.kv_events += kv_events
        self.changed.set()

    async def take_events(
        self, snapshot: Callable[[], Awaitable[BlocksSnapshot]], timeout_s: float
    ) -> tuple[KvEvent, ...]:
        """What the next report carries. Events that come while a snapshot is taken follow it: that one may hold them
        too is harmless, since each sets an absolute state. Nothing where the snapshot takes longer than `timeout_s`,
        because the engine is in a long step; a later report has it then."""
        if self.needs_snapshot and self.snapshot is None:
            self.needs_snapshot = False
            self.kv_events.clear()
            self.snapshot = asyncio.ensure_future(snapshot())
        if self.snapshot is not None:
            done, _ = await asyncio.wait((self.snapshot,), timeout=timeout_s)
            if not done:
                return ()
            self.kv_events.insert(0, self.snapshot.result())
            self.snapshot = None
        if not self.needs_snapshot:
            self.changed.clear()  # Only now: what came while the snapshot was taken is in this report.
        events, self.kv_events = tuple(self.kv_events), []
        return events

    def close(self) -> None:
        """Cancel a running snapshot, because the stream has ended."""
        if self.snapshot is not None:
            self.snapshot.cancel()


class WorkerService:
    """Owner of the worker's gRPC server. All methods run on the asyncio thread.

    Args:
        worker: what it serves.
        load: of the idle worker, for reports until the engine's first batch.
        secret: of the cluster.
        new_mailbox: makes the queue of a session, of at most so many updates.
    """

    def __init__(
        self,
        worker: ServedWorker,
        load: Load,
        secret: ClusterSecret,
        new_mailbox: Callable[[int], Mailbox[StepUpdate]] = Mailbox,
    ) -> None:
        self._worker = worker
        self._new_mailbox = new_mailbox
        self._sessions: dict[GatewayId, Mailbox[StepUpdate]] = {}
        self._watches: set[_Watch] = set()
        self._load = load
        self._adapters: tuple[AdapterState, ...] = ()
        self._counters = WorkerCounters()
        self._from_gateway = decoder(GatewayToWorker)
        self._secret = secret
        self._server = grpc.aio.server(interceptors=(ClusterGuard(secret),), options=SERVER_OPTIONS)

    async def bind(self, host: str, port: int, role_handlers: Sequence[Any]) -> int:
        """Listen; the port that was bound. Raises `RuntimeError` when the address cannot be bound."""
        methods = {
            service_and_method(SESSION)[1]: grpc.stream_stream_rpc_method_handler(self._session),
            service_and_method(WATCH)[1]: grpc.unary_stream_rpc_method_handler(self._watch),
            service_and_method(AUDIT)[1]: grpc.unary_unary_rpc_method_handler(self._audit),
            service_and_method(LOAD_ADAPTER)[1]: grpc.unary_unary_rpc_method_handler(self._load_adapter),
            service_and_method(UNLOAD_ADAPTER)[1]: grpc.unary_unary_rpc_method_handler(self._unload_adapter),
        }
        handler = grpc.method_handlers_generic_handler(WORKER_SERVICE, methods)
        self._server.add_generic_rpc_handlers((handler, *role_handlers))
        bound_port = add_port(self._server, f"{host}:{port}", self._secret)
        await self._server.start()
        return bound_port

    async def close(self) -> None:
        """End all sessions and the server."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.close()
        await self._server.stop(grace=0.5)

    def send(self, gateway_id: GatewayId, update: StepUpdate) -> bool:
        """Queue an update for a gateway; false when it has no session. One that is too far behind loses its session."""
        session = self._sessions.get(gateway_id)
        if session is None:
            return False
        session.put(update)
        if session.closed:
            # Its handler may be blocked in a write for as long as the gateway does not read.
            logger.warning(
                "gateway %s: %d updates behind, closing its session and cancelling its sequences",
                gateway_id,
                MAX_PENDING_UPDATES,
            )
            self._end_session(gateway_id, session)
        return True

    def publish(self, batch: Batch) -> None:
        """Note load, KV events and steps of one batch of the engine for the report streams."""
        self._counters.note(batch.steps, batch.totals)
        changed = bool(batch.kv_events) or batch.load != self._load or batch.idle_step is not None
        changed = changed or batch.adapters != self._adapters
        self._load, self._adapters = batch.load, batch.adapters
        if not changed:
            return
        for watch in self._watches:
            watch.note(batch.kv_events, batch.steps, batch.idle_step)

    def note_adapters(self, states: tuple[AdapterState, ...]) -> None:
        """These adapters are loaded now."""
        self._adapters = states
        for watch in self._watches:
            watch.changed.set()

    def leave_out(self, prompt_tokens: int, output_tokens: int) -> None:
        """Of the next batch these are a probe's, and do not count."""
        self._counters.leave_out(prompt_tokens, output_tokens)

    # ------------------------------------------------------------ handlers

    async def _session(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        gateway_id = GatewayId(str(dict(context.invocation_metadata() or ()).get(GATEWAY_ID_METADATA, "")))
        if not gateway_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"metadata {GATEWAY_ID_METADATA} is missing")
        session = self._open_session(gateway_id)
        reader = asyncio.create_task(self._read_session(requests, gateway_id, session), name=f"session-{gateway_id}")
        try:
            yield encode(SessionHello(info=self._worker.info))
            async for update in session:
                yield encode(update)
        finally:
            reader.cancel()
            self._end_session(gateway_id, session)

    def _open_session(self, gateway_id: GatewayId) -> Mailbox[StepUpdate]:
        """Begins with a clean slate: a gateway gives up all that it had here when its session breaks, which it may have
        seen before this worker did."""
        if (earlier := self._sessions.get(gateway_id)) is not None:
            earlier.close()
        self._worker.on_gateway_lost(gateway_id)
        session = self._new_mailbox(MAX_PENDING_UPDATES)
        self._sessions[gateway_id] = session
        return session

    def _end_session(self, gateway_id: GatewayId, session: Mailbox[StepUpdate]) -> None:
        """Idempotent; the end of a session that was replaced changes nothing."""
        session.close()
        if self._sessions.get(gateway_id) is session:
            del self._sessions[gateway_id]
            self._worker.on_gateway_lost(gateway_id)

    async def _read_session(
        self, requests: AsyncIterator[bytes], gateway_id: GatewayId, session: Mailbox[StepUpdate]
    ) -> None:
        try:
            async for frame in requests:
                if session.closed:  # What an earlier session still had on the wire was given up with it.
                    return
                self._worker.on_message(self._from_gateway.decode(frame), gateway_id)
        except msgspec.MsgspecError as error:
            logger.warning("gateway %s: a bad frame, closing its session: %s", gateway_id, error)
        except grpc.RpcError as error:
            logger.debug("gateway %s: its session broke: %s", gateway_id, error)
        except Exception:
            # A bug here. It costs this session: what the gateway has here is cancelled, and placed again.
            logger.exception(
                "gateway %s: internal error in worker; closing its session, which fails its attempts", gateway_id
            )
        finally:
            self._end_session(gateway_id, session)

    async def _watch(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        await _decode_or_abort(frame, WatchRequest, context)
        config, info = self._worker.config, self._worker.info
        watch = _Watch()
        metrics: WorkerMetrics | None = None
        # Registered before its snapshot is taken, so that no event is in neither.
        self._watches.add(watch)
        sequence = 0
        try:
            while True:
                kv_events = await watch.take_events(self._worker.prefix_snapshot, config.report_idle_s)
                before, metrics = metrics, self._metrics()
                report = WorkerReport(
                    worker_id=info.worker_id,
                    incarnation=info.incarnation,
                    sequence=sequence,
                    load=self._load_now(),
                    kv_events=kv_events,
                    steps=watch.steps.take(),
                    metrics=None if metrics == before else metrics,
                    turn_s=self._worker.turn_s(),
                    expected_s=self._worker.expected_s(),
                    adapters=self._adapters,
                )
                yield encode(report)
                sequence += 1
                await asyncio.sleep(config.report_interval_s)
                try:
                    async with asyncio.timeout(config.report_idle_s):
                        await watch.changed.wait()
                except TimeoutError:
                    continue  # An idle heartbeat.
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            self._watches.discard(watch)
            watch.close()

    def _metrics(self) -> WorkerMetrics:
        return self._counters.metrics(self._worker.transfers(), self._worker.num_served_fetches())

    def _load_now(self) -> Load:
        """The engine's, and the prompts that it does not count yet."""
        num_more = self._worker.num_pending_prompt_tokens()
        if not num_more:
            return self._load
        return msgspec.structs.replace(
            self._load, uncomputed_prompt_tokens=self._load.uncomputed_prompt_tokens + num_more
        )

    async def _audit(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await _decode_or_abort(frame, AuditRequest, context)
        try:
            return encode(await self._worker.audit())
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise

    async def _load_adapter(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        message = await _decode_or_abort(frame, LoadAdapter, context)
        try:
            return encode(await self._worker.load_adapter(message.adapter))
        except AdapterError as error:
            await context.abort(_STATUS[error.fault], str(error))
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    async def _unload_adapter(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        message = await _decode_or_abort(frame, UnloadAdapter, context)
        try:
            return encode(await self._worker.unload_adapter(message.fingerprint))
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise


_STATUS: Final = {
    "content": grpc.StatusCode.INVALID_ARGUMENT,
    "missing": grpc.StatusCode.NOT_FOUND,
    "changed": grpc.StatusCode.FAILED_PRECONDITION,
}
"""gRPC's status of each fault of an adapter."""

M = TypeVar("M", bound=Message)


async def _decode_or_abort(frame: bytes, kind: type[M], context: grpc.aio.ServicerContext[Any, Any]) -> M:
    try:
        return decoder(kind).decode(frame)
    except msgspec.MsgspecError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.__name__}: {error}")
        raise
