"""What a worker reports to routers beside its load: counters since its start (`WorkerCounters`), a few measured steps
(`StepSampler`), and prompt tokens that were dispatched and that the engine does not count yet (`PendingPrompts`). Pure.

Owner: the asyncio side of one worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from disagg.proto.ids import AttemptKey
from disagg.proto.messages import (
    STEP_SECONDS_BOUNDS,
    FetchOutcome,
    StepSample,
    TierCounts,
    TransferCount,
    WorkerMetrics,
)


class EngineTotals(NamedTuple):
    """What the engine counts itself."""

    output_tokens: int = 0
    """Number of tokens that the engine sampled."""
    cached_tokens: int = 0
    """Tokens of new sequences that were found in the prefix cache."""
    preemptions: int = 0
    swapped_out_blocks: int = 0
    """KV blocks of preempted sequences that were copied to host memory."""
    swapped_in_blocks: int = 0
    """KV blocks that were copied back."""
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_runs: tuple[int, ...] = ()
    """As in `WorkerMetrics`, like the three before."""
    expert_imbalance: tuple[float, ...] = ()
    loaded_tokens: int = 0
    """Prompt tokens whose KV was loaded from a tier; among the cached ones."""
    dropped_extents: int = 0
    tiers: tuple[TierCounts, ...] = ()
    fetched_tokens: int = 0
    """Prompt tokens whose KV came from another worker; among the cached ones."""
    fetches: Mapping[FetchOutcome, int] = MappingProxyType({})


class WorkerCounters:
    """Steps by duration, tokens, preemptions; they only grow."""

    def __init__(self) -> None:
        self._steps = [0] * (len(STEP_SECONDS_BOUNDS) + 1)
        self._seconds = 0.0
        self._prompt_tokens = 0
        self._totals = EngineTotals()
        self._prompt_tokens_left_out = self._output_tokens_left_out = 0

    def note(self, steps: Iterable[StepSample], totals: EngineTotals) -> None:
        """The steps that the engine ran since the last time, and its totals after them."""
        self._totals = totals
        for step in steps:
            self._steps[bisect_left(STEP_SECONDS_BOUNDS, step.ms / 1000)] += 1
            self._seconds += step.ms / 1000
            self._prompt_tokens += step.prefill_tokens

    def leave_out(self, prompt_tokens: int, output_tokens: int) -> None:
        """These are, or will be, among what `note` gets, and are a probe's."""
        self._prompt_tokens_left_out += prompt_tokens
        self._output_tokens_left_out += output_tokens

    def metrics(self, transfers: tuple[TransferCount, ...], served_fetches: int = 0) -> WorkerMetrics:
        """All counters, with those of the roles."""
        return WorkerMetrics(
            step_seconds=tuple(self._steps),
            step_seconds_sum=self._seconds,
            prompt_tokens=self._prompt_tokens - self._prompt_tokens_left_out,
            cached_tokens=self._totals.cached_tokens,
            output_tokens=self._totals.output_tokens - self._output_tokens_left_out,
            preemptions=self._totals.preemptions,
            swapped_out_blocks=self._totals.swapped_out_blocks,
            swapped_in_blocks=self._totals.swapped_in_blocks,
            draft_steps=self._totals.draft_steps,
            drafted_tokens=self._totals.drafted_tokens,
            accepted_tokens=self._totals.accepted_tokens,
            draft_runs=self._totals.draft_runs,
            expert_imbalance=self._totals.expert_imbalance,
            transfers=transfers,
            fetched_tokens=self._totals.fetched_tokens,
            fetches=dict(self._totals.fetches),
            served_fetches=served_fetches,
            loaded_tokens=self._totals.loaded_tokens,
            dropped_extents=self._totals.dropped_extents,
            tiers=self._totals.tiers,
        )


MAX_STEPS_PER_REPORT = 4

_GOLDEN, _MODULUS = 0x9E3779B1, 1 << 32
_MAX_STRIDE = 1 << 16


class StepSampler:
    """The steps that a report carries; at most `MAX_STEPS_PER_REPORT`.

    A worker may do hundreds of steps between two reports. Were they taken as they come until the report is full, a long
    step would be taken more often than its share: it is the likeliest to be running when a report is sent, so that it
    comes first in the next one. So a step is chosen by its number alone: of all numbers a share of 1/`stride` is
    chosen, spread evenly but not periodically (multiples of the golden ratio modulo 1), so that no pattern of steps
    correlates with it. The stride follows how many fit.
    """

    def __init__(self) -> None:
        self._steps: list[StepSample] = []
        self._num_offered = 0
        self._num_chosen = 0
        self._stride = 1

    def offer(self, step: StepSample) -> None:
        """A step was done."""
        self._num_offered += 1
        if self._num_offered * _GOLDEN % _MODULUS >= _MODULUS // self._stride:
            return
        self._num_chosen += 1
        if len(self._steps) < MAX_STEPS_PER_REPORT:
            self._steps.append(step)

    def add(self, step: StepSample) -> None:
        """A step of an idle worker, of which there are few: the next report carries it."""
        if len(self._steps) < MAX_STEPS_PER_REPORT:
            self._steps.append(step)

    def take(self) -> tuple[StepSample, ...]:
        """The chosen steps since the last call. Where there were too many, half as many will be chosen from now on;
        where half the room is left, twice as many."""
        if self._num_chosen > MAX_STEPS_PER_REPORT:
            self._stride = min(_MAX_STRIDE, self._stride * 2)
        elif self._num_chosen * 2 < MAX_STEPS_PER_REPORT:
            self._stride = max(1, self._stride // 2)
        steps, self._steps = tuple(self._steps), []
        self._num_chosen = 0
        return steps


class PendingPrompts:
    """Prompt tokens of attempts that were dispatched to this worker and that its engine does not count yet.

    A prompt waits for blocks on its decode worker, and then for the end of the engine's step: together longer than the
    time between two reports. A report without it would look to a router as if the prompt had been computed.
    """

    def __init__(self) -> None:
        self._tokens: dict[AttemptKey, int] = {}

    def dispatched(self, key: AttemptKey, num_tokens: int) -> None:
        """An attempt was given to a role."""
        self._tokens[key] = num_tokens

    def added(self, keys: Iterable[AttemptKey]) -> None:
        """The engine counts these from now on, also those that have ended there."""
        for key in keys:
            self._tokens.pop(key, None)

    def num_tokens(self, is_live: Callable[[AttemptKey], bool]) -> int:
        """The sum; attempts that are not live any more are forgotten."""
        for key in [key for key in self._tokens if not is_live(key)]:
            del self._tokens[key]
        return sum(self._tokens.values())
