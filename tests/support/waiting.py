"""Waiting for a state that another thread or process reaches."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

WAIT_S = 120.0
"""For one state, on a machine that is slow or does other things, too. It costs nothing where all is well."""
LONG_WAIT_S = 240.0
"""For what takes several processes one after the other: a rollout, a cluster that starts."""
POLL_S = 0.02


def until(condition: Callable[[], bool], what: str = "the condition did not become true") -> None:
    """Wait without an event loop; `what` is the error if the condition is not true within `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether the condition became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


async def eventually(
    condition: Callable[[], object] | Callable[[], Awaitable[object]],
    what: str = "the condition did not become true",
    *,
    every_s: float = 0.005,
) -> None:
    """Wait for a condition, or for one that is awaited; `what` is the error if it is not true within `LONG_WAIT_S`."""
    deadline = time.monotonic() + LONG_WAIT_S
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, what
        await asyncio.sleep(every_s)
