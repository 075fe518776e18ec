"""How the two sides of a shared-memory channel come to know each other: who may, and what they show.

One message each way, typed and bounded, with descriptors beside it: the side's ring, and from the sender also the
receiver's ends of the lanes there and back.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import msgspec

from disagg.engine.kv_transfer.transports.shm_lane import NUM_SLOTS, PIECE_BYTES, new_ring
from disagg.engine.kv_transfer.transports.transport import TransportError
from disagg.engine.plan import Buffer
from disagg.proto.handover import Side

HELLO_TIMEOUT_S = 1.0
"""How long a connection may keep the rendezvous waiting for its hello."""
_MAX_BYTES = 4096
_NUM_DESCRIPTORS: dict[Side, int] = {"sender": 3, "receiver": 1}
_USER = struct.Struct("3i")
"""struct ucred: process, user, group."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a side says. Geometry that differs would be garbage without a sign."""

    pair_name: str
    side: Side
    piece_bytes: int = PIECE_BYTES
    num_slots: int = NUM_SLOTS

    def send(self, connection: socket.socket, descriptors: list[int]) -> None:
        """Say it. Raises OSError if the other end has gone."""
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
    """See that the other end is a process of our own user; raises `TransportError`."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size)
    process, user, _ = _USER.unpack(credentials)
    if user != os.geteuid():
        raise TransportError(f"process {process} belongs to user {user}, not to {os.geteuid()}")


def say(connection: socket.socket, pair_name: str, side: Side, *links: int) -> Buffer:
    """Say hello with a new ring and the links; the ring. Raises OSError."""
    descriptor, ring = new_ring()
    try:
        Hello(pair_name=pair_name, side=side).send(connection, [descriptor, *links])
    finally:
        os.close(descriptor)
    return ring


def hear(connection: socket.socket) -> tuple[Hello, list[int]]:
    """A hello and its descriptors, which the caller closes.

    Raises:
        TransportError: if it is not what this code says.
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


def hear_from(connection: socket.socket, side: Side) -> list[int]:
    """What that side brought; see `hear`."""
    hello, descriptors = hear(connection)
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
        raise TransportError("the other side went away")
    try:
        hello = msgspec.msgpack.decode(frame, type=Hello)
    except msgspec.MsgspecError as error:
        raise TransportError(f"not a hello: {error}") from error
    if num_descriptors != _NUM_DESCRIPTORS[hello.side]:
        raise TransportError(f"a {hello.side} came with {num_descriptors} descriptors")
    if (hello.piece_bytes, hello.num_slots) != (PIECE_BYTES, NUM_SLOTS):
        raise TransportError(f"the other side's ring has {hello.num_slots} slots of {hello.piece_bytes} bytes")
    return hello
