"""The ring of a shared-memory lane: two ends over a link that is a pair of queues, one step at a time."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from disagg.engine.kv_transfer.transport import UNKEYED, TransportError
from disagg.engine.kv_transfer.transports.shm_lane import (
    NUM_SLOTS,
    PIECE_BYTES,
    RING_BYTES,
    BrokenLaneError,
    Operation,
    RingReceiver,
    RingSender,
    new_ring,
    peers_ring,
)

Bytes = npt.NDArray[np.uint8]


class Link:
    """One end of a message link. Where nothing has come it lets the other side act, instead of waiting."""

    def __init__(self) -> None:
        self.come: deque[bytes] = deque()
        self.sent: list[bytes] = []
        self.peer: Link | None = None
        self.act: Callable[[], None] = lambda: None

    def send(self, message: bytes) -> int:
        self.sent.append(message)
        if self.peer is not None:
            self.peer.come.append(message)
        return len(message)

    def recv(self, limit: int) -> bytes:
        if not self.come:
            self.act()
        return self.come.popleft()[:limit] if self.come else b""


def linked() -> tuple[Link, Link]:
    one, other = Link(), Link()
    one.peer, other.peer = other, one
    return one, other


def operation(buffer: Bytes, nbytes: int | None = None) -> Operation:
    def never(*_: object) -> None:
        raise AssertionError("a ring answers nobody")

    return Operation(buffer, len(buffer) if nbytes is None else nbytes, never)


def content(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def ends(ring: Bytes) -> tuple[RingSender, RingReceiver, Link, Link]:
    sender_link, receiver_link = linked()
    links: tuple[Any, Any] = (sender_link, receiver_link)
    return (
        RingSender(links[0], ring),
        RingReceiver(links[1], ring, UNKEYED, threading.Event()),
        sender_link,
        receiver_link,
    )


SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7]


def test_operations_come_out_as_they_went_in_round_the_ring_and_again() -> None:
    send, receive, _, _ = ends(np.zeros(RING_BYTES, np.uint8))
    for seed in range(5 * NUM_SLOTS):
        sent = content(seed, SIZES[seed % len(SIZES)])
        got = np.full(len(sent) + 2, 0xEE, np.uint8)
        assert send(operation(sent)) == 0
        assert receive(operation(got, len(sent))) == UNKEYED(sent)
        assert got.tobytes() == sent.tobytes() + b"\xee\xee"


def test_a_sender_stops_at_a_full_ring_until_slots_are_freed() -> None:
    send, receive, sender_link, _ = ends(np.zeros(RING_BYTES, np.uint8))
    for seed in range(NUM_SLOTS):
        send(operation(content(seed, 10)))
    waited: list[int] = []

    def receive_some() -> None:
        waited.append(len(sender_link.sent))
        for seed in range(NUM_SLOTS // 4):
            got = np.zeros(10, np.uint8)
            assert receive(operation(got)) == UNKEYED(content(seed, 10))

    sender_link.act = receive_some
    send(operation(content(99, 10)))
    assert waited == [NUM_SLOTS]
    for _ in range(NUM_SLOTS // 4 - 1):  # the others that were freed at the same time
        send(operation(content(99, 10)))
    assert waited == [NUM_SLOTS]


def test_a_size_that_differs_is_an_error_that_says_so() -> None:
    send, receive, _, _ = ends(np.zeros(RING_BYTES, np.uint8))
    send(operation(content(1, 5)))
    target = np.zeros(6, np.uint8)
    with pytest.raises(BrokenLaneError, match="5 bytes were sent where 6 were expected"):
        receive(operation(target))
    assert not target.any()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (b"", "the peer ended the channel"),
        (b"short", "a message of 5 bytes where 16 were expected"),
        (struct.pack("<QQQ", 1, 1, 1), "a message of 17 bytes where 16 were expected"),
        (struct.pack("<QQ", 5, 4), "reported 4 bytes where 5 were expected"),
        (struct.pack("<QQ", 5, 2**63), "bytes where 5 were expected"),
    ],
)
def test_a_receiver_believes_no_nonsense(message: bytes, error: str) -> None:
    _, receive, _, receiver_link = ends(np.zeros(RING_BYTES, np.uint8))
    receiver_link.come.append(message)
    with pytest.raises(BrokenLaneError, match=error):
        receive(operation(np.zeros(5, np.uint8)))


@pytest.mark.parametrize("num_freed", [0, NUM_SLOTS + 1, 2**64 - 1])
def test_a_sender_believes_no_nonsense(num_freed: int) -> None:
    send, _, sender_link, _ = ends(np.zeros(RING_BYTES, np.uint8))
    for _ in range(NUM_SLOTS):
        send(operation(content(0, 1)))
    sender_link.come.append(struct.pack("<Q", num_freed))
    with pytest.raises(BrokenLaneError, match=f"freed {num_freed} slots"):
        send(operation(content(0, 1)))


def test_a_ring_is_one_memory_for_both_and_only_the_sender_writes() -> None:
    descriptor, ours = new_ring()
    theirs = peers_ring(descriptor)
    ours[7] = 42
    assert theirs[7] == 42
    assert not theirs.flags.writeable
    assert len(ours) == len(theirs) == RING_BYTES


def test_memory_that_could_shrink_is_no_ring() -> None:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, RING_BYTES)
    with pytest.raises(TransportError, match="seals 0x0"):
        peers_ring(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_descriptor_that_is_no_memory_is_no_ring() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(TransportError, match="cannot be used"):
        peers_ring(reader)


def test_a_ring_of_another_size_is_no_ring() -> None:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(TransportError, match=f"has {mmap.PAGESIZE} bytes"):
        peers_ring(descriptor)
