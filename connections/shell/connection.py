"""Frames between two ranks of a worker over one TCP connection: a length of four bytes, then msgpack.

A connection is made by `connect` or accepted by `group.RankRendezvous`, begins with the handshake of `handshake.py`,
and then carries `messages.py`. One thread reads; any thread may write. A connection that fails in one direction is of
no use in the other: `close` ends both, and wakes the reader.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Protocol

import msgspec
from typing_extensions import override

from disagg.connections.addresses import split_address
from disagg.proto.messages import MAX_FRAME_BYTES, encode

WRITE_TIMEOUT_S = 30
"""How long a frame may wait for a reader that has stopped reading; the connection is then broken."""

_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


class ConnectionFailedError(RuntimeError):
    """The connection is broken or closed, or what came over it is no frame."""


class Connection(Protocol):
    """One end of a connection. `receive` belongs to one thread, the rest is thread-safe."""

    def send(self, message: msgspec.Struct) -> None:
        """Write one frame, behind those before it.

        Raises:
            ConnectionFailedError: if it cannot be written, or is too large.
        """
        ...

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
        """Read the next frame; None when the other side has ended the connection between two frames.

        Raises:
            ConnectionFailedError: if the connection breaks, or a frame is larger than `max_bytes`.
        """
        ...

    def close(self) -> None:
        """End the connection; a `receive` that waits returns or raises. Idempotent."""
        ...


class SocketConnection(Connection):
    """A `Connection` over a connected TCP socket, which belongs to it from here on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", WRITE_TIMEOUT_S, 0))
        self._socket = sock
        self._received = bytearray()
        self._write_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._is_reading = False
        self._is_closed = False

    @override
    def send(self, message: msgspec.Struct) -> None:
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise ConnectionFailedError(f"a frame of {len(frame)} bytes is more than {MAX_FRAME_BYTES}")
        with self._write_lock:
            try:
                self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
            except OSError as error:
                raise ConnectionFailedError(f"cannot write: {error}") from error

    @override
    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
        with self._state_lock:
            if self._is_closed:
                raise ConnectionFailedError("the connection is closed")
            self._is_reading = True
        try:
            return self._receive(max_bytes)
        except OSError as error:
            raise ConnectionFailedError(f"cannot read: {error}") from error
        finally:
            self._end_reading()

    def _receive(self, max_bytes: int) -> bytes | None:
        head = self._take(_LENGTH.size)
        if head is None:
            if self._received:
                raise ConnectionFailedError("the connection broke in the middle of a frame")
            return None
        nbytes = _LENGTH.unpack(head)[0]
        if nbytes > max_bytes:
            raise ConnectionFailedError(f"a frame of {nbytes} bytes is more than {max_bytes}")
        frame = self._take(nbytes)
        if frame is None:
            raise ConnectionFailedError("the connection broke in the middle of a frame")
        return frame

    def _take(self, nbytes: int) -> bytes | None:
        """The next bytes; None if the connection ends before."""
        while len(self._received) < nbytes:
            piece = self._socket.recv(_READ_BYTES)
            if not piece:
                return None
            self._received += piece
        taken = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return taken

    @override
    def close(self) -> None:
        with self._state_lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):  # the other side was quicker
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._is_reading:
                self._close_socket()

    def _end_reading(self) -> None:
        with self._state_lock:
            self._is_reading = False
            if self._is_closed:
                self._close_socket()

    def _close_socket(self) -> None:
        """Close the descriptor once it is unused: its number may be another socket's at once."""
        with self._write_lock:
            self._socket.close()


def connect(address: str, timeout_s: float) -> SocketConnection:
    """Connect to the rank that listens at `host:port`.

    Raises:
        ConnectionFailedError: if it is not accepted in time.
    """
    host, port = split_address(address)
    try:
        return SocketConnection(socket.create_connection((host, int(port)), timeout=timeout_s))
    except (OSError, ValueError) as error:
        raise ConnectionFailedError(f"no rank 0 at {address!r}: {error}") from error
