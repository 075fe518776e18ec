"""Bytes between processes over TCP, by gloo: one process group of two ranks (0 is P, 1 is D) per pair, without a world.

Each pair exchanges gloo's addresses at D's `RendezvousServer`, which takes processes of the cluster only; then both
ranks prove themselves once more over gloo's own connection. Buffers are uint8 numpy arrays, wrapped without a copy.

What gloo does not do by itself, and how it is done here:

- A group's constructor waits for the other rank as long as an operation may take. Both sides first meet in the store,
  with a deadline of their own, and the group's timeout is the set-up's; every operation gets one instead that is longer
  than any regular transfer, because a dead peer is noticed by the control stream.
- An operation is known to be complete only inside `wait()`, so each direction in use has one thread that waits.
- Neither `abort()` nor `shutdown()` wakes a blocked wait. An operation that times out does: it closes the connection,
  and with it all operations that have not begun. `close()` posts one that must time out.
- An operation of which some bytes have moved is not woken by the end of its connection, whatever ended it: it sleeps
  until its own limit. So no thread waits for a payload. Behind each one travels an empty message, for which the
  receiver waits, and which it answers with an empty message, for which the sender waits. Neither can be half done:

      sender    payload ──> end ──> waits for the answer        receiver    waits for the end ──> answer

  A connection keeps the order, so the end shows that the payload is there, and the answer that it was taken. Where a
  wait fails instead, gloo has closed its socket, and touches no buffer any more.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from disagg.engine.io.rendezvous import MemberStore, gloo_group, member_store
from disagg.engine.kv_transfer.transport import (
    CLOSED,
    RANK_OF,
    Checksum,
    Done,
    PairTransport,
    Posted,
    Received,
    TransportError,
    ignore_posted,
    no_checksum,
    with_checksum,
)
from disagg.engine.kv_transfer.transports.settings import ServerConnector, ServerRendezvous, TransportSettings
from disagg.engine.plan import Buffer
from disagg.proto.handover import Side

_BYTES_TAG, _CLOSE_TAG, _END_TAG, _ANSWER_TAG = 1, 2, 3, 4
_MAX_POSTED = 4
"""Sends that gloo is given at once; the rest wait in our queue."""
_SHORT_SEND_BYTES = 2 << 20
"""Posted on the caller's thread, where nothing is before it: what a socket takes at once costs that thread less than it
costs a stream to wait until another one runs."""
OPERATION_TIMEOUT_S = 600.0
"""How long one operation may take once it is waited for; the time for which a machine stands still counts. The state
machines give a pair up much earlier."""
_AT_ONCE = datetime.timedelta(milliseconds=1)


class GlooRendezvous(ServerRendezvous["GlooTransport"]):
    """D's end of the set-up: the two members of a pair's gloo group find each other at its server."""

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings, _form)


class GlooConnector(ServerConnector["GlooTransport"]):
    """P's way to any D, or that of a rank of D to the ranks of P."""

    def __init__(self, settings: TransportSettings, side: Side = "sender") -> None:
        super().__init__(settings, _form, side)


def _form(settings: TransportSettings, pair_name: str, address: str, side: Side) -> GlooTransport:
    rank, secret, timeout_s = RANK_OF[side], settings.secret, settings.set_up_timeout_s
    try:
        with member_store(pair_name, address, secret, rank, 2, timeout_s) as store:
            group = gloo_group(store, secret, pair_name, rank, 2, settings.host, timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise TransportError(f"could not form the pair {pair_name!r} at {address!r}: {error}") from error
    return GlooTransport(group, store, 1 - rank, settings.checksum)


@dataclass(slots=True)
class _Operation:
    tensor: torch.Tensor
    done: Done
    posted: Posted = ignore_posted
    works: Sequence[Any] = ()
    """What gloo returned when the operation was posted; gloo drops an operation without a reference to this."""
    awaited: Any = None
    """The one of them that is waited for; None until it is posted."""
    error: str = ""


class _Lane(ABC):
    """One direction: operations in order, and the thread that waits for them."""

    def __init__(self, group: Any, peer: int, name: str) -> None:
        self._group: Any = group
        self._peer = peer
        self._name = name
        self._queue: deque[_Operation] = deque()
        self._num_under_way = 0
        """Queued or posted, and not over."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, operation: _Operation) -> None:
        """Queue it; where the channel is closed, it is answered at once."""
        with self._changed:
            if not self._closed:
                self._accept(operation)
                self._queue.append(operation)
                self._num_under_way += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
        operation.done(False, CLOSED)

    def stop(self) -> None:
        """Accept no more operations."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until everything is answered (from a `Done` of this lane: return at once), and let go of the group."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._group = None

    @abstractmethod
    def _accept(self, operation: _Operation) -> None:
        """On the caller's thread, before the operation is queued."""

    @abstractmethod
    def _start(self, group: Any, operation: _Operation) -> None:
        """Give gloo all that belongs to the operation. Raises `RuntimeError` if the connection is broken."""

    @abstractmethod
    def _complete(self) -> None:
        """What follows an operation that is complete. Before its `Done`, which may close the channel."""

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
                if operation.awaited is None and not operation.error:
                    self._post(operation)
            self._finish(posted.popleft())

    def _post(self, operation: _Operation) -> None:
        group = self._group
        if self._closed or group is None:
            operation.error = CLOSED
            return
        try:
            self._start(group, operation)
        except RuntimeError as error:
            operation.error = str(error)
        else:
            operation.posted()

    def _finish(self, operation: _Operation) -> None:
        if not operation.error:
            try:
                operation.awaited.wait(datetime.timedelta(seconds=OPERATION_TIMEOUT_S))
            except RuntimeError as error:
                operation.error = str(error)
            else:
                self._complete()
        operation.works, operation.awaited = (), None
        with self._changed:
            self._num_under_way -= 1
        operation.done(not operation.error, operation.error)

    def _send(self, group: Any, tensor: torch.Tensor, tag: int) -> Any:
        return group.send([tensor], self._peer, tag)

    def _recv(self, group: Any, tensor: torch.Tensor, tag: int) -> Any:
        return group.recv([tensor], self._peer, tag)


class _Sends(_Lane):
    """A send may copy megabytes into the socket, so the thread posts it, unless it is short."""

    def _accept(self, operation: _Operation) -> None:
        if not self._num_under_way and operation.tensor.numel() <= _SHORT_SEND_BYTES:
            self._post(operation)

    def _start(self, group: Any, operation: _Operation) -> None:
        operation.awaited = self._recv(group, _empty(), _ANSWER_TAG)
        payload = self._send(group, operation.tensor, _BYTES_TAG)
        operation.works = payload, self._send(group, _empty(), _END_TAG)

    def _complete(self) -> None:
        """The receiver has answered: nothing is left to do."""


class _Recvs(_Lane):
    """A receive is posted at once, so that the peer may send."""

    def __init__(self, group: Any, peer: int, name: str) -> None:
        super().__init__(group, peer, name)
        self._answers: deque[Any] = deque(maxlen=2 * _MAX_POSTED)
        """The last ones. When an answer leaves here, the peer has it: without it, it would not have sent so much."""

    @override
    def join(self) -> None:
        super().join()
        self._answers.clear()

    def _accept(self, operation: _Operation) -> None:
        self._post(operation)

    def _start(self, group: Any, operation: _Operation) -> None:
        payload = self._recv(group, operation.tensor, _BYTES_TAG)
        operation.awaited = self._recv(group, _empty(), _END_TAG)
        operation.works = (payload,)

    def _complete(self) -> None:
        group = self._group
        if group is not None:  # else an earlier `Done` closed the channel
            with contextlib.suppress(RuntimeError):  # the bytes are there; the next operation fails
                self._answers.append(self._send(group, _empty(), _ANSWER_TAG))


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


class GlooTransport(PairTransport):
    """A gloo process group of two, with a thread for each direction."""

    name = "gloo"

    def __init__(self, group: Any, store: MemberStore, peer: int, checksum: Checksum) -> None:
        self._group: Any = group
        self._store = store
        """The group's C++ side calls it, and does not keep it alive."""
        self._checksum_of: Callable[[Buffer], int] = checksum
        self._peer = peer
        self._close_lock = threading.Lock()
        self._sends = _Sends(group, peer, "kv-send")
        self._recvs = _Recvs(group, peer, "kv-recv")

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        self._sends.submit(_Operation(torch.from_numpy(buffer[:nbytes]), done))

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        received = with_checksum(done, buffer, nbytes, self._checksum_of)
        self._recvs.submit(_Operation(torch.from_numpy(buffer[:nbytes]), received, posted))

    @override
    def skip_checksums(self) -> None:
        self._checksum_of = no_checksum

    @override
    def close(self) -> None:
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
