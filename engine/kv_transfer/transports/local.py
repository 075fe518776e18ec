"""Bytes between two workers of one process: a copy when both sides are there. For tests, demos and the fake runner.

There is no thread: the second of the two calls, `send` or `recv`, makes the copy and answers both.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.kv_transfer.transport import (
    CLOSED,
    SET_UP_TIMEOUT_S,
    Checksum,
    Connector,
    Done,
    PairTransport,
    Posted,
    Received,
    Rendezvous,
    TransportError,
    ignore_posted,
    with_checksum,
)
from disagg.engine.plan import Buffer
from disagg.proto.handover import Side


@dataclass(frozen=True, slots=True)
class _Operation:
    buffer: Buffer
    nbytes: int
    done: Done
    posted: Posted = ignore_posted


@dataclass(slots=True)
class _Queues:
    """One direction of a channel. At most one of the two is not empty."""

    sends: deque[_Operation] = field(default_factory=deque)
    recvs: deque[_Operation] = field(default_factory=deque)


class _Channel:
    """What both ends share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.directions = (_Queues(), _Queues())


class LocalTransport(PairTransport):
    """One end of a channel: rank 0 is P, rank 1 is D."""

    name = "local"

    def __init__(self, channel: _Channel, rank: int, checksum: Checksum) -> None:
        self._channel = channel
        self._checksum = checksum
        self._outgoing = channel.directions[rank]
        self._incoming = channel.directions[1 - rank]

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        self._meet(_Operation(buffer, nbytes, done), self._outgoing.sends, self._outgoing)

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        received = with_checksum(done, buffer, nbytes, self._checksum)
        self._meet(_Operation(buffer, nbytes, received, posted), self._incoming.recvs, self._incoming)

    @override
    def close(self) -> None:
        """Closes the other end too."""
        with self._channel.lock:
            self._channel.closed = True
            pending = [op for queues in self._channel.directions for op in (*queues.sends, *queues.recvs)]
            for queues in self._channel.directions:
                queues.sends.clear()
                queues.recvs.clear()
        for operation in pending:
            operation.done(False, CLOSED)

    def _meet(self, operation: _Operation, mine: deque[_Operation], queues: _Queues) -> None:
        with self._channel.lock:
            error = CLOSED if self._channel.closed else ""
            answered: tuple[_Operation, ...] = (operation,)
            if not error:
                mine.append(operation)
                operation.posted()
                if not (queues.sends and queues.recvs):
                    return
                send, recv = queues.sends.popleft(), queues.recvs.popleft()
                answered = (send, recv)
                error = _copy(send, recv)
        for each in answered:
            each.done(not error, error)


def _copy(send: _Operation, recv: _Operation) -> str:
    """Why it was not done; empty if it was."""
    if send.nbytes != recv.nbytes:
        return f"{send.nbytes} bytes were sent where {recv.nbytes} were expected"
    recv.buffer[: recv.nbytes] = send.buffer[: send.nbytes]
    return ""


class _Meeting:
    def __init__(self) -> None:
        self.channel = _Channel()
        self.both_here = threading.Barrier(2)


class LocalRendezvous(Rendezvous):
    """D's end of the set-up, found by its address within the process."""

    _all: ClassVar[dict[str, LocalRendezvous]] = {}
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._meetings: dict[str, _Meeting] = {}
        self._address = f"local-{next(self._numbers)}"
        self._all[self._address] = self

    @property
    @override
    def address(self) -> str:
        return self._address

    @override
    def accept(self, pair_name: str) -> LocalTransport:
        return self._meet(pair_name, 1, self._secret)

    @override
    def close(self) -> None:
        self._all.pop(self._address, None)
        with self._lock:
            meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.both_here.abort()

    @classmethod
    def connect(cls, pair_name: str, address: str, *, secret: ClusterSecret, side: Side = "sender") -> LocalTransport:
        """P's end of a pair, or that of a rank of D beside the one whose rendezvous this is.

        Raises:
            TransportError: if no such rendezvous is open in this process, or D does not come in time.
        """
        rendezvous = cls._all.get(address)
        if rendezvous is None:
            raise TransportError(f"no rendezvous {address!r} in this process")
        return rendezvous._meet(pair_name, 0 if side == "sender" else 1, secret)

    def _meet(self, pair_name: str, rank: int, secret: ClusterSecret) -> LocalTransport:
        with self._lock:
            meeting = self._meetings.setdefault(pair_name, _Meeting())
        try:
            meeting.both_here.wait(SET_UP_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise TransportError(f"the other side of {pair_name!r} did not come") from None
        finally:
            with self._lock:
                self._meetings.pop(pair_name, None)
        return LocalTransport(meeting.channel, rank, Checksum.of_secret(secret))


def local_connector(secret: ClusterSecret, side: Side) -> Connector:
    """One side's way to the other."""
    return functools.partial(LocalRendezvous.connect, secret=secret, side=side)
