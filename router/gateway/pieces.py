"""Work on the event loop in pieces, with a turn for everybody else in between."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def in_pieces(work: Generator[None, None, T]) -> T:
    """What `work` returns. Each piece, up to a `yield`, should take a millisecond at most."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)
