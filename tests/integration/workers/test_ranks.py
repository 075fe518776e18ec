"""Workers of several ranks: their connection over real sockets, and real rank processes, whole and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disagg.cluster.hosts.processes import WORKER_MODULE, start_child, stop_children
from disagg.cluster.system.process_tools import thread_environment
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.connection import Connection, ConnectionFailedError, SocketConnection, connect
from disagg.connections.shell.handshake import HandshakeError, answer
from disagg.decode_worker.role import DecodeRole
from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.parallel.follower import Follower, serve_rank
from disagg.engine.parallel.followers import RankLostError
from disagg.engine.parallel.group import RankRendezvous
from disagg.engine.parallel.interfaces import Ranks
from disagg.engine.rank_messages import Begin, Failed
from disagg.engine.sharding.shards import Shard
from disagg.engine.shell.worker import Worker
from disagg.proto.errors import ConfigError
from disagg.proto.messages import MAX_FRAME_BYTES, Sampling, WorkerInfo, decoder
from tests.support import reference
from tests.support.leftovers import is_ours
from tests.support.rank_connections import NoTransports
from tests.support.registry import Registry
from tests.support.secret import OTHER_SECRET, SECRET
from tests.support.tiny_models import make_checkpoint
from tests.support.waiting import until
from tests.support.workers import GatewayStub, open_gateway

WAIT_S = 60.0
NONCE = bytes(32)


def config(**values: Any) -> WorkerConfig:
    """A worker with both roles."""
    defaults: dict[str, Any] = {"model_path": "fake", "tp": 2, "num_blocks": 512, "num_threads": 1}
    return WorkerConfig(worker_id="decode-0", roles=("prefill", "decode"), **{**defaults, **values})


# ---------------------------------------------------------------- connections


@contextmanager
def socket_connections() -> Iterator[tuple[SocketConnection, socket.socket]]:
    """A connection, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = connect(f"127.0.0.1:{listener.getsockname()[1]}", WAIT_S)
        other, _ = listener.accept()
    with other:
        yield connection, other
    connection.close()


def test_frames_of_any_size_arrive_whole_and_in_order() -> None:
    sizes = [0, 1, 65_535, 65_536, 3_000_000, 5]
    with socket_connections() as (connection, other):
        far = SocketConnection(other.dup())

        def write() -> None:
            for size in sizes:
                connection.send(Failed(error="x" * size))

        writer = threading.Thread(target=write)
        writer.start()
        received = [decoder(Failed).decode(far.receive() or b"") for _ in sizes]
        writer.join()
        assert [len(message.error) for message in received] == sizes
        connection.close()
        assert far.receive() is None
        far.close()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "a frame of .* bytes is more than"),
        (struct.pack(">I", 10) + b"12345", "in the middle of a frame"),
        (b"\x00\x00", "in the middle of a frame"),
    ],
)
def test_what_is_no_frame_breaks_the_line(sent: bytes, why: str) -> None:
    with socket_connections() as (connection, other):
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionFailedError, match=why):
            connection.receive()


def test_a_line_that_is_closed_wakes_its_reader_and_refuses_all() -> None:
    errors: list[ConnectionFailedError | None] = []
    with socket_connections() as (connection, _):

        def read() -> None:
            try:
                errors.append(connection.receive())  # type: ignore[arg-type]
            except ConnectionFailedError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        connection.close()
        reader.join(WAIT_S)
        assert len(errors) == 1
        with pytest.raises(ConnectionFailedError, match="cannot write"):
            connection.send(Failed(error=""))
        with pytest.raises(ConnectionFailedError, match="closed"):
            connection.receive()


def test_frames_that_are_too_large_are_not_sent() -> None:
    with socket_connections() as (connection, _), pytest.raises(ConnectionFailedError, match="is more than"):
        connection.send(Failed(error="x" * MAX_FRAME_BYTES))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConnectionFailedError, match="no rank 0 at"):
        connect(address, WAIT_S)
    assert serve_rank(config(), Shard(1, 2), address, SECRET) == 3


# ---------------------------------------------------------------- joining


@contextmanager
def rank_rendezvous(size: int = 3) -> Iterator[tuple[RankRendezvous, dict[int, Connection]]]:
    came: dict[int, Connection] = {}
    place = RankRendezvous("127.0.0.1", "decode-0", size, SECRET, came.__setitem__)
    try:
        yield place, came
    finally:
        place.close()
        for connection in came.values():
            connection.close()


def join(address: str, rank: int, secret: ClusterSecret = SECRET, worker: str = "decode-0") -> SocketConnection:
    connection = connect(address, WAIT_S)
    try:
        answer(connection, secret, "rank connection", worker, rank, NONCE)
    except ConnectionFailedError:
        connection.close()
        raise
    return connection


def test_each_rank_is_taken_once() -> None:
    with rank_rendezvous() as (place, came):
        connections = [join(place.address, 2), join(place.address, 1)]
        until(lambda: sorted(came) == [1, 2], "not both came")
        for rank in (0, 1, 2, 3):
            with pytest.raises(ConnectionFailedError, match="refused"):
                join(place.address, rank)
        came[1].send(Begin(num_blocks=7, collective_address=""))
        assert decoder(Begin).decode(connections[1].receive() or b"").num_blocks == 7
        for connection in connections:
            connection.close()


def test_strangers_are_refused_and_hold_up_nobody() -> None:
    with rank_rendezvous() as (place, came):
        host, port = place.address.split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(20)]
        with socket.create_connection((host, int(port))) as noisy:
            noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for secret, worker in ((OTHER_SECRET, "decode-0"), (SECRET, "decode-1")):
            with pytest.raises(ConnectionFailedError, match="refused"):
                join(place.address, 1, secret, worker)
        assert serve_rank(config(), Shard(1, 3), place.address, OTHER_SECRET) == 3
        assert came == {}
        connection = join(place.address, 1)
        until(lambda: sorted(came) == [1], "rank 1 did not come")
        connection.close()
    for sock in silent:  # the end of the rendezvous ends them, too
        sock.settimeout(WAIT_S)
        while sock.recv(4096):
            pass
        sock.close()


def test_nobody_is_taken_after_the_end() -> None:
    with rank_rendezvous() as (place, _):
        address = place.address
    with pytest.raises(ConnectionFailedError, match="no rank 0"):
        join(address, 1)


# ---------------------------------------------------------------- the worker, with ranks on threads


class ThreadRanks:
    """Ranks on threads, each with the fake model that `make` gives it; `link.Ranks`."""

    def __init__(self, make: Callable[[WorkerConfig, Shard], FakeModelRunner], config: WorkerConfig) -> None:
        self._make = make
        self._config = config
        self._threads: list[threading.Thread] = []
        self.statuses: list[int] = []
        self.num_stops = 0

    def __call__(self, address: str) -> Ranks:
        for rank in range(1, self._config.tp):
            thread = threading.Thread(target=self._serve, args=(address, Shard(rank, self._config.tp)))
            thread.start()
            self._threads.append(thread)
        return self

    def _serve(self, address: str, shard: Shard) -> None:
        try:
            connection = join(address, shard.rank)
        except (HandshakeError, ConnectionFailedError):  # the leader gave up while they still shook hands
            self.statuses.append(3)
            return
        follower = Follower(
            self._config,
            shard,
            connection,
            SECRET,
            make_runner=self._make,
            make_transports=lambda *_: NoTransports(),
            end_process=self.statuses.append,
            grace_s=WAIT_S,
        )
        self.statuses.append(follower.serve())

    def stop(self) -> None:
        self.num_stops += 1
        for thread in self._threads:
            thread.join(WAIT_S)


def fake_rank(config: WorkerConfig, shard: Shard) -> FakeModelRunner:
    return FakeModelRunner(512 - shard.rank, 16, 4096, shard=shard)


def test_a_worker_of_three_ranks_starts_and_stops_with_the_blocks_that_all_have() -> None:
    ranks = ThreadRanks(fake_rank, config(tp=3))
    worker = Worker(config(tp=3), [DecodeRole], SECRET, ranks)
    info = worker.start()
    assert (info.tp, info.num_blocks, worker.followers.size) == (3, 510, 3)
    worker.stop()
    worker.stop()
    assert ranks.statuses == [0, 0]
    assert not worker.crashed.is_set()


def test_a_worker_whose_rank_has_another_model_does_not_start() -> None:
    class Other(FakeModelRunner):
        fingerprint = "another"

    ranks = ThreadRanks(lambda _, shard: Other(512, 16, 4096, shard=shard), config())
    with pytest.raises(RankLostError, match="rank 1 has loaded another model: another"):
        Worker(config(), [DecodeRole], SECRET, ranks).start()
    assert (ranks.statuses, ranks.num_stops) == ([0], 1)


def test_a_worker_whose_rank_cannot_load_does_not_start_and_says_why() -> None:
    def fail(_: WorkerConfig, shard: Shard) -> FakeModelRunner:
        raise ConfigError("device 'cuda:1': there is none")

    ranks = ThreadRanks(fail, config())
    with pytest.raises(RankLostError, match="rank 1 is lost: ConfigError: device 'cuda:1': there is none"):
        Worker(config(), [DecodeRole], SECRET, ranks).start()
    assert (ranks.statuses, ranks.num_stops) == ([3], 1)


def test_the_ranks_of_a_worker_that_cannot_load_end_with_it() -> None:
    ranks = ThreadRanks(fake_rank, config())
    with pytest.raises(ConfigError):
        Worker(config(model_path="/no/such/checkpoint"), [DecodeRole], SECRET, ranks).start()
    assert ranks.statuses in ([0], [3])  # told to stop, or refused, whichever comes first
    assert ranks.num_stops == 1


def test_a_worker_whose_rank_is_lost_has_crashed() -> None:
    class Fragile(FakeModelRunner):
        def compute(self, arrays: Any) -> None:
            if len(arrays.token_ids_T) == 3:  # not a step of the calibration
                raise MemoryError("no memory")
            super().compute(arrays)

    ranks = ThreadRanks(lambda _, shard: Fragile(512, 16, 4096, shard=shard), config())
    worker = Worker(config(), [DecodeRole], SECRET, ranks)
    info = worker.start()

    async def ask() -> None:
        stub = GatewayStub()
        await stub.connect(info)
        stub.submit([1, 2, 3], worker="decode-0")
        await asyncio.to_thread(worker.crashed.wait, WAIT_S)
        await stub.close()

    asyncio.run(ask())
    assert worker.crashed.is_set()
    worker.stop()
    assert ranks.statuses == [3]


def test_a_rank_that_hangs_does_not_keep_the_worker_from_ending() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Stuck(FakeModelRunner):
        def scatter_part(self, block_table: Any, start: int, end: int, data: Any, peer: Any, group: int = 0) -> None:
            if end == 3:  # not the calibration
                entered.set()
                leave.wait(WAIT_S)

    class Killable(ThreadRanks):
        def stop(self) -> None:
            leave.set()
            super().stop()

    ranks = Killable(lambda _, shard: Stuck(512, 16, 4096, shard=shard), config())
    worker = Worker(config(), [DecodeRole], SECRET, ranks)
    worker.start()
    runner = worker._runner
    copy = worker._engine.call(lambda _: runner.scatter([0], 0, 3, runner.new_staging(2 * 3 * 8)))
    assert entered.wait(WAIT_S)
    worker.stop(grace_s=0.05)
    assert isinstance(copy.exception(WAIT_S), RankLostError)
    assert ranks.statuses == [0]


def test_a_worker_of_several_ranks_needs_somebody_to_start_them() -> None:
    with pytest.raises(ConfigError, match="tp: a worker of 2 ranks needs `start_ranks`, to start 1 of them"):
        Worker(config(), [DecodeRole], SECRET)


# ---------------------------------------------------------------- processes


@dataclass
class Process:
    """A worker process with its followers."""

    info: WorkerInfo
    wait: Callable[[], int]
    log: Path

    @property
    def follower_pids(self) -> list[int]:
        """Its children that run."""
        return [pid for pid, parent in parents().items() if parent == self.info.pid and is_ours(pid)]


def parents() -> dict[int, int]:
    """Process -> parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@contextmanager
def running_worker(worker: WorkerConfig) -> Iterator[Process]:
    with tempfile.TemporaryDirectory() as logs, Registry() as registry:
        environment = thread_environment(1)
        child = start_child("decode-0", WORKER_MODULE, worker, registry.address, SECRET, Path(logs), environment)
        try:
            info = registry.wait(["decode-0"], 60.0)[0]
            yield Process(info, lambda: child.process.wait(WAIT_S), child.log)
        finally:
            stop_children([child])


async def start_answer(stub: GatewayStub, process: Process, num_tokens: int) -> None:
    """Until the worker is in the middle of a long answer."""
    await stub.connect(process.info)
    greedy = Sampling(temperature=0.0, max_tokens=num_tokens)
    _, answer = stub.submit([3, 1, 4], worker="decode-0", sampling=greedy)
    await asyncio.wait_for(answer.first_token.wait(), WAIT_S)
    assert not answer.ends


def kill_in_mid_answer(process: Process, pid: int, num_tokens: int) -> None:
    async def run() -> None:
        stub = GatewayStub()
        await start_answer(stub, process, num_tokens)
        os.kill(pid, signal.SIGKILL)
        await stub.close()

    asyncio.run(run())


def test_two_rank_processes_compute_what_one_does_and_end_with_their_follower(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    worker = config(model_path=str(folder), dtype="float32", num_blocks=256, token_budget=48)
    prompts = [[(7 * i + seed) % 250 for i in range(length)] for seed, length in enumerate((1, 16, 49, 130))]
    with running_worker(worker) as process:
        answers = asyncio.run(ask_all(process.info, prompts, 24))
        assert answers == [reference.generate(folder, prompt, 24) for prompt in prompts]
        (follower,) = process.follower_pids
        kill_in_mid_answer(process, follower, 1900)
        killed_at = time.monotonic()
        assert process.wait() == 3
        assert time.monotonic() - killed_at < 10.0
        assert "rank 1 is lost" in process.log.read_text()
        assert not is_ours(follower)


async def ask_all(info: WorkerInfo, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    async with open_gateway([info]) as gateway:
        answers = await asyncio.gather(
            *(gateway.run(prompt, worker="decode-0", max_tokens=num_tokens) for prompt in prompts)
        )
    return [answer.token_ids for answer in answers]


@pytest.mark.slow
def test_a_worker_ends_in_order_though_its_follower_hangs(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    with running_worker(config(model_path=str(folder), dtype="float32", num_blocks=256)) as process:
        (follower,) = process.follower_pids

        async def hang() -> None:
            stub = GatewayStub()
            await start_answer(stub, process, 1900)
            os.kill(follower, signal.SIGSTOP)
            os.kill(process.info.pid, signal.SIGTERM)
            await stub.close()

        asyncio.run(hang())
        assert process.wait() == 0
        assert "rank-1 ended: killed by SIGKILL" in process.log.read_text()
        assert not is_ours(follower)


def test_followers_end_when_rank_0_is_killed() -> None:
    prompt = list(range(50))
    with running_worker(config(tp=3, max_model_len=8000)) as process:
        assert asyncio.run(ask_all(process.info, [prompt], 20)) == [fake_generate(prompt, 20)]
        followers = process.follower_pids
        assert len(followers) == 2
        kill_in_mid_answer(process, process.info.pid, 7000)
        assert process.wait() == -signal.SIGKILL
        until(lambda: not any(map(is_ours, followers)), "a follower outlived rank 0")
