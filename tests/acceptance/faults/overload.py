"""Rows with ten times the load that the cluster can serve.

In `overload_10x` prefill is what there is too little of. Its goodput is in answers within their target per second, and
the peak is the best of what a closed loop and open loops around its rate get.

In the others the decode side is what there is too little of: places to decode, and KV blocks.

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
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.client import AsyncClient, Targets
from tests.acceptance.faults.cluster import Up
from tests.acceptance.faults.load import Model, Stream, send
from tests.acceptance.faults.row import Row
from tests.support.pace import on_time, steady
from tests.support.reports import percentile

TTFT_MS = 1000.0
WARM_S = 4.0
"""Before the window: the places fill up, and the first answers end."""
WINDOW_S = 16.0
OVERLOAD = 10.0
REFUSED_P99_MS = 50.0
LEAST_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Requests of one size."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    places: int = 0
    """How many of them the decode workers hold at a time; 0 where that is not what limits them."""
    timeout_s: float = 60.0


PLACES = Kind(name="overload_decode_10x", prompt_tokens=64, answer_tokens=60, places=8)
"""Two workers with `max_num_seqs: 4`."""
BLOCKS = Kind(name="overload_kv_10x", prompt_tokens=600, answer_tokens=60, places=6)
"""Two workers with 150 KV blocks, of which such a sequence takes 42."""
PROMPTS = Kind(name="overload_10x", prompt_tokens=256, answer_tokens=4, timeout_s=30.0)
PROMPTS_S = 6.0
PROBE_CONCURRENCY = 32


class Source:
    """Sends requests of a kind with prompts that are never the same."""

    def __init__(self, client: AsyncClient, model: Model, kind: Kind) -> None:
        self._client = client
        self._vocab_size = model.vocab_size
        self._kind = kind
        self._rng = random.Random(f"{kind.name} {time.monotonic()}")  # no prompt may be cached
        self.answers: list[Stream] = []
        """Those that have ended."""

    async def send(self, *, has_target: bool) -> None:
        """One request, to its end."""
        prompt = [self._rng.randrange(self._vocab_size) for _ in range(self._kind.prompt_tokens)]
        targets = Targets(ttft_ms=TTFT_MS) if has_target else None
        anything = (0,) * self._kind.answer_tokens  # computing what is expected would take time from the cluster
        self.answers.append(await send(self._client, prompt, anything, self._kind.timeout_s, targets))

    async def offer(self, per_s: float, seconds: float) -> None:
        """Open-loop load with targets, to the end of its last request."""
        offsets_s = itertools.islice(steady(per_s), round(per_s * seconds))
        tasks = [asyncio.create_task(self.send(has_target=True)) async for _ in on_time(offsets_s)]
        await asyncio.gather(*tasks)


def is_good(answer: Stream) -> bool:
    """Whether it is whole and its first token came in time."""
    return answer.is_whole and answer.ttft_s * 1000 <= TTFT_MS


# ---------------------------------------------------------------- prefill


async def _capacity(up: Up, model: Model) -> float:
    """Answers per second within the target, of clients that come back at once: about what the cluster can do."""
    source = Source(up.client, model, PROMPTS)
    began = time.monotonic()

    async def client() -> None:
        while time.monotonic() - began < PROMPTS_S:
            await source.send(has_target=True)
            await asyncio.sleep(0.05)

    await asyncio.gather(*(client() for _ in range(PROBE_CONCURRENCY)))
    return sum(map(is_good, source.answers)) / (time.monotonic() - began)


async def _goodput(up: Up, source: Source, per_s: float) -> float:
    """Answers per second within the target, of open-loop load at a rate."""
    began = time.monotonic()
    await source.offer(per_s, PROMPTS_S)
    elapsed_s = time.monotonic() - began
    await up.emptied()
    return sum(map(is_good, source.answers)) / elapsed_s


async def overload_prefill(up: Up, model: Model) -> Row:
    """Short answers to prompts, ten times what the cluster can do."""
    await up.settled()
    await _capacity(up, model)  # the router's models of cost settle
    capacity = await _capacity(up, model)
    peak = max([await _goodput(up, Source(up.client, model, PROMPTS), capacity * share) for share in (0.8, 1.0, 1.5)])
    source = Source(up.client, model, PROMPTS)
    goodput = await _goodput(up, source, OVERLOAD * max(peak, capacity))
    left_for_s, left = await up.emptied()
    refused_ms = [(each.ended - each.sent) * 1000 for each in source.answers if each.is_refused]
    refused_p99_ms = percentile(refused_ms, 99) if refused_ms else 0.0
    taken = [each for each in source.answers if not each.is_refused]
    errors = tuple(each.error for each in taken if each.error)
    num_good = sum(map(is_good, taken))
    return Row(
        name=PROMPTS.name,
        promise=f"goodput >= 90 % of peak; refusals answered within {REFUSED_P99_MS:g} ms at p99",
        met=goodput >= LEAST_SHARE * peak and 0.0 < refused_p99_ms <= REFUSED_P99_MS and not errors and not left,
        streams=len(taken),
        completed=len(taken) - len(errors),
        failed=len(errors),
        left=sum(left.values()),
        left_for_s=left_for_s,
        errors=errors[:3],
        figures={
            "peak_per_s": peak,
            "goodput_per_s": goodput,
            "share": goodput / peak,
            "refused": float(len(refused_ms)),
            "refused_p50_ms": percentile(refused_ms, 50) if refused_ms else 0.0,
            "refused_p99_ms": refused_p99_ms,
            "missed": float(len(taken) - len(errors) - num_good),
        },
    )


# ---------------------------------------------------------------- decode


def rate(answers: Sequence[Stream], begin: float, answer_tokens: int) -> float:
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
    await source.offer(per_s, WARM_S + WINDOW_S)
    return began + WARM_S


async def _row(up: Up, model: Model, kind: Kind) -> Row:
    await up.settled()
    saturated = Source(up.client, model, kind)
    begin = await _saturate(saturated, kind)
    most = rate(saturated.answers, begin, kind.answer_tokens)
    whole = [each for each in saturated.answers if each.is_whole]
    held_s = sum(each.times[-1] - each.times[0] for each in whole) / max(1, len(whole))
    await up.emptied()
    overloaded = Source(up.client, model, kind)
    begin = await _overload(overloaded, OVERLOAD * most)
    left_for_s, left = await up.emptied()
    answers = overloaded.answers
    good = [each for each in answers if is_good(each)]
    most = max(most, rate(answers, begin, kind.answer_tokens))
    goodput = rate(good, begin, kind.answer_tokens)
    refused_ms = [(each.ended - each.sent) * 1000 for each in answers if each.is_refused]
    refused_p99_ms = percentile(refused_ms, 99) if refused_ms else 0.0
    taken = [each for each in answers if not each.is_refused]
    errors = tuple(each.error for each in (*saturated.answers, *answers) if each.error and not each.is_refused)
    waits_ms = [each.ttft_s * 1000 for each in taken if each.times]
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
            "missed": float(sum(each.is_whole and not is_good(each) for each in taken)),
            "ttft_p50_ms": percentile(waits_ms, 50) if waits_ms else 0.0,
        },
    )


async def overload_decode(up: Up, model: Model) -> Row:
    """Long answers, ten times what the places to decode can serve."""
    return await _row(up, model, PLACES)


async def overload_kv(up: Up, model: Model) -> Row:
    """Long prompts with long answers, ten times what the KV blocks can hold."""
    return await _row(up, model, BLOCKS)
