"""Runs the batches of a store, one of each tenant at a time: claims them, runs the lines that have no answer, writes
the answers, ends them.

    claim ──> index the input ──> lines, as many at a time as their model has room, the tenants in turn ──> finish
                  └─> fail         │   └─ each turn: answers kept, leases renewed, cancelled or expired?
                                   └─ a line that cannot be answered now gives its place back, and comes again later

A runner that is cancelled gives its leases back. Lines that ran then are run again by the next owner. What a line was
told to wait for is waited for here, without a place, so that a tenant whose limits are used up holds up no other. A
batch whose answers have no room is not lost: it starts no line until there is room, and ends when it expires.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from disagg.gateway.batches import lines
from disagg.gateway.batches.batch_quota import BatchQuota, lines_to_start
from disagg.gateway.batches.begun_lines import MAX_ENDS
from disagg.gateway.batches.leases import TakeOver
from disagg.gateway.batches.store import Answer, Batch, BatchStore, Held
from disagg.gateway.batches.tries import KeptTries, Tries
from disagg.gateway.requests.call_use import CallUse
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.clock.still_time import StillTime

logger = logging.getLogger(__name__)

MAX_OPEN: Final = 16
"""Maximum number of batches open at a time, one of each tenant. Further tenants wait until one ends or has had no line
running for `_IDLE_S`."""
_IDLE_S: Final = 10.0
TURN_S: Final = 0.5
_PACE_S: Final = 0.02
"""Seconds between two checks for room while prompts of lines are computed."""
_FIRST_ERROR_STATUS: Final = 400
MAX_WAIT_S: Final = 30.0
"""Maximum seconds until a line without an answer is tried again."""
_MAX_INDEXING: Final = 2
"""Maximum number of inputs that are indexed at a time: each takes a thread, and memory for its lines."""
_MAX_RUNNING_BYTES: Final = 64 << 20
"""Maximum bytes of input of the lines that run; a single larger line may still run alone."""
_LEAST_ANSWER_BYTES: Final = 1 << 10
"""Bytes that an answer is expected to have until its batch has a larger one."""
NO_ROOM: Final = "it waits: there is no room for its further answers (gateway.batches.max_total_bytes); delete files"


class LineResult(NamedTuple):
    """The final result of a line."""

    status: int
    """HTTP status of the answer."""
    body: bytes
    """JSON of the answer or the error."""
    use: CallUse
    """Usage of the last try. Earlier tries lost their worker or used nothing."""


class Later(NamedTuple):
    """Result of a try that gave no answer: the line is tried again."""

    wait_s: float
    """Seconds until the next try; at most `MAX_WAIT_S` are waited."""
    holds_others: bool
    """Whether further lines of the batch at this model wait as well, because the reason is not the line's own."""


class AnswerLine(Protocol):
    """Runs lines for the tenant of their batch."""

    async def __call__(self, batch: Batch, line: lines.Line, tries: Tries) -> LineResult | Later:
        """Try a line once, and record the try in `tries`. Raises nothing but cancellation."""
        ...

    def most_running(self, batch: Batch) -> int | None:
        """The number of answers that the batch's tenant may have running at one model; None for any number."""
        ...


class _Done(NamedTuple):
    answer: Answer
    use: CallUse


class _Running(NamedTuple):
    """A line that runs, as part of an open batch."""

    number: int
    model: int
    num_answers: int
    num_bytes: int
    is_noted: asyncio.Event
    """Set once the line may run: the store has recorded it as begun where that is necessary."""


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that this runner owns."""

    batch: Batch
    path: Path
    indexing: asyncio.Task[lines.Index] | None
    """The task that indexes the input; None once it has ended."""
    is_dropped: threading.Event = field(default_factory=threading.Event)
    """Set to end the indexing, whose thread cannot be cancelled."""
    index: lines.Index | None = None
    left: dict[int, deque[int]] = field(default_factory=dict)
    """Numbers of lines without an answer that may start, by model."""
    later: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap of lines to be tried again: (time of the next try, model, line number)."""
    held: dict[int, float] = field(default_factory=dict)
    """Time until which no line of the batch starts at a model, by model."""
    tries: dict[int, Tries] = field(default_factory=dict)
    """Tries of lines that have no answer yet, by line number."""
    room: int = 0
    """Bytes that further answers of the batch may have."""
    largest: int = _LEAST_ANSWER_BYTES
    """Bytes of the largest answer of the batch."""
    is_waiting: bool = False
    """Whether the tenant was told that there is no room for answers."""
    running: dict[asyncio.Task[_Done | Later], _Running] = field(default_factory=dict)
    num_started: int = 0
    """The runner's count of started lines when this batch last started one. Among batches with equally many running
    answers the one with the lowest count is next, so that a line that has to run alone gets its turn."""
    looked: float = -math.inf
    """Time at which the batch's state was last read from the store."""
    busy: float = math.inf
    """Time at which a line or the indexing of the batch last ran."""
    num_ends: dict[int, int] = field(default_factory=dict)
    """Number of gateways that ended while a line ran, by line number; lines with none are left out."""

    @property
    def is_done(self) -> bool:
        """Whether each line has an answer."""
        return self.indexing is None and not any(self.left.values()) and not self.running and not self.later

    @property
    def num_fitting(self) -> int:
        """The number of further lines for whose answers there is room, if each running line's answer is as large as the
        batch's largest. At least one while there is any room and no line runs."""
        return max(self.room // self.largest - len(self.running), int(self.room > 0 and not self.running))

    def come_again(self, now: float) -> None:
        """Move lines whose retry time has come to the front of `left`. A clock that was set back does not delay
        them."""
        while self.later and not now < self.later[0][0] <= now + MAX_WAIT_S:
            _, model, number = heapq.heappop(self.later)
            self.left.setdefault(model, deque()).appendleft(number)
        self.held = {model: until for model, until in self.held.items() if now < until <= now + MAX_WAIT_S}

    def num_running(self, model: int | None = None) -> int:
        """Number of answers that run at a model, or at all models if None."""
        return sum(each.num_answers for each in self.running.values() if model in (None, each.model))


class BatchRunner:
    """Owner of the lines that run.

    Args:
        store: used by this runner alone; whoever else looks at the batches has a connection of its own.
        owner: name of this process's life; one that starts again has another.
        models: names of those that are served, or were: a model keeps its position, further ones follow.
        answer_line: see `AnswerLine`.
        quota: what may start at the model of that position, from the answers that run there and at all. Lines of
            `lines.NO_MODEL`, and those for a model that is not served any more, end at once.
        wall_clock: seconds since the epoch.
        kept: called with the tenant and what a line used, once its answer is kept.
        turn_s: how often leases and the batches' states are looked at, and room at least.
        process: the clock of this process, by which it knows that it stood still.
    """

    def __init__(
        self,
        store: BatchStore,
        owner: str,
        models: Callable[[], Sequence[str]],
        answer_line: AnswerLine,
        quota: Callable[[int, int, int], BatchQuota],
        wall_clock: Callable[[], float],
        kept: Callable[[str, CallUse], None],
        turn_s: float = TURN_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        process: StillTime | None = None,
    ) -> None:
        self._take_over = TakeOver(process or process_clock(), store.lease_s)
        self._store = store
        self._owner = owner
        self._models = models
        self._answer_line = answer_line
        self._quota = quota
        self._clock = wall_clock
        self._kept = kept
        self._turn_s = turn_s
        self._sleep = sleep
        self._open: dict[str, _Open] = {}
        """The open batch of each tenant."""
        self._tries = KeptTries()
        self._served: set[str] = set()
        """Tenants that had a turn since every other tenant with batches had one."""
        self._num_started = 0
        self._claimed = -math.inf
        self._is_paced = False
        """Whether there will be more room soon even if no line ends."""
        self._alone: tuple[_Open, int] | None = None
        """A line that ran when a gateway ended. It runs, or waits until no other line runs; no other line starts."""

    async def run(self) -> bool:
        """Run batches until none is left that no other gateway owns. Returns whether there was any."""
        had_any = False
        self._claimed = -math.inf
        try:
            while await self._claim():
                had_any = True
                for each in list(self._open.values()):
                    await self._look(each)
                self._start()
                await self._note_begun()
                await self._keep()
                for each in list(self._open.values()):
                    if each.is_done:
                        await self._end(each, "completed")
            return had_any
        finally:
            for each in list(self._open.values()):
                await self._drop(each)

    async def _claim(self) -> bool:
        """Claim batches of tenants that have none open, at most once a turn. Returns whether any batch is open."""
        now = self._clock()
        if self._open and self._claimed <= now < self._claimed + self._turn_s:
            return True
        self._claimed = now
        while self._num_indexing < _MAX_INDEXING:
            idle = min(self._open.values(), key=lambda each: each.busy, default=None)
            is_full = len(self._open) >= MAX_OPEN
            if is_full and (idle is None or now < idle.busy + _IDLE_S):
                break
            batch = await asyncio.to_thread(self._next_batch, now)
            if batch is None:
                break
            if is_full and idle is not None:
                await self._give_back(idle)
            path = self._store.path(batch.input_file)
            opened = self._open[batch.tenant] = _Open(batch, path, None, tries=self._tries.take(batch.id))
            indexing = asyncio.to_thread(
                lines.index, path, batch.endpoint, tuple(self._models()), opened.is_dropped.is_set
            )
            opened.indexing = asyncio.create_task(indexing, name=f"index-{batch.id}")
        return bool(self._open)

    @property
    def _num_indexing(self) -> int:
        return sum(each.indexing is not None for each in self._open.values())

    def _next_batch(self, now: float) -> Batch | None:
        """Claim the oldest batch of a tenant that has none open. Tenants that had a turn come after the others, however
        many older batches they have. Blocks on the disk."""
        takes_over = self._take_over.is_allowed()
        batch = self._store.claim(self._owner, now, self._served.union(self._open), takes_over=takes_over)
        if batch is None and self._served:
            self._served.clear()
            batch = self._store.claim(self._owner, now, tuple(self._open), takes_over=takes_over)
        if batch is not None:
            self._served.add(batch.tenant)
        return batch

    async def _look(self, each: _Open) -> None:
        """Renew the lease of a batch, and react to a change of its state in the store."""
        now = self._clock()
        if each.running or each.indexing is not None:
            each.busy = now
        if not each.looked <= now < each.looked + self._turn_s:
            each.looked = now
            held: Held | None = await asyncio.to_thread(self._store.renew, each.batch.id, self._owner, now)
            if held is None:
                await self._lose(each)
            elif held.batch.status == "cancelling":
                await self._end(each, "cancelled")
            elif held.batch.expires <= now:
                await self._end(each, "expired")
            else:
                await self._make_room(each, held.room)
        if each.indexing is not None and each.indexing.done():
            await self._begin(each, each.indexing)

    async def _make_room(self, each: _Open, room: int) -> None:
        """Set the bytes that further answers may have, and tell the tenant when its batch begins or ceases to wait for
        room."""
        each.room, batch = room, each.batch
        is_waiting = not room and any(each.left.values())
        if is_waiting == each.is_waiting:
            return
        each.is_waiting = is_waiting
        await asyncio.to_thread(self._store.note, batch.id, self._owner, NO_ROOM if is_waiting else None)
        if is_waiting:
            left_s = batch.expires - self._clock()
            logger.warning("batch %s of tenant %r: %s. In %.0f s it expires", batch.id, batch.tenant, NO_ROOM, left_s)
        else:
            logger.info("batch %s of tenant %r goes on: there is room", batch.id, batch.tenant)

    async def _begin(self, each: _Open, indexing: asyncio.Task[lines.Index]) -> None:
        """Start the lines of a batch whose input has been indexed, or fail the batch."""
        each.indexing, batch = None, each.batch
        self._claimed = -math.inf  # another input may be indexed
        try:
            index = each.index = indexing.result()
        except asyncio.CancelledError:
            return
        except (lines.InputError, OSError) as error:
            reason = str(error) if isinstance(error, lines.InputError) else "its input file cannot be read"
            logger.info("batch %s of tenant %r failed: %s", batch.id, batch.tenant, error)
            await self._drop(each)
            self._tries.take(batch.id)
            await asyncio.to_thread(self._store.fail, batch.id, self._owner, reason, self._clock())
            return
        await asyncio.to_thread(self._store.begin, batch.id, self._owner, len(index.offsets), index.expected_bytes)
        done, each.num_ends = await asyncio.to_thread(self._known_of, batch.id)
        for number, model in enumerate(index.models):
            if number not in done:
                each.left.setdefault(model, deque()).append(number)

    def _known_of(self, batch_id: str) -> tuple[set[int], dict[int, int]]:
        """The lines of a batch that have an answer, and the gateway ends of each line. Blocks on the disk."""
        return self._store.answered(batch_id), self._store.begun.num_ends(batch_id)

    def _start(self) -> None:
        """Start lines, first at the model with the fewest running answers, since the limit of running answers is shared
        by all."""
        self._is_paced = False
        now = self._clock()
        for each in self._open.values():
            each.come_again(now)
        if self._alone is not None and not any(each.running for each in self._open.values()):
            self._start_alone(*self._alone)
        models = sorted({model for each in self._open.values() for model, left in each.left.items() if left})
        for model in sorted(models, key=lambda model: sum(each.num_running(model) for each in self._open.values())):
            self._start_at(model)

    def _start_at(self, model: int) -> None:
        opened = sorted(self._open.values(), key=lambda each: each.num_started)
        running = [each.num_running(model) for each in opened]
        quota = self._quota(model, sum(running), sum(each.num_running() for each in opened))
        self._is_paced |= quota.is_paced
        waiting = [self._next(each, model, quota) for each in opened]
        for each, count in zip(opened, lines_to_start(quota, running, waiting), strict=True):
            for _ in range(count):
                if not self._run_line(each, model):
                    break

    def _next(self, each: _Open, model: int, quota: BatchQuota) -> list[int]:
        """Number of answers of each of the batch's next lines."""
        if each.index is None or model in each.held:
            return []
        most = self._answer_line.most_running(each.batch)
        num_left = quota.num_for(each.batch.tenant, most, each.num_running(model))
        found: list[int] = []
        for number in islice(each.left.get(model, ()), max(0, min(num_left, each.num_fitting))):
            num_left -= each.index.num_answers[number]
            if num_left < 0 and (found or each.running):
                break  # alone it may run, though its tenant's limit is smaller
            found.append(each.index.num_answers[number])
        return found

    def _run_line(self, each: _Open, model: int) -> bool:
        """Start the next line of a batch. Returns false if it may not start now or its input exceeds
        `_MAX_RUNNING_BYTES`."""
        assert each.index is not None
        number = each.left[model][0]
        if not self._may_start(each, number):
            return False
        num_bytes = each.index.num_bytes[number]
        running = sum(one.num_bytes for other in self._open.values() for one in other.running.values())
        if running and running + num_bytes > _MAX_RUNNING_BYTES:
            return False
        each.left[model].popleft()
        self._num_started += 1
        each.num_started = self._num_started
        running_line = _Running(number, model, each.index.num_answers[number], num_bytes, asyncio.Event())
        task = asyncio.create_task(self._answer(each, each.index, running_line), name=f"batch-{each.batch.id}-{number}")
        each.running[task] = running_line
        return True

    def _may_start(self, each: _Open, number: int) -> bool:
        """Whether a line may start now. A line that ran when a gateway ended runs only alone: if a gateway ends again,
        that line is the reason."""
        if self._alone is not None:
            return False
        if 0 < each.num_ends.get(number, 0) < MAX_ENDS:
            self._alone = each, number
            return not any(other.running for other in self._open.values())
        return True

    def _start_alone(self, each: _Open, number: int) -> None:
        """Start the line that waited until nothing else ran, if its model has room."""
        assert each.index is not None
        self._alone, model = None, each.index.models[number]
        left = each.left.get(model)
        if left and left[0] == number:
            self._start_at(model)

    async def _note_begun(self) -> None:
        """Let lines that were just started run, after recording them in the store if a gateway has ended with their
        batch."""
        for each in list(self._open.values()):
            new = [line for line in each.running.values() if not line.is_noted.is_set()]
            if new and each.batch.num_ends:
                await asyncio.to_thread(self._store.begun.begin, each.batch.id, [line.number for line in new])
            for line in new:
                line.is_noted.set()

    async def _keep(self) -> None:
        """Wait until a line or an index is ready, at most one turn, then store the new answers."""
        tasks: set[asyncio.Task[Any]] = {task for each in self._open.values() for task in each.running}
        tasks |= {each.indexing for each in self._open.values() if each.indexing is not None}
        if tasks:
            wait_s = min(_PACE_S, self._turn_s) if self._is_paced else self._turn_s
            await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        elif self._open and not any(each.is_done for each in self._open.values()):
            await self._sleep(self._turn_s)
        for each in list(self._open.values()):
            ended = [(task.result(), each.running.pop(task)) for task in list(each.running) if task.done()]
            if self._alone is not None and self._alone in [(each, line.number) for _, line in ended]:
                self._alone = None
            resting = [line.number for result, line in ended if isinstance(result, Later)]
            if resting and each.batch.num_ends:
                await asyncio.to_thread(self._store.begun.rest, each.batch.id, resting)
            for result, line in ended:
                if isinstance(result, Later):
                    self._put_back(each, line, result)
                else:
                    each.tries.pop(line.number, None)
            if done := [result for result, _ in ended if not isinstance(result, Later)]:
                await self._keep_answers(each, done)

    def _put_back(self, each: _Open, line: _Running, later: Later) -> None:
        """Schedule a line that has no answer yet for another try, before lines that have not run."""
        due = self._clock() + min(MAX_WAIT_S, later.wait_s)
        heapq.heappush(each.later, (due, line.model, line.number))
        if later.holds_others:
            each.held[line.model] = max(due, each.held.get(line.model, due))

    async def _keep_answers(self, each: _Open, done: list[_Done]) -> None:
        batch = each.batch
        room = await asyncio.to_thread(self._store.answer, batch.id, self._owner, [one.answer for one in done])
        if room is None:
            await self._lose(each)
            return
        each.largest = max(each.largest, *(len(one.answer.data) for one in done))
        for one in done:
            self._kept(batch.tenant, one.use)
        await self._make_room(each, room)

    async def _end(self, each: _Open, status: str, error: str | None = None) -> None:
        await self._drop(each)
        self._tries.take(each.batch.id)
        await asyncio.to_thread(self._store.finish, each.batch.id, self._owner, status, self._clock(), error)

    async def _lose(self, each: _Open) -> None:
        logger.info("batch %s: another gateway has taken it over and goes on with it", each.batch.id)
        await self._drop(each)

    async def _give_back(self, each: _Open) -> None:
        """Give a batch back to the store, so that another tenant has its turn."""
        await self._drop(each)
        await asyncio.to_thread(self._store.give_back, each.batch.id, self._owner)

    async def _drop(self, each: _Open) -> None:
        """Cancel the running lines of a batch and close it."""
        self._open.pop(each.batch.tenant, None)
        self._tries.keep(each.batch.id, each.tries)
        each.is_dropped.set()
        self._claimed = -math.inf  # its tenant may have another one
        if self._alone is not None and self._alone[0] is each:
            self._alone = None
        tasks: list[asyncio.Task[Any]] = [*each.running, *([] if each.indexing is None else [each.indexing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        each.running.clear()
        each.left.clear()
        each.later.clear()
        each.indexing = None

    async def _answer(self, each: _Open, index: lines.Index, running: _Running) -> _Done | Later:
        await running.is_noted.wait()
        number = running.number
        line = await asyncio.to_thread(lines.read, each.path, index.offsets[number])
        tries = each.tries.setdefault(number, Tries())
        tries.num_ends = each.num_ends.get(number, 0)
        result = await self._answer_line(each.batch, line, tries)
        if isinstance(result, Later):
            return result
        data = lines.answer(each.batch.id, number, line.custom_id, result.status, result.body)
        return _Done(Answer(number, result.status < _FIRST_ERROR_STATUS, data), result.use)
