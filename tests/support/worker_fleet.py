"""A process of workers without engines: each listens, registers with the controller, beats and reports as a real one
does, and computes nothing. Beside them a follower that counts what a gateway gets of the membership.

    FleetProcess (in the program) ───Start, Stop, Follow, Ask──> run_fleet (the process) ──Seen, Stopped, Counts──>
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import msgspec
from typing_extensions import override

from disagg.cluster.config.cluster_config import PoolConfig
from disagg.cluster.hosts.processes import ProcessLauncher
from disagg.cluster.system.process_tools import allow_open_files
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import WorkerConfig
from disagg.proto.control import HEARTBEAT_S, GatewayHeartbeat, GatewayHello, WorkerHeartbeat, WorkerHello
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import (
    BlocksSnapshot,
    Connect,
    GatewayToWorker,
    KvLayout,
    Load,
    RoleName,
    SessionHello,
    WorkerInfo,
    WorkerReport,
    encode,
)
from disagg.proto.services import (
    CHANNEL_OPTIONS,
    FOLLOW,
    REGISTER,
    SERVER_OPTIONS,
    SESSION,
    WATCH,
    WORKER_SERVICE,
    service_and_method,
)

CONFIG = {
    "model": {"path": "fake"},
    "gateway": {"port": 0},
    "transfer": {"transport": "shm"},
    "controller": {"probes": False},  # they have no engine
    "pools": {"prefill": {"size": 1}, "decode": {"size": 1}},
}
"""A cluster of them before it is scaled."""
REPORT_IDLE_S = 0.27
"""An idle worker reports so often, see `WorkerConfig`."""
WAIT_S = 120.0
MAX_MODEL_LEN = 4096
FOLLOWER = GatewayId("counting-follower")
_OWN_CONNECTION = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
"""Workers of one process have a connection each, as workers in processes of their own have."""

_Context = grpc.aio.ServicerContext[Any, Any]
_down: msgspec.msgpack.Decoder[GatewayToWorker] = msgspec.msgpack.Decoder(GatewayToWorker)


@dataclass(frozen=True, slots=True)
class Start:
    """Be this worker."""

    worker_id: str
    roles: tuple[RoleName, ...]
    start_id: str
    controller: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Be these workers no longer."""

    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow the membership beside the gateway."""

    controller: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Request the counts."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker was seen to do that, at a time of the monotonic clock: `registers`, or `placeable` once a gateway
    requests its reports, which it does when its router has the worker."""

    worker_id: str
    what: str
    at: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the process started."""

    connects: int = 0
    """Pairs that workers were ordered to form."""
    frames: int = 0
    """Messages of the membership that the follower got."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Stopped:
    """These workers are gone."""

    worker_ids: tuple[str, ...]


# ---------------------------------------------------------------- in the process of the fleet


class _IdleWorker:
    """One worker: a server and a line to the controller."""

    def __init__(self, start: Start, secret: ClusterSecret, fleet: _Fleet) -> None:
        self._start = start
        self._secret = secret
        self._fleet = fleet
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._line: asyncio.Task[None] | None = None
        self._info: WorkerInfo | None = None

    async def begin(self) -> None:
        handlers = {
            service_and_method(SESSION)[1]: grpc.stream_stream_rpc_method_handler(self._session),
            service_and_method(WATCH)[1]: grpc.unary_stream_rpc_method_handler(self._watch),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WORKER_SERVICE, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._info = WorkerInfo(
            worker_id=WorkerId(self._start.worker_id),
            incarnation=Incarnation(self._start.start_id),
            roles=self._start.roles,
            address=f"127.0.0.1:{port}",
            pid=os.getpid(),
            start_id=self._start.start_id,
            fingerprint="idle",
            kv_layout=KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=8),
            num_blocks=1024,
            block_size=16,
            max_num_seqs=64,
            token_budget=2048,
            max_model_len=MAX_MODEL_LEN,
        )
        self._line = asyncio.create_task(self._register(self._info))

    async def end(self) -> None:
        if self._line is not None:
            self._line.cancel()
            await asyncio.gather(self._line, return_exceptions=True)
        await self._server.stop(0)

    async def _register(self, info: WorkerInfo) -> None:
        async with grpc.aio.insecure_channel(self._start.controller, options=_OWN_CONNECTION) as channel:
            self._fleet.send(Seen(info.worker_id, "registers", time.monotonic()))
            call = channel.stream_stream(REGISTER, None, None)(self._beats(info), metadata=self._secret.metadata)
            async for _ in call:
                pass

    async def _beats(self, info: WorkerInfo) -> AsyncIterator[bytes]:
        yield encode(WorkerHello(info=info))
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            yield encode(WorkerHeartbeat())

    async def _session(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        assert self._info is not None
        yield encode(SessionHello(info=self._info))
        async for frame in requests:
            if isinstance(_down.decode(frame), Connect):
                self._fleet.num_connects += 1

    async def _watch(self, frame: bytes, context: _Context) -> AsyncIterator[bytes]:
        assert self._info is not None
        info, sequence = self._info, 0
        self._fleet.send(Seen(info.worker_id, "placeable", time.monotonic()))
        while True:
            yield encode(
                WorkerReport(
                    worker_id=info.worker_id,
                    incarnation=info.incarnation,
                    sequence=sequence,
                    load=Load(blocks_total=info.num_blocks),
                    kv_events=() if sequence else (BlocksSnapshot(hashes=()),),
                )
            )
            sequence += 1
            await asyncio.sleep(REPORT_IDLE_S)


class _Fleet:
    """The workers of this process, and what they saw."""

    def __init__(self, pipe: Connection, secret: ClusterSecret) -> None:
        self.num_connects = 0
        self._pipe = pipe
        self._secret = secret
        self._workers: dict[str, _IdleWorker] = {}
        self._frames = self._nbytes = 0
        self._follower: asyncio.Task[None] | None = None

    def send(self, message: Seen | Counts | Stopped) -> None:
        self._pipe.send(message)

    async def run(self) -> None:
        """Until the other end of the pipe is closed."""
        while True:
            try:
                message = await asyncio.to_thread(self._pipe.recv)
            except EOFError:
                break
            match message:
                case Start(worker_id=worker_id):
                    worker = self._workers[worker_id] = _IdleWorker(message, self._secret, self)
                    await worker.begin()
                case Stop(worker_ids=worker_ids):
                    await self._stop(worker_ids)
                    self.send(Stopped(worker_ids))
                case Follow(controller=controller):
                    self._follower = asyncio.create_task(self._follow(controller))
                case Ask():
                    self.send(Counts(self.num_connects, self._frames, self._nbytes))
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self._stop(tuple(self._workers))

    async def _stop(self, worker_ids: Sequence[str]) -> None:
        await asyncio.gather(*(self._workers.pop(name).end() for name in worker_ids if name in self._workers))

    async def _follow(self, controller: str) -> None:
        async with grpc.aio.insecure_channel(controller, options=_OWN_CONNECTION) as channel:
            call = channel.stream_stream(FOLLOW, None, None)(_follower_frames(), metadata=self._secret.metadata)
            async for frame in call:
                self._frames += 1
                self._nbytes += len(frame)


async def _follower_frames() -> AsyncIterator[bytes]:
    yield encode(GatewayHello(gateway_id=FOLLOWER, address="", pid=os.getpid()))
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        yield encode(GatewayHeartbeat())


def run_fleet(pipe: Connection, secret: ClusterSecret) -> None:
    """The main function of the process."""
    allow_open_files()
    asyncio.run(_Fleet(pipe, secret).run())


# ---------------------------------------------------------------- in the benchmark


@dataclass
class FleetProcess:
    """A process of idle workers; a context manager. `seen` and `counts` may be used on any thread."""

    secret: ClusterSecret
    seen: dict[tuple[str, str], float] = field(default_factory=dict)
    """(worker, what it was first seen to do) -> when."""

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_fleet, args=(theirs, self.secret), daemon=True)
        self._changed = threading.Condition()
        self._counts: list[Counts] = []
        self._stopped: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._theirs = theirs

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        """Process id; constant, the process is not restarted."""
        assert self._process.pid is not None
        return self._process.pid

    def start(self, config: WorkerConfig, controller: str) -> None:
        """Begin to be a worker."""
        self._pipe.send(Start(config.worker_id, config.roles, config.start_id, controller))

    def stop(self, worker_ids: Sequence[str]) -> None:
        """Be these no longer; returns when they are gone."""
        names = tuple(worker_ids)
        with self._changed:
            self._stopped.difference_update(names)
        self._pipe.send(Stop(names))
        self._wait(lambda: self._stopped.issuperset(names))

    def follow(self, controller: str) -> None:
        """Begin to count what a gateway gets of the membership."""
        self._pipe.send(Follow(controller))

    def counts(self) -> Counts:
        """What was counted up to now."""
        with self._changed:
            known = len(self._counts)
        self._pipe.send(Ask())
        self._wait(lambda: len(self._counts) > known)
        return self._counts[-1]

    def _wait(self, condition: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, WAIT_S):
                raise TimeoutError("the fleet does not answer")

    def _read(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                return
            with self._changed:
                match message:
                    case Seen(worker_id=worker_id, what=what, at=at):
                        self.seen.setdefault((worker_id, what), at)
                    case Counts():
                        self._counts.append(message)
                    case Stopped(worker_ids=worker_ids):
                        self._stopped.update(worker_ids)
                self._changed.notify_all()


class FleetLauncher(ProcessLauncher):
    """Its gateway is a process; its workers live in fleets."""

    def __init__(self, log_dir: Path, secret: ClusterSecret, fleets: Sequence[FleetProcess]) -> None:
        super().__init__(log_dir, secret)
        self._fleets = fleets
        self._num_started = 0
        self._fleet_of: dict[str, FleetProcess] = {}

    @override
    def start_worker(self, config: WorkerConfig, controller_address: str, pool: PoolConfig) -> None:
        fleet = self._fleets[self._num_started % len(self._fleets)]
        self._num_started += 1
        self._fleet_of[config.worker_id] = fleet
        fleet.start(config, controller_address)

    @override
    def stop_workers(self, worker_ids: Sequence[WorkerId]) -> None:
        for fleet in self._fleets:
            if mine := [worker_id for worker_id in worker_ids if self._fleet_of.get(worker_id) is fleet]:
                fleet.stop(mine)
