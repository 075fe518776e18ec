"""Several streams as one, for the answers of one call.

The next item of a stream is read only after its last one was taken: a consumer that reads slowly holds back all of
them, and costs one item a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all `streams` as they come, each stream's in its order. Ends after the last stream, or with the
    first error; then, and when it is closed early, every stream is closed. Close it (`contextlib.aclosing`)."""
    reading: dict[asyncio.Task[tuple[T, ...]], AsyncGenerator[T, None]] = {}
    try:
        for stream in streams:
            reading[asyncio.create_task(_next(stream))] = stream
            await asyncio.sleep(0)  # what a stream does first is done in a turn of the event loop of its own
        while reading:
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in reading if task.done()]:
                stream = reading.pop(task)
                for item in task.result():
                    yield item
                    reading[asyncio.create_task(_next(stream))] = stream
    finally:
        for task in reading:
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not all(task.done() for task in reading):
            try:
                await asyncio.gather(*(asyncio.shield(task) for task in reading), return_exceptions=True)
            except asyncio.CancelledError as error:  # once more: the streams are closed before it goes on
                cancelled = error
        for stream in streams:
            await stream.aclose()
        if cancelled is not None:
            raise cancelled


async def _next(stream: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next item, none at the end."""
    async for item in stream:
        return (item,)
    return ()
