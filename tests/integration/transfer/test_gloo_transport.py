"""The gloo transport between two real processes on the loopback interface."""

from __future__ import annotations

import functools
import gc
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from disagg.engine.io.rendezvous import RendezvousServer
from disagg.engine.kv_transfer.transport import PairTransport, TransportError
from disagg.engine.kv_transfer.transports.gloo import GlooConnector, GlooRendezvous, GlooTransport
from tests.support import transport_peer
from tests.support.secret import SECRET, checksum
from tests.support.sockets import listening_addresses
from tests.support.transport_peer import ANSWER_S, HOST, Answers, Bytes, content
from tests.support.waiting import until

SIZES = [1, 2, 7, 4095, 4097, 65_537, 1_000_003, (4 << 20) - 1]
OK = (True, "", 0)
LARGE = 128 << 20
"""More than the sockets of both sides take, and than moves in a moment."""

Peer = functools.partial(transport_peer.Peer, "gloo")


@pytest.fixture
def rendezvous() -> Iterator[GlooRendezvous]:
    """One on loopback; afterwards no thread of a channel and no socket is left."""
    before = set(threading.enumerate())
    rendezvous = GlooRendezvous(HOST, SECRET)
    yield rendezvous
    rendezvous.close()
    until(lambda: set(threading.enumerate()) <= before, "a thread is left")


def receive(transport: PairTransport, sizes: list[int]) -> list[Bytes]:
    """Post all receives at once, with room to spare behind each, and wait for them."""
    answers = Answers()
    targets = [np.full(size + 3, 0xEE, np.uint8) for size in sizes]
    for target, size in zip(targets, sizes, strict=True):
        transport.recv(target, size, answers)
    assert answers.all(len(sizes)) == [(True, "", checksum(t[:n])) for t, n in zip(targets, sizes, strict=True)]
    assert all(target[size:].tolist() == [0xEE] * 3 for target, size in zip(targets, sizes, strict=True))
    return [target[:size] for target, size in zip(targets, sizes, strict=True)]


def test_chunks_of_odd_sizes_both_ways(rendezvous: GlooRendezvous) -> None:
    peer = Peer(rendezvous, [("send", SIZES), ("recv", SIZES), ("close", None)])
    for seed, received in enumerate(receive(peer.transport, SIZES)):
        assert checksum(received) == checksum(content(seed, SIZES[seed]))
    assert peer.hears() == [OK] * len(SIZES)
    answers = Answers()
    for seed, size in enumerate(SIZES):
        peer.transport.send(content(seed + 50, size), size, answers)
    assert answers.all(len(SIZES)) == [OK] * len(SIZES)
    assert peer.hears() == [(True, "", checksum(content(seed + 50, size))) for seed, size in enumerate(SIZES)]
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
        answers.next(0.2)
    start = time.monotonic()
    peer.transport.close()
    assert time.monotonic() - start < ANSWER_S
    assert len(answers.errors(6)) == 6
    peer.transport.close()
    peer.transport.recv(np.zeros(1, np.uint8), 1, answers, functools.partial(posted.append, 3))
    peer.transport.send(np.zeros(1, np.uint8), 1, answers)
    assert answers.errors(2) == ["the channel is closed"] * 2
    assert posted == [0, 1, 2]  # each before `recv` returned; not the last, which was not posted
    peer.end()


def test_a_peer_that_dies_before_it_sends_is_an_error_at_once(rendezvous: GlooRendezvous) -> None:
    peer = Peer(rendezvous, [("wait", None), ("die", None)])
    answers = Answers()
    for _ in range(3):
        peer.transport.recv(np.zeros(100, np.uint8), 100, answers)
    peer.link.send("go")
    assert len(answers.errors(3)) == 3  # without a close
    peer.end()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receive_that_breaks_off_in_its_middle_wakes_whoever_waits(
    rendezvous: GlooRendezvous, ending: signal.Signals
) -> None:
    """A death is noticed without a close; a stopped peer is no error until we close."""
    for number in range(5):
        peer = Peer(rendezvous, [("wait", None), ("send_into", LARGE), ("wait", None)], f"pair-{number}")
        answers, buffer = Answers(), np.zeros(LARGE, np.uint8)
        peer.transport.recv(buffer, LARGE, answers)
        peer.link.send("go")
        while not buffer[:100].any():
            time.sleep(0.0001)
        os.kill(pid_of(peer), ending)
        if buffer[-100:].any():
            peer.end()  # this process slept too long: all of it is there
            continue
        check_broken(peer, answers, ending)
        return
    pytest.fail("it was never in the middle")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_send_that_breaks_off_in_its_middle_wakes_whoever_waits(
    rendezvous: GlooRendezvous, ending: signal.Signals
) -> None:
    peer = Peer(rendezvous, [("recv_into", LARGE), ("tell", "posted"), ("wait", None)])
    assert peer.hears() == "posted"
    os.kill(pid_of(peer), signal.SIGSTOP)
    answers = Answers()
    peer.transport.send(np.zeros(LARGE, np.uint8), LARGE, answers)
    with pytest.raises(queue.Empty):
        answers.next(0.1)
    check_broken(peer, answers, ending)


def pid_of(peer: transport_peer.Peer) -> int:
    assert peer.process.pid is not None
    return peer.process.pid


def check_broken(peer: transport_peer.Peer, answers: Answers, ending: signal.Signals) -> None:
    """The one operation under way is answered, and closing takes no time."""
    os.kill(pid_of(peer), ending)
    if ending is signal.SIGKILL:
        assert len(answers.errors(1)) == 1
    start = time.monotonic()
    peer.transport.close()
    assert time.monotonic() - start < ANSWER_S
    if ending is signal.SIGSTOP:
        assert len(answers.errors(1)) == 1
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
        ends["p"] = GlooConnector(HOST, SECRET)(name, rendezvous.address)
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


@pytest.fixture
def others() -> set[tuple[str, int]]:
    """Where this process listens already, because of other tests."""
    return listening_addresses()


def test_it_listens_on_the_given_address_only(
    others: set[tuple[str, int]], rendezvous: GlooRendezvous
) -> None:  # In this order.
    peer = Peer(rendezvous, [("wait", None)])
    listening = listening_addresses() - others
    assert listening
    assert {address for address, _ in listening} == {HOST}
    assert int(rendezvous.address.rpartition(":")[2]) in {port for _, port in listening}
    peer.end()


def test_nobody_there_is_an_error_that_says_so() -> None:
    with socket.create_server((HOST, 0)) as taken:
        free_port = taken.getsockname()[1]
    with pytest.raises(TransportError, match="pair-1"):
        GlooConnector(HOST, SECRET)("pair-1", f"{HOST}:{free_port}")
    with pytest.raises(TransportError, match="nonsense"):
        GlooConnector(HOST, SECRET)("pair-1", "nonsense")


def test_a_peer_that_does_not_come_is_waited_for_only_so_long() -> None:
    rendezvous = GlooRendezvous(HOST, SECRET, set_up_timeout_s=0.2)
    with pytest.raises(TransportError, match=r"'pair-1' .*\['here/0'\] did not come in 0\.2 s"):
        rendezvous.accept("pair-1")
    with pytest.raises(TransportError, match=r"'pair-2' .*\['here/1'\] did not come in 0\.2 s"):
        GlooConnector(HOST, SECRET, set_up_timeout_s=0.2)("pair-2", rendezvous.address)
    rendezvous.close()


def test_operations_may_take_longer_than_the_set_up() -> None:
    rendezvous = GlooRendezvous(HOST, SECRET, set_up_timeout_s=2.0)
    connector = GlooConnector(HOST, SECRET, set_up_timeout_s=2.0)
    ends: dict[str, GlooTransport] = {}
    thread = threading.Thread(target=lambda: ends.update(d=rendezvous.accept("pair-1")))
    thread.start()
    ends["p"] = connector("pair-1", rendezvous.address)
    thread.join()
    answers, target = Answers(), np.zeros(10, np.uint8)
    ends["d"].recv(target, 10, answers)
    with pytest.raises(queue.Empty):
        answers.next(2.5)
    ends["p"].send(content(3, 10), 10, answers)
    assert sorted(answers.all(2)) == [OK, (True, "", checksum(target))]
    assert target.tolist() == content(3, 10).tolist()
    for end in ends.values():
        end.close()
    rendezvous.close()


def test_a_closed_rendezvous_takes_nobody() -> None:
    rendezvous = GlooRendezvous(HOST, SECRET)
    rendezvous.close()
    with pytest.raises(TransportError, match="closed"):
        rendezvous.accept("pair-1")


def test_an_address_that_is_not_ours_is_an_os_error() -> None:
    with pytest.raises(OSError, match="address"):
        RendezvousServer("192.0.2.1", SECRET)
