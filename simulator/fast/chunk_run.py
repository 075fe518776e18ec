"""Steps of a fast worker that compute chunks of one long prompt beside the same decodes, taken together.

Where the token budget limits a prompt's chunks, many steps in a row are alike but for the chunk's place: they are
worked out here in one go. An event that comes meanwhile ends the run with the step under way.
"""

from __future__ import annotations

from typing import NamedTuple

from disagg.engine.core.policy import chunk_length
from disagg.step_times.interface import StepTimes, StepWork

MAX_RUN_S = 0.1
"""Seconds after which the router is told how far the prompt is."""


class ChunkStep(NamedTuple):
    """One step of a run."""

    ended: float
    num_tokens: int
    work: StepWork
    step_s: float


class ChunkRun:
    """The steps from `began` on, each `gap_s` after the end of the one before.

    Args:
        times: the step times.
        start: number of the prompt's tokens that are computed already.
        num_tokens: number of tokens in the first chunk.
        num_known: number of tokens in the prompt.
        budget: tokens of a step beside its decodes.
        num_decodes: number of decodes in each step.
        attends: number of tokens to which the decodes attend in the first step.
        most: the most steps.
        others_need: tokens of the budget that must be left for another prompt to get some.
        until: no step begins then or later.
    """

    def __init__(
        self,
        times: StepTimes,
        began: float,
        gap_s: float,
        *,
        start: int,
        num_tokens: int,
        num_known: int,
        budget: int,
        block_size: int,
        num_decodes: int,
        attends: int,
        most: int,
        others_need: float,
        until: float,
    ) -> None:
        self.steps: list[ChunkStep] = []
        self.gap_s = gap_s
        until = min(until, began + MAX_RUN_S)
        while True:
            attended = num_tokens * start + num_tokens * (num_tokens + 1) // 2
            work = StepWork(num_tokens, attended, num_decodes, attends, 1)
            step_s = times.step_s(work)
            ended = began + step_s
            self.steps.append(ChunkStep(ended, num_tokens, work, step_s))
            start, began = start + num_tokens, ended + gap_s
            attends += num_decodes
            if len(self.steps) >= most or began >= until or num_known - start <= budget:
                break
            num_tokens = chunk_length(start, num_known - start, budget, block_size, first=True)
            if budget - num_tokens >= others_need:
                break

    @property
    def ended(self) -> float:
        """When the last step ends."""
        return self.steps[-1].ended

    def cut(self, now: float) -> None:
        """End the run with the step that is under way, or with the one before it if that has ended and the next one has
        not begun."""
        steps, passed = self.steps, now - self.gap_s
        number = next((n for n, step in enumerate(steps, start=1) if step.ended >= passed), len(steps))
        del steps[number:]
