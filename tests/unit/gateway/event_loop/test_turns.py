"""Turns on the event loop: one at a time, tenant by tenant, given up when the task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from disagg.gateway.event_loop.fair_order import FairOrder
from disagg.gateway.event_loop.shell.turns import LoopTurns
from disagg.proto.errors import OverloadedError


def turns_for(max_bytes: int = 1000) -> LoopTurns:
    return LoopTurns(FairOrder(max_bytes, max_bytes, what="messages"))


async def test_tasks_have_their_turns_and_leave_when_cancelled() -> None:
    turns = turns_for()
    order: list[str] = []

    async def work(name: str, tenant: str, done: asyncio.Event) -> None:
        async with turns.of(tenant, 10):
            order.append(name)
            await done.wait()

    hold = asyncio.Event()
    first = asyncio.create_task(work("first", "a", hold))
    await asyncio.sleep(0)
    go = asyncio.Event()
    go.set()
    tasks = [asyncio.create_task(work(name, name[0], go)) for name in ("a1", "a2", "b1", "gone")]
    await asyncio.sleep(0)
    assert (order, turns.num_waiting) == (["first"], 4)
    tasks[3].cancel()
    await asyncio.gather(tasks[3], return_exceptions=True)
    assert turns.num_waiting == 3
    hold.set()
    await asyncio.gather(first, *tasks[:3])
    assert order[0] == "first"
    assert set(order[1:3]) == {"a1", "b1"}
    assert order[3] == "a2"
    async with turns.of("z", 1):
        assert turns.num_waiting == 0


async def test_a_turn_that_was_given_to_a_task_that_is_cancelled_goes_on_to_the_next() -> None:
    turns = turns_for()
    served: list[str] = []

    async def work(name: str) -> None:
        async with turns.of(name, 10):
            served.append(name)

    async with turns.of("holder", 1):
        late, next_one = asyncio.create_task(work("late")), asyncio.create_task(work("next"))
        await asyncio.sleep(0)
    late.cancel()  # its turn was given just now
    await asyncio.gather(late, next_one, return_exceptions=True)
    assert (served, turns.num_waiting) == (["next"], 0)
    async with turns.of("again", 1):
        served.append("again")
    assert served == ["next", "again"]


async def test_too_much_is_refused_and_leaves_nothing() -> None:
    turns = turns_for(100)
    async with turns.of("a", 90):
        with pytest.raises(OverloadedError, match="90 bytes of this key's messages are worked on, at most 100"):
            async with turns.of("a", 20):
                pass
        assert turns.num_waiting == 0
    async with turns.of("a", 100):
        pass


async def test_a_task_that_is_cancelled_as_the_turn_ends_harms_nobody_else() -> None:
    turns = turns_for()
    go = asyncio.Event()

    async def work(name: str) -> str:
        async with turns.of(name, 10):
            await go.wait()
        return name

    first, second, third = (asyncio.create_task(work(name)) for name in ("first", "second", "third"))
    await asyncio.sleep(0)
    go.set()
    second.cancel()  # before the first one, which is ready, gives its turn to it
    assert await first == "first"
    assert await third == "third"
    with pytest.raises(asyncio.CancelledError):
        await second
    assert turns.num_waiting == 0


async def test_a_tenant_has_its_next_turn_after_a_rest_by_the_size_of_the_message_and_others_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("disagg.gateway.event_loop.shell.turns.MESSAGE_S", 0.002)
    monkeypatch.setattr("disagg.gateway.event_loop.shell.turns.BYTE_S", 60e-9)
    timers: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(
        asyncio.get_running_loop(),
        "call_later",
        lambda seconds, callback, *args: timers.append((round(seconds, 6), partial(callback, *args))),
    )
    turns, order = turns_for(3_000_000), []

    async def work(name: str, tenant: str, error: Exception | None = None) -> None:
        with suppress(ValueError):
            async with turns.of(tenant, 1_000_000):
                order.append(name)
                if error is not None:
                    raise error

    tasks = [asyncio.create_task(work(name, name[0], error)) for name, error in (("a1", ValueError()), ("a2", None))]
    await asyncio.gather(tasks[0], work("b1", "b"))
    await asyncio.sleep(0)
    assert (order, turns.num_waiting, [seconds for seconds, _ in timers]) == (["a1", "b1"], 1, [0.062, 0.062])
    with pytest.raises(OverloadedError, match="3000000 bytes of messages are worked on"):
        await work("c1", "c")  # what rests counts
    timers[0][1]()
    await tasks[1]
    assert order == ["a1", "b1", "a2"]
