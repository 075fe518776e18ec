"""The loops that the benchmarks' load clients share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tests.support import pace
from tests.support.pace import in_flight, on_time, steady


class Clock:
    """Stands in for `time` and `asyncio`: time passes in `sleep`, or when a test moves it."""

    def __init__(self) -> None:
        self.now = 5.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    monkeypatch.setattr(pace, "asyncio", clock)
    return clock


async def test_an_open_loop_keeps_its_times_after_one_that_was_late(clock: Clock) -> None:
    sent = []
    async for number in on_time(itertools.islice(steady(4.0), 5)):
        sent.append((number, clock.now))
        clock.now += 0.6 if number == 1 else 0.0
    assert sent == [(0, 5.0), (1, 5.25), (2, 5.85), (3, 5.85), (4, 6.0)]


async def test_an_offset_is_taken_when_the_one_before_was_used(clock: Clock) -> None:
    drawn = []

    def offsets() -> Iterator[float]:
        for offset_s in (0.5, 1.0, 1.5):
            drawn.append(offset_s)
            yield offset_s

    assert [len(drawn) async for _ in on_time(offsets())] == [1, 2, 3]


async def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    sent, most, now = [], 0, 0

    async def send(request: int) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        sent.append(request)

    await in_flight(send, range(10), 4)
    assert (sorted(sent), most, now) == (list(range(10)), 4, 0)


async def test_an_error_ends_a_closed_loop() -> None:
    sent = []

    async def send(request: int) -> None:
        await asyncio.sleep(0)
        if request == 3:
            raise ValueError("no")
        sent.append(request)

    with pytest.raises(ExceptionGroup) as raised:
        await in_flight(send, range(100), 2)
    assert [str(error) for error in raised.value.exceptions] == ["no"]
    assert len(sent) < 10
