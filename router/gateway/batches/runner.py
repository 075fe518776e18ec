"""Runs the batches of a store, one of each tenant at a time: claims them, runs the lines that have no answer, writes
the answers, ends them.

    claim ──> index the input ──> lines, as many at a time as their model has room, the tenants in turn ──> finish
                  └─> fail             └─ each turn: answers kept, leases renewed, cancelled or expired?

A runner that is cancelled gives its leases back. Lines that ran then are run again by the next owner.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from disagg.router.gateway.batches import lines
from disagg.router.gateway.batches.room import Room, lines_to_start
from disagg.router.gateway.batches.store import Answer, Batch, BatchStore
from disagg.router.gateway.usage.counts import CallUse

logger = logging.getLogger(__name__)

MAX_OPEN: Final = 16
"""Batches that run at a time, each of another tenant; further tenants wait for the end of one."""
TURN_S: Final = 0.5
_PACE_S: Final = 0.02
"""Between two looks for room, while prompts of lines are computed."""
_FIRST_ERROR_STATUS: Final = 400
NO_ROOM: Final = "there is no room for its further answers (gateway.batches.max_total_bytes); delete some files"


class LineResult(NamedTuple):
    """What a line came to."""

    status: int
    """Of HTTP."""
    body: bytes
    """JSON."""
    use: CallUse
    """Of its last try: tries before it ended with the loss of a worker, or used nothing."""


AnswerLine = Callable[[Batch, lines.Line], Awaitable[LineResult]]
"""Runs one line for the batch's tenant. Raises nothing but cancellation."""


class _Done(NamedTuple):
    answer: Answer
    use: CallUse


class _Running(NamedTuple):
    """A line that runs."""

    model: int
    num_answers: int


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that this runner owns."""

    batch: Batch
    path: Path
    indexing: asyncio.Task[lines.Index] | None
    """Until `index` is known."""
    index: lines.Index | None = None
    left: dict[int, deque[int]] = field(default_factory=dict)
    """Lines without an answer that do not run, by model."""
    running: dict[asyncio.Task[_Done], _Running] = field(default_factory=dict)
    num_started: int = 0
    """Lines of all batches that were started up to its latest one. Of batches with equally many answers running that
    with the least has its turn, so that a line that runs alone has one."""
    looked: float = -math.inf
    """When its state was looked at last."""

    @property
    def is_done(self) -> bool:
        """Whether each line has an answer."""
        return self.indexing is None and not any(self.left.values()) and not self.running

    def num_running(self, model: int | None = None) -> int:
        """Answers that run at a model; None for all."""
        return sum(each.num_answers for each in self.running.values() if model in (None, each.model))


class BatchRunner:
    """Owner of the lines that run.

    Args:
        store: used by this runner alone; whoever else looks at the batches has a connection of its own.
        owner: name of this process's life; one that starts again has another.
        models: names of those that are served, or were: a model keeps its position, further ones follow.
        answer_line: see `AnswerLine`.
        room: what may start at the model of that position, from the answers that run there and at all. Lines of
            `lines.NO_MODEL`, and those for a model that is not served any more, end at once.
        wall_clock: seconds since the epoch.
        kept: called with the tenant and what a line used, once its answer is kept.
        turn_s: how often leases and the batches' states are looked at, and room at least.
    """

    def __init__(
        self,
        store: BatchStore,
        owner: str,
        models: Callable[[], Sequence[str]],
        answer_line: AnswerLine,
        room: Callable[[int, int, int], Room],
        wall_clock: Callable[[], float],
        kept: Callable[[str, CallUse], None],
        turn_s: float = TURN_S,
    ) -> None:
        self._store = store
        self._owner = owner
        self._models = models
        self._answer_line = answer_line
        self._room = room
        self._clock = wall_clock
        self._kept = kept
        self._turn_s = turn_s
        self._open: dict[str, _Open] = {}
        """By tenant."""
        self._num_started = 0
        self._claimed = -math.inf
        self._is_paced = False
        """Whether there is more room soon, though no line may have ended."""

    async def run(self) -> bool:
        """Run batches until there is none that nobody else owns; whether there was one."""
        had_any = False
        self._claimed = -math.inf
        try:
            while await self._claim():
                had_any = True
                for each in list(self._open.values()):
                    await self._look(each)
                self._start()
                await self._keep()
                for each in list(self._open.values()):
                    if each.is_done:
                        await self._end(each, "completed")
            return had_any
        finally:
            for each in list(self._open.values()):
                await self._drop(each)

    async def _claim(self) -> bool:
        """Look for batches of tenants that have none open, at most once a turn; whether any is open."""
        now = self._clock()
        if self._open and self._claimed <= now < self._claimed + self._turn_s:
            return True
        self._claimed = now
        while len(self._open) < MAX_OPEN:
            batch = await asyncio.to_thread(self._store.claim, self._owner, now, tuple(self._open))
            if batch is None:
                break
            path = self._store.path(batch.input_file)
            indexing = asyncio.to_thread(lines.index, path, batch.endpoint, tuple(self._models()))
            self._open[batch.tenant] = _Open(batch, path, asyncio.create_task(indexing, name=f"index-{batch.id}"))
        return bool(self._open)

    async def _look(self, each: _Open) -> None:
        """Renew the lease, and see what became of the batch meanwhile."""
        now = self._clock()
        if not each.looked <= now < each.looked + self._turn_s:
            each.looked = now
            batch = await asyncio.to_thread(self._store.renew, each.batch.id, self._owner, now)
            if batch is None:
                await self._lose(each)
            elif batch.status == "cancelling":
                await self._end(each, "cancelled")
            elif batch.expires <= now:
                await self._end(each, "expired")
        if each.indexing is not None and each.indexing.done():
            await self._begin(each, each.indexing)

    async def _begin(self, each: _Open, indexing: asyncio.Task[lines.Index]) -> None:
        """Its input is indexed."""
        each.indexing, batch = None, each.batch
        try:
            index = each.index = indexing.result()
        except asyncio.CancelledError:
            return
        except (lines.InputError, OSError) as error:
            reason = str(error) if isinstance(error, lines.InputError) else "its input file cannot be read"
            logger.info("batch %s of tenant %r failed: %s", batch.id, batch.tenant, error)
            await self._drop(each)
            await asyncio.to_thread(self._store.fail, batch.id, self._owner, reason, self._clock())
            return
        await asyncio.to_thread(self._store.begin, batch.id, self._owner, len(index.offsets))
        done = await asyncio.to_thread(self._store.answered, batch.id)
        for number, model in enumerate(index.models):
            if number not in done:
                each.left.setdefault(model, deque()).append(number)

    def _start(self) -> None:
        """First at the model with the fewest answers: the bound of all is for each in turn."""
        self._is_paced = False
        models = sorted({model for each in self._open.values() for model, left in each.left.items() if left})
        for model in sorted(models, key=lambda model: sum(each.num_running(model) for each in self._open.values())):
            self._start_at(model)

    def _start_at(self, model: int) -> None:
        opened = sorted(self._open.values(), key=lambda each: each.num_started)
        running = [each.num_running(model) for each in opened]
        room = self._room(model, sum(running), sum(each.num_running() for each in opened))
        self._is_paced |= room.is_paced
        waiting = [self._next(each, model, room) for each in opened]
        for each, count in zip(opened, lines_to_start(room, running, waiting), strict=True):
            for _ in range(count):
                self._run_line(each, model)

    def _next(self, each: _Open, model: int, room: Room) -> list[int]:
        """How many answers each of its next lines has."""
        if each.index is None or each.batch.tenant in room.waiting:
            return []
        return [each.index.num_answers[number] for number in islice(each.left.get(model, ()), max(0, room.num_answers))]

    def _run_line(self, each: _Open, model: int) -> None:
        assert each.index is not None
        self._num_started += 1
        each.num_started = self._num_started
        number = each.left[model].popleft()
        task = asyncio.create_task(self._answer(each, each.index, number), name=f"batch-{each.batch.id}-{number}")
        each.running[task] = _Running(model, each.index.num_answers[number])

    async def _keep(self) -> None:
        """Wait a turn, or until a line or an index is ready, then keep what was answered."""
        tasks: set[asyncio.Task[Any]] = {task for each in self._open.values() for task in each.running}
        tasks |= {each.indexing for each in self._open.values() if each.indexing is not None}
        if tasks:
            wait_s = min(_PACE_S, self._turn_s) if self._is_paced else self._turn_s
            await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        elif self._open and not any(each.is_done for each in self._open.values()):
            await asyncio.sleep(self._turn_s)
        for each in list(self._open.values()):
            if ended := [task for task in each.running if task.done()]:
                for task in ended:
                    del each.running[task]
                await self._keep_answers(each, [task.result() for task in ended])

    async def _keep_answers(self, each: _Open, done: list[_Done]) -> None:
        batch = each.batch
        kept = await asyncio.to_thread(self._store.answer, batch.id, self._owner, [one.answer for one in done])
        if kept == "lost":
            await self._lose(each)
        elif kept == "full":
            logger.warning("batch %s of tenant %r fails: %s", batch.id, batch.tenant, NO_ROOM)
            await self._end(each, "failed", NO_ROOM)
        else:
            for one in done:
                self._kept(batch.tenant, one.use)

    async def _end(self, each: _Open, status: str, error: str | None = None) -> None:
        await self._drop(each)
        await asyncio.to_thread(self._store.finish, each.batch.id, self._owner, status, self._clock(), error)

    async def _lose(self, each: _Open) -> None:
        logger.warning("batch %s: another gateway has taken it over and goes on with it", each.batch.id)
        await self._drop(each)

    async def _drop(self, each: _Open) -> None:
        """Give up what runs of a batch; it is not open any more."""
        self._open.pop(each.batch.tenant, None)
        self._claimed = -math.inf  # its tenant may have another one
        tasks: list[asyncio.Task[Any]] = [*each.running, *([] if each.indexing is None else [each.indexing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        each.running.clear()
        each.left.clear()
        each.indexing = None

    async def _answer(self, each: _Open, index: lines.Index, number: int) -> _Done:
        line = await asyncio.to_thread(lines.read, each.path, index.offsets[number])
        status, body, use = await self._answer_line(each.batch, line)
        data = lines.answer(each.batch.id, number, line.custom_id, status, body)
        return _Done(Answer(number, status < _FIRST_ERROR_STATUS, data), use)
