"""What a worker counts since it started, for its reports. Pure.

Owner: the asyncio side of one worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from disagg.proto.messages import STEP_SECONDS_BOUNDS, StepSample, TransferCount, WorkerMetrics


class EngineTotals(NamedTuple):
    """What the engine counts itself."""

    output_tokens: int = 0
    """Tokens sampled."""
    cached_tokens: int = 0
    """Tokens of new sequences that were found in the prefix cache."""
    preemptions: int = 0
    swapped_out_blocks: int = 0
    """KV blocks of preempted sequences that were copied to host memory."""
    swapped_in_blocks: int = 0
    """KV blocks that were copied back."""


class WorkerCounters:
    """Steps by duration, tokens, preemptions; they only grow."""

    def __init__(self) -> None:
        self._steps = [0] * (len(STEP_SECONDS_BOUNDS) + 1)
        self._seconds = 0.0
        self._prompt_tokens = 0
        self._totals = EngineTotals()

    def note(self, steps: Iterable[StepSample], totals: EngineTotals) -> None:
        """The steps that the engine ran since the last time, and its totals after them."""
        self._totals = totals
        for step in steps:
            self._steps[bisect_left(STEP_SECONDS_BOUNDS, step.ms / 1000)] += 1
            self._seconds += step.ms / 1000
            self._prompt_tokens += step.prefill_tokens

    def metrics(self, transfers: tuple[TransferCount, ...]) -> WorkerMetrics:
        """All of it, with what the roles count."""
        return WorkerMetrics(
            step_seconds=tuple(self._steps),
            step_seconds_sum=self._seconds,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._totals.cached_tokens,
            output_tokens=self._totals.output_tokens,
            preemptions=self._totals.preemptions,
            swapped_out_blocks=self._totals.swapped_out_blocks,
            swapped_in_blocks=self._totals.swapped_in_blocks,
            transfers=transfers,
        )
