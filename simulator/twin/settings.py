"""The settings to compare: `spread`, `gather`, and the splits near the one that the load asks for.

A split of n workers has 1 to n - 1 workers that take no prompts, and the replay of each setting costs as much. So with
many workers only the splits near decoding's share of the work, and near the present split, are compared. For that share
prompts count without their cached tokens, and answers at the batch size that their TPOT target allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.messages import StepCoefficients
from disagg.router.config import SPLIT, Decodes, num_split
from disagg.router.telemetry.prefix_marks import PLACES
from disagg.router.telemetry.recent_load import Arrival

USUAL: tuple[Decodes, ...] = ("spread", "gather")
FEW = 4
"""Largest number of workers of which all splits are compared."""
_NEAR = (-1, 0, 1)
"""With more workers: offsets from the split that the load asks for, and from the present one, that are compared."""


def settings_of(arrivals: Sequence[Arrival], steps: Sequence[StepCoefficients], present: Decodes) -> list[Decodes]:
    """The settings to compare, including the present one. `steps`: the coefficients of each worker, at least two."""
    numbers = set(range(1, len(steps)))
    if len(steps) > FEW:
        centers = {round(len(steps) * decode_share(arrivals, mean_steps(steps))), num_split(present)} - {0}
        numbers = {center + offset for center in centers for offset in _NEAR} & numbers
    found = [*USUAL, *(f"{SPLIT}:{number}" for number in sorted(numbers))]
    return found if present in found else [*found, present]


def most_settings(num_workers: int) -> int:
    """Most settings in a comparison."""
    return len(USUAL) + (num_workers - 1 if num_workers <= FEW else 2 * len(_NEAR))


def decode_share(arrivals: Iterable[Arrival], steps: StepCoefficients) -> float:
    """Share of the workers' time that decoding needs, by at least one request."""
    prompts_ms = answers_ms = 0.0
    seen: set[int] = set()
    for each in arrivals:
        num_cached = 0
        for place, mark in zip(PLACES, each.marks, strict=False):
            if mark in seen:
                num_cached = place * HASH_BLOCK_TOKENS
            seen.add(mark)
        num_new = max(0, each.prompt_tokens - num_cached)
        prompts_ms += num_new * (steps.prefill_token_ms + (each.prompt_tokens + num_cached) / 2 * steps.attended_ms)
        joining_ms = steps.decode_ms + (each.prompt_tokens + each.output_tokens / 2) * steps.context_ms
        base_ms = steps.base_ms + steps.experts_ms  # a batch as large as the target allows reads all experts
        step_ms = max(base_ms + joining_ms, (each.tpot_s or 0.0) * 1e3)
        answers_ms += each.output_tokens * step_ms / max(1.0, (step_ms - base_ms) / max(1e-6, joining_ms))
    return answers_ms / max(1e-6, prompts_ms + answers_ms)


def mean_steps(steps: Sequence[StepCoefficients]) -> StepCoefficients:
    """The mean coefficients of all workers."""
    return StepCoefficients(*map(fmean, zip(*steps, strict=True)))
