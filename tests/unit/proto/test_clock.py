"""The clock by which a process judges others: stopped, busy, starved, and read by whichever thread is first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from disagg.proto.clock.process_clock import AwakeLoop, process_clock
from disagg.proto.clock.still_time import LOOK_S, StillTime


class Process:
    """A process whose times a test sets."""

    def __init__(self) -> None:
        self.monotonic_s, self.cpu_s = 1000.0, 5.0
        self.told: list[float] = []
        self.time = StillTime(lambda: self.monotonic_s, lambda: self.cpu_s)
        self.time.on_stood_still.append(self.told.append)
        self.time.begin()

    def runs(self, seconds: float, cpu_share: float = 0.02) -> None:
        """With looks in time."""
        for _ in range(round(seconds / LOOK_S)):
            self.stops(LOOK_S, cpu_share)
            self.time.look()

    def stops(self, seconds: float, cpu_share: float = 0.0) -> None:
        """Without a look."""
        self.monotonic_s += seconds
        self.cpu_s += seconds * cpu_share


def test_it_goes_like_the_monotonic_clock() -> None:
    it = Process()
    began = it.time.now()
    it.runs(20.0)
    assert it.time.now() - began == pytest.approx(20.0)
    assert it.told == []


@pytest.mark.parametrize("still_s", [5.0, 40.0, 300.0])
@pytest.mark.parametrize("looks_first", [True, False])
def test_the_time_for_which_it_stood_still_does_not_count(still_s: float, looks_first: bool) -> None:
    it = Process()
    it.runs(1.0)
    began = it.time.now()
    it.stops(still_s)
    if looks_first:
        it.time.look()
    assert it.time.now() - began == pytest.approx(LOOK_S)
    it.runs(2.0)
    assert it.time.now() - began == pytest.approx(2.0 + LOOK_S)
    assert it.told == [pytest.approx(still_s - LOOK_S)]


def test_the_time_for_which_it_was_busy_counts() -> None:
    """Something of it held the interpreter's lock; others waited for it all the same."""
    it = Process()
    began = it.time.now()
    it.stops(40.0, cpu_share=1.0)
    assert it.time.now() - began == pytest.approx(40.0)
    assert it.told == []


def test_a_process_that_found_no_core_stood_still() -> None:
    it = Process()
    began = it.time.now()
    it.stops(5.0, cpu_share=0.05)
    assert it.time.now() - began == pytest.approx(LOOK_S)


def test_it_never_goes_back() -> None:
    it = Process()
    before = it.time.now()
    for _ in range(10):
        it.stops(3.0)
        now = it.time.now()
        assert now > before
        before = now
        it.runs(0.5)


def test_without_looks_nothing_is_taken_off() -> None:
    """Nobody could tell a process that stood still from one that did not look."""
    it = Process()
    it.time.end()
    began = it.time.now()
    it.stops(40.0)
    assert it.time.now() - began == 40.0


def test_loops_go_by_it_and_end_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Process()
    loops = [AwakeLoop(), AwakeLoop()]
    monkeypatch.setattr(loops[0], "_awake", it.time.now)
    began = loops[0].time()
    it.stops(40.0)
    assert loops[0].time() - began == pytest.approx(LOOK_S)
    assert [thread.name for thread in threading.enumerate()].count("clock") == 1
    for loop in loops:
        loop.close()
        loop.close()
    assert "clock" not in [thread.name for thread in threading.enumerate()]


def test_a_timeout_of_a_loop_does_not_run_out_while_its_process_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Process()
    answered = asyncio.Event()

    async def ask() -> str:
        async with asyncio.timeout(5.0):
            asyncio.get_running_loop().call_soon(lambda: it.stops(40.0))
            asyncio.get_running_loop().call_later(0.0, answered.set)
            await answered.wait()
        return "answered"

    with asyncio.Runner(loop_factory=AwakeLoop) as runner:
        monkeypatch.setattr(runner.get_loop(), "_awake", it.time.now)
        assert runner.run(ask()) == "answered"


def test_each_process_has_one() -> None:
    assert process_clock() is process_clock()
