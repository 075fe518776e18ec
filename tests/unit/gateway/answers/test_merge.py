from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from disagg.gateway.answers.answer import merge


class Source:
    """A stream that gives what is put into its queue, and knows what became of it."""

    def __init__(self, *items: str | Exception | None) -> None:
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.num_asked = 0
        self.closed = False
        for item in items:
            self.queue.put_nowait(item)

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            while True:
                self.num_asked += 1
                item = await self.queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    return
                yield item
        finally:
            self.closed = True


def of(*sources: Source) -> AsyncGenerator[str, None]:
    return merge([source.stream() for source in sources])


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def read_into(seen: list[str], items: AsyncIterator[str]) -> None:
    async for item in items:
        seen.append(item)  # noqa: PERF401 - a comprehension would lose what came before an error


async def test_every_stream_to_its_end_in_its_order() -> None:
    sources = Source("a1", "a2", "a3", None), Source(None), Source("c1", None)
    seen: list[str] = []
    await read_into(seen, of(*sources))
    assert sorted(seen) == ["a1", "a2", "a3", "c1"]
    assert [item for item in seen if item < "b"] == ["a1", "a2", "a3"]
    assert all(source.closed for source in sources)


async def test_each_stream_begins_in_a_turn_of_its_own() -> None:
    sources = [Source("x", None) for _ in range(64)]
    reading = asyncio.create_task(read_into([], of(*sources)))
    begun = [0]
    while begun[-1] < len(sources):
        await asyncio.sleep(0)
        begun.append(sum(bool(source.num_asked) for source in sources))
    assert max(later - earlier for earlier, later in itertools.pairwise(begun)) == 1
    await reading


async def test_an_item_does_not_wait_for_other_streams() -> None:
    silent, talking = Source(), Source("b1", "b2")
    async with aclosing(of(silent, talking)) as items:
        assert [await anext(items), await anext(items)] == ["b1", "b2"]
        silent.queue.put_nowait("a1")
        assert await anext(items) == "a1"
    assert silent.closed
    assert talking.closed


async def test_nothing_is_asked_for_ahead_of_the_consumer() -> None:
    sources = Source(*"aaaa"), Source(*"bbbb")
    async with aclosing(of(*sources)) as items:
        await anext(items)
        await settle()
        assert [source.num_asked for source in sources] == [1, 1]
        await anext(items)
        await settle()
        assert [source.num_asked for source in sources] == [2, 1]


async def test_the_first_error_closes_all() -> None:
    failing, other, silent = Source("a", OSError("x")), Source("b"), Source()
    seen: list[str] = []
    with pytest.raises(OSError, match="x"):
        await read_into(seen, of(failing, other, silent))
    assert seen == ["a", "b"]
    assert (failing.closed, other.closed, silent.closed) == (True, True, True)


async def test_errors_of_several_streams_at_once_are_all_read() -> None:
    with pytest.raises(OSError, match="1"):
        await read_into([], of(Source(OSError("1")), Source(OSError("2"))))


async def test_a_cancelled_consumer_closes_all() -> None:
    before = asyncio.all_tasks()
    sources = Source("a"), Source()
    task = asyncio.create_task(read_into([], of(*sources)))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [source.closed for source in sources] == [True, True]
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("num_turns", range(1, 12))
async def test_streams_are_closed_whenever_the_consumer_is_cancelled(num_turns: int) -> None:
    """Also where one stream has failed, and the others are being closed for that."""
    closed: list[str] = []

    async def failing() -> AsyncGenerator[int, None]:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for number in list[int]():
            yield number
        raise ValueError("wrong")

    async def endless() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            closed.append("endless")

    async def consume() -> None:
        async with aclosing(merge([failing(), endless()])) as merged:
            async for _ in merged:
                await asyncio.sleep(0)

    consumer = asyncio.create_task(consume())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    assert closed == ["endless"] if num_turns > 1 else closed in ([], ["endless"])
