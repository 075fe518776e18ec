"""What users ask in the comparison of shapes: the same requests at any rate, their times stretched.

    512/64, 512/128     prompts and answers of one length, which router and workers are told
    varied              prompts log-normal with mean 512 (16 to 2,048), answers exponential with mean 96 (2 to 768)
    mooncake            conversations as in Mooncake's trace at 1/32 of its prompt lengths and a quarter of its answers:
                        a turn repeats the blocks of the one before it, and each has some of its own

Of `varied` and `mooncake` the lengths of answers are not told (limit 1,024): a stop token ends them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from disagg.loadtests.workload.arrivals import ArrivalConfig, due_times
from disagg.loadtests.workload.randomness import Stream
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart
from disagg.simulator.world.users import LOAD_TEST, Habits

MAX_MODEL_LEN = 8192
UNTOLD = Habits(max_tokens=1024)
_SIGMA = 0.6
_BLOCK_TOKENS = 16
"""Tokens that stand for a block of 512 of Mooncake's."""
_MOST_BLOCKS = 200
_GOES_ON = 0.6
"""The probability that a request of `mooncake` goes on with a conversation."""
_MANY = 512
"""Requests are made so many at a time: fewer are the first of more."""
_OPEN = 64
"""Conversations that may go on."""


class Lengths(NamedTuple):
    """A request without its time."""

    parts: tuple[PromptPart, ...]
    output_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of all parts."""
        return sum(part.num_tokens for part in self.parts)


def habits(workload: str) -> Habits:
    """Whether the lengths of answers are told."""
    return UNTOLD if workload in ("varied", "mooncake") else LOAD_TEST


def lengths(workload: str, seed: int, number: int) -> tuple[Lengths, ...]:
    """Prompts and answers of the first requests of a workload: a name above, or `prompt/answer` in tokens.

    Raises:
        ValueError: for another name.
    """
    return _lengths(workload, seed, -(-number // _MANY) * _MANY)[:number]


@functools.lru_cache(maxsize=64)
def _lengths(workload: str, seed: int, number: int) -> tuple[Lengths, ...]:
    if workload == "varied":
        return tuple(_varied(seed, index) for index in range(number))
    if workload == "mooncake":
        return _conversations(seed, number)
    isl, slash, osl = workload.partition("/")
    if not (slash and isl.isdecimal() and osl.isdecimal()):
        raise ValueError(f"workload: {workload!r} is none; choose 512/64 (any lengths), varied or mooncake")
    return tuple(Lengths((PromptPart(int(isl), (workload, seed, index)),), int(osl)) for index in range(number))


def requests(workload: str, rate_per_s: float, seed: int, number: int) -> list[OutlinedRequest]:
    """So many requests at a mean rate, Poisson arrivals. At another rate they are the same at another pace."""
    times = due_times(ArrivalConfig(rate_per_s=rate_per_s, num_requests=number, seed=seed))
    return [
        OutlinedRequest(index=index, due_s=due_s, parts=each.parts, max_tokens=each.output_tokens)
        for index, (due_s, each) in enumerate(zip(times, lengths(workload, seed, number), strict=True))
    ]


def _varied(seed: int, index: int) -> Lengths:
    draws = Stream("elastic lengths", seed, index)
    prompt = 512 * math.exp(_SIGMA * draws.normal() - _SIGMA**2 / 2)
    answer = 1 + 95 * draws.exponential()
    part = PromptPart(min(2048, max(16, round(prompt))), ("varied", seed, index))
    return Lengths((part,), min(768, max(2, round(answer))))


def _conversations(seed: int, number: int) -> tuple[Lengths, ...]:
    draws = Stream("elastic conversations", seed)
    open_ends: list[list[int]] = []
    found: list[Lengths] = []
    next_id = 0
    for _ in range(number):
        goes_on = bool(open_ends) and draws.uniform() < _GOES_ON
        before = open_ends.pop(draws.integer(0, len(open_ends) - 1)) if goes_on else []
        num_new = draws.integer(2, 40)
        blocks = [*before[:_MOST_BLOCKS], *range(next_id, next_id + num_new)]
        next_id += num_new
        open_ends = [*open_ends, blocks][-_OPEN:]
        last = draws.integer(1, _BLOCK_TOKENS)
        sizes = [_BLOCK_TOKENS] * (len(blocks) - 1) + [last]
        parts = tuple(PromptPart(size, ("block", seed, each)) for each, size in zip(blocks, sizes, strict=True))
        found.append(Lengths(parts, min(768, 2 + round(84 * draws.exponential()))))
    return tuple(found)
