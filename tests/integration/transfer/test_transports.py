"""What every transport between processes promises (`transport.py`), with each of them. What is special to one is tested
in its own file; NCCL, which needs a GPU, in `tests/gpu/`; the transport within a process, in `tests/unit/`."""

from __future__ import annotations

import gc
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.engine.kv_transfer.transport import CLOSED, PEER_ENDED, PairTransport, Rendezvous, TransportError
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.kv_transfer.transports.gloo import GlooConnector, GlooRendezvous
from disagg.engine.kv_transfer.transports.nixl import NixlConnector, NixlRendezvous
from disagg.engine.kv_transfer.transports.settings import TransportSettings
from disagg.engine.kv_transfer.transports.shm import ShmConnector, ShmRendezvous
from disagg.engine.kv_transfer.transports.shm_lane import PIECE_BYTES, RING_BYTES
from disagg.proto.handover import Side
from tests.support.secret import SECRET, checksum
from tests.support.transport_peer import ANSWER_S, HOST, Answers, Peer, Script, content
from tests.support.transports import HAS_NIXL, NIXL, TRANSPORTS
from tests.support.waiting import until

SIZES = [1, 2, 7, 4095, 4097, 65_537, 1_000_003, PIECE_BYTES, (4 << 20) - 1, RING_BYTES + 1, 9 << 20]
MANY_BYTES = 2 * RING_BYTES
"""More than sockets and the ring of shared memory take."""
OK = (True, "", 0)
KINDS: dict[str, tuple[Any, Any]] = {
    "gloo": (GlooRendezvous, GlooConnector),
    "shm": (ShmRendezvous, ShmConnector),
    "nixl": (NixlRendezvous, NixlConnector),
}


class Bench:
    """D's rendezvous of one transport, and the ways to it."""

    def __init__(self, name: Any) -> None:
        self.name = name
        self.rendezvous: Rendezvous = make_rendezvous(self.name, HOST, SECRET)

    def peer(self, script: Script, pair_name: str = "pair-1") -> Peer:
        """P in another process, and D's end."""
        return Peer(self.name, self.rendezvous, script, pair_name)

    def both(self, pair_name: str = "pair-1") -> tuple[PairTransport, PairTransport]:
        """(P's end, D's end), in this process."""
        accepted: list[PairTransport] = []
        thread = threading.Thread(target=lambda: accepted.append(self.rendezvous.accept(pair_name)))
        thread.start()
        p = make_connector(self.name, HOST, SECRET)(pair_name, self.rendezvous.address)
        thread.join()
        return p, accepted[0]


def num_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def memory_of_channels() -> list[str]:
    """What is left in shared memory: mappings of this process that are rings, and files of UCX."""
    gc.collect()
    rings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:disagg-kv" in line]
    return rings + [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("ucx")]


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """A transport that was used once: libraries open some things at their first use and keep them."""
    bench = Bench(request.param)
    bench.peer([]).end()
    bench.rendezvous.close()
    return str(request.param)


@pytest.fixture
def bench(transport: str) -> Iterator[Bench]:
    """One on loopback; afterwards no thread, descriptor or memory of a channel is left."""
    threads, descriptors = set(threading.enumerate()), num_descriptors()
    bench = Bench(transport)
    yield bench
    bench.rendezvous.close()
    until(lambda: set(threading.enumerate()) <= threads, "a thread is left")
    until(lambda: num_descriptors() <= descriptors, "a descriptor is left")
    until(lambda: not memory_of_channels(), "memory of a channel is left")  # others may use UCX at present


# ---------------------------------------------------------------- bytes


def test_chunks_of_odd_sizes_both_ways(bench: Bench) -> None:
    peer = bench.peer([("send", SIZES), ("recv", SIZES), ("close", None)])
    answers, order = Answers(), []
    targets = [np.full(size + 3, 0xEE, np.uint8) for size in SIZES]
    for number, target in enumerate(targets):
        peer.transport.recv(target, SIZES[number], answers, lambda number=number: order.append(number))  # type: ignore[misc]
    assert order == list(range(len(SIZES)))  # each before `recv` returned
    expected = [content(seed, size) for seed, size in enumerate(SIZES)]
    assert answers.all(len(SIZES)) == [(True, "", checksum(each)) for each in expected]
    assert all(target[:-3].tobytes() == each.tobytes() for target, each in zip(targets, expected, strict=True))
    assert all(target[-3:].tolist() == [0xEE] * 3 for target in targets)
    assert peer.hears() == [OK] * len(SIZES)
    for each in expected:
        peer.transport.send(each, len(each), answers)
    assert answers.all(len(SIZES)) == [OK] * len(SIZES)
    assert peer.hears() == [(True, "", checksum(each)) for each in expected]
    assert peer.hears() == ["MainThread"]
    peer.end()


def test_pairs_stand_side_by_side(bench: Bench) -> None:
    (p1, d1), (p2, d2) = bench.both("one"), bench.both("two")
    answers, target = Answers(), np.zeros(1, np.uint8)
    d2.recv(target, 1, answers)
    p1.send(np.array([1], np.uint8), 1, lambda *_: None)
    p2.send(np.array([2], np.uint8), 1, lambda *_: None)
    assert answers.next()[:2] == (True, "")
    assert target.tolist() == [2]
    for end in (p1, d1, p2, d2):
        end.close()


def test_a_rank_of_d_meets_a_sender_at_the_rendezvous_of_rank_0(bench: Bench) -> None:
    sides: tuple[tuple[Side, Side], ...] = (("sender", "receiver"), ("receiver", "sender"))
    for first, second in sides:
        ends: dict[str, PairTransport] = {}

        def join(side: Side, name: str = f"pair/{first}", ends: dict[str, PairTransport] = ends) -> None:
            ends[side] = make_connector(bench.name, HOST, SECRET, side)(name, bench.rendezvous.address)

        thread = threading.Thread(target=join, args=(first,))
        thread.start()
        join(second)
        thread.join()
        answers, target, sent = Answers(), np.zeros(5000, np.uint8), content(1, 5000)
        for source, sink in (("sender", "receiver"), ("receiver", "sender")):
            ends[sink].recv(target, 5000, answers)
            ends[source].send(sent, 5000, lambda *_: None)
            assert answers.next() == (True, "", checksum(sent))
        for end in ends.values():
            end.close()


def test_nobody_asks_for_checksums_that_are_skipped(bench: Bench) -> None:
    p, d = bench.both()
    d.skip_checksums()
    answers, target, sent = Answers(), np.zeros(5000, np.uint8), content(1, 5000)
    d.recv(target, 5000, answers)
    p.send(sent, 5000, lambda *_: None)
    assert answers.next() == OK
    assert target.tobytes() == sent.tobytes()
    p.close()
    d.close()


def test_the_name_is_that_of_the_configuration(bench: Bench) -> None:
    p, d = bench.both()
    assert (p.name, d.name) == (bench.name, bench.name)
    p.close()
    d.close()


# ---------------------------------------------------------------- ends


def test_a_peer_that_stops_is_no_error_until_we_close(bench: Bench) -> None:
    peer = bench.peer([("wait", None)])
    answers = Answers()
    for _ in range(3):
        peer.transport.recv(np.zeros(100, np.uint8), 100, answers)
        peer.transport.send(np.zeros(MANY_BYTES, np.uint8), MANY_BYTES, answers)
    with pytest.raises(queue.Empty):
        answers.next(0.2)
    peer.transport.close()
    errors = answers.errors(6)
    assert bench.name == "gloo" or errors == [CLOSED] * 6
    peer.transport.close()
    posted: list[int] = []
    peer.transport.recv(np.zeros(1, np.uint8), 1, answers, lambda: posted.append(1))
    peer.transport.send(np.zeros(1, np.uint8), 1, answers)
    assert answers.errors(2) == [CLOSED] * 2
    assert not posted
    peer.end()


def test_a_killed_peer_is_noticed_at_once(bench: Bench) -> None:
    """Without a close, a heartbeat or a timeout."""
    peer = bench.peer([("wait", None), ("die", None)])
    answers = Answers()
    for _ in range(3):
        peer.transport.recv(np.zeros(100, np.uint8), 100, answers)
    peer.transport.send(np.zeros(MANY_BYTES, np.uint8), MANY_BYTES, answers)
    peer.link.send("go")
    peer.process.join(ANSWER_S)
    assert peer.process.exitcode == -signal.SIGKILL
    assert len(answers.errors(4)) == 4
    peer.end()


def test_the_peers_close_ends_our_operations(bench: Bench) -> None:
    p, d = bench.both()
    answers = Answers()
    d.recv(np.zeros(5, np.uint8), 5, answers)
    p.close()
    errors = answers.errors(1)
    d.send(np.zeros(5, np.uint8), 5, answers)
    errors += answers.errors(1)
    assert bench.name == "gloo" or errors == [PEER_ENDED] * 2
    d.close()


@pytest.mark.parametrize("transport", ["shm", NIXL], indirect=True)
def test_sizes_that_differ_end_the_pair_and_not_the_process(bench: Bench) -> None:
    """With gloo they end the process."""
    p, d = bench.both()
    received, sent, target = Answers(), Answers(), np.zeros(MANY_BYTES, np.uint8)
    d.recv(target, 7, received)
    d.recv(target, 7, received)
    p.send(np.ones(MANY_BYTES, np.uint8), MANY_BYTES, sent)
    assert received.errors(2) == [f"{MANY_BYTES} bytes were sent where 7 were expected"] * 2
    assert len(sent.errors(1)) == 1
    p.recv(target, 7, sent)
    assert len(sent.errors(1)) == 1
    assert not target.any()
    p.close()
    d.close()


def test_a_done_may_close_the_channel(bench: Bench) -> None:
    p, d = bench.both()
    closed = threading.Event()

    def done(ok: bool, error: str, digest: int) -> None:
        d.close()
        closed.set()

    d.recv(np.zeros(1, np.uint8), 1, done)
    p.send(np.zeros(1, np.uint8), 1, lambda *_: None)
    assert closed.wait(ANSWER_S)
    p.close()


def test_many_rounds_leave_nothing(bench: Bench) -> None:
    bench.both("first")[0].close()
    gc.collect()
    before = num_descriptors()
    for number in range(8):
        p, d = bench.both(f"round-{number}")
        answers, target = Answers(), np.zeros(5000, np.uint8)
        d.recv(target, 5000, answers)
        p.send(content(number, 5000), 5000, lambda *_: None)
        assert answers.next() == (True, "", checksum(content(number, 5000)))
        d.close()
        p.close()
    until(lambda: num_descriptors() <= before, "a descriptor is left")  # though both ends are still referred to
    assert memory_of_channels() == []


# ---------------------------------------------------------------- set-up


def test_a_peer_that_does_not_come_is_waited_for_only_so_long(transport: str) -> None:
    make_d, make_p = KINDS[transport]
    settings = TransportSettings(HOST, SECRET, set_up_timeout_s=0.2)
    rendezvous = make_d(settings)
    with pytest.raises(TransportError, match=r"'pair-1'.* 0\.2 s"):
        rendezvous.accept("pair-1")
    with pytest.raises(TransportError, match="could not form the pair 'pair-2'"):
        make_p(settings)("pair-2", rendezvous.address)
    rendezvous.close()


def test_a_closed_rendezvous_takes_nobody(bench: Bench) -> None:
    bench.rendezvous.close()
    with pytest.raises(TransportError, match="the rendezvous is closed"):
        bench.rendezvous.accept("pair-1")


def test_an_address_where_nobody_is_is_named(bench: Bench) -> None:
    with socket.create_server((HOST, 0)) as taken:
        free = f"{HOST}:{taken.getsockname()[1]}"
    address = free if bench.name != "shm" else f"{bench.rendezvous.address}-nobody"
    with pytest.raises(TransportError, match="could not form the pair 'pair-1'"):
        make_connector(bench.name, HOST, SECRET)("pair-1", address)


def test_the_door_to_it(transport: str) -> None:
    rendezvous = make_rendezvous(transport, HOST, SECRET)  # type: ignore[arg-type]
    make_d, make_p = KINDS[transport]
    assert isinstance(rendezvous, make_d)
    assert isinstance(make_connector(transport, HOST, SECRET), make_p)
    rendezvous.close()


@pytest.mark.skipif(HAS_NIXL, reason="the extra `nixl` is installed")
def test_a_transport_that_is_not_installed_says_so() -> None:
    with pytest.raises(RuntimeError, match="nixl"):
        make_connector("nixl", HOST, SECRET)
