"""Ranks 1 and up of a worker: each carries out the commands of rank 0.

    serve_rank()   connect and prove itself -> load its part of the model -> `Join` -> `Begin`: meet the other ranks
                   -> commands, one after the other -> `Stop`

One thread reads the connection. It hands the commands of the engine to the engine thread (the one that called
`serve_rank`), and those of the transport to the rank's transports, which have threads of their own.

A follower ends with rank 0. When its connection ends without `Stop`, rank 0 is lost, and the process exits with
`EXIT_LOST`. It shuts down in order if its engine thread returns soon; where that thread is loading a model, or waits
for the other ranks inside a step, the process is ended at once. The same holds after `Stop`.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.connection import Connection, ConnectionFailedError, connect
from disagg.connections.shell.handshake import NONCE_BYTES, answer
from disagg.engine.config import WorkerConfig
from disagg.engine.kv_transfer.transport import Checksum
from disagg.engine.parallel.adapters import KeptAdapters
from disagg.engine.parallel.factories import join_collective, make_runner
from disagg.engine.parallel.interfaces import RankTransports, ShardRunner
from disagg.engine.parallel.staging import StagingParts, own_part
from disagg.engine.plan import Buffer, is_fatal
from disagg.engine.rank_messages import (
    Answer,
    Begin,
    Capture,
    ClearBuffer,
    Done,
    DropCaptures,
    EngineCommand,
    Failed,
    FreeBuffer,
    GatherPart,
    Join,
    Mark,
    Posted,
    PutAdapter,
    RankCommand,
    ReadAdapter,
    ScatterPart,
    StateBuffers,
    Step,
    Stop,
    TransportCommand,
    decode_step,
)
from disagg.engine.sharding.shards import Shard
from disagg.proto.messages import decoder

logger = logging.getLogger(__name__)

EXIT_STOPPED: Final = 0
EXIT_LOST: Final = 3
"""Rank 0 is lost or refused this rank, or this rank failed: handled like a crashed worker."""

CONNECT_TIMEOUT_S = 20.0
GRACE_S = 1.0
"""How long the engine thread may take to return when rank 0 is lost."""
STOP_GRACE_S = 3.0
"""And after `Stop`; rank 0 computes nothing any more then."""

MakeTransports = Callable[[WorkerConfig, ClusterSecret, ShardRunner, Callable[[int, int], Buffer]], RankTransports]
"""(configuration of a rank, the cluster's secret, its runner, (number, bytes) -> its part of a staging buffer) -> its
transports."""


def serve_rank(
    config: WorkerConfig,
    shard: Shard,
    leader_address: str,
    secret: ClusterSecret,
    load: Callable[[WorkerConfig, Shard], ShardRunner] = make_runner,
) -> int:
    """Be one rank of the worker whose rank 0 listens at `leader_address`, until the worker ends; returns the exit
    status. `load` makes the rank's runner once rank 0 has accepted it. The process must be this rank's alone: it
    is ended if rank 0 is lost and the engine does not notice."""
    name = f"{config.worker_id} rank {shard.number}"
    try:
        connection = connect(leader_address, CONNECT_TIMEOUT_S)
    except ConnectionFailedError as error:
        logger.error("%s cannot connect to rank 0, exiting: %s", name, error)
        return EXIT_LOST
    try:
        answer(connection, secret, "rank connection", config.worker_id, shard.number, secrets.token_bytes(NONCE_BYTES))
    except ConnectionFailedError as error:
        logger.error("%s: rank 0 at %s refused this rank, exiting: %s", name, leader_address, error)
        connection.close()
        return EXIT_LOST
    return Follower(config, shard, connection, secret, load).serve()


def shard_transports(
    config: WorkerConfig, secret: ClusterSecret, runner: ShardRunner, staging: Callable[[int, int], Buffer]
) -> RankTransports:
    """The transports that every rank uses."""
    from disagg.engine.parallel.transport import ShardTransports  # with the libraries that carry bytes

    return ShardTransports(config.host, runner.layout, runner.shape, runner.shard, staging, secret)


class Follower:
    """One rank, once rank 0 has accepted it. `serve` is called once. `end_process` ends the process at once."""

    def __init__(
        self,
        config: WorkerConfig,
        shard: Shard,
        connection: Connection,
        secret: ClusterSecret,
        make_runner: Callable[[WorkerConfig, Shard], ShardRunner] = make_runner,
        make_transports: MakeTransports = shard_transports,
        end_process: Callable[[int], object] = os._exit,
        grace_s: float = GRACE_S,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._config = config
        self._shard = shard
        self._connection = connection
        self._secret = secret
        self._make_runner = make_runner
        self._make_transports = make_transports
        self._end_process = end_process
        self._grace_s = grace_s
        self._stop_grace_s = stop_grace_s
        self._name = f"{config.worker_id} rank {shard.number}"
        self._commands: queue.SimpleQueue[EngineCommand | Begin | Stop | None] = queue.SimpleQueue()
        """Commands for the engine thread; None when the connection has ended."""
        self._returned = threading.Event()
        self._staging: StagingParts | None = None
        self._transports: RankTransports | None = None
        self._adapters: KeptAdapters | None = None

    def serve(self) -> int:
        """Load, join, and carry out commands until the worker ends; the exit status."""
        reader = threading.Thread(target=self._read, name="rank-0", daemon=True)
        reader.start()
        try:
            return self._serve()
        except Exception as error:
            logger.exception("%s failed, exiting; the worker restarts as a whole", self._name)
            self._send_failed(error)
            return EXIT_LOST
        finally:
            self._returned.set()
            if self._transports is not None:
                self._transports.close()
            self._connection.close()
            reader.join()

    def _serve(self) -> int:
        runner = self._make_runner(self._config, self._shard)
        runner.checksum = Checksum.of_secret(self._secret)
        self._staging = StagingParts(runner.new_staging, own_part(runner))
        self._transports = self._make_transports(self._config, self._secret, runner, self._staging)
        join = Join(
            rank=self._shard.number, pid=os.getpid(), fingerprint=runner.fingerprint, num_blocks=runner.num_blocks
        )
        options = self._config.adapters
        self._adapters = KeptAdapters(runner, self._answer, 0 if options is None else options.max_loaded)
        self._connection.send(join)
        try:
            return self._follow(runner, self._staging, self._adapters)
        finally:
            runner.drop_captures()  # the end of the process would wait for them, as `Collective.close` does

    def _follow(self, runner: ShardRunner, staging: StagingParts, adapters: KeptAdapters) -> int:
        while (command := self._commands.get()) is not None:
            match command:
                case Begin():
                    address = command.collective_address
                    runner.join(join_collective(self._config, self._secret, self._shard, address), command.num_blocks)
                    logger.info("%s is ready to compute", self._name)
                case Step():
                    runner.compute(decode_step(command))
                case Mark():
                    self._answer(Done(call=command.call, ok=True))
                case StateBuffers():
                    self._answer(Done(call=command.call, ok=True, buffers=runner.buffers))
                case Capture():
                    error = runner.capture(command.num_seqs)
                    self._answer(Done(call=command.call, ok=not error, error=error))
                case DropCaptures():
                    runner.drop_captures()
                case PutAdapter():
                    runner.put_adapter(command.slot, adapters.take(command.fingerprint))
                case ClearBuffer():
                    staging(command.buffer, command.buffer_bytes)[:] = 0
                case GatherPart() | ScatterPart():
                    self._answer(_copy(runner, staging, command))
                case Stop():
                    return EXIT_STOPPED
        return EXIT_LOST

    def _send_failed(self, error: Exception) -> None:
        try:
            self._connection.send(Failed(error=f"{type(error).__name__}: {error}"))
        except ConnectionFailedError:
            logger.info("%s: cannot report the failure, rank 0 is lost", self._name)

    # ------------------------------------------------------------ the reader

    def _read(self) -> None:
        decode = decoder(RankCommand).decode
        why = "it ended the connection"
        try:
            while (frame := self._connection.receive()) is not None:
                command: RankCommand = decode(frame)
                self._on_command(command)
                if isinstance(command, Stop):
                    self._exit_after(EXIT_STOPPED, self._stop_grace_s)
                    return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if not self._returned.is_set():
            self._on_lost(why)

    def _on_command(self, command: RankCommand) -> None:
        match command:
            case FreeBuffer():
                if self._staging is not None:
                    self._staging.free(command.buffer)
            case ReadAdapter():
                if self._adapters is None:
                    raise ValueError("a command for adapters came before this rank has joined")
                self._adapters.read(command)
            case (
                Begin()
                | Stop()
                | Step()
                | Mark()
                | StateBuffers()
                | PutAdapter()
                | Capture()
                | DropCaptures()
                | GatherPart()
                | ScatterPart()
                | ClearBuffer()
            ):
                self._commands.put(command)
            case _:
                self._on_transport_command(command)

    def _on_transport_command(self, command: TransportCommand) -> None:
        if self._transports is None:
            raise ValueError("a command for the transport came before this rank has joined")
        self._transports.handle(command, self._answer, lambda: self._answer(Posted(call=command.call)))

    def _answer(self, answer: Answer) -> None:
        """May be called on any thread. A connection that cannot be written to ends for the reader, too."""
        try:
            self._connection.send(answer)
        except ConnectionFailedError as error:
            logger.warning("%s: cannot send an answer to rank 0, closing the connection: %s", self._name, error)
            self._connection.close()

    def _on_lost(self, why: str) -> None:
        logger.critical("%s: rank 0 is lost, exiting within a few seconds: %s", self._name, why)
        self._commands.put(None)
        self._exit_after(EXIT_LOST, self._grace_s)

    def _exit_after(self, status: int, grace_s: float) -> None:
        """End the process if the engine thread does not return in time."""
        if not self._returned.wait(grace_s):
            logger.critical("%s: the engine thread did not return in time, ending the process", self._name)
            self._end_process(status)


def _copy(runner: ShardRunner, staging: StagingParts, command: GatherPart | ScatterPart) -> Done:
    table = np.frombuffer(command.block_table, dtype="<i4").tolist()
    try:
        part = staging(command.buffer, command.buffer_bytes)
        if isinstance(command, GatherPart):
            checksums = tuple(runner.gather_part(table, command.start, command.end, part, command.peer, command.group))
            return Done(call=command.call, ok=True, checksums=checksums)
        runner.scatter_part(table, command.start, command.end, part, command.peer, command.group)
        return Done(call=command.call, ok=True)
    except (ValueError, RuntimeError) as error:
        if is_fatal(error):
            raise
        return Done(call=command.call, ok=False, error=f"{type(error).__name__}: {error}")
