"""Speed of lookup on answers of a real model, in virtual time.

answers.json has plain answers of SmolLM2-135M-Instruct, as (prompt, answer) in token ids: greedy ones to copying work
and drawn ones to chat, by the prompts of `benchmarks.speculation`. A worker that decodes them again takes as long as
one thread of an AMD EPYC (Zen 4) took (processor time, bf16, 2026-11-27).
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from disagg.engine.request import Sequence, SequenceState
from disagg.engine.speculation.lookup import Lookup
from disagg.engine.speculation.speculation import Speculation
from disagg.proto.messages import StepSample
from tests.support.engine import make_spec

Answer = tuple[list[int], list[int]]

WORKS: dict[str, list[Answer]] = json.loads((Path(__file__).parent / "answers.json").read_text(encoding="utf-8"))
END = 2
MS_OF_ROWS = (0.0, 8.13, 8.4, 8.9, 9.45, 10.0, 10.02, 10.05, 10.9, 12.1, 13.4, 14.6, 15.9, 17.3, 18.7, 20.0, 21.4)
MS_OF_MORE_ROWS, MS_OF_CONTEXT, SHARE_OF_DRAFTS = 1.28, 0.00085, 0.8
PLACES = 64


def ms_of(rows: int, context: int, context_of_drafts: int = 0) -> float:
    """Duration of a step; `context` is that of its rows without drafts."""
    at_most = min(rows, len(MS_OF_ROWS) - 1)
    attended = context + SHARE_OF_DRAFTS * context_of_drafts
    return MS_OF_ROWS[at_most] + MS_OF_MORE_ROWS * (rows - at_most) + MS_OF_CONTEXT * attended


CALIBRATION = [
    StepSample(ms_of(rows, rows * tokens), 0, 0, rows, rows * tokens)
    for rows, tokens in ((1, 64), (1, 512), (8, 64), (8, 512), (32, 64))
]


class Method(Protocol):
    """What plans drafts: `Speculation`, or the same number in every step."""

    def plan(
        self, sequences: Seq[tuple[Sequence, int]], *, num_rows: int, context: int, most_rows: int, most_ms: float
    ) -> list[tuple[int, ...]]: ...

    def observe(self, rows: int, context: int, ms: float) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...


class Fixed(Method):
    """As many drafts in every step as there are, up to some number."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._proposer = Lookup()

    def plan(
        self, sequences: Seq[tuple[Sequence, int]], *, num_rows: int, context: int, most_rows: int, most_ms: float
    ) -> list[tuple[int, ...]]:
        return [self._proposer.propose(each, min(most, self._number)).token_ids for each, most in sequences]

    def observe(self, rows: int, context: int, ms: float) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


def speed(method: Method, answers: Seq[Answer], batch: int, noise: float = 0.0) -> float:
    """Tokens a second of a worker that gives these answers, `batch` at a time. The steps that it measures are off by a
    share of about `noise`."""
    rng = random.Random(0)
    waiting, running = deque(answers), list[tuple[Sequence, list[int]]]()
    ms, num_tokens = 0.0, 0
    while waiting or running:
        while waiting and len(running) < batch:
            prompt, answer = waiting.popleft()
            spec = make_spec("r", prompt, max_tokens=len(answer), stop=[END], cached=False)
            running.append((Sequence(spec, SequenceState.RUNNING, token_ids=[*prompt, answer[0]]), [*prompt, *answer]))
        context = sum(sequence.num_tokens for sequence, _ in running)
        wanted = [(sequence, len(text) - sequence.num_tokens - 1) for sequence, text in running]
        drafts = method.plan(wanted, num_rows=len(running), context=context, most_rows=PLACES, most_ms=math.inf)
        rows = len(running) + sum(map(len, drafts))
        attended = sum(sequence.num_tokens * len(ids) for (sequence, _), ids in zip(running, drafts, strict=True))
        step_ms = ms_of(rows, context, attended)
        ms += step_ms
        for (sequence, text), ids in zip(running, drafts, strict=True):
            start = sequence.num_tokens
            num_accepted = next((i for i, draft in enumerate(ids) if draft != text[start + i]), len(ids))
            sequence.token_ids += text[start : start + num_accepted + 1]
            num_tokens += num_accepted + 1
            if sequence.num_tokens == len(text):
                method.forget(sequence)
        running = [each for each in running if each[0].num_tokens < len(each[1])]
        method.observe(rows, context + attended, step_ms * math.exp(rng.gauss(0.0, noise)))
    return num_tokens / ms * 1e3


def lookup() -> Speculation:
    return Speculation(Lookup(), CALIBRATION, max_draft=8)


@cache
def plain_speed(work: str, batch: int) -> float:
    """Tokens a second without drafts."""
    return speed(Fixed(0), WORKS[work], batch)


@pytest.mark.parametrize(("batch", "least"), [(1, 2.6), (4, 1.6), (8, 1.2), (32, 1.2)])
def test_answers_that_copy_are_decoded_faster(batch: int, least: float) -> None:
    assert speed(lookup(), WORKS["copying"], batch) >= least * plain_speed("copying", batch)


@pytest.mark.parametrize(("batch", "least"), [(1, 1.1), (4, 1.0), (8, 1.0), (32, 0.98)])
def test_chat_is_decoded_no_slower(batch: int, least: float) -> None:
    assert speed(lookup(), WORKS["chat"], batch) >= least * plain_speed("chat", batch)


@pytest.mark.parametrize("batch", [1, 4, 8, 32])
@pytest.mark.parametrize("work", WORKS)
def test_no_fixed_number_of_drafts_is_much_better(work: str, batch: int) -> None:
    best = max(speed(Fixed(number), WORKS[work], batch) for number in (1, 2, 3, 4, 6, 8))
    assert speed(lookup(), WORKS[work], batch, noise=0.05) >= 0.95 * max(best, plain_speed(work, batch))


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_copies_among_chat_have_the_drafts(batch: int) -> None:
    mixed = [each for pair in zip(WORKS["copying"], WORKS["chat"], strict=True) for each in pair]
    best = max(speed(Fixed(number), mixed, batch) for number in (0, 1, 2, 3, 4, 6, 8))
    assert speed(lookup(), mixed, batch) >= 0.98 * best


@pytest.mark.parametrize("work", WORKS)
def test_steps_that_are_often_disturbed_mislead_little(work: str) -> None:
    for batch in (1, 4, 8):
        quiet = speed(lookup(), WORKS[work], batch)
        assert speed(lookup(), WORKS[work], batch, noise=0.3) >= 0.95 * quiet


def test_a_worker_without_calibration_learns_its_step_times() -> None:
    for batch in (1, 4, 8):
        unknown = Speculation(Lookup(), [], max_draft=8)
        assert speed(unknown, WORKS["copying"], batch) >= 0.9 * speed(lookup(), WORKS["copying"], batch)
