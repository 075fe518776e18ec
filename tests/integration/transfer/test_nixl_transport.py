"""The transport by NIXL: between two real processes, or with both ends in this one."""

from __future__ import annotations

import functools
import gc
import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disagg.connections.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.connections.shell.connection import connect
from disagg.connections.shell.handshake import NONCE_BYTES, HandshakeError, answer
from disagg.engine.kv_transfer.transport import PEER_ENDED, TransportError
from disagg.engine.kv_transfer.transports import nixl, nixl_agent
from disagg.engine.kv_transfer.transports.nixl import Filled, NixlConnector, NixlRendezvous, NixlTransport, Taken
from disagg.engine.kv_transfer.transports.nixl_agent import NixlAgent, NixlError, region_of
from disagg.proto.messages import Message
from tests.support import transport_peer
from tests.support.secret import SECRET, checksum
from tests.support.sockets import listening_addresses
from tests.support.transport_peer import ANSWER_S, HOST, Answers, Bytes, LinkedProcess, content
from tests.support.transports import SETTINGS, needs_nixl
from tests.support.waiting import until

pytestmark = needs_nixl

LARGE = 256 << 20
KILLED_BYTES = 32 << 20
WITH_HELP = {"engine_config": "TLS=posix,self", "ucx_error_handling_mode": "none"}
"""UCX's memory channels alone: D cannot read by itself, P's side has to copy."""

Peer = functools.partial(transport_peer.Peer, "nixl")


def num_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """What is opened once: by the library at its first agent, and for processes at the first one."""
    rendezvous = NixlRendezvous(SETTINGS)
    Peer(rendezvous, []).end()
    rendezvous.close()


@pytest.fixture
def rendezvous() -> Iterator[NixlRendezvous]:
    """One on loopback; afterwards no thread or descriptor of a channel is left, and nothing in /dev/shm."""
    threads, descriptors = set(threading.enumerate()), num_descriptors()
    rendezvous = NixlRendezvous(SETTINGS)
    yield rendezvous
    rendezvous.close()
    until(lambda: set(threading.enumerate()) <= threads, "a thread is left")
    until(lambda: num_descriptors() <= descriptors, "a descriptor is left")
    assert [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("ucx")] == []


@pytest.fixture(params=[None, WITH_HELP], ids=["by itself", "with the sender's help"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How D comes to P's memory, where both are in this process."""
    if request.param is not None:
        monkeypatch.setattr(nixl_agent, "WITHIN_A_HOST", request.param)


def both(rendezvous: NixlRendezvous, name: str = "pair-1") -> tuple[NixlTransport, NixlTransport]:
    """(P's end, D's end), in this process."""
    ends: list[NixlTransport] = []
    thread = threading.Thread(target=lambda: ends.append(rendezvous.accept(name)))
    thread.start()
    p = NixlConnector(SETTINGS)(name, rendezvous.address)
    thread.join()
    return p, ends[0]


# ---------------------------------------------------------------- bytes


@pytest.mark.usefixtures("options")
def test_parts_of_one_allocation_are_sent_in_order_and_registered_once(rendezvous: NixlRendezvous) -> None:
    p, d = both(rendezvous)
    whole, received, sent = content(1, 5 << 20), Answers(), Answers()
    target = np.zeros(5 << 20, np.uint8)
    cuts = [(0, 10), (10, 1 << 20), (1 << 20, 3 << 20), (3 << 20, 5 << 20)]
    for first, last in cuts:
        d.recv(target[first:last], last - first, received)
        p.send(whole[first:last], last - first, sent)
    assert received.all(4) == [(True, "", checksum(whole[first:last])) for first, last in cuts]
    assert sent.all(4) == [(True, "", 0)] * 4
    assert target.tobytes() == whole.tobytes()
    assert [len(end._agent._owners) for end in (p, d)] == [2, 2]  # the probe's, and this one
    p.close()
    d.close()


def test_a_buffer_may_be_filled_anew_when_it_is_answered(rendezvous: NixlRendezvous) -> None:
    p, d = both(rendezvous)
    source, target, received, sent = np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8), Answers(), Answers()
    for seed in range(20):
        source[:] = content(seed, len(source))
        d.recv(target, len(target), received)
        p.send(source, len(source), sent)
        assert sent.next()[0]
        source[:] = 0xEE
        assert received.next() == (True, "", checksum(content(seed, len(source))))
    p.close()
    d.close()


def test_a_payload_waits_for_its_receive(rendezvous: NixlRendezvous) -> None:
    p, d = both(rendezvous)
    sent, received, target = Answers(), Answers(), np.zeros(50, np.uint8)
    p.send(content(1, 50), 50, sent)
    with pytest.raises(queue.Empty):
        sent.next(0.1)
    d.recv(target, 50, received)
    assert (received.next(), sent.next()) == ((True, "", checksum(content(1, 50))), (True, "", 0))
    p.close()
    d.close()


def test_what_is_corrupt_has_another_checksum(rendezvous: NixlRendezvous) -> None:
    p, d = both(rendezvous)
    source, received = content(1, 5000), Answers()
    announced = checksum(source)
    source[2500] ^= 1
    d.recv(np.zeros(5000, np.uint8), 5000, received)
    p.send(source, 5000, lambda *_: None)
    ok, _, arrived = received.next()
    assert ok
    assert arrived == checksum(source) != announced
    p.close()
    d.close()


# ---------------------------------------------------------------- ends


def test_a_killed_sender_is_noticed_at_once_and_leaves_nothing(rendezvous: NixlRendezvous) -> None:
    peer = Peer(rendezvous, [("send_into", 100), ("wait", None), ("die", None)])
    answers = Answers()
    for _ in range(3):
        peer.transport.recv(np.zeros(100, np.uint8), 100, answers)
    assert answers.next()[:2] == (True, "")
    peer.transport.send(np.zeros(100, np.uint8), 100, answers)
    peer.link.send("go")
    peer.process.join(ANSWER_S)
    assert peer.process.exitcode == -signal.SIGKILL
    errors = answers.errors(3)
    assert all(error.startswith(PEER_ENDED) for error in errors), errors
    peer.end()


def test_a_killed_receiver_is_noticed_at_once(rendezvous: NixlRendezvous) -> None:
    peer = Peer(rendezvous, [("recv_into", 100), ("wait", None), ("die", None)])
    answers = Answers()
    for _ in range(3):
        peer.transport.send(np.zeros(100, np.uint8), 100, answers)
    assert answers.next()[:2] == (True, "")
    peer.link.send("go")
    errors = answers.errors(2)
    assert all(error.startswith(PEER_ENDED) for error in errors), errors
    peer.end()


def test_a_sender_that_is_killed_while_it_is_read(rendezvous: NixlRendezvous) -> None:
    """The kill falls into the read, or before or after it: never is something else than its bytes answered ok."""
    expected = content(0, KILLED_BYTES)
    for number, delay_s in enumerate((0.0, 0.005, 0.02)):
        peer = Peer(rendezvous, [("wait", None), ("send_into", KILLED_BYTES), ("wait", None)], f"pair-{number}")
        answers, target = Answers(), np.zeros(KILLED_BYTES, np.uint8)
        peer.transport.recv(target, KILLED_BYTES, answers)
        peer.link.send("go")
        while not target[: 1 << 20].any() and delay_s:
            time.sleep(0.0005)
        time.sleep(delay_s)
        os.kill(peer.process.pid or 0, signal.SIGKILL)
        ok, error, digest = answers.next()
        assert (digest == checksum(expected)) if ok else error
        peer.end()


def _let_read(link: Connection) -> None:
    """P's process: lets D read `LARGE` bytes, and helps it as often as it is told."""
    nixl_agent.WITHIN_A_HOST = WITH_HELP
    agent, source = NixlAgent("still/sender", HOST), np.full(LARGE, 7, np.uint8)
    agent.register(source)
    link.send((agent.metadata, region_of(source)))
    agent.add_peer(link.recv())
    while times := link.recv():
        for _ in range(times):
            agent.progress()
        link.send(times)
    os._exit(0)  # UCX has crashed where an agent was closed after another had left it in the middle of a read


def test_no_read_writes_when_its_agent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """P stands still in the middle of a read, and goes on when D has closed the pair. The two are processes of their
    own, as in a cluster: with both ends in one, UCX itself has failed here."""
    monkeypatch.setattr(nixl_agent, "WITHIN_A_HOST", WITH_HELP)
    before = num_descriptors()
    p = LinkedProcess(_let_read)
    metadata, region = p.hears()
    d, target = NixlAgent("still/receiver", HOST), np.zeros(LARGE, np.uint8)
    d.register(target)
    d.add_peer(metadata)
    p.link.send(d.metadata)
    number = d.read(target, LARGE, region)
    while not target.any():  # P helps until the first bytes are here
        assert not d.is_done(number)
        p.link.send(1)
        assert p.hears() == 1
    d.close()
    assert not target[-(1 << 20) :].any(), "it was not in the middle"
    seen = checksum(target)
    p.link.send(1000)
    assert p.hears() == 1000
    assert checksum(target) == seen
    p.link.send(0)
    p.process.join(ANSWER_S)
    assert p.process.exitcode == 0
    p.end()
    assert num_descriptors() <= before
    with pytest.raises(NixlError, match="closed"):
        d.progress()


@pytest.mark.parametrize(("is_fatal", "ended"), [(True, 1), (False, 0)])
def test_a_device_that_is_lost_ends_the_process(
    rendezvous: NixlRendezvous, monkeypatch: pytest.MonkeyPatch, is_fatal: bool, ended: int
) -> None:
    text = "CUDA error: an illegal memory access was encountered"
    error = torch.AcceleratorError(text) if is_fatal else RuntimeError(text)
    ends: list[BaseException] = []

    def fail(*_: object) -> int:
        raise error

    p, d = both(rendezvous)
    monkeypatch.setattr(nixl, "checksum_of", fail)
    monkeypatch.setattr(nixl, "end_process", lambda _, why: ends.append(why))
    answers = Answers()
    d.recv(np.zeros(5, np.uint8), 5, answers)
    p.send(np.ones(5, np.uint8), 5, lambda *_: None)
    assert answers.errors(1) == [f"internal error: {text}"]
    assert ends == [error] * ended
    p.close()
    d.close()


@pytest.mark.parametrize(
    ("word", "error"),
    [
        (Taken(), "it has taken what was not sent"),
        (Filled(address=4096, nbytes=5, kind="DRAM", device=0), "NIXL"),  # no memory that was registered
        (Filled(address=4096, nbytes=5, kind="DRAM", device=0, metadata=b"nonsense"), "NIXL"),
        (nixl.Agent(metadata=b""), "the peer broke the protocol"),
    ],
)
def test_a_peer_that_says_nonsense_ends_the_pair(rendezvous: NixlRendezvous, word: Message, error: str) -> None:
    p, d = both(rendezvous)
    answers, target = Answers(), np.zeros(5, np.uint8)
    d.recv(target, 5, answers)
    p._link.send(word)
    assert error in answers.errors(1)[0]
    assert not target.any()
    p.close()
    d.close()


def test_a_peer_may_not_announce_without_end(rendezvous: NixlRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_MAX_FILLED", 3)
    p, d = both(rendezvous)
    sent = Answers()
    for _ in range(4):
        p.send(np.zeros(5, np.uint8), 5, sent)
    assert all(error.startswith(PEER_ENDED) for error in sent.errors(4))
    d.recv(np.zeros(5, np.uint8), 5, sent)
    assert "3 payloads wait for a receive" in sent.errors(1)[0]
    p.close()
    d.close()


# ---------------------------------------------------------------- set-up


def test_it_listens_on_the_given_address_only_and_for_this_pair_only(rendezvous: NixlRendezvous) -> None:
    """UCX would listen on every interface, and let whoever comes read this process's memory."""
    before = listening_addresses()  # of the rendezvous, and of what this process ran for other tests
    assert [1 for host, port in before if f"{host}:{port}" == rendezvous.address] == [1]
    p, d = both(rendezvous)
    assert listening_addresses() - before == set()
    p.close()
    d.close()


def test_who_does_not_have_the_secret_is_not_spoken_with(
    rendezvous: NixlRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []
    real = nixl._open_link

    def spied(store: Any, *arguments: Any) -> Any:
        address = store.get("link").decode()
        addresses.append(address)
        stranger, other = connect(address, ANSWER_S), ClusterSecret(bytes(NUM_BYTES))
        with pytest.raises(HandshakeError):
            answer(stranger, other, "kv link", "pair-1", 0, secrets.token_bytes(NONCE_BYTES))
        stranger.close()
        wrong_pair = connect(address, ANSWER_S)
        with pytest.raises(HandshakeError):
            answer(wrong_pair, SECRET, "kv link", "pair-2", 0, secrets.token_bytes(NONCE_BYTES))
        wrong_pair.close()
        return real(store, *arguments)

    monkeypatch.setattr(nixl, "_open_link", spied)
    p, d = both(rendezvous)
    assert len(addresses) == 1
    p.close()
    d.close()


def test_a_pair_whose_bytes_do_not_come_through_does_not_stand(
    rendezvous: NixlRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = NixlAgent.read

    def short(self: NixlAgent, buffer: Bytes, nbytes: int, remote: Any) -> int:
        return real(self, buffer, nbytes - 16, remote)  # a single random byte may be right by chance

    monkeypatch.setattr(NixlAgent, "read", short)
    errors: list[str] = []

    def accept() -> None:
        with pytest.raises(TransportError, match="the sender's memory was read wrongly") as raised:
            rendezvous.accept("pair-1")
        errors.append(str(raised.value))

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(TransportError, match="the receiver cannot read memory of this process"):
        NixlConnector(SETTINGS)("pair-1", rendezvous.address)
    thread.join()
    assert len(errors) == 1
