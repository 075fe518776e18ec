"""Blocking calls, each on a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from disagg.engine.io.blocking import call_on_thread, open_on_thread

WAIT_S = 10.0


class Door:
    """Something that can be closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


async def test_results_and_errors_come_back() -> None:
    def fail() -> int:
        raise OSError("nobody there")

    door = Door()
    assert await call_on_thread("t", threading.current_thread) is not threading.current_thread()
    assert await open_on_thread("t", lambda: door) is door
    assert not door.closed.is_set()
    with pytest.raises(OSError, match="nobody there"):
        await call_on_thread("t", fail)


async def test_many_that_wait_do_not_hold_up_another_one() -> None:
    gate = threading.Event()
    waiting = [asyncio.create_task(call_on_thread("t", lambda: gate.wait(WAIT_S))) for _ in range(40)]
    assert await call_on_thread("t", lambda: 7) == 7
    gate.set()
    assert await asyncio.gather(*waiting) == [True] * 40


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_opened_for_a_caller_that_left_is_closed(fails: bool) -> None:
    gate, door, done = threading.Event(), Door(), threading.Event()

    def open_it() -> Door:
        assert gate.wait(WAIT_S)
        done.set()
        if fails:
            raise OSError("nobody there")
        return door

    task = asyncio.create_task(open_on_thread("t", open_it))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert done.wait(WAIT_S)
    assert door.closed.wait(0.0 if fails else WAIT_S) is not fails
