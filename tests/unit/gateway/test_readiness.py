"""When a gateway should get requests, and how it drains."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from disagg.gateway.readiness import Readiness
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import WorkerId
from disagg.proto.messages import Load, TierCounts, WorkerMetrics
from disagg.router.api import ClusterView, WorkerView
from tests.support.router import worker_info


def view(*worker_ids: str) -> ClusterView:
    return ClusterView(tuple(WorkerView(worker_info(worker_id), Load()) for worker_id in worker_ids), 0, 0)


@pytest.mark.parametrize(
    ("workers", "waits_for_workers", "state"),
    [
        ((), True, "no decode worker"),
        (("p0",), True, "no decode worker"),
        (("p0", "d0"), True, "ready"),
        ((), False, "ready"),
    ],
)
def test_the_state_by_workers(workers: tuple[str, ...], waits_for_workers: bool, state: str) -> None:
    readiness = Readiness(lambda: view(*workers), waits_for_workers=waits_for_workers)
    assert readiness.state == state
    readiness.begin_drain()
    assert readiness.state == "draining"


def test_tiers_that_are_off_are_told_and_nothing_is_refused_for_them() -> None:
    off = WorkerMetrics(tiers=(TierCounts(name="host"), TierCounts(name="disk", off_reason="No space left on device")))
    counters = {WorkerId("d0"): off, WorkerId("gone"): off}
    readiness = Readiness(lambda: dataclasses.replace(view("d0"), counters=counters))
    assert readiness.tiers_off == {"d0 disk": "No space left on device"}
    assert readiness.state == "ready"


async def test_a_drain_refuses_new_answers_and_waits_for_those_that_run() -> None:
    readiness = Readiness(lambda: view("d0"))
    assert await readiness.wait_ended(0.0) == 0
    go_on = asyncio.Event()

    async def answer() -> None:
        with readiness.answering():
            await go_on.wait()

    running = [asyncio.create_task(answer()) for _ in range(2)]
    await asyncio.sleep(0)
    assert readiness.begin_drain() == 2
    with pytest.raises(UnavailableError) as refused, readiness.answering():
        raise AssertionError("it was let in")
    assert refused.value.code == "gateway_stopping"
    assert await readiness.wait_ended(0.0) == 2
    go_on.set()
    assert await readiness.wait_ended(60.0) == 0
    await asyncio.gather(*running)


async def test_an_answer_that_fails_has_ended() -> None:
    readiness = Readiness(lambda: view("d0"))
    with pytest.raises(RuntimeError), readiness.answering():
        raise RuntimeError("a bug")
    assert readiness.begin_drain() == 0
