"""One timer for many steps: it fires on time, once, and does not swallow anybody else's cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from disagg.gateway.event_loop.shell.stall import StalledError, StallWatch


class Timers:
    """A loop's clock and timers, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], object], asyncio.TimerHandle]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        monkeypatch.setattr(loop, "call_at", self.call_at)
        monkeypatch.setattr(loop, "call_later", lambda delay, call: self.call_at(self.now + delay, call))
        self._loop = loop

    def call_at(self, when: float, call: Callable[[], object], *_: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, call, (), self._loop)
        self.due.append((when, call, handle))
        return handle

    def at(self, now: float) -> None:
        """Move the clock and run what is due."""
        self.now = now
        ready = [entry for entry in self.due if entry[0] <= now]
        self.due = [entry for entry in self.due if entry[0] > now]
        for _, call, handle in ready:
            if not handle.cancelled():
                call()


async def test_steps_within_their_time_cost_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    async with StallWatch(10.0) as watch:
        for i in range(100):
            with watch:
                timers.now = i / 20
        assert [when for when, _, _ in timers.due] == [10.0]
        timers.at(10.0)
        assert [when for when, _, _ in timers.due] == [20.0], "between steps nothing is late"
        timers.now = 14.0
        with watch:
            timers.at(20.0)
            assert [when for when, _, _ in timers.due] == [24.0], "ten seconds from the start of the step"
    assert [handle.cancelled() for _, _, handle in timers.due] == [True]


async def test_a_step_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    never = asyncio.Event()
    seen = []

    async def work() -> None:
        try:
            async with StallWatch(10.0) as watch:
                timers.now = 3.0
                with watch:
                    await never.wait()
        except StalledError:
            seen.append(timers.now)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    timers.at(10.0)
    await asyncio.sleep(0)
    assert (seen, task.cancelling()) == ([], 0)
    timers.at(13.0)
    await task
    assert (seen, task.cancelling()) == ([13.0], 0)
    assert timers.due == []


async def test_a_cancel_from_elsewhere_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    never = asyncio.Event()

    async def work() -> None:
        async with StallWatch(10.0) as watch:
            with watch:
                await never.wait()

    for is_late in (False, True):
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        if is_late:
            timers.at(timers.now + 10.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    Timers(monkeypatch)

    async def fail() -> None:
        async with StallWatch(10.0) as watch:
            with watch:
                raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await fail()
