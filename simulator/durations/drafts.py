"""Steps with drafts, in a simulation: how many tokens they give, and how long a token takes.

A simulated worker proposes no drafts, because its tokens mean nothing. Instead each of its steps without prompts gives
one token and takes as long as a token does on a worker with drafts: a step with all its rows, divided by its tokens.
All requests have the same means. Steps with prompts have no drafts.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from disagg.proto.messages import MAX_DRAFT
from disagg.step_times.interface import StepTimes, StepWork

Mean = Annotated[float, msgspec.Meta(ge=1, le=MAX_DRAFT + 1)]


class Drafts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What steps do for a sequence that decodes, on the mean; as in `proto.messages.Load`."""

    tokens_per_step: Mean
    rows_per_step: Mean

    def __post_init__(self) -> None:
        if self.rows_per_step < self.tokens_per_step:
            raise ValueError(
                f"rows_per_step: a row gives a token at most; expected at least tokens_per_step, "
                f"{self.tokens_per_step:g}, not {self.rows_per_step:g}"
            )


class DraftedSteps(StepTimes):
    """The times of steps that give one token, on a worker whose steps are as `drafts` says and take `times`."""

    def __init__(self, times: StepTimes, drafts: Drafts) -> None:
        self._times = times
        self._drafts = drafts

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step, or of one token of a step with drafts."""
        if work.prefill_tokens or not work.num_decodes:
            return self._times.step_s(work)
        rows = self._drafts.rows_per_step
        whole = work._replace(
            num_decodes=round(work.num_decodes * rows), decode_context=round(work.decode_context * rows)
        )
        return self._times.step_s(whole) / self._drafts.tokens_per_step
