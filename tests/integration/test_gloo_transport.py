"""The gloo transport between two real processes on the loopback interface.

The parent is D. The child is P: it does what a script of (operation, argument) pairs says, so that each test reads in
one place.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from disagg.engine.kv_transfer import gloo
from disagg.engine.kv_transfer.checksum import checksum
from disagg.engine.kv_transfer.gloo import GlooConnector, GlooRendezvous, GlooTransport
from disagg.engine.kv_transfer.transport import TransportError
from disagg.engine.process_groups import StoreHost

HOST = "127.0.0.1"
SIZES = [1, 2, 7, 4095, 4097, 65_537, 1_000_003, (4 << 20) - 1]
ANSWER_S = 20.0
Bytes = npt.NDArray[np.uint8]
Script = list[tuple[str, Any]]


def content(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Answers:
    """Collects what `done` was told."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()

    def __call__(self, ok: bool, error: str, _checksum: int = 0) -> None:
        self._queue.put((ok, error))

    def next(self) -> tuple[bool, str]:
        return self._queue.get(timeout=ANSWER_S)

    def all_ok(self, count: int) -> bool:
        return [self.next() for _ in range(count)] == [(True, "")] * count


def play(address: str, pair_name: str, script: Script, link: Connection) -> None:
    """P's process."""
    torch.set_num_threads(1)
    transport = GlooConnector(HOST)(pair_name, address)
    answers = Answers()
    for operation, argument in script:
        match operation:
            case "send":
                buffers = [content(seed, size) for seed, size in enumerate(argument)]
                for buffer in buffers:
                    transport.send(buffer, len(buffer), answers)
                link.send(answers.all_ok(len(buffers)))
            case "recv":
                buffers = [np.zeros(size, np.uint8) for size in argument]
                for buffer in buffers:
                    transport.recv(buffer, len(buffer), answers)
                assert answers.all_ok(len(buffers))
                link.send([checksum(buffer) for buffer in buffers])
            case "send_and_die":
                transport.send(content(0, argument), argument, answers)
                link.send("sending")
                os.kill(os.getpid(), signal.SIGKILL)
            case "wait":
                link.recv()
            case "close":
                transport.close()
                link.send([thread.name for thread in threading.enumerate()])


class Peer:
    """A running P, and D's end of the pair."""

    def __init__(self, rendezvous: GlooRendezvous, script: Script, pair_name: str = "pair-1") -> None:
        context = multiprocessing.get_context("spawn")
        self.link, other = context.Pipe()
        self.process = context.Process(target=play, args=(rendezvous.address, pair_name, script, other), daemon=True)
        self.process.start()
        other.close()
        self.transport = rendezvous.accept(pair_name)

    def hears(self) -> Any:
        assert self.link.poll(ANSWER_S)
        return self.link.recv()

    def end(self) -> None:
        self.transport.close()
        self.process.kill()
        self.process.join()
        self.link.close()


@pytest.fixture
def rendezvous() -> Iterator[GlooRendezvous]:
    """One on loopback; afterwards no thread of a channel and no socket is left."""
    before = set(threading.enumerate())
    rendezvous = GlooRendezvous(HOST)
    yield rendezvous
    rendezvous.close()
    assert set(threading.enumerate()) <= before


def receive(transport: GlooTransport, sizes: list[int]) -> list[Bytes]:
    """Post all receives at once, with room to spare behind each, and wait for them."""
    answers = Answers()
    targets = [np.full(size + 3, 0xEE, np.uint8) for size in sizes]
    for target, size in zip(targets, sizes, strict=True):
        transport.recv(target, size, answers)
    assert answers.all_ok(len(sizes))
    assert all(target[size:].tolist() == [0xEE] * 3 for target, size in zip(targets, sizes, strict=True))
    return [target[:size] for target, size in zip(targets, sizes, strict=True)]


def test_chunks_of_odd_sizes_both_ways(rendezvous: GlooRendezvous) -> None:
    peer = Peer(rendezvous, [("send", SIZES), ("recv", SIZES), ("close", None)])
    for seed, received in enumerate(receive(peer.transport, SIZES)):
        assert checksum(received) == checksum(content(seed, SIZES[seed]))
    assert peer.hears() is True
    answers = Answers()
    for seed, size in enumerate(SIZES):
        peer.transport.send(content(seed + 50, size), size, answers)
    assert answers.all_ok(len(SIZES))
    assert peer.hears() == [checksum(content(seed + 50, size)) for seed, size in enumerate(SIZES)]
    assert peer.hears() == ["MainThread"]
    peer.end()


def test_pairs_stand_side_by_side(rendezvous: GlooRendezvous) -> None:
    first = Peer(rendezvous, [("send", [1000]), ("wait", None)], "pair-1")
    second = Peer(rendezvous, [("send", [2000]), ("wait", None)], "pair-2")
    assert checksum(receive(second.transport, [2000])[0]) == checksum(content(0, 2000))
    second.end()
    assert checksum(receive(first.transport, [1000])[0]) == checksum(content(0, 1000))
    first.end()


def test_a_peer_that_stops_is_no_error_until_we_close(rendezvous: GlooRendezvous) -> None:
    peer = Peer(rendezvous, [("wait", None)])
    answers = Answers()
    posted: list[int] = []
    for number in range(3):
        peer.transport.recv(np.zeros(100, np.uint8), 100, answers, functools.partial(posted.append, number))
        assert posted[-1] == number
        peer.transport.send(np.zeros(8 << 20, np.uint8), 8 << 20, answers)
    with pytest.raises(queue.Empty):
        answers._queue.get(timeout=0.2)
    start = time.monotonic()
    peer.transport.close()
    assert time.monotonic() - start < ANSWER_S
    assert [answers.next()[0] for _ in range(6)] == [False] * 6
    peer.transport.close()
    peer.transport.recv(np.zeros(1, np.uint8), 1, answers, functools.partial(posted.append, 3))
    peer.transport.send(np.zeros(1, np.uint8), 1, answers)
    assert [answers.next() for _ in range(2)] == [(False, "the channel is closed")] * 2
    assert posted == [0, 1, 2]  # each before `recv` returned; not the last, which was not posted
    peer.end()


@pytest.mark.parametrize("num_bytes", [100, 16 << 20])
def test_a_killed_peer_is_an_error_and_not_a_hang(
    rendezvous: GlooRendezvous, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "OPERATION_TIMEOUT_S", 3.0)
    peer = Peer(rendezvous, [("wait", None), ("send_and_die", num_bytes)])
    answers = Answers()
    for _ in range(3):
        peer.transport.recv(np.zeros(num_bytes, np.uint8), num_bytes, answers)
    peer.link.send("go")
    peer.process.join(ANSWER_S)
    assert peer.process.exitcode == -signal.SIGKILL
    # With gloo a death in the middle of a transfer may go unseen; closing ends it, or the operation's own limit.
    peer.transport.close()
    results = [answers.next()[0] for _ in range(3)]
    assert results[1:] == [False, False]
    peer.end()


def test_the_peers_close_ends_our_operations(rendezvous: GlooRendezvous) -> None:
    peer = Peer(rendezvous, [("wait", None), ("close", None), ("wait", None)])
    answers = Answers()
    peer.transport.recv(np.zeros(5, np.uint8), 5, answers)
    peer.link.send("go")
    peer.hears()
    assert answers.next()[0] is False
    peer.transport.send(np.zeros(5, np.uint8), 5, answers)
    assert answers.next()[0] is False
    peer.end()


def test_many_rounds_leave_no_descriptor(rendezvous: GlooRendezvous) -> None:
    def one_round(number: int) -> None:
        ends: dict[str, GlooTransport] = {}
        name = f"round-{number}"
        thread = threading.Thread(target=lambda: ends.update(d=rendezvous.accept(name)))
        thread.start()
        ends["p"] = GlooConnector(HOST)(name, rendezvous.address)
        thread.join()
        answers = Answers()
        ends["p"].send(content(1, 5000), 5000, answers)
        assert checksum(receive(ends["d"], [5000])[0]) == checksum(content(1, 5000))
        ends["d"].close()
        ends["p"].close()

    one_round(0)
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(1, 6):
        one_round(number)
    gc.collect()
    deadline = time.monotonic() + ANSWER_S
    while len(list(Path("/proc/self/fd").iterdir())) > before and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_it_listens_on_the_given_address_only(rendezvous: GlooRendezvous) -> None:
    peer = Peer(rendezvous, [("wait", None)])
    listening = listening_addresses()
    assert listening
    assert {address for address, _ in listening} == {HOST}
    assert int(rendezvous.address.rpartition(":")[2]) in {port for _, port in listening}
    peer.end()


def listening_addresses() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process listens, from /proc."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw, _, port = fields[1].rpartition(":")
                packed = bytes.fromhex(raw)
                address = socket.inet_ntoa(packed[::-1]) if table == "tcp" else f"tcp6 {raw}"
                found.add((address, int(port, 16)))
    return found


def test_nobody_there_is_an_error_that_says_so() -> None:
    with socket.create_server((HOST, 0)) as taken:
        free_port = taken.getsockname()[1]
    with pytest.raises(TransportError, match="pair-1"):
        GlooConnector(HOST)("pair-1", f"{HOST}:{free_port}")
    with pytest.raises(TransportError, match="nonsense"):
        GlooConnector(HOST)("pair-1", "nonsense")


def test_a_peer_that_does_not_come_is_waited_for_only_so_long() -> None:
    rendezvous = GlooRendezvous(HOST, set_up_timeout_s=0.2)
    with pytest.raises(TransportError, match="nobody met 'pair-1'"):
        rendezvous.accept("pair-1")
    with pytest.raises(TransportError, match="nobody met 'pair-2'"):
        GlooConnector(HOST, set_up_timeout_s=0.2)("pair-2", rendezvous.address)
    rendezvous.close()


def test_operations_may_take_longer_than_the_set_up() -> None:
    rendezvous = GlooRendezvous(HOST, set_up_timeout_s=2.0)
    connector = GlooConnector(HOST, set_up_timeout_s=2.0)
    ends: dict[str, GlooTransport] = {}
    thread = threading.Thread(target=lambda: ends.update(d=rendezvous.accept("pair-1")))
    thread.start()
    ends["p"] = connector("pair-1", rendezvous.address)
    thread.join()
    answers, target = Answers(), np.zeros(10, np.uint8)
    ends["d"].recv(target, 10, answers)
    with pytest.raises(queue.Empty):
        answers._queue.get(timeout=2.5)
    ends["p"].send(content(3, 10), 10, answers)
    assert answers.all_ok(2)
    assert target.tolist() == content(3, 10).tolist()
    for end in ends.values():
        end.close()
    rendezvous.close()


def test_a_closed_rendezvous_takes_nobody() -> None:
    rendezvous = GlooRendezvous(HOST)
    rendezvous.close()
    with pytest.raises(TransportError, match="closed"):
        rendezvous.accept("pair-1")


def test_an_address_that_is_not_ours_is_an_os_error() -> None:
    with pytest.raises(OSError, match="address"):
        StoreHost("192.0.2.1")
