"""The steps that `disagg calibrate` measures: prompts of several lengths, alone and behind a context; batches of
decodes over contexts; and both in one step.

Ordered so that every fifth one of a kind is spread over the sizes (`fitted.held_out_error` holds those out), and the
longest come last: steps for which the time is too short are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PREFILL_TOKENS = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
PREFILL_STARTS = (0, 256, 1024, 3072)
DECODE_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DECODE_CONTEXTS = (32, 128, 512, 1024, 2048)
MIXED_PREFILLS = (16, 64, 128, 256, 512)
MIXED_BATCHES = (1, 4, 8, 16, 32)
MIXED_CONTEXTS = (128, 1024)


class GridStep(NamedTuple):
    """One step to measure: a chunk of `prefill_tokens` prompt tokens behind `start` others, and `num_decodes` decodes,
    each of which attends to `context` tokens, itself included. Either part may be missing."""

    prefill_tokens: int = 0
    start: int = 0
    num_decodes: int = 0
    context: int = 0

    @property
    def num_rows(self) -> int:
        """Number of tokens that the step computes."""
        return self.prefill_tokens + self.num_decodes


def grid(*, token_budget: int, max_len: int, num_blocks: int, block_size: int, max_num_seqs: int) -> list[GridStep]:
    """The steps that a worker of these limits can compute, shortest first."""

    def fits(step: GridStep) -> bool:
        blocks = -(-(step.start + step.prefill_tokens) // block_size)
        blocks += step.num_decodes * -(-step.context // block_size)
        longest = max(step.start + step.prefill_tokens, step.context)
        num_seqs = step.num_decodes + (step.prefill_tokens > 0)
        return step.num_rows <= token_budget and longest < max_len and blocks <= num_blocks and num_seqs <= max_num_seqs

    return sorted(filter(fits, _all_steps()), key=lambda step: (_size(step), step))


def _all_steps() -> Iterator[GridStep]:
    for tokens in PREFILL_TOKENS:
        for start in PREFILL_STARTS:
            yield GridStep(prefill_tokens=tokens, start=start)
    for batch in DECODE_BATCHES:
        for context in DECODE_CONTEXTS:
            yield GridStep(num_decodes=batch, context=context)
    for tokens in MIXED_PREFILLS:
        for batch in MIXED_BATCHES:
            for context in MIXED_CONTEXTS:
                yield GridStep(prefill_tokens=tokens, start=0, num_decodes=batch, context=context)


def _size(step: GridStep) -> float:
    """A rough measure of the step's time: its rows, and one more for each thousand attended tokens."""
    attended = step.prefill_tokens * (step.start + step.prefill_tokens / 2) + step.num_decodes * step.context
    return step.num_rows + attended / 1000.0
