"""Work on the event loop in pieces, with a turn for everybody else in between, and twice the time that the piece took.

A token passes through several turns of the loop on its way to a client. Long work whose pieces followed each other
without a rest would be in each of them, and the messages of the workers would come faster than they are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Final, TypeVar

T = TypeVar("T")

SHORT_S: Final = 0.0005
"""After less than this nothing rests."""
_RESTS: Final = 2
"""As long as the piece took, each."""
_MAX_REST_S: Final = 0.02
"""A piece may have taken long because the processor was not there."""


async def in_pieces(work: Generator[None, None, T]) -> T:
    """What `work` returns. Each piece, up to a `yield`, should take a millisecond at most; two thirds of the time
    of the loop are left to others."""
    while True:
        began = time.monotonic()
        try:
            next(work)
        except StopIteration as end:
            await rest_after(began)
            result: T = end.value
            return result
        except Exception:
            await rest_after(began)
            raise
        if not await rest_after(began):
            await asyncio.sleep(0)


async def rest_after(began: float) -> bool:
    """Leave the loop to others for twice as long as the piece of work took that began then, unless it was short.
    Whether it did."""
    took_s = time.monotonic() - began
    if took_s < SHORT_S:
        return False
    await asyncio.sleep(min(_RESTS * took_s, _MAX_REST_S))
    return True
