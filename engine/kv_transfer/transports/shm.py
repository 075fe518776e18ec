"""Bytes between processes of one host, through memory that both see. Linux only.

    D         listens on an abstract Unix socket, which leaves no file; its address names this host, too
    sender    connects; its hello has the pair's name, its ring, and a socket for each direction
    receiver  D itself, or a rank of D that connects as the sender does; brings its ring
    D         gives each what the other brought; these two are then connected, by a lane (`shm_lane.py`) each way

Whoever connects shows its user id, and so does D: the kernel vouches for it, and only processes of one user share
memory. Nothing needs to be cleaned up after a process that was killed: rings and sockets end with their last user, and
the other side sees the end at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec
from typing_extensions import override

from disagg.engine.kv_transfer.transport import (
    CLOSED,
    Checksum,
    Done,
    PairTransport,
    Posted,
    Received,
    Rendezvous,
    TransportError,
    ignore_posted,
)
from disagg.engine.kv_transfer.transports.settings import TransportSettings
from disagg.engine.kv_transfer.transports.shm_lane import (
    NUM_SLOTS,
    PIECE_BYTES,
    Lane,
    Operation,
    RingReceiver,
    RingSender,
    new_ring,
    peers_ring,
)
from disagg.engine.plan import Buffer
from disagg.proto.handover import Side

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 1.0
"""How long a connection may keep the rendezvous waiting for its hello."""
_MAX_BYTES = 4096
_NUM_DESCRIPTORS: dict[Side, int] = {"sender": 3, "receiver": 1}
_USER = struct.Struct("3i")
"""struct ucred: process, user, group."""


class ShmTransport(PairTransport):
    """Either end of two rings in shared memory, one for each direction.

    Args:
        send_link, send_ring: of the lane to the peer.
        recv_link, recv_ring: of the lane from the peer.
    """

    name = "shm"

    def __init__(
        self,
        send_link: socket.socket,
        send_ring: Buffer,
        recv_link: socket.socket,
        recv_ring: Buffer,
        checksum: Checksum,
    ) -> None:
        self._sends = Lane(send_link, "kv-send", RingSender(send_link, send_ring), self._break)
        self._skips_checksums = threading.Event()
        receiver = RingReceiver(recv_link, recv_ring, checksum, self._skips_checksums)  # a lane drops it at its end
        self._recvs = Lane(recv_link, "kv-recv", receiver, self._break)

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        self._sends.submit(Operation(buffer, nbytes, lambda ok, error, _: done(ok, error)))

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        """The ring holds what comes early, so the peer may send at once."""
        if not self._recvs.has_ended:
            posted()
        self._recvs.submit(Operation(buffer, nbytes, done))

    @override
    def skip_checksums(self) -> None:
        self._skips_checksums.set()

    @override
    def close(self) -> None:
        self._break(CLOSED)
        for lane in (self._sends, self._recvs):
            lane.join()

    def _break(self, reason: str) -> None:
        """If one lane cannot go on, the pair cannot. Both lanes have the reason before the peer sees an end, because it
        ends the other lane then."""
        for lane in (self._sends, self._recvs):
            lane.refuse(reason)
        for lane in (self._sends, self._recvs):
            lane.shut_down()


class ShmRendezvous(Rendezvous):
    """D's end of the set-up: a listening socket, and the thread that takes the hellos.

    Raises:
        RuntimeError: if this machine is not a Linux.
    """

    def __init__(self, settings: TransportSettings) -> None:
        self._checksum = settings.checksum
        host = host_token()
        name = f"disagg-kv-{secrets.token_hex(16)}"
        self._address = f"{host}/{name}"
        self._timeout_s = settings.set_up_timeout_s
        self._changed = threading.Condition()
        self._arrived: dict[tuple[str, Side], _Arrival] = {}
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._listen, name="kv-shm-listen", daemon=True)
        self._thread.start()

    @property
    @override
    def address(self) -> str:
        return self._address

    @override
    def accept(self, pair_name: str) -> ShmTransport:
        with self._changed:
            key: tuple[str, Side] = (pair_name, "sender")
            self._changed.wait_for(lambda: self._closed or key in self._arrived, self._timeout_s)
            if self._closed:
                raise TransportError("the rendezvous is closed")
            sender = self._arrived.pop(key, None)
        if sender is None:
            raise TransportError(f"no sender of {pair_name!r} at {self._address!r} after {self._timeout_s:g} s")
        try:
            ring = send_hello(sender.connection, pair_name, "receiver")
            return _as_receiver(ring, sender.take_descriptors(), self._checksum)
        except (OSError, TransportError) as error:
            raise TransportError(f"could not form the pair {pair_name!r}: {error}") from error
        finally:
            sender.close()

    @override
    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            arrived, self._arrived = list(self._arrived.values()), {}
            self._changed.notify_all()
        for arrival in arrived:
            arrival.close()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    logger.warning("transport shm: the rendezvous cannot take a connection, trying again: %s", error)
                    with self._changed:  # such as when no descriptor is free: in a moment one may be
                        self._changed.wait_for(lambda: self._closed, 0.1)
                continue
            try:
                self._take(connection)
            except (OSError, TransportError) as error:
                logger.warning("transport shm: refused a connection to this worker's rendezvous: %s", error)
                connection.close()

    def _take(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_TIMEOUT_S)
        check_user(connection)
        hello, descriptors = receive_hello(connection)
        arrival = _Arrival(connection, hello, descriptors)
        other: _Arrival | None = None
        with self._changed:
            late = [key for key, each in self._arrived.items() if arrival.since - each.since > self._timeout_s]
            for key in late:  # its other side never came, and it has timed out
                self._arrived.pop(key).close()
            is_known = self._closed or arrival.key in self._arrived
            if not is_known:
                other = self._arrived.pop(arrival.other_key, None)
            if other is None and not is_known:
                self._arrived[arrival.key] = arrival
                self._changed.notify_all()
        if is_known:
            arrival.close()
            raise TransportError(
                f"the {hello.side} of {hello.pair_name!r} is here already, or the rendezvous is closed"
            )
        if other is not None:
            _connect_sides(arrival, other)


class _Arrival:
    """A side whose hello came, and the descriptors that it brought."""

    def __init__(self, connection: socket.socket, hello: Hello, descriptors: list[int]) -> None:
        self.hello = hello
        self.since = time.monotonic()
        self.key: tuple[str, Side] = (hello.pair_name, hello.side)
        self.other_key: tuple[str, Side] = (hello.pair_name, "receiver" if hello.side == "sender" else "sender")
        self.connection = connection
        self._descriptors = descriptors

    def pass_on(self, other: _Arrival) -> None:
        """Pass on what the other side brought. Raises OSError if this one has gone."""
        other.hello.send(self.connection, other._descriptors)

    def take_descriptors(self) -> list[int]:
        """The descriptors, which are the caller's now."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """End the connection, and close what was not taken."""
        self.connection.close()
        close_all(self.take_descriptors())


def _connect_sides(one: _Arrival, other: _Arrival) -> None:
    """Give each side what the other brought. Where one has gone the other sees its sockets end."""
    for to, of in ((one, other), (other, one)):
        try:
            to.pass_on(of)
        except OSError as error:
            logger.warning("transport shm: the %s of pair %r has gone: %s", to.hello.side, to.hello.pair_name, error)
    one.close()
    other.close()


class ShmConnector:
    """The way to any D of this host, of its senders or of its own ranks.

    Raises:
        RuntimeError: if this machine is not a Linux.
    """

    def __init__(self, settings: TransportSettings, side: Side = "sender") -> None:
        self._checksum = settings.checksum
        self._host = host_token()
        self._timeout_s = settings.set_up_timeout_s
        self._side: Side = side

    def __call__(self, pair_name: str, address: str) -> ShmTransport:
        """Join D's rendezvous at `address`; blocks until D accepts the pair. Raises `TransportError` if it is on
        another host or does not in time."""
        host, _, name = address.partition("/")
        if host != self._host:
            raise TransportError(
                f"{address!r} is on another host or in another network namespace (this is {self._host}); transport "
                "shm joins processes of one host only"
            )
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(f"\0{name}")
                check_user(connection)
                if self._side == "sender":
                    return _meet_as_sender(connection, pair_name, self._checksum)
                return _meet_as_receiver(connection, pair_name, self._checksum)
        except (OSError, ValueError, TransportError) as error:
            raise TransportError(f"could not form the pair {pair_name!r} at {address!r}: {error}") from error


def _meet_as_sender(connection: socket.socket, pair_name: str, checksum: Checksum) -> ShmTransport:
    with contextlib.ExitStack() as ours:
        out, theirs_in = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        back, theirs_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(out)
        ours.enter_context(back)
        with theirs_in, theirs_out:
            ring = send_hello(connection, pair_name, "sender", theirs_in.fileno(), theirs_out.fileno())
        (their_ring,) = receive_hello_from(connection, "receiver")
        recv_ring = peers_ring(their_ring)
        ours.pop_all()
    return ShmTransport(out, ring, back, recv_ring, checksum)


def _meet_as_receiver(connection: socket.socket, pair_name: str, checksum: Checksum) -> ShmTransport:
    ring = send_hello(connection, pair_name, "receiver")
    return _as_receiver(ring, receive_hello_from(connection, "sender"), checksum)


def _as_receiver(ring: Buffer, descriptors: list[int], checksum: Checksum) -> ShmTransport:
    """The receiver's end, of what the sender brought."""
    their_ring, link_in, link_out = descriptors
    recv_link, send_link = socket.socket(fileno=link_in), socket.socket(fileno=link_out)
    try:
        return ShmTransport(send_link, ring, recv_link, peers_ring(their_ring), checksum)
    except TransportError:
        recv_link.close()
        send_link.close()
        raise


# ---------------------------------------------------------------- hello: one message each way, with descriptors


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message of each side. A ring of another geometry would be read as garbage without an error."""

    pair_name: str
    side: Side
    piece_bytes: int = PIECE_BYTES
    num_slots: int = NUM_SLOTS

    def send(self, connection: socket.socket, descriptors: list[int]) -> None:
        """Send this side with its descriptors. Raises OSError if the other end has gone."""
        socket.send_fds(connection, [msgspec.msgpack.encode(self)], descriptors)


def host_token() -> str:
    """The same text in all processes that can share memory and abstract sockets: this boot of this machine, and the
    network namespace.

    Raises:
        RuntimeError: if this machine is not a Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/net").stat().st_ino
    except OSError as error:
        raise RuntimeError(f"transport shm needs Linux with /proc; use gloo ({error})") from error
    return f"{boot}-{namespace}"


def check_user(connection: socket.socket) -> None:
    """Raises `TransportError` unless the other end is a process of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size)
    process, user, _ = _USER.unpack(credentials)
    if user != os.geteuid():
        raise TransportError(f"process {process} belongs to user {user}, not to {os.geteuid()}")


def send_hello(connection: socket.socket, pair_name: str, side: Side, *links: int) -> Buffer:
    """Send a hello with a new ring and the links; returns the ring. Raises OSError."""
    descriptor, ring = new_ring()
    try:
        Hello(pair_name=pair_name, side=side).send(connection, [descriptor, *links])
    finally:
        os.close(descriptor)
    return ring


def receive_hello(connection: socket.socket) -> tuple[Hello, list[int]]:
    """A hello and its descriptors, which the caller closes.

    Raises:
        TransportError: if it is none, or of another geometry.
        OSError: if it does not come in time.
    """
    frame, descriptors, _, _ = socket.recv_fds(
        connection, _MAX_BYTES, max(_NUM_DESCRIPTORS.values()), socket.MSG_CMSG_CLOEXEC
    )
    try:
        return _checked(frame, len(descriptors)), descriptors
    except TransportError:
        close_all(descriptors)
        raise


def receive_hello_from(connection: socket.socket, side: Side) -> list[int]:
    """What that side brought; see `receive_hello`."""
    hello, descriptors = receive_hello(connection)
    if hello.side != side:
        close_all(descriptors)
        raise TransportError(f"a {hello.side} answered instead of a {side}")
    return descriptors


def close_all(descriptors: list[int]) -> None:
    """Close what another process sent."""
    for descriptor in descriptors:
        os.close(descriptor)


def _checked(frame: bytes, num_descriptors: int) -> Hello:
    if not frame:
        raise TransportError("the other side closed the connection")
    try:
        hello = msgspec.msgpack.decode(frame, type=Hello)
    except msgspec.MsgspecError as error:
        raise TransportError(f"not a hello: {error}") from error
    if num_descriptors != _NUM_DESCRIPTORS[hello.side]:
        raise TransportError(f"a {hello.side} came with {num_descriptors} descriptors")
    if (hello.piece_bytes, hello.num_slots) != (PIECE_BYTES, NUM_SLOTS):
        raise TransportError(f"the other side's ring has {hello.num_slots} slots of {hello.piece_bytes} bytes")
    return hello
