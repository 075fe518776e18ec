"""Open and closed loops.

An open loop sends at set times, whatever has become of the requests before; a closed one sends the next request when
another has ended:

    async for number in on_time(steady(rate)): tasks.append(asyncio.create_task(send(...)))
    await in_flight(send, requests, concurrency)
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def on_time(offsets_s: Iterable[float]) -> AsyncIterator[int]:
    """Yield 0, 1, 2, ..., each as soon as its offset, in seconds from the first `anext`, has passed.

    An offset is taken from the iterable when the one before has been used. What is late is yielded at once, and nothing
    after it is put off.
    """
    began = time.monotonic()
    for number, offset_s in enumerate(offsets_s):
        await asyncio.sleep(max(0.0, began + offset_s - time.monotonic()))
        yield number


def steady(per_s: float) -> Iterator[float]:
    """0, 1/rate, 2/rate, ... in seconds, without end."""
    return (number / per_s for number in itertools.count())


async def in_flight(send: Callable[[T], Awaitable[None]], requests: Iterable[T], concurrency: int) -> None:
    """Send all of them, `concurrency` at a time. What one raises ends the others, in an `ExceptionGroup`."""
    left = iter(requests)

    async def client() -> None:
        for request in left:
            await send(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
