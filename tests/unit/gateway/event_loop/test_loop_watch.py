"""What an event loop does in its long turns."""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from disagg.gateway.event_loop.loop_times import LoopTimes
from disagg.gateway.event_loop.shell import loop_watch
from disagg.gateway.event_loop.shell.loop_watch import MAX_EVENTS, LoopWatch, TimedSelector, name_task


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(loop_watch, "process_clock", lambda: SimpleNamespace(now=it.monotonic))
    return it


def run(work: Callable[[LoopTimes], Awaitable[None]]) -> LoopTimes:
    selector = TimedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(_await(work, selector.times))
    return selector.times


async def _await(work: Callable[[LoopTimes], Awaitable[None]], times: LoopTimes) -> None:
    await work(times)


def test_the_selector_times_each_turn_and_not_the_wait(clock: Clock) -> None:
    async def work(times: LoopTimes) -> None:
        clock.now += 0.0625
        assert times.turn_s(clock.now) == 0.0625
        await asyncio.sleep(0)
        assert times.turn_s(clock.now) == 0.0
        clock.now += 0.0078125
        await asyncio.sleep(0)

    times = run(work)
    assert times.num_long == [2, 1]
    assert times.longest_s == 0.0625


def test_of_many_sockets_that_are_ready_each_has_its_turn() -> None:
    selector, number = TimedSelector(), 2 * MAX_EVENTS + 10
    with ExitStack() as closed:
        closed.callback(selector.close)
        for _ in range(number):
            ours, theirs = socket.socketpair()
            closed.callback(ours.close)
            closed.callback(theirs.close)
            theirs.send(b"x")
            selector.register(ours, selectors.EVENT_READ)
        turns = [{key.fd for key, _ in selector.select(0)} for _ in range(3)]
        assert [len(turn) for turn in turns] == [MAX_EVENTS] * 3
        assert len(set.union(*turns)) == number
        for key in list(selector.get_map().values())[MAX_EVENTS:]:
            selector.unregister(key.fileobj)
        assert len(selector.select(0)) == MAX_EVENTS


def test_a_long_turn_is_logged_with_its_request(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async def work(times: LoopTimes) -> None:
        name_task("r7")
        watch = LoopWatch(times)
        clock.now += 0.02
        watch.look()
        turn_s, doing = watch.state()
        assert (turn_s, doing) == (pytest.approx(0.02), "")  # type: ignore[comparison-overlap]
        clock.now += 0.06
        watch.look()
        turn_s, doing = watch.state()
        assert turn_s == pytest.approx(0.08)
        assert doing.startswith("request r7 in ")
        assert caplog.messages == []
        await asyncio.sleep(0)
        watch.look()
        watch.look()
        assert watch.state() == (0.0, "")

    with caplog.at_level(logging.WARNING, loop_watch.logger.name):
        run(work)
    (line,) = caplog.messages
    assert line.startswith("event loop blocked for at least 80 ms (")
    assert " by request r7 in look (loop_watch.py:" in line or " by request r7 in _doing (loop_watch.py:" in line


def test_a_turn_below_the_limit_is_not_logged(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async def work(times: LoopTimes) -> None:
        watch = LoopWatch(times)
        clock.now += 0.04
        watch.look()
        await asyncio.sleep(0)
        watch.look()

    run(work)
    assert caplog.messages == []
