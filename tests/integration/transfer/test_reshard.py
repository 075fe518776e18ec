"""KV between two workers of two ranks each, over real gloo: four processes.

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
from disagg.proto.messages import ParallelShape
from tests.support.reshard import D_TABLE, HOST, NUM_BLOCKS, P_TABLE, Answer, Model, arrived, fake_rank, fill
from tests.support.secret import SECRET, checksum
from tests.support.transports import NIXL

MODEL, TP = Model(heads=4), 2
CHUNKS = [(3, 9), (9, 10), (10, 21)]
WAIT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")


def worker_config(name: str) -> WorkerConfig:
    return WorkerConfig(worker_id=name, roles=("prefill",), model_path="fake", host=HOST, tp=TP)


def be_follower(name: str, port: int, pipe: Connection) -> None:
    """Rank 1. At the end it reports its pages."""
    runner = fake_rank(MODEL, Shard(1, TP))
    if name == "p":
        fill(runner)
    connection = connect(f"{HOST}:{port}", WAIT_S)
    Follower(worker_config(name), runner.shard, connection, SECRET, make_runner=lambda *_: runner).serve()
    pipe.send(runner._pages_2HNB)


class Led:
    """Rank 0 of a worker, with its follower."""

    def __init__(self, name: str) -> None:
        self.rank_0 = fake_rank(MODEL, Shard(0, TP))
        if name == "p":
            fill(self.rank_0)
        self.lost: list[BaseException] = []
        self.followers = ConnectedFollowers(TP, self.lost.append)
        self.pipe, other = SPAWN.Pipe()
        with socket.create_server((HOST, 0)) as listener:
            port = listener.getsockname()[1]
            self.process = SPAWN.Process(target=be_follower, args=(name, port, other))
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


def pair_end(side: Side, address: str, transport: TransportName) -> PairEnd:
    plan = plan_pair(fake_rank(MODEL, Shard()).layout, ParallelShape(tp=TP), ParallelShape(tp=TP))
    return PairEnd(
        plan=plan,
        side=side,
        pair_name="pair-1",
        transport=transport,
        host=HOST,
        store_address=address,
        checksum=checksum,
    )


def be_p(transport_name: TransportName, address: str, pipe: Connection) -> None:
    """P's rank 0: gathers and reports the checksum, sends when it may and reports the answer."""
    led = Led("p")
    end = pair_end("sender", address, transport_name)
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

    def __init__(self, led: Led, pipe: Connection, transport: PairTransport) -> None:
        self.led = led
        self.pipe = pipe
        self.transport = transport
        self.follower_of_p: int = self.hears()

    def hears(self) -> Any:
        assert self.pipe.poll(WAIT_S)
        return self.pipe.recv()

    def receive(self, start: int, stop: int) -> tuple[Answer, Any]:
        plan = pair_end("receiver", "", "gloo").plan
        buffer = self.led.runner.new_staging((stop - start) * plan.groups[0].token_bytes)
        answer = Answer()
        self.transport.recv(buffer, buffer.nbytes, answer, answer.posted)
        return answer, buffer


@contextmanager
def running_pair(transport: TransportName) -> Iterator[Bench]:
    rendezvous = make_rendezvous(transport, HOST, SECRET)
    pipe, other = SPAWN.Pipe()
    p: BaseProcess = SPAWN.Process(target=be_p, args=(transport, rendezvous.address, other))
    p.start()
    led = Led("d")
    end = pair_end("receiver", rendezvous.address, transport)
    bench = Bench(led, pipe, form_pair(end, rendezvous.accept, led.followers))
    try:
        yield bench
    finally:
        bench.transport.close()
        rendezvous.close()
        led.end()
        p.join(WAIT_S)
        pipe.close()
        assert (p.exitcode, led.process.exitcode) == (0, 0)


@pytest.mark.parametrize("transport", ["gloo", pytest.param("nixl", marks=[*NIXL.marks, pytest.mark.slow])])
def test_four_processes_move_heads_and_all_end_when_one_is_killed(transport: TransportName) -> None:
    with running_pair(transport) as bench:
        for start, stop in CHUNKS:
            bench.pipe.send((start, stop))
            announced = bench.hears()
            answer, buffer = bench.receive(start, stop)
            answer.wait_posted()
            bench.pipe.send("may send")
            assert bench.hears() is True
            assert answer.result() == (True, "", announced)
            bench.led.runner.scatter(D_TABLE, start, stop, buffer, bench.led.runner.shape)
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
        assert np.array_equal(pages, arrived(fake_rank(MODEL, Shard(1, TP)), range(3, 21)))
