"""Rank 0's connections to its followers: commands out, answers in.

    attach(rank, connection)      as each follower connects, before it has loaded its model
    wait_joined()           all have connected and loaded
    broadcast, call         one thread for each follower reads its answers
    close()                 `Stop` to all; they end

The ranks end together: when one is lost (its connection ends, it reports a failure, or a frame that makes
no sense) all connections are closed, which ends the others, every open call is answered as failed, and `on_lost` is
called.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from disagg.connections.shell.connection import Connection, ConnectionFailedError
from disagg.engine.parallel.interfaces import Followers, Reply
from disagg.engine.rank_messages import Answer, Done, Failed, Join, Posted, RankCall, RankCommand, Stop
from disagg.proto.messages import decoder

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3.0
"""How long followers may take to end after `Stop`; then their connections are closed, which ends them at once."""


class RankLostError(RuntimeError):
    """A rank of the worker is lost, which ends the worker."""


@dataclass(slots=True)
class _OpenCall:
    rank: int
    reply: Reply
    on_posted: Callable[[], None] | None


class ConnectedFollowers(Followers):
    """Followers in other processes, each over a connection. `on_lost` is called at most once, on any thread, and not
    before `wait_joined` returned."""

    def __init__(self, size: int, on_lost: Callable[[BaseException], None]) -> None:
        self.size = size
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._connections: dict[int, Connection] = {}
        self._readers: list[threading.Thread] = []
        self._joins: dict[int, Join] = {}
        self._calls: dict[int, _OpenCall] = {}
        self._numbers = itertools.count(1)
        self._lost: RankLostError | None = None
        self._is_complete = False
        self._is_closing = False

    # ------------------------------------------------------------ join and close

    def attach(self, rank: int, connection: Connection) -> None:
        """A follower has connected."""
        reader = threading.Thread(target=self._read, args=(rank, connection), name=f"rank-{rank}", daemon=True)
        with self._changed:
            is_late = self._is_closing or self._lost is not None
            if not is_late:
                self._connections[rank] = connection
                self._readers.append(reader)
                reader.start()
                self._changed.notify_all()
        if is_late:
            connection.close()

    def wait_joined(self, connect_timeout_s: float, load_timeout_s: float) -> tuple[Join, ...]:
        """Wait until all followers have connected and then until they have loaded; their `Join`s by rank.

        Raises:
            RankLostError: one was lost, or it takes longer than so many seconds.
        """
        with self._changed:
            self._wait_for_all(self._connections, connect_timeout_s, "connected")
            self._wait_for_all(self._joins, load_timeout_s, "loaded its model")
            self._is_complete = True
            return tuple(self._joins[rank] for rank in range(1, self.size))

    def _wait_for_all(self, present: Mapping[int, object], timeout_s: float, what: str) -> None:
        self._changed.wait_for(lambda: self._lost or len(present) == self.size - 1, timeout_s)
        if self._lost is not None:
            raise self._lost
        missing = [str(rank) for rank in range(1, self.size) if rank not in present]
        if missing:
            raise RankLostError(f"rank {', '.join(missing)} has not {what} after {timeout_s:.0f} s")

    def close(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Send `Stop` to all, wait until they have ended, and close their connections. Idempotent."""
        with self._changed:
            first, self._is_closing = not self._is_closing, True
            readers = list(self._readers)
        if first:
            self.broadcast(Stop())
        deadline = time.monotonic() + timeout_s
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self._end(RankLostError("the worker stops"))
        for reader in readers:
            reader.join()

    # ------------------------------------------------------------ commands

    @override
    def broadcast(self, command: RankCommand) -> None:
        with self._changed:
            connections = [] if self._lost is not None else list(self._connections.items())
        for rank, connection in connections:
            self._send(rank, connection, command)

    @override
    def call(self, rank: int, command: RankCall, reply: Reply, on_posted: Callable[[], None] | None = None) -> None:
        number = next(self._numbers)
        call = _OpenCall(rank, reply, on_posted)
        with self._changed:
            lost = self._lost
            if lost is None:
                self._calls[number] = call
                connection = self._connections[rank]
        if lost is not None:
            reply(Done(call=number, ok=False, error=str(lost)))
        else:
            self._send(rank, connection, msgspec.structs.replace(command, call=number))

    def _send(self, rank: int, connection: Connection, command: RankCommand) -> None:
        try:
            connection.send(command)
        except ConnectionFailedError as error:
            self._lose(rank, str(error))

    # ------------------------------------------------------------ answers

    def _read(self, rank: int, connection: Connection) -> None:
        decode = decoder(Answer).decode
        try:
            while (frame := connection.receive()) is not None:
                self._on_answer(rank, decode(frame))
            self._lose(rank, "it ended its connection")
        except Exception as error:
            self._lose(rank, f"{type(error).__name__}: {error}")

    def _on_answer(self, rank: int, answer: Answer) -> None:
        match answer:
            case Join():
                self._on_join(rank, answer)
            case Posted():
                self._on_posted(rank, answer.call)
            case Done():
                self._on_done(rank, answer)
            case Failed():
                self._lose(rank, answer.error)

    def _on_join(self, rank: int, join: Join) -> None:
        with self._changed:
            if join.rank != rank or rank in self._joins:
                raise ValueError(f"it joined as rank {join.rank}, or twice")
            self._joins[rank] = join
            self._changed.notify_all()

    def _on_posted(self, rank: int, number: int) -> None:
        with self._changed:
            call = self._open_call(rank, number)
            on_posted = None
            if call is not None:
                on_posted, call.on_posted = call.on_posted, None
        if on_posted is not None:
            on_posted()

    def _on_done(self, rank: int, done: Done) -> None:
        with self._changed:
            call = self._open_call(rank, done.call)
            if call is not None:
                del self._calls[done.call]
        if call is not None:
            call.reply(done)

    def _open_call(self, rank: int, number: int) -> _OpenCall | None:
        """With the lock held. None where the call was answered already because a rank is lost."""
        call = self._calls.get(number)
        if call is not None and call.rank == rank:
            return call
        if self._lost is not None:
            return None
        raise ValueError(f"it answers call {number}, which was not made")

    # ------------------------------------------------------------ loss

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            if self._is_closing:
                return  # Ranks end one by one now, and the others still get `Stop`.
            is_complete = self._is_complete
        error = RankLostError(f"rank {rank} is lost: {why}")
        if self._end(error) and is_complete:
            self._on_lost(error)

    def _end(self, error: RankLostError) -> bool:
        """Close all connections and answer all calls; whether there was something to end."""
        with self._changed:
            if self._lost is not None:
                return False
            self._lost = error
            calls, self._calls = self._calls, {}
            self._changed.notify_all()
        for connection in self._connections.values():
            connection.close()
        for number, call in calls.items():
            call.reply(Done(call=number, ok=False, error=str(error)))
        return True
