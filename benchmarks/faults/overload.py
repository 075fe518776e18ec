"""Rows in which the decode side is what there is too little of: places to decode, and KV blocks.

    saturate   closed loop without targets: twice as many clients as places, each sends again at once ──> the most
    overload   open loop at ten times that, every request with a TTFT target                          ──> goodput

Both are rates over a window in which the load is steady, in answers per second: output tokens that arrived in the
window, divided by the tokens of an answer, so that an answer that is half in the window counts as half. Goodput counts
the tokens of those answers only whose first token met the target and that are whole.

**The most there can be** is the larger one of what the saturated run makes and of what the overloaded run makes with
the answers that missed their target. Both keep every place taken, so that nothing depends on a guess about step times.
`bound_per_s` is a figure beside it: places over the mean time that an answer keeps one (first token to last), which
leaves out the time between two answers, while a prompt is computed and its KV moved.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from benchmarks.common import percentile
from benchmarks.faults.cluster import Up
from benchmarks.faults.load import Model
from benchmarks.faults.row import Row
from disagg.client import AsyncClient, Targets
from disagg.proto.errors import DisaggError, OverloadedError

TTFT_MS = 1000.0
WARM_S = 4.0
"""Before the window: the places fill up, and the first answers end."""
WINDOW_S = 16.0
OVERLOAD = 10.0
REFUSED_P99_MS = 50.0
LEAST_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Requests of one size, and how many of them the decode workers hold at a time."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    places: int


PLACES = Kind(name="overload_decode_10x", prompt_tokens=64, answer_tokens=60, places=8)
"""Two workers with `max_num_seqs: 4`."""
BLOCKS = Kind(name="overload_kv_10x", prompt_tokens=600, answer_tokens=60, places=6)
"""Two workers with 150 KV blocks, of which such a sequence takes 42."""


@dataclass(slots=True)
class Answer:
    """One request and what came of it."""

    sent: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(When, how many) of each message."""
    ended: float = 0.0
    is_whole: bool = False
    is_refused: bool = False
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it is whole and its first token came in time."""
        return self.is_whole and (self.tokens[0][0] - self.sent) * 1000 <= TTFT_MS

    def tokens_in(self, begin: float, end: float) -> int:
        """Those that came in a window."""
        return sum(count for when, count in self.tokens if begin <= when < end)


class Source:
    """Sends requests of a kind with prompts that are never the same."""

    def __init__(self, client: AsyncClient, model: Model, kind: Kind) -> None:
        self._client = client
        self._vocab_size = model.vocab_size
        self._kind = kind
        self._rng = random.Random(f"{kind.name} {time.monotonic()}")  # no prompt may be cached
        self.answers: list[Answer] = []

    async def send(self, *, has_target: bool) -> None:
        """One request, to its end."""
        kind = self._kind
        prompt = [self._rng.randrange(self._vocab_size) for _ in range(kind.prompt_tokens)]
        answer = Answer(time.monotonic())
        self.answers.append(answer)
        try:
            deltas = self._client.stream(
                prompt,
                max_tokens=kind.answer_tokens,
                ignore_eos=True,
                temperature=0.0,
                timeout_s=60.0,
                targets=Targets(ttft_ms=TTFT_MS) if has_target else None,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    if delta.token_ids:
                        answer.tokens.append((time.monotonic(), len(delta.token_ids)))
            answer.is_whole = sum(count for _, count in answer.tokens) == kind.answer_tokens
        except OverloadedError:
            answer.is_refused = True
        except DisaggError as error:
            answer.error = f"{type(error).__name__}: {error}"[:200]
        answer.ended = time.monotonic()


def rate(answers: Sequence[Answer], begin: float, answer_tokens: int) -> float:
    """Answers per second in the window that begins then."""
    return sum(each.tokens_in(begin, begin + WINDOW_S) for each in answers) / answer_tokens / WINDOW_S


async def _saturate(source: Source, kind: Kind) -> float:
    """When the window began."""
    began = time.monotonic()

    async def client() -> None:
        while time.monotonic() < began + WARM_S + WINDOW_S:
            await source.send(has_target=False)

    await asyncio.gather(*(client() for _ in range(2 * kind.places)))
    return began + WARM_S


async def _overload(source: Source, per_s: float) -> float:
    """When the window began."""
    began = time.monotonic()
    tasks = []
    for number in range(round(per_s * (WARM_S + WINDOW_S))):
        await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
        tasks.append(asyncio.create_task(source.send(has_target=True)))
    await asyncio.gather(*tasks)
    return began + WARM_S


async def _row(up: Up, model: Model, kind: Kind) -> Row:
    await up.settled()
    saturated = Source(up.client, model, kind)
    begin = await _saturate(saturated, kind)
    most = rate(saturated.answers, begin, kind.answer_tokens)
    whole = [each for each in saturated.answers if each.is_whole]
    held_s = sum(each.tokens[-1][0] - each.tokens[0][0] for each in whole) / max(1, len(whole))
    await up.emptied()
    overloaded = Source(up.client, model, kind)
    begin = await _overload(overloaded, OVERLOAD * most)
    left_for_s, left = await up.emptied()
    answers = overloaded.answers
    good = [each for each in answers if each.is_good]
    most = max(most, rate(answers, begin, kind.answer_tokens))
    goodput = rate(good, begin, kind.answer_tokens)
    refused_ms = [(each.ended - each.sent) * 1000 for each in answers if each.is_refused]
    refused_p99_ms = percentile(refused_ms, 99) if refused_ms else 0.0
    taken = [each for each in answers if not each.is_refused]
    errors = tuple(each.error for each in (*saturated.answers, *answers) if each.error)
    waits_ms = [(each.tokens[0][0] - each.sent) * 1000 for each in taken if each.tokens]
    return Row(
        name=kind.name,
        promise=f"goodput >= 90 % of the most there can be; refusals answered within {REFUSED_P99_MS:g} ms at p99",
        met=goodput >= LEAST_SHARE * most and 0.0 < refused_p99_ms <= REFUSED_P99_MS and not errors and not left,
        streams=len(taken),
        completed=sum(each.is_whole for each in taken),
        failed=len(errors),
        longest_ttft_s=max(waits_ms, default=0.0) / 1000,
        left=sum(left.values()),
        left_for_s=left_for_s,
        errors=errors[:3],
        figures={
            "most_per_s": most,
            "bound_per_s": kind.places / held_s if held_s else 0.0,
            "goodput_per_s": goodput,
            "share": goodput / most,
            "offered": float(len(answers)),
            "refused": float(len(refused_ms)),
            "refused_p50_ms": percentile(refused_ms, 50) if refused_ms else 0.0,
            "refused_p99_ms": refused_p99_ms,
            "missed": float(sum(each.is_whole and not each.is_good for each in taken)),
            "ttft_p50_ms": percentile(waits_ms, 50) if waits_ms else 0.0,
        },
    )


async def overload_decode(up: Up, model: Model) -> Row:
    """Long answers, ten times what the places to decode can serve."""
    return await _row(up, model, PLACES)


async def overload_kv(up: Up, model: Model) -> Row:
    """Long prompts with long answers, ten times what the KV blocks can hold."""
    return await _row(up, model, BLOCKS)
