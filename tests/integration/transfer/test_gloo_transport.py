"""The gloo transport between two real processes on the loopback interface."""

from __future__ import annotations

import functools
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from disagg.engine.io.rendezvous import RendezvousServer
from disagg.engine.kv_transfer.transport import TransportError
from disagg.engine.kv_transfer.transports.gloo import GlooConnector, GlooRendezvous, GlooTransport
from disagg.engine.kv_transfer.transports.settings import TransportSettings
from tests.support import transport_peer
from tests.support.secret import SECRET, checksum
from tests.support.sockets import listening_addresses
from tests.support.transport_peer import ANSWER_S, HOST, Answers, content
from tests.support.transports import SETTINGS
from tests.support.waiting import until

OK = (True, "", 0)
LARGE = 128 << 20
"""More than the sockets of both sides take, and than moves in a moment."""

Peer = functools.partial(transport_peer.Peer, "gloo")


@pytest.fixture
def rendezvous() -> Iterator[GlooRendezvous]:
    """One on loopback; afterwards no thread of a channel and no socket is left."""
    before = set(threading.enumerate())
    rendezvous = GlooRendezvous(SETTINGS)
    yield rendezvous
    rendezvous.close()
    until(lambda: set(threading.enumerate()) <= before, "a thread is left")


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
        GlooConnector(SETTINGS)("pair-1", f"{HOST}:{free_port}")
    with pytest.raises(TransportError, match="nonsense"):
        GlooConnector(SETTINGS)("pair-1", "nonsense")


def test_operations_may_take_longer_than_the_set_up() -> None:
    rendezvous = GlooRendezvous(TransportSettings(HOST, SECRET, 2.0))
    connector = GlooConnector(TransportSettings(HOST, SECRET, 2.0))
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


def test_an_address_that_is_not_ours_is_an_os_error() -> None:
    with pytest.raises(OSError, match="address"):
        RendezvousServer("192.0.2.1", SECRET)
