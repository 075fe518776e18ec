"""Pools that grow, shrink and heal under load: child processes, the deterministic model, every answer compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.fake_runner import fake_generate
from disagg.proto.control import ScaleRequest
from disagg.proto.errors import InvalidRequestError, UnavailableError
from tests.integration.workers.test_processes import FAKE, PROMPT
from tests.support.waiting import LONG_WAIT_S, WAIT_S, wait_until

NUM_STREAMS = 8
NUM_TOKENS = 200
"""Of each: some tenths of a second."""


@contextmanager
def endless_streams(address: str, num_streams: int = NUM_STREAMS) -> Iterator[Callable[[], None]]:
    """So many streams at a time, each followed by another one until the block ends; yields a call that waits until
    each has ended and begun anew. All answers must be whole and right."""
    stop = threading.Event()
    counts = [0] * num_streams

    def stream(index: int) -> None:
        prompt = (*range(index, index + 40),)
        expected = fake_generate(prompt, NUM_TOKENS)
        with Client(address) as client:
            while not stop.is_set():
                deltas = client.stream(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=60)
                assert [token for delta in deltas for token in delta.token_ids] == expected
                counts[index] += 1

    def wait_for_all() -> None:
        before = list(counts)

        def are_done() -> bool:
            return all(now > then for now, then in zip(counts, before, strict=True))

        assert wait_until(lambda: are_done() or any(future.done() for future in futures), timeout_s=LONG_WAIT_S)

    futures: list[Future[None]] = []
    with ThreadPoolExecutor(num_streams) as executor:
        futures += [executor.submit(stream, index) for index in range(num_streams)]
        try:
            yield wait_for_all
        finally:
            stop.set()
    for future in futures:
        future.result()


def settled(cluster: ProcessCluster) -> bool:
    return cluster.state().is_settled


def replaced(cluster: ProcessCluster, name: str, pid: int, timeout_s: float = WAIT_S) -> bool:
    """Whether another process than `pid` has that name in a settled cluster, in time.

    Between the end of a process and the controller's notice of it, the cluster still calls itself settled.
    """

    def is_replaced() -> bool:
        state = cluster.state()
        pids: dict[str, int] = {gateway.name: gateway.pid for gateway in state.gateways}
        pids |= {record.worker_id: record.info.pid for record in state.workers if record.info}
        return state.is_settled and pids.get(name, pid) != pid

    return wait_until(is_replaced, timeout_s)


def names(cluster: ProcessCluster) -> list[str]:
    return [record.worker_id for record in cluster.state().workers]


def test_scaling_cuts_no_stream_and_leaves_nothing() -> None:
    config = parse_config({**FAKE, "placement": {"policy": "round_robin"}})
    with ProcessCluster(config) as cluster, Client(cluster.address) as client:

        def is_serving(name: str) -> bool:
            return any(w.worker_id == name and w.sequences for w in client.cluster_state().workers)

        with endless_streams(cluster.address) as wait_for_all:
            wait_for_all()
            client.scale({"decode": 2, "prefill": 2})
            assert names(cluster) == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
            assert wait_until(lambda: settled(cluster))
            added = [ProcessRef.of(cluster.pid(name)) for name in ("prefill-1", "decode-1")]
            wait_for_all()
            assert wait_until(lambda: is_serving("decode-1"))
            client.scale({"decode": 1, "prefill": 1})
            assert wait_until(lambda: settled(cluster))
            assert names(cluster) == ["prefill-0", "decode-0"]
            assert [process for process in added if process.is_alive()] == []
            wait_for_all()
        state = client.cluster_state()
        assert [(pool.name, pool.desired, pool.ready) for pool in state.pools] == [("prefill", 1, 1), ("decode", 1, 1)]
        assert [(w.worker_id, w.phase, w.starts) for w in state.workers] == [
            ("prefill-0", "ready", 1),
            ("decode-0", "ready", 1),
        ]
    assert cluster.killed == []


def test_a_drain_that_takes_too_long_moves_the_streams() -> None:
    config = parse_config({**FAKE, "controller": {"drain_timeout_s": 0.05}, "pools": {"decode": {"size": 2}}})
    with ProcessCluster(config) as cluster, endless_streams(cluster.address) as wait_for_all:
        wait_for_all()
        cluster.control(ScaleRequest(sizes={"decode": 1}))
        assert wait_until(lambda: settled(cluster))
        wait_for_all()
    assert cluster.killed == []


def test_killed_processes_are_started_again_and_serve() -> None:
    with ProcessCluster(parse_config({**FAKE, "pools": {"decode": {"size": 2}}})) as cluster:
        for name in ("prefill-0", "decode-1", "gateway"):
            address, pid = cluster.address, cluster.pid(name)
            os.kill(pid, signal.SIGKILL)
            assert replaced(cluster, name, pid)
            assert cluster.address == address
            details = {str(record.worker_id): record.detail for record in cluster.state().workers}
            details["gateway"] = cluster.state().gateways[0].detail
            # a busy machine may have had it log something before
            assert details[name].partition("; the end of its log:")[0] == "killed by SIGKILL"
            serves(cluster, name)
    assert cluster.killed == []


def serves(cluster: ProcessCluster, name: str) -> None:
    """The cluster, since the process of that name has come back."""
    with Client(cluster.address) as client:

        def is_connected() -> bool:
            """The state has workers of the membership too; a request shows that the gateway has a session with it."""
            known = {worker.worker_id: worker.pid for worker in client.cluster_state().workers}
            if name != "gateway" and known.get(name) != cluster.pid(name):
                return False
            try:
                client.generate(PROMPT, max_tokens=1, temperature=0.0, ignore_eos=True)
            except UnavailableError:
                return False
            return True

        assert wait_until(is_connected, timeout_s=LONG_WAIT_S)  # a moment after the controller knows it
        for _ in range(4):
            answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == fake_generate(PROMPT, 20)


def test_a_worker_that_dies_under_load_costs_no_answer() -> None:
    config = parse_config({**FAKE, "pools": {"prefill": {"size": 2}, "decode": {"size": 2}}})
    with ProcessCluster(config) as cluster, endless_streams(cluster.address) as wait_for_all:
        wait_for_all()
        pid = cluster.pid("decode-1")
        os.kill(pid, signal.SIGKILL)
        assert replaced(cluster, "decode-1", pid)
        wait_for_all()


def test_a_worker_can_be_replaced() -> None:
    config = parse_config({**FAKE, "pools": {"decode": {"size": 2}}})
    with ProcessCluster(config) as cluster, Client(cluster.address) as client:
        with endless_streams(cluster.address) as wait_for_all:
            wait_for_all()
            before = ProcessRef.of(cluster.pid("decode-0"))
            client.drain("decode-0")
            assert replaced(cluster, "decode-0", before.pid)
            assert not before.is_alive()
            wait_for_all()
        assert cluster.state().workers[1].num_starts == 2


def test_requests_that_cannot_be_followed_name_the_field() -> None:
    with ProcessCluster(parse_config(FAKE)) as cluster, Client(cluster.address) as client:
        for sizes, message in (
            ({"decode": 0}, "sizes.decode: expected 1 to 1024 workers; got 0"),
            ({"colocated": 1}, "sizes.colocated: this cluster has prefill, decode"),
            ({"gpu": 1}, "sizes.pool: there is no pool 'gpu'; this cluster has prefill, decode"),
            ({}, "sizes: name at least one pool of prefill, decode"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                client.scale(sizes)
            assert str(caught.value) == message
        with pytest.raises(
            InvalidRequestError, match=r"^worker_id: there is no decode-7; there is prefill-0, decode-0$"
        ):
            client.drain("decode-7")
        with pytest.raises(InvalidRequestError, match=r"^worker_id: decode-0 is the only ready worker of its pool"):
            client.drain("decode-0")


def test_the_command_line_scales_and_shows() -> None:
    with ProcessCluster(parse_config(FAKE)) as cluster:

        def disagg(*arguments: str) -> tuple[int, str, str]:
            command = [sys.executable, "-m", "disagg.cli", *arguments, "--address", cluster.address]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            return done.returncode, done.stdout, done.stderr

        status, out, err = disagg("scale", "decode=2")
        assert (status, err) == (0, "")
        lines = [line.split() for line in out.splitlines()]
        # a start may be over before the command looks for the first time
        assert lines in ([["starting", "decode-1"], ["ready", "decode-1"]], [["ready", "decode-1"]])
        status, out, err = disagg("status")
        rows = [line.split() for line in out.splitlines()]
        assert (status, err) == (0, "")
        assert ["decode", "2", "2"] in rows
        assert [row[:3] for row in rows if row and row[0] == "decode-1"] == [
            ["decode-1", "ready", str(cluster.pid("decode-1"))],
            ["decode-1", "started", "in"],
        ]
        assert disagg("scale", "decode=0") == (
            1,
            "",
            "error: sizes.decode: expected 1 to 1024 workers; got 0\n",
        )


OF_THE_MACHINE = ("event loop blocked", "stood still", "cores")
"""What a process says of a machine that is busy or small."""


def test_a_healthy_cluster_writes_no_warning(tmp_path: Path) -> None:
    """From its start over an answer and two changes of a pool's size to its stop."""
    with ProcessCluster(parse_config(FAKE), log_dir=tmp_path) as cluster, Client(cluster.address) as client:
        for size in (2, 1):
            answer = client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == fake_generate(PROMPT, 8)
            cluster.control(ScaleRequest(sizes={"decode": size}))
            assert wait_until(lambda: settled(cluster))
    lines = [line for log in tmp_path.glob("*.log") for line in log.read_text().splitlines()]
    assert any(" INFO " in line for line in lines)
    alarms = [line for line in lines if " WARNING " in line or " ERROR " in line]
    assert [line for line in alarms if not any(words in line for words in OF_THE_MACHINE)] == []
