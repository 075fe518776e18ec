"""KV between two workers of two ranks each, by heads or by layers, over real gloo: four processes.

The test is rank 0 of D. P's rank 0 is a child that is driven over a pipe; the other ranks are followers as
in a real worker, with a fake model of four KV heads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest

from disagg.connections.shell.connection import SocketConnection, connect
from disagg.engine.config import TransportName, WorkerConfig
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.kv_transfer.transport import PairTransport
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.parallel.follower import Follower
from disagg.engine.parallel.followers import ConnectedFollowers
from disagg.engine.parallel.leader import GroupRunner
from disagg.engine.parallel.transport import PairEnd, form_pair
from disagg.engine.rank_messages import Begin
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.sharding.shards import Shard
from disagg.proto.handover import Side
from tests.support.reshard import D_TABLE, HOST, NUM_BLOCKS, P_TABLE, Answer, Model, arrived, fake_rank, fill
from tests.support.secret import SECRET, checksum
from tests.support.transports import NIXL

MODEL = Model(heads=4, layers=3)
Wide = tuple[int, int]
"""Stages of a worker, and ranks of each: two ranks in all."""
CHUNKS = [(3, 9), (9, 10), (10, 21)]
WAIT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")


def worker_config(name: str, wide: Wide) -> WorkerConfig:
    pp, tp = wide
    return WorkerConfig(worker_id=name, roles=("prefill",), model_path="fake", host=HOST, tp=tp, pp=pp)


def rank_of(number: int, wide: Wide) -> FakeModelRunner:
    pp, tp = wide
    return fake_rank(MODEL, Shard.of_number(number, tp, pp))


def be_follower(name: str, wide: Wide, port: int, pipe: Connection) -> None:
    """Rank 1. At the end it reports its pages."""
    runner = rank_of(1, wide)
    if name == "p":
        fill(runner)
    connection = connect(f"{HOST}:{port}", WAIT_S)
    Follower(worker_config(name, wide), runner.shard, connection, SECRET, make_runner=lambda *_: runner).serve()
    pipe.send(runner._pages_2HNB)


class Led:
    """Rank 0 of a worker, with its follower."""

    def __init__(self, name: str, wide: Wide) -> None:
        self.rank_0 = rank_of(0, wide)
        if name == "p":
            fill(self.rank_0)
        self.lost: list[BaseException] = []
        self.followers = ConnectedFollowers(2, self.lost.append)
        self.pipe, other = SPAWN.Pipe()
        with socket.create_server((HOST, 0)) as listener:
            port = listener.getsockname()[1]
            self.process = SPAWN.Process(target=be_follower, args=(name, wide, port, other))
            self.process.start()
            connection, _ = listener.accept()
        self.followers.attach(1, SocketConnection(connection))
        self.followers.wait_joined(WAIT_S, WAIT_S)
        self.followers.broadcast(Begin(num_blocks=NUM_BLOCKS, collective_address=""))
        self.runner = GroupRunner(self.rank_0, self.followers, self.lost.append)

    def pages(self) -> Any:
        """The follower stops in order, and reports its pages."""
        self.followers.close()
        assert self.pipe.poll(WAIT_S)
        return self.pipe.recv()

    def end(self) -> None:
        self.followers.close()
        self.process.join(WAIT_S)
        self.pipe.close()


def pair_end(side: Side, p: Wide, d: Wide, address: str, transport: TransportName) -> PairEnd:
    sender, receiver = rank_of(0, p), rank_of(0, d)
    return PairEnd(
        plan=plan_pair(sender.layout, sender.shape, receiver.shape),
        side=side,
        pair_name="pair-1",
        transport=transport,
        store_address=address,
        checksum=checksum,
    )


def be_p(wide: Wide, d: Wide, transport_name: TransportName, address: str, pipe: Connection) -> None:
    """P's rank 0: gathers and reports the checksum, sends when it may and reports the answer."""
    led = Led("p", wide)
    end = pair_end("sender", wide, d, address, transport_name)
    dial = make_connector(transport_name, HOST, SECRET)
    transport = form_pair(end, lambda name: dial(name, address), led.followers)
    pipe.send(led.process.pid)
    while (command := pipe.recv()) is not None:
        start, stop = command
        nbytes = (stop - start) * end.plan.groups[0].token_bytes
        buffer = led.runner.new_staging(nbytes)
        pipe.send(led.runner.gather(P_TABLE, start, stop, buffer, end.plan.receiver))
        pipe.recv()
        answer = Answer()
        transport.send(buffer, nbytes, answer)
        pipe.send(answer.result()[0])
    transport.close()
    led.end()
    pipe.send([str(error) for error in led.lost])


class Bench:
    """Rank 0 of D, and its view of P."""

    def __init__(self, led: Led, end: PairEnd, pipe: Connection, transport: PairTransport) -> None:
        self.led = led
        self.end = end
        self.pipe = pipe
        self.transport = transport
        self.follower_of_p: int = self.hears()

    def hears(self) -> Any:
        assert self.pipe.poll(WAIT_S)
        return self.pipe.recv()

    def receive(self, start: int, stop: int) -> tuple[Answer, Any]:
        buffer = self.led.runner.new_staging((stop - start) * self.end.plan.groups[0].token_bytes)
        answer = Answer()
        self.transport.recv(buffer, buffer.nbytes, answer, answer.posted)
        return answer, buffer


@contextmanager
def running_pair(transport: TransportName, p_wide: Wide, d_wide: Wide) -> Iterator[Bench]:
    rendezvous = make_rendezvous(transport, HOST, SECRET)
    pipe, other = SPAWN.Pipe()
    p: BaseProcess = SPAWN.Process(target=be_p, args=(p_wide, d_wide, transport, rendezvous.address, other))
    p.start()
    led = Led("d", d_wide)
    end = pair_end("receiver", p_wide, d_wide, rendezvous.address, transport)
    bench = Bench(led, end, pipe, form_pair(end, rendezvous.accept, led.followers))
    try:
        yield bench
    finally:
        bench.transport.close()
        rendezvous.close()
        led.end()
        p.join(WAIT_S)
        pipe.close()
        assert (p.exitcode, led.process.exitcode) == (0, 0)


@pytest.mark.parametrize(
    ("transport", "p", "d"),
    [
        ("gloo", (1, 2), (1, 2)),
        ("gloo", (2, 1), (1, 2)),
        pytest.param("gloo", (2, 1), (2, 1), marks=pytest.mark.slow),
        pytest.param("nixl", (1, 2), (1, 2), marks=[*NIXL.marks, pytest.mark.slow]),
    ],
)
def test_four_processes_move_kv_and_all_end_when_one_is_killed(transport: TransportName, p: Wide, d: Wide) -> None:
    with running_pair(transport, p, d) as bench:
        for start, stop in CHUNKS:
            bench.pipe.send((start, stop))
            announced = bench.hears()
            answer, buffer = bench.receive(start, stop)
            answer.wait_posted()
            bench.pipe.send("may send")
            assert bench.hears() is True
            assert answer.result() == (True, "", announced)
            bench.led.runner.scatter(D_TABLE, start, stop, buffer, bench.end.plan.sender)
        assert np.array_equal(bench.led.rank_0._pages_2HNB, arrived(bench.led.rank_0, range(3, 21)))
        pending = [bench.receive(0, 3)[0], bench.receive(0, 3)[0]]
        for each in pending:
            each.wait_posted()
        os.kill(bench.follower_of_p, signal.SIGKILL)
        assert [each.result()[0] for each in pending] == [False, False]
        bench.pipe.send(None)
        (lost,) = bench.hears()
        assert "rank 1 is lost" in lost
        bench.transport.close()
        pages = bench.led.pages()
        assert np.array_equal(pages, arrived(rank_of(1, d), range(3, 21)))
