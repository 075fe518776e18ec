"""Tasks of one connection, all of which end with the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def first_to_end(*coroutines: Coroutine[None, None, None]) -> None:
    """Run all coroutines until one ends; cancel the others, wait for them, and raise the exception of the first one."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
