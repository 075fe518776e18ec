"""Runs the batches of a store: claims one, runs its lines that have no answer, writes the answers, ends it.

    claim ──> index the input ──> lines, as many at a time as there is room ──> finish
                  └─> fail             └─ each turn: answers kept, lease renewed, cancelled or expired?

A runner that is cancelled gives its lease back. Lines that ran then are run again by the next owner.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from disagg.router.gateway.batches import lines
from disagg.router.gateway.batches.store import LEASE_S, Answer, Batch, BatchStore

logger = logging.getLogger(__name__)

_FIRST_ERROR_STATUS: Final = 400
AnswerLine = Callable[[Batch, lines.Line], Awaitable[tuple[int, bytes]]]
"""Runs one line for the batch's tenant: its HTTP status and JSON body. Raises nothing but cancellation."""


def num_admissible(num_free: int, num_waiting: int, reserve: int, num_running: int, most: int) -> int:
    """How many more lines may start now. (pure)

    Args:
        num_free: decode places that nothing uses.
        num_waiting: interactive requests that wait for a place; while there are any, no line starts.
        reserve: free places that are left to interactive requests.
        num_running: lines that run.
        most: lines that may run at a time.
    """
    if num_waiting:
        return 0
    return max(0, min(num_free - reserve, most - num_running))


@dataclass(frozen=True, slots=True)
class _Input:
    batch: Batch
    path: Path
    offsets: array[int]


class BatchRunner:
    """Owner of the lines that run.

    Args:
        store: used by this runner alone; whoever else looks at the batches has a connection of its own.
        owner: name of this process's life; one that starts again has another.
        answer_line: see `AnswerLine`.
        num_room: from the lines that run, how many more may start; see `num_admissible`.
        wall_clock: seconds since the epoch.
        turn_s: how often lease and the batch's state are looked at, and room at least.
    """

    def __init__(
        self,
        store: BatchStore,
        owner: str,
        answer_line: AnswerLine,
        num_room: Callable[[int], int],
        wall_clock: Callable[[], float],
        turn_s: float = LEASE_S / 30,
    ) -> None:
        self._store = store
        self._owner = owner
        self._answer_line = answer_line
        self._num_room = num_room
        self._clock = wall_clock
        self._turn_s = turn_s

    async def run_one(self) -> bool:
        """Run the oldest batch that nobody owns to its end, or until it is lost; whether there was one."""
        batch = await asyncio.to_thread(self._store.claim, self._owner, self._clock())
        if batch is None:
            return False
        await self._run_claimed(batch)
        return True

    async def _run_claimed(self, batch: Batch) -> None:
        path = self._store.path(batch.input_file)
        try:
            offsets = await asyncio.to_thread(lines.index, path, batch.endpoint)
        except (lines.InputError, OSError) as error:
            reason = str(error) if isinstance(error, lines.InputError) else "its input file cannot be read"
            logger.info("batch %s of tenant %r failed: %s", batch.id, batch.tenant, error)
            await asyncio.to_thread(self._store.fail, batch.id, self._owner, reason, self._clock())
            return
        await asyncio.to_thread(self._store.begin, batch.id, self._owner, len(offsets))
        status = await self._run(_Input(batch, path, offsets))
        if status is None:
            logger.warning("batch %s: another gateway has taken it over and goes on with it", batch.id)
        else:
            await asyncio.to_thread(self._store.finish, batch.id, self._owner, status, self._clock())

    async def _run(self, given: _Input) -> str | None:
        """The state that the batch ends in; None where this runner has lost it."""
        done = await asyncio.to_thread(self._store.answered, given.batch.id)
        left = deque(number for number in range(len(given.offsets)) if number not in done)
        running: set[asyncio.Task[Answer]] = set()
        looked = -math.inf
        try:
            while True:
                now = self._clock()
                if not looked <= now < looked + self._turn_s:
                    batch = await asyncio.to_thread(self._store.renew, given.batch.id, self._owner, now)
                    if batch is None:
                        return None
                    if batch.status == "cancelling":
                        return "cancelled"
                    if batch.expires <= now:
                        return "expired"
                    looked = now
                self._start(given, left, running)
                if not running and not left:
                    return "completed"
                if not await self._keep(given.batch.id, running):
                    return None
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _start(self, given: _Input, left: deque[int], running: set[asyncio.Task[Answer]]) -> None:
        for _ in range(min(len(left), self._num_room(len(running)))):
            number = left.popleft()
            running.add(asyncio.create_task(self._answer(given, number), name=f"batch-{given.batch.id}-{number}"))

    async def _keep(self, batch_id: str, running: set[asyncio.Task[Answer]]) -> bool:
        """Wait a turn, then keep what was answered. False where the batch is lost."""
        if not running:
            await asyncio.sleep(self._turn_s)
            return True
        ended, _ = await asyncio.wait(running, timeout=self._turn_s, return_when=asyncio.FIRST_COMPLETED)
        running -= ended
        answers = [task.result() for task in ended]
        return not answers or await asyncio.to_thread(self._store.answer, batch_id, self._owner, answers)

    async def _answer(self, given: _Input, number: int) -> Answer:
        line = await asyncio.to_thread(lines.read, given.path, given.offsets[number])
        status, body = await self._answer_line(given.batch, line)
        data = lines.answer(given.batch.id, number, line.custom_id, status, body)
        return Answer(number, status < _FIRST_ERROR_STATUS, data)
