"""The bounded way out to one peer."""

from __future__ import annotations

import asyncio

from disagg.engine.io.mailbox import Mailbox


async def start_reading(mailbox: Mailbox[int], found: list[int]) -> asyncio.Task[None]:
    async def read() -> None:
        async for item in mailbox:
            found.append(item)  # noqa: PERF401 - the test looks at `found` meanwhile

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    return task


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_items_come_in_order_before_and_while_it_is_read() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    mailbox.put(1)
    mailbox.put(2)
    found: list[int] = []
    reader = await start_reading(mailbox, found)
    assert found == [1, 2]
    mailbox.put(3)
    await turns()
    mailbox.put(4)
    await turns()
    assert found == [1, 2, 3, 4]
    mailbox.close()
    await reader


async def test_one_item_too_many_closes_and_drops_what_was_queued() -> None:
    mailbox: Mailbox[int] = Mailbox(2)
    states = []
    for item in range(3):
        mailbox.put(item)
        states.append(mailbox.closed)
    assert states == [False, False, True]
    found: list[int] = []
    await (await start_reading(mailbox, found))
    assert found == []


async def test_a_reader_makes_room() -> None:
    mailbox: Mailbox[int] = Mailbox(1)
    found: list[int] = []
    reader = await start_reading(mailbox, found)
    for item in range(5):
        mailbox.put(item)
        await turns()
    assert found == [0, 1, 2, 3, 4]
    assert not mailbox.closed
    mailbox.close()
    await reader


async def test_close_ends_a_waiting_reader_and_everything_after_it() -> None:
    mailbox: Mailbox[int] = Mailbox(2)
    found: list[int] = []
    reader = await start_reading(mailbox, found)
    mailbox.put(1)
    mailbox.close()  # before the reader had its turn
    mailbox.close()
    mailbox.put(2)
    await reader
    assert found == []
    await (await start_reading(mailbox, found))
    assert found == []


async def test_batches_hold_what_was_queued_since_the_last_one() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    found: list[list[int]] = []

    async def read() -> None:
        async for batch in mailbox.batches():
            found.append(batch)  # noqa: PERF401 - the test looks at `found` meanwhile

    mailbox.put(1)
    mailbox.put(2)
    reader = asyncio.create_task(read())
    await turns()
    assert found == [[1, 2]]
    for item in (3, 4, 5):
        mailbox.put(item)
    await turns()
    assert found == [[1, 2], [3, 4, 5]]
    mailbox.put(6)
    mailbox.close()  # before the reader had its turn
    await reader
    assert found == [[1, 2], [3, 4, 5]]
