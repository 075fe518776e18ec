"""Pieces of work on the event loop: long ones rest, short ones do not."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from disagg.gateway.auth.auth import CALLER
from disagg.gateway.event_loop.shell.turns import rest_after, run_cooperatively


class Times:
    """A clock that the work itself moves, and what was slept."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.moves = True
        """Whether sleeping takes time."""

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        if self.moves:
            self.now += seconds


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    it = Times()
    monkeypatch.setattr("disagg.gateway.event_loop.shell.turns.time.monotonic", it.monotonic)
    monkeypatch.setattr("disagg.gateway.event_loop.shell.turns.SHORT_S", 0.0005)
    monkeypatch.setattr(asyncio, "sleep", it.sleep)
    return it


def work(times: Times, *pieces_s: float, error: Exception | None = None) -> Generator[None, None, str]:
    for i, seconds in enumerate(pieces_s):
        if i:
            yield
        times.now += seconds
    if error is not None:
        raise error
    return "done"


def test_work_rests_three_times_as_long_as_each_piece_took(times: Times) -> None:
    assert asyncio.run(run_cooperatively(work(times, 0.002, 0.0001, 0.5, 0.003))) == "done"
    assert times.slept == [0.006, 0, 0.02, 0.009]


def test_all_work_of_a_tenant_rests_together_and_no_other_tenant_with_it(times: Times) -> None:
    async def piece_of(tenant: str) -> None:
        CALLER.set(CALLER.get()._replace(tenant=tenant))
        times.now += 0.001
        await rest_after(times.now - 0.001)

    async def three() -> None:
        times.moves = False
        for tenant in ("a", "a", "b"):
            await piece_of(tenant)

    asyncio.run(three())
    assert times.slept == [0.003, 0.005, 0.003]  # the second piece began 1 ms after the first, whose rest had 2 ms left


def test_short_work_does_not_give_the_loop_away(times: Times) -> None:
    assert asyncio.run(run_cooperatively(work(times, 0.0004))) == "done"
    assert times.slept == []


def test_refused_work_rests_too(times: Times) -> None:
    with pytest.raises(ValueError, match="refused"):
        asyncio.run(run_cooperatively(work(times, 0.0001, 0.004, error=ValueError("refused"))))
    assert times.slept == [0, 0.012]
