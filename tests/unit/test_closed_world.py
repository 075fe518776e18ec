"""The fences around the tests hold: what a unit test must not do fails, and what a test leaves behind is found."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time

import grpc
import grpc.aio
import pytest

from tests.support.leftovers import Snapshot, leftovers, pending_tasks


def test_sleeping_is_forbidden() -> None:
    time.sleep(0)
    with pytest.raises(AssertionError, match="must not sleep"):
        time.sleep(0.001)


async def test_sleeping_on_the_loop_is_forbidden() -> None:
    assert await asyncio.sleep(0, "result") == "result"
    with pytest.raises(AssertionError, match="must not sleep"):
        await asyncio.sleep(0.001)


def test_internet_sockets_are_forbidden_and_socket_pairs_work() -> None:
    with socket.socket() as client, pytest.raises(AssertionError, match=r"socket\.connect"):
        client.connect(("127.0.0.1", 9))
    with socket.socket() as server, pytest.raises(AssertionError, match=r"socket\.bind"):
        server.bind(("127.0.0.1", 0))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"


def test_grpc_is_forbidden() -> None:
    with pytest.raises(AssertionError, match=r"grpc\.aio\.insecure_channel"):
        grpc.aio.insecure_channel("127.0.0.1:9")
    with pytest.raises(AssertionError, match=r"grpc\.insecure_channel"):
        grpc.insecure_channel("127.0.0.1:9")


def test_a_thread_left_behind_is_found() -> None:
    before = Snapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-behind")
    thread.start()
    assert leftovers(before, grace_s=0) == ["thread left-behind"]
    stop.set()
    thread.join()
    assert leftovers(before, grace_s=0) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")  # noqa: PTH110
def test_a_process_left_behind_is_found_also_as_an_orphan() -> None:
    before = Snapshot.take()
    script = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0).pid, flush=True)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    orphan = int(parent.stdout.readline())
    parent.wait()
    assert [line.split(":")[0] for line in leftovers(before, grace_s=0)] == [f"process {orphan}"]
    parent.stdin.close()
    parent.stdout.close()
    assert leftovers(before, grace_s=5) == []


def test_a_task_left_behind_is_found() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        tasks.append(asyncio.create_task(forever(), name="left-behind"))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    with pending_tasks() as found:
        asyncio.run(main())
    assert found == ["task left-behind: test_a_task_left_behind_is_found.<locals>.forever"]


@pytest.mark.parametrize(("rounds", "found"), [(3, []), (None, ["task a-call"])])
def test_a_task_of_grpc_may_end_some_rounds_of_the_loop_later(rounds: int | None, found: list[str]) -> None:
    async def end_after() -> None:
        turn = 0
        while turn != rounds:
            await asyncio.sleep(0)
            turn += 1

    end_after.__code__ = end_after.__code__.replace(co_filename="src/python/grpcio/grpc/call.pyx.pxi")

    async def main() -> None:
        tasks.append(asyncio.create_task(end_after(), name="a-call"))

    tasks: list[asyncio.Task[None]] = []
    with pending_tasks(grace_s=0.05) as left:
        asyncio.run(main())
    assert [task.partition(":")[0] for task in left] == found
