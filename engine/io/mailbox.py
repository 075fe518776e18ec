"""A bounded queue of messages to one peer: put without waiting, iterate to send. A peer that falls too far behind loses
the connection, because an unbounded queue would fill the memory instead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """One reader, one asyncio loop."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing more is sent."""
        return self._closed

    def put(self, item: T) -> None:
        """Queue an item; beyond `max_items` the mailbox closes instead. Ignored once closed."""
        if self._closed:
            return
        if len(self._items) >= self._max_items:
            self.close()
            return
        self._items.append(item)
        self._wake.set()

    def close(self) -> None:
        """End the iteration; what is queued is dropped. Idempotent."""
        self._closed = True
        self._items.clear()
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[T]]:
        """All that is queued, in order, whenever something is; until closed. For one reader, instead of the items."""
        while await self._has_items():
            batch = list(self._items)
            self._items.clear()
            yield batch

    async def __aiter__(self) -> AsyncIterator[T]:
        """Items in order, until closed."""
        while await self._has_items():
            yield self._items.popleft()

    async def _has_items(self) -> bool:
        """Waits until something is queued; false once closed."""
        while not self._items and not self._closed:
            self._wake.clear()
            await self._wake.wait()
        return not self._closed
