"""Long work on the event loop itself, for what holds the interpreter, so that a thread would not help (`offload` is for
the rest).

    async with turns.of(tenant, num_bytes): ...        one large message at a time, tenant by tenant, and of a tenant
                                                       16 MB/s at most; what waits is bounded
    await run_cooperatively(generator)                 other tasks run between two pieces, for three times the time
                                                       of a piece

A token passes through several turns of the loop on its way to a client. Long work whose pieces followed each other
without a rest would be in each of them, and the messages of the workers would come faster than they are read. All work
of a tenant rests together: after a piece of one message no other message of the tenant continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from disagg.gateway.auth.auth import CALLER
from disagg.gateway.event_loop.fair_order import FairOrder, Work


class LoopTurns:
    """The order in which large messages are worked on. Used on one event loop.

    Args:
        order: the order of waiting work; empty.
    """

    def __init__(self, order: FairOrder) -> None:
        self._order = order
        self._waiting: dict[Work, asyncio.Future[None]] = {}
        self._is_taken = False

    @property
    def num_waiting(self) -> int:
        """Number of tasks that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def of(self, tenant: str, num_bytes: int) -> AsyncGenerator[None, None]:
        """Wait for the turn and hold it inside. Raises `OverloadedError` at once if too much work waits."""
        work = Work(tenant, num_bytes)
        self._order.offer(work)
        turn = self._waiting[work] = asyncio.get_running_loop().create_future()
        if not self._is_taken:
            self._pass_on()
        try:
            await turn
        except asyncio.CancelledError:
            if self._order.cancel(work):
                del self._waiting[work]
            else:  # it was given, and will not be used
                self._end(work, 0.0)
            raise
        try:
            yield
        finally:
            self._end(work, MESSAGE_S + num_bytes * BYTE_S)

    def _end(self, work: Work, rest_s: float) -> None:
        """Pass the turn to another tenant now. This tenant's next turn comes after `rest_s`; until then the bytes of
        the work still count."""
        self._is_taken = False
        if rest_s > 0:
            asyncio.get_running_loop().call_later(rest_s, self._rested, work)
        else:
            self._order.finished(work)
        self._pass_on()

    def _rested(self, work: Work) -> None:
        self._order.finished(work)
        if not self._is_taken:
            self._pass_on()

    def _pass_on(self) -> None:
        work, _ = self._order.take(0.0)  # none of them has a deadline
        self._is_taken = work is not None
        if work is not None and not (turn := self._waiting.pop(work)).done():
            turn.set_result(None)  # One that was cancelled just now passes the turn on itself.


T = TypeVar("T")

SHORT_S: Final = 0.0005
"""Pieces of work that take less than this many seconds are not followed by a rest."""
_RESTS: Final = 3
"""Length of a rest, as a multiple of the duration of the piece before it."""
_MAX_REST_S: Final = 0.02
"""Maximum seconds of a rest: a piece may have taken long because its thread did not get the processor."""
MESSAGE_S: Final = 0.002
BYTE_S: Final = 60e-9
"""Seconds for which a large message (`MESSAGE_S`) and each of its bytes delay further large messages of its tenant:
receiving it and writing its answer take time of the loop too, outside of all pieces. The message itself is not
delayed."""
_rest_until: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, float]] = WeakKeyDictionary()
"""End of the rests of all pieces of a tenant so far, by tenant."""


async def run_cooperatively(work: Generator[None, None, T]) -> T:
    """Run `work` with rests between its pieces and return its result. Each piece, up to a `yield`, should take a
    millisecond at most. Three quarters of the loop's time are left to other tenants, however many messages a tenant
    sends at a time."""
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
    """Sleep for three times as long as the piece of work that began at `began` took, after the rests of the tenant's
    other pieces, unless it was short. Returns whether it slept."""
    now = time.monotonic()
    took_s = now - began
    if took_s < SHORT_S:
        return False
    ends, tenant = _rest_until.setdefault(asyncio.get_running_loop(), {}), CALLER.get().tenant
    ends[tenant] = until = max(now, ends.get(tenant, now)) + min(_RESTS * took_s, _MAX_REST_S)
    await asyncio.sleep(until - now)
    return True
