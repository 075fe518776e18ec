"""The things that happen to an answer on its way, one after the other, and the proof that each one did.

    warm ──> asked ──> P is killed ──> decodes ──> continued ──> swapped ──> moved ──> D is killed

Each waits for what the one before it does, not for a time. Steps of decode workers are slow (`fleet.py`), so that the
answer does not end before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from disagg.router.api import RUNNING, RequestTrace
from tests.integration.matrix.answers import BLOCK, NUM_PREFIX, NUM_PROMPT, EventStream, Expected, Got, Question, ask
from tests.integration.matrix.factors import OFF, ON
from tests.integration.matrix.fleet import DECODES, NUM_DECODE_BLOCKS, PREFILLS, REPORT_IDLE_S, RESERVE_TOKENS, Fleet
from tests.integration.matrix.front_end import MODEL, FrontEnd
from tests.support.covering import Row
from tests.support.waiting import eventually
from tests.support.workers import audit, wait_until_workers_idle

Stage = Callable[[], Coroutine[Any, Any, None]]
FIRST, OTHER = DECODES
FIRST_PREFILL, OTHER_PREFILL = PREFILLS
NUM_BEGUN = 4
"""Tokens of each answer before anything is done to it."""
NUM_FILLER_TOKENS = 90
HIGH_PRIORITY = -10
"""Of vLLM's priorities, in which a smaller one comes first."""
SHARE_OF_STEPS = 0.8
"""An answer with fewer steps of decode workers for each of its tokens has some that were computed together."""


@dataclass
class Seen:
    """What was seen of a row's answers."""

    prefix_on_prefill: int = 0
    prefix_on_decode: int = 0
    """Tokens of the prompt that the workers had in their caches when it was handed over for the first time."""
    swapped_in_blocks: int = 0
    num_moved: int = 0
    num_killed: dict[str, int] = field(default_factory=dict)
    """Worker -> attempts that it took with it."""
    num_continued: int = 0
    """Tokens that a client had when it came again."""
    num_accepted: int = 0
    """Drafts that became tokens."""
    has_forced: bool = False
    """Whether its tokens, accepted drafts apart, took fewer steps than one for each."""

    def check(self, row: Row) -> None:
        """Everything that the row names happened, and nothing else did. Drafts are computed where measured times say
        that they pay, which they may not on a busy machine: whether any were accepted is for all rows together."""
        on_prefill = NUM_PREFIX if row["prefix-on-P"] == ON else 0
        if row["retry"] != "prefill":  # what a killed worker had in its cache is gone
            assert self.prefix_on_prefill == on_prefill
        assert self.prefix_on_decode == (NUM_PREFIX if row["prefix-on-D"] == ON else 0)
        assert (self.swapped_in_blocks > 0) == (row["swap"] == ON)
        assert (self.num_moved > 0) == (row["migration"] == ON)
        assert set(self.num_killed) == ({row["retry"]} if row["retry"] != OFF else set())
        assert all(self.num_killed.values())
        assert (self.num_continued > 0) == (row["resumed"] != OFF)
        assert self.has_forced == (row["forced"] == ON)
        assert row["speculation"] == ON or self.num_accepted == 0


class Drill:
    """One row: its question is asked, and its answers are followed."""

    def __init__(self, front: FrontEnd, fleet: Fleet, question: Question, expected: Expected) -> None:
        self._front = front
        self._fleet = fleet
        self._question = question
        self._expected = expected
        self._row = question.row
        self._stream = EventStream(front.http_url, question, expected)
        self._here, self._there = FIRST, OTHER
        self.seen = Seen()

    async def run(self) -> list[Got]:
        """The answers, when all that the row names has been done to them."""
        self._front.avoid(OTHER)
        self._front.avoid(OTHER_PREFILL)
        await self._warm()
        steps, accepted = self._num_decode_steps(), self._num_accepted()
        answers = asyncio.create_task(self._ask())
        try:
            for stage in self._stages():
                await _unless_ended(stage, answers)
        finally:
            got = await answers
        await eventually(lambda: not self._live(), "a request of the row does not end")
        num_tokens = self._expected.num_tokens(got)
        num_steps = await self._decode_steps_since(steps, num_tokens)
        self.seen.num_accepted = self._num_accepted() - accepted
        self.seen.has_forced = num_steps < num_tokens * SHARE_OF_STEPS - self.seen.num_accepted
        return got

    def _ask(self) -> Coroutine[Any, Any, list[Got]]:
        if self._row["resumed"] == "events":
            return self._stream.read()
        return ask(self._front.address, self._question, self._expected)

    def _stages(self) -> list[Stage]:
        row = self._row
        stages: list[Stage] = []
        if row["retry"] == "prefill":
            stages.append(self._kill_prefill)
        stages.append(self._decodes)
        if row["resumed"] != OFF:
            stages.append(self._continue)
        if row["swap"] == ON:
            stages.append(self._swap)
        if row["migration"] == ON:
            stages.append(self._move)
        if row["retry"] == "decode":
            stages.append(self._kill_decode)
        return stages

    # ---------------------------------------------------------------- before the request

    async def _warm(self) -> None:
        """Leave the beginning of the prompt in the caches of the workers that the row names. An answer of one token
        ends on the prefill worker; one without that worker is computed by the decode worker alone."""
        prefix = [*self._question.prompt[:NUM_PREFIX], 1]
        if self._row["prefix-on-P"] == ON:
            await self._complete(prefix, 1)
        if self._row["prefix-on-D"] == ON:
            self._front.prefill_on_decode_workers(may=True)
            self._front.avoid(FIRST_PREFILL)
            await self._complete(prefix, 2)
            self._front.use(FIRST_PREFILL)
            self._front.prefill_on_decode_workers(may=False)

        if self._row["swap"] == ON:
            await self._complete(self._filler(NUM_DECODE_BLOCKS // 8 * 7), 2)
        await wait_until_workers_idle(self._fleet.running())

    def _filler(self, num_blocks: int) -> list[int]:
        """The prompt of a request that takes blocks from the answers; a shorter one begins a longer one."""
        return [(7 * i + self._question.number) % 250 for i in range(num_blocks * BLOCK)]

    async def _complete(self, prompt: list[int], num_tokens: int, priority: int = 0) -> None:
        """Another request, of the same client."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"priority": priority, "speculation": "off"}
        async with httpx.AsyncClient(base_url=self._front.http_url, timeout=60.0, trust_env=False) as http:
            reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text

    # ---------------------------------------------------------------- what happens to it

    async def _kill_prefill(self) -> None:
        """While it computes the prompt and sends it; another one begins anew."""
        self._fleet.slow_down("prefill")
        try:
            await eventually(self._is_reserved, f"{FIRST} has no room for the prompt")
            taken = [trace for trace in self._live() if trace.marks and trace.marks[-1].handed_over is None]
            self._fleet.kill(FIRST_PREFILL)
        finally:
            self._fleet.quicken("prefill")
        self._front.use(OTHER_PREFILL)
        await self._retried(taken)
        await self._front.lose(FIRST_PREFILL)
        self.seen.num_killed["prefill"] = len(taken)

    async def _is_reserved(self) -> bool:
        """Whether an answer was placed, and its blocks are reserved on the decode worker."""
        report = await audit(self._fleet.infos[FIRST])
        return report.counts["blocks_reserved"] > 0 and any(trace.marks for trace in self._live())

    async def _retried(self, taken: Sequence[RequestTrace]) -> None:
        before = [trace.attempts for trace in taken]
        await eventually(
            lambda: all(trace.attempts > number for trace, number in zip(taken, before, strict=True)),
            "there is no retry",
        )

    async def _decodes(self) -> None:
        """Every answer has begun on the decode worker."""
        await eventually(lambda: self._num_begun() == self._question.num_answers, "the answers do not begin")
        first = self._live()[-1]
        self.seen.prefix_on_prefill = first.prefill_cached_tokens
        self.seen.prefix_on_decode = first.decode_cached_tokens

    def _num_begun(self) -> int:
        return sum(
            bool(trace.marks and trace.marks[-1].handed_over) and trace.num_output_tokens >= NUM_BEGUN
            for trace in self._live()
        )

    async def _continue(self) -> None:
        """The client comes again, to another gateway or to the same one."""
        (first,) = self._live()
        if self._row["resumed"] == "events":
            self._stream.leave()
            await eventually(lambda: first.outcome != RUNNING, "the client does not leave")
        else:
            await self._front.restart()
        self.seen.num_continued = first.num_output_tokens
        await eventually(lambda: self._num_begun() == 1, "the answer does not go on")

    async def _swap(self) -> None:
        """A request of a higher priority leaves few blocks to the answers, takes them too as it grows, and ends."""
        before = self._front.counters(self._here).swapped_in_blocks
        counted = self._question.num_answers * ((NUM_PROMPT + NUM_BEGUN + RESERVE_TOKENS) // BLOCK + 2)
        filler = self._filler(NUM_DECODE_BLOCKS - 3 - counted)  # the router counts a prompt of several answers for each
        await self._complete(filler, NUM_FILLER_TOKENS, priority=HIGH_PRIORITY)

        def blocks() -> int:
            return self._front.counters(self._here).swapped_in_blocks - before

        await eventually(blocks, "nothing was swapped")
        self.seen.swapped_in_blocks = blocks()

    async def _move(self) -> None:
        """All of the answers go to the other worker."""
        moving = self._live()
        self._front.use(self._there)
        self._front.avoid(self._here)

        def have_moved() -> list[bool]:
            return [any(move.has_arrived for move in trace.marks[-1].moves) for trace in moving]

        await eventually(lambda: all(have_moved()), "the answers do not move")
        self.seen.num_moved = sum(have_moved())
        self._here, self._there = self._there, self._here

    async def _kill_decode(self) -> None:
        """With all answers on it; they go on at the other worker."""
        taken = self._live()
        self._fleet.kill(self._here)
        self._front.use(self._there)
        await self._retried(taken)
        await self._front.lose(self._here)
        self.seen.num_killed["decode"] = len(taken)

    # ---------------------------------------------------------------- what is seen

    def _live(self) -> list[RequestTrace]:
        """The requests of the row that run, the latest first."""
        return [trace for trace in self._front.traces(self._question.max_tokens) if trace.outcome == RUNNING]

    def _num_decode_steps(self) -> int:
        return sum(sum(self._front.counters(name).step_seconds) for name in DECODES)

    def _num_accepted(self) -> int:
        return sum(self._front.counters(name).accepted_tokens for name in DECODES)

    async def _decode_steps_since(self, before: int, num_tokens: int) -> int:
        """Steps of the decode workers, of an answer of so many tokens. Workers report them now and then: until there
        are as many as it takes without forced tokens, or until there are no more."""
        counts = [before]

        def is_known() -> bool:
            counts.append(self._num_decode_steps())
            return counts[-1] - before >= num_tokens * SHARE_OF_STEPS or counts[-1] == counts[-2] != before

        await eventually(is_known, every_s=2 * REPORT_IDLE_S)
        return counts[-1] - before


async def _unless_ended(stage: Stage, answers: asyncio.Task[list[Got]]) -> None:
    """Run a stage. An answer that fails, or ends before the stage has, ends it."""
    running = asyncio.ensure_future(stage())
    await asyncio.wait({running, answers}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await answers
        raise AssertionError(f"the answer ended before {stage.__name__} was done")
    await running
