"""Work on threads, in turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from disagg.gateway.event_loop.shell.offload import Offload
from disagg.proto.errors import DeadlineError, OverloadedError


@asynccontextmanager
async def offload(max_bytes: int = 1000, clock: Callable[[], float] = lambda: 0.0) -> AsyncIterator[Offload]:
    it = Offload(1, inline_bytes=10, max_bytes=max_bytes, max_tenant_bytes=max_bytes, clock=clock)
    try:
        yield it
    finally:
        it.close()


async def test_small_work_runs_on_the_event_loop_and_large_work_on_a_thread() -> None:
    async with offload() as it:
        here = threading.get_ident()
        assert await it.run(threading.get_ident, tenant="a", num_bytes=10) == here
        assert await it.run(threading.get_ident, tenant="a", num_bytes=11) != here
        assert (it.num_bytes, it.num_waiting) == (0, 0)


async def test_what_the_work_raises_reaches_the_caller() -> None:
    async with offload() as it:
        with pytest.raises(ZeroDivisionError):
            await it.run(lambda: 1 // 0, tenant="a", num_bytes=11)
        assert await it.run(lambda: 1, tenant="a", num_bytes=11) == 1


async def test_tenants_take_turns_while_the_thread_is_busy() -> None:
    gate = threading.Event()
    done: list[str] = []
    async with offload(max_bytes=1 << 30) as it:
        busy = asyncio.create_task(it.run(gate.wait, tenant="x", num_bytes=11))
        works = [
            asyncio.create_task(it.run(partial(done.append, tenant), tenant=tenant, num_bytes=1 << 20))
            for tenant in "aaabb"
        ]
        await asyncio.sleep(0)
        assert it.num_waiting == 5
        gate.set()
        await asyncio.gather(busy, *works)
    assert done == list("ababa")


async def test_a_caller_that_leaves_gives_its_place_back() -> None:
    gate = threading.Event()
    async with offload(max_bytes=100) as it:
        busy = asyncio.create_task(it.run(gate.wait, tenant="a", num_bytes=50))
        leaving = asyncio.create_task(it.run(lambda: pytest.fail("was cancelled"), tenant="a", num_bytes=50))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await it.run(lambda: None, tenant="a", num_bytes=50)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        assert (it.num_bytes, it.num_waiting) == (50, 0)
        busy.cancel()  # its thread still works
        await asyncio.wait([busy])
        assert it.num_bytes == 50
        after = asyncio.create_task(it.run(lambda: 7, tenant="a", num_bytes=50))
        await asyncio.sleep(0)
        gate.set()
        assert await after == 7
        assert it.num_bytes == 0


async def test_a_deadline_that_passed_before_the_turn() -> None:
    gate, now = threading.Event(), [0.0]
    async with offload(clock=lambda: now[0]) as it:
        busy = asyncio.create_task(it.run(gate.wait, tenant="a", num_bytes=50))
        late = asyncio.create_task(it.run(lambda: 1, tenant="a", num_bytes=50, deadline=2.0))
        good = asyncio.create_task(it.run(lambda: 2, tenant="a", num_bytes=50, deadline=2.5))
        await asyncio.sleep(0)
        now[0] = 2.0
        gate.set()
        await busy
        with pytest.raises(DeadlineError):
            await late
        assert await good == 2


async def test_closing_cancels_what_waits() -> None:
    gate = threading.Event()
    async with offload() as it:
        busy = asyncio.create_task(it.run(gate.wait, tenant="a", num_bytes=50))
        waiting = asyncio.create_task(it.run(lambda: 1, tenant="a", num_bytes=50))
        await asyncio.sleep(0)
        gate.set()
        it.close()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await busy
        assert it.num_bytes == 0
