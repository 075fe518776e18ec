"""One direction of a shared-memory channel: a ring of pieces that the sender fills and the receiver empties.

    sender    piece of the buffer -> free slot of the ring -> "so many bytes of the operation are there"
    receiver  slot -> its buffer, with the checksum in passing -> now and then "so many slots are free again"

These messages go over a Unix socket: a side that waits sleeps, and the end of the peer, however it ended, is the end
of the socket. The ring is memory without a name (a memfd): it is gone with its last user. Both sides copy at the same
time, one piece apart. The sender's buffer is free as soon as its last piece is in the ring.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from disagg.engine.kv_transfer.transport import CLOSED, PEER_ENDED, Checksum, Received, TransportError
from disagg.engine.plan import Buffer

if sys.platform != "linux":
    raise RuntimeError("transport shm needs Linux; use gloo")

PIECE_BYTES = 256 << 10
NUM_SLOTS = 32
"""8 MiB in all: two chunks of the default size."""
RING_BYTES = PIECE_BYTES * NUM_SLOTS

_FILLED = struct.Struct("<QQ")
"""Sender to receiver: bytes of the operation, and how many of them have been put into the ring."""
_FREED = struct.Struct("<Q")
"""Receiver to sender: slots that are free again."""
_FREED_AT_A_TIME = NUM_SLOTS // 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A ring that could shrink would end its other user by SIGBUS."""


class BrokenLaneError(Exception):
    """The lane is broken; the text has the cause."""


def new_ring() -> tuple[int, Buffer]:
    """The descriptor of a new ring, for the peer, and its memory. The caller closes the descriptor.

    Raises:
        OSError: if there is no memory.
    """
    descriptor = os.memfd_create("disagg-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, RING_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, np.frombuffer(mmap.mmap(descriptor, RING_BYTES), np.uint8)
    except BaseException:
        os.close(descriptor)
        raise


def peers_ring(descriptor: int) -> Buffer:
    """The peer's ring, to read. Closes the descriptor.

    Raises:
        TransportError: if it is not what `new_ring` makes.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        num_bytes = os.fstat(descriptor).st_size
        if seals & _SEALS != _SEALS or num_bytes != RING_BYTES:
            raise TransportError(f"the peer's ring has {num_bytes} bytes and seals {seals:#x}, not {RING_BYTES} bytes")
        return np.frombuffer(mmap.mmap(descriptor, RING_BYTES, prot=mmap.PROT_READ), np.uint8)
    except OSError as error:
        raise TransportError(f"the peer's ring cannot be used: {error}") from error
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Operation:
    """A send or a receive. `done` gets the checksum of what came; 0 for a send."""

    buffer: Buffer
    nbytes: int
    done: Received


class Lane:
    """Operations in order, and the thread that carries them out, which starts with the first one.

    Args:
        link: the direction's socket, of type SOCK_SEQPACKET.
        carry_out: does one operation and gives its checksum; raises `BrokenLaneError` or OSError.
        on_broken: called with the cause when that happens, before anything is answered.
    """

    def __init__(
        self, link: socket.socket, name: str, carry_out: Callable[[Operation], int], on_broken: Callable[[str], None]
    ) -> None:
        self._link = link
        self._name = name
        self._carry_out = carry_out
        self._on_broken = on_broken
        self._queue: deque[Operation] = deque()
        self._changed = threading.Condition()
        self._ended = ""
        """Why there are no more operations."""
        self._thread: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Whether what is submitted is refused."""
        return bool(self._ended)

    def submit(self, operation: Operation) -> None:
        """Queue it, or answer it if the lane has ended."""
        with self._changed:
            ended = self._ended
            if not ended:
                self._queue.append(operation)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify()
        if ended:
            operation.done(False, ended, 0)

    def refuse(self, reason: str) -> None:
        """No more operations; the one under way goes on until `shut_down`. Idempotent: the first reason counts."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify()

    def shut_down(self) -> None:
        """Waits for the peer end, on both sides. Idempotent, does not wait."""
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            """The peer was first."""

    def join(self) -> None:
        """After both: wait until everything is answered (from a `done` of this lane: return at once)."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._link.close()
        self._carry_out = _no_more  # lets go of the ring

    def _run(self) -> None:
        while (operation := self._next()) is not None:
            try:
                checksum = self._carry_out(operation)
            except (BrokenLaneError, OSError) as error:
                self._on_broken(PEER_ENDED if isinstance(error, ConnectionError) else str(error))
                operation.done(False, self._ended, 0)
            else:
                operation.done(True, "", checksum)
        for operation in self._queue:
            operation.done(False, self._ended, 0)
        self._queue.clear()

    def _next(self) -> Operation | None:
        """The next operation; None when the lane has ended."""
        with self._changed:
            while not (self._queue or self._ended):
                self._changed.wait()
            return None if self._ended else self._queue.popleft()


def _no_more(_: Operation) -> int:
    raise BrokenLaneError(CLOSED)


class RingSender:
    """What a sending lane does with an operation. One thread at a time."""

    def __init__(self, link: socket.socket, ring: Buffer) -> None:
        self._link = link
        self._ring = ring
        self._num_free = NUM_SLOTS
        self._next_slot = 0

    def __call__(self, operation: Operation) -> int:
        """Put all pieces into the ring."""
        nbytes, end = operation.nbytes, 0
        while True:
            start, end = end, min(end + PIECE_BYTES, nbytes)
            at = self._slot() * PIECE_BYTES
            self._ring[at : at + end - start] = operation.buffer[start:end]
            self._link.send(_FILLED.pack(nbytes, end))
            if end == nbytes:
                return 0

    def _slot(self) -> int:
        """A slot that is free."""
        while not self._num_free:
            message = _next_message(self._link, _FREED)
            (num_freed,) = _FREED.unpack(message)
            if not 0 < num_freed <= NUM_SLOTS:
                raise BrokenLaneError(f"the peer freed {num_freed} slots of {NUM_SLOTS}")
            self._num_free = num_freed
        self._num_free -= 1
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % NUM_SLOTS
        return slot


class RingReceiver:
    """What a receiving lane does with an operation. One thread at a time."""

    def __init__(self, link: socket.socket, ring: Buffer, checksum: Checksum, skips_checksums: threading.Event) -> None:
        """Checksums are 0 from when `skips_checksums` is set."""
        self._link = link
        self._ring = ring
        self._seed = checksum.seed
        self._skips_checksums = skips_checksums
        self._num_taken = 0
        """Free slots that were not reported to the sender yet."""
        self._next_slot = 0

    def __call__(self, operation: Operation) -> int:
        """Take all pieces out of the ring; their checksum, taken of our copy: the ring is the peer's. 0 where it is
        skipped."""
        nbytes, end, seen = operation.nbytes, 0, xxhash.xxh3_64(seed=self._seed)
        skips = self._skips_checksums.is_set()
        while True:
            start, end = end, min(end + PIECE_BYTES, nbytes)
            self._wait_for_piece(nbytes, end)
            at = self._next_slot * PIECE_BYTES
            piece = operation.buffer[start:end]
            piece[:] = self._ring[at : at + end - start]
            self._free_slot()
            if not skips:
                seen.update(memoryview(piece))
            if end == nbytes:
                return 0 if skips else seen.intdigest()

    def _wait_for_piece(self, nbytes: int, end: int) -> None:
        """Wait for the message that the next piece is there."""
        sent_nbytes, sent_end = _FILLED.unpack(_next_message(self._link, _FILLED))
        if sent_nbytes != nbytes:
            raise BrokenLaneError(f"{sent_nbytes} bytes were sent where {nbytes} were expected")
        if sent_end != end:
            raise BrokenLaneError(f"the peer reported {sent_end} bytes where {end} were expected")

    def _free_slot(self) -> None:
        self._next_slot = (self._next_slot + 1) % NUM_SLOTS
        self._num_taken += 1
        if self._num_taken == _FREED_AT_A_TIME:
            self._link.send(_FREED.pack(self._num_taken))
            self._num_taken = 0


def _next_message(link: socket.socket, form: struct.Struct) -> bytes:
    message = link.recv(form.size + 1)
    if not message:
        raise BrokenLaneError(PEER_ENDED)
    if len(message) != form.size:
        raise BrokenLaneError(f"the peer sent a message of {len(message)} bytes where {form.size} were expected")
    return message
