"""Bytes between processes over TCP, by gloo: one process group of two ranks (0 is P, 1 is D) per pair, without a world.

D hosts one TCPStore on a socket that it bound itself (left alone, a TCPStore listens on all interfaces); each pair
meets under its own prefix there. Buffers are uint8 numpy arrays, wrapped without a copy.

What gloo does not do by itself, and how it is done here:

- A group's constructor waits for the other rank as long as an operation may take. Both sides first meet in the store,
  with a deadline of their own, and the group's timeout is the set-up's; every operation gets one instead that is longer
  than any honest transfer, because whether the peer lives is for the control stream to say.
- A receive knows that it is complete only inside `wait()`, so each direction in use has one thread that waits.
- Neither `abort()` nor `shutdown()` wakes a blocked wait. An operation that times out does: it closes the connection,
  and with it all operations on it. `close()` posts one that must time out. Where gloo has seen the connection break by
  itself, in the middle of a payload, that one is refused instead and the receive under way may not be woken: then its
  own limit ends it.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from disagg.engine.kv_transfer.transport import (
    CLOSED,
    SET_UP_TIMEOUT_S,
    Done,
    Posted,
    Received,
    TransportError,
    nobody_waits,
    with_checksum,
)
from disagg.engine.plan import Buffer
from disagg.engine.process_groups import StoreHost, gloo_group, meet
from disagg.proto.handover import Side

RANK_OF: dict[Side, int] = {"sender": 0, "receiver": 1}
"""In a pair's group."""

_BYTES_TAG, _CLOSE_TAG = 1, 2
_MAX_POSTED = 4
"""Sends that gloo is given at once; the rest wait in our queue."""
OPERATION_TIMEOUT_S = 60.0
"""How long one operation may take once it is waited for. The state machines give a pair up much earlier."""
_AT_ONCE = datetime.timedelta(milliseconds=1)


def meet_pair(pair_name: str, address: str, rank: int, timeout_s: float) -> Any:
    """Wait in the store at `address` until the other rank is there too; the pair's own part of the store.

    Raises:
        TransportError: if it does not come in time, or there is no store.
    """
    try:
        return meet(pair_name, address, rank, 2, timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise TransportError(f"nobody met {pair_name!r} at {address!r}: {error}") from error


def check_open(store: StoreHost) -> None:
    """Raises:
    TransportError: if nobody can meet there any more.
    """
    if not store.is_open:
        raise TransportError("the rendezvous is closed")


class GlooRendezvous:
    """D's meeting point."""

    def __init__(self, host: str, set_up_timeout_s: float = SET_UP_TIMEOUT_S) -> None:
        self._host = host
        self._timeout_s = set_up_timeout_s
        self._store = StoreHost(host)

    @property
    def address(self) -> str:
        """See `Rendezvous.address`."""
        return self._store.address

    def accept(self, pair_name: str) -> GlooTransport:
        """See `Rendezvous.accept`."""
        check_open(self._store)
        return _join(pair_name, self._store.address, self._host, "receiver", self._timeout_s)

    def close(self) -> None:
        """See `Rendezvous.close`."""
        self._store.close()


class GlooConnector:
    """P's way to any D, or that of a rank of D to the ranks of P."""

    def __init__(self, host: str, set_up_timeout_s: float = SET_UP_TIMEOUT_S, side: Side = "sender") -> None:
        self._host = host
        self._timeout_s = set_up_timeout_s
        self._side: Side = side

    def __call__(self, pair_name: str, address: str) -> GlooTransport:
        """See `Connector`."""
        return _join(pair_name, address, self._host, self._side, self._timeout_s)


def _join(pair_name: str, address: str, host: str, side: Side, timeout_s: float) -> GlooTransport:
    rank = RANK_OF[side]
    store = meet_pair(pair_name, address, rank, timeout_s)
    try:
        group = gloo_group(store, rank, 2, host, timeout_s)
    except RuntimeError as error:
        raise TransportError(f"could not form the pair {pair_name!r} at {address!r}: {error}") from error
    return GlooTransport(group, 1 - rank)


@dataclass(slots=True)
class _Operation:
    tensor: torch.Tensor
    done: Done
    posted: Posted = nobody_waits
    work: Any = None
    """What gloo returned when the operation was posted."""
    error: str = ""


class _Lane:
    """One direction: operations in order, and the thread that waits for them."""

    def __init__(self, group: Any, peer: int, *, sends: bool) -> None:
        self._group: Any = group
        self._peer = peer
        self._sends = sends
        self._queue: deque[_Operation] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, operation: _Operation) -> None:
        """Queue it. A receive is posted at once, so that the peer may send; a send may copy megabytes into the socket
        and is posted by the thread."""
        with self._changed:
            if not self._closed:
                if not self._sends:
                    self._post(operation)
                self._queue.append(operation)
                if self._thread is None:
                    name = "kv-send" if self._sends else "kv-recv"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
        operation.done(False, CLOSED)

    def stop(self) -> None:
        """No more operations."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until everything is answered (from a `Done` of this lane: return at once), and let go of the group."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._group = None

    def _run(self) -> None:
        posted: deque[_Operation] = deque()
        while True:
            with self._changed:
                while not (posted or self._queue or self._closed):
                    self._changed.wait()
                while self._queue and len(posted) < _MAX_POSTED:
                    posted.append(self._queue.popleft())
            if not posted:
                return
            for operation in posted:
                if operation.work is None and not operation.error:
                    self._post(operation)
            self._finish(posted.popleft())

    def _post(self, operation: _Operation) -> None:
        group = self._group
        if self._closed or group is None:
            operation.error = CLOSED
            return
        start = group.send if self._sends else group.recv
        try:
            operation.work = start([operation.tensor], self._peer, _BYTES_TAG)
        except RuntimeError as error:
            operation.error = str(error)
        else:
            operation.posted()

    def _finish(self, operation: _Operation) -> None:
        if operation.work is not None:
            try:
                operation.work.wait(datetime.timedelta(seconds=OPERATION_TIMEOUT_S))
            except RuntimeError as error:
                operation.error = str(error)
        operation.work = None
        operation.done(not operation.error, operation.error)


class GlooTransport:
    """See `PairTransport`."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group: Any = group
        self._peer = peer
        self._close_lock = threading.Lock()
        self._sends = _Lane(group, peer, sends=True)
        self._recvs = _Lane(group, peer, sends=False)

    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        """See `PairTransport.send`."""
        self._sends.submit(_Operation(torch.from_numpy(buffer[:nbytes]), done))

    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = nobody_waits) -> None:
        """See `PairTransport.recv`."""
        received = with_checksum(done, buffer, nbytes)
        self._recvs.submit(_Operation(torch.from_numpy(buffer[:nbytes]), received, posted))

    def close(self) -> None:
        """See `PairTransport.close`."""
        with self._close_lock:
            if self._group is None:
                return
            self._sends.stop()
            self._recvs.stop()
            # Both ways in one: it times out and so closes the connection, or it finds the connection closed.
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _CLOSE_TAG).wait(_AT_ONCE)
            self._sends.join()
            self._recvs.join()
            self._group = None
