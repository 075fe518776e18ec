"""The transport through shared memory: between two real processes, or with both ends in this one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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

import msgspec
import numpy as np
import pytest

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from disagg.engine.kv_transfer.transport import TransportError
from disagg.engine.kv_transfer.transports.shm import Hello, ShmConnector, ShmRendezvous, ShmTransport
from disagg.engine.kv_transfer.transports.shm_lane import RING_BYTES
from tests.support import transport_peer
from tests.support.secret import checksum
from tests.support.transport_peer import ANSWER_S, Answers, content
from tests.support.transports import NIXL, SETTINGS
from tests.support.waiting import until
from tests.support.workers import wait_until_workers_idle

Peer = functools.partial(transport_peer.Peer, "shm")


def num_descriptors() -> int:
    """Sockets and rings that are open here."""
    gc.collect()
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            count += str(link.readlink()).startswith(("socket:", "/memfd:"))
    return count


def num_rings() -> int:
    """Mappings of this process that are rings."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:disagg-kv")


@pytest.fixture
def rendezvous() -> Iterator[ShmRendezvous]:
    """One of this host; afterwards no thread, descriptor or memory of a channel is left."""
    threads, descriptors = set(threading.enumerate()), num_descriptors()
    rendezvous = ShmRendezvous(SETTINGS)
    yield rendezvous
    rendezvous.close()
    until(lambda: set(threading.enumerate()) <= threads, "a thread is left")
    assert (num_rings(), num_descriptors() - descriptors) == (0, 0)


def both(rendezvous: ShmRendezvous, name: str = "pair-1") -> tuple[ShmTransport, ShmTransport]:
    """(P's end, D's end), in this process."""
    ends: list[ShmTransport] = []
    thread = threading.Thread(target=lambda: ends.append(rendezvous.accept(name)))
    thread.start()
    p = ShmConnector(SETTINGS)(name, rendezvous.address)
    thread.join()
    return p, ends[0]


@pytest.mark.parametrize("num_bytes", [100, 2 * RING_BYTES])
def test_a_killed_peer_is_noticed_at_once_and_leaves_nothing(rendezvous: ShmRendezvous, num_bytes: int) -> None:
    """Also in the middle of an operation: without a close, a heartbeat or a timeout."""
    peer = Peer(rendezvous, [("send_into", num_bytes), ("recv_into", 1), ("wait", None), ("die", None)])
    answers = Answers()
    for _ in range(3):
        peer.transport.recv(np.zeros(4 * RING_BYTES, np.uint8), 4 * RING_BYTES if num_bytes > 100 else 100, answers)
    if num_bytes == 100:
        assert answers.next()[:2] == (True, "")
    peer.transport.send(np.zeros(RING_BYTES + 1, np.uint8), RING_BYTES + 1, answers)
    peer.link.send("go")
    peer.process.join(ANSWER_S)
    assert peer.process.exitcode == -signal.SIGKILL
    assert len(answers.errors(3 if num_bytes == 100 else 4)) >= 3
    peer.end()


def test_a_sender_that_is_far_ahead_waits_for_the_receiver(rendezvous: ShmRendezvous) -> None:
    p, d = both(rendezvous)
    sent, received = Answers(), Answers()
    for seed in range(4):
        p.send(content(seed, RING_BYTES), RING_BYTES, sent)
    assert sent.next()[0]
    with pytest.raises(queue.Empty):
        sent.next(0.1)
    target = np.zeros(RING_BYTES, np.uint8)
    for seed in range(4):
        d.recv(target, RING_BYTES, received)
        assert received.next() == (True, "", checksum(content(seed, RING_BYTES)))
    assert [sent.next()[0] for _ in range(3)] == [True] * 3
    p.close()
    d.close()


def test_another_host_is_named(rendezvous: ShmRendezvous) -> None:
    name = rendezvous.address.partition("/")[2]
    with pytest.raises(TransportError, match=r"'elsewhere/.*is on another host"):
        ShmConnector(SETTINGS)("pair-1", f"elsewhere/{name}")


def test_nobody_there_is_an_error_that_says_so(rendezvous: ShmRendezvous) -> None:
    host = rendezvous.address.partition("/")[0]
    with pytest.raises(TransportError, match=r"could not form the pair 'pair-1'.*refused"):
        ShmConnector(SETTINGS)("pair-1", f"{host}/disagg-kv-nobody")


def test_another_user_is_sent_away(rendezvous: ShmRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(TransportError, match=f"belongs to user {user}, not to {user + 1}"):
        ShmConnector(SETTINGS)("pair-1", rendezvous.address)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"GET / HTTP/1.1",
        msgspec.msgpack.encode(Hello(pair_name="pair-1", side="sender")),
        msgspec.msgpack.encode(Hello(pair_name="pair-1", side="receiver", num_slots=7)),
    ],
)
def test_who_says_nonsense_is_sent_away_and_holds_nobody_up(rendezvous: ShmRendezvous, frame: bytes) -> None:
    name = rendezvous.address.partition("/")[2]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{name}")
        reader, writer = os.pipe()
        if frame:
            socket.send_fds(stranger, [frame], [reader])
        os.close(reader)
        os.close(writer)
        p, d = both(rendezvous)  # after the stranger, or after its time is up
        stranger.settimeout(ANSWER_S)
        assert stranger.recv(10) == b""
    p.close()
    d.close()


def test_a_peer_that_does_not_come_is_waited_for_only_so_long(rendezvous: ShmRendezvous) -> None:
    rendezvous._timeout_s = 0.2
    with pytest.raises(TransportError, match="no sender of 'pair-1'"):
        rendezvous.accept("pair-1")
    with pytest.raises(TransportError, match="could not form the pair 'pair-2'"):
        ShmConnector(dataclasses.replace(SETTINGS, set_up_timeout_s=0.2))("pair-2", rendezvous.address)
    while not rendezvous._arrived:
        time.sleep(0.001)
    rendezvous._timeout_s = ANSWER_S
    rendezvous._arrived["pair-2", "sender"].since -= ANSWER_S
    p, d = both(rendezvous, "pair-3")  # which clears away what waited for pair-2
    assert not rendezvous._arrived
    p.close()
    d.close()


def test_a_name_is_used_once(rendezvous: ShmRendezvous) -> None:
    first = threading.Thread(target=lambda: _fails("pair-1", rendezvous.address))
    first.start()
    while not rendezvous._arrived:
        time.sleep(0.001)
    with pytest.raises(TransportError, match="could not form the pair 'pair-1'"):
        ShmConnector(SETTINGS)("pair-1", rendezvous.address)
    rendezvous.close()
    first.join(ANSWER_S)
    assert not first.is_alive()


def _fails(pair_name: str, address: str) -> None:
    with pytest.raises(TransportError, match="could not form the pair"):
        ShmConnector(SETTINGS)(pair_name, address)


def test_a_rendezvous_that_closes_wakes_whoever_waits(rendezvous: ShmRendezvous) -> None:
    errors: list[str] = []

    def accept() -> None:
        try:
            rendezvous.accept("pair-1")
        except TransportError as error:
            errors.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    rendezvous.close()
    thread.join(ANSWER_S)
    assert errors == ["the rendezvous is closed"]
    with pytest.raises(TransportError, match="closed"):
        rendezvous.accept("pair-2")


@pytest.mark.parametrize("transport", ["shm", NIXL])
async def test_a_cluster_hands_over_within_a_host(transport: str) -> None:
    config = {
        "model": {"path": "fake"},
        "gateway": {"port": 0, "http_port": None},
        "placement": {"local_prefill": "never"},
        "transfer": {"transport": transport, "chunk_bytes": 4096, "staging_bytes": 8192},
    }
    with ProcessCluster(parse_config(config)) as cluster:
        async with AsyncClient(cluster.address) as client:
            prompts = [
                [(7 * i + start) % 250 for i in range(length)] for start, length in enumerate((1, 17, 700, 1500))
            ]
            answers = await asyncio.gather(
                *(client.generate(each, temperature=0.0, ignore_eos=True, max_tokens=9) for each in prompts)
            )
            assert [list(answer.token_ids) for answer in answers] == [fake_generate(each, 9) for each in prompts]
            routes = [await client.explain(answer.request_id) for answer in answers]
            assert {route.transport for route in routes} == {transport}
            assert all(route.kv_bytes > 0 for route in routes)
            await wait_until_workers_idle(cluster.workers, cluster.secret)
    assert cluster.killed == []
