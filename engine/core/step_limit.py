"""How much of prompts a step computes at most, by how long it is predicted to take. Pure.

Whatever waits for the end of a step (a cancel, a copy, a sequence that comes) waits for all of it, and a step that
never ends is known by its length. So a prompt is cut into chunks by which no step takes longer than `LONGEST_STEP_MS`,
however slow the processor; one block of tokens is computed where even that takes longer. Nothing is cut where the
largest step takes less.

On a worker with stages a step waits in each of them for the one before it. So there chunks shrink as the context grows
(`is_even`), to the time of a full step at a prompt's beginning: with steps of one length no stage waits, and the last
chunk of a long prompt, which passes the stages alone, is not the longest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.proto.messages import StepCoefficients
from disagg.step_times.step_model import StepModel

LONGEST_STEP_MS = 5_000.0
"""A sixth of `recovery.stuck_after_s`, for machines that become slower than they were measured."""


class StepLimit:
    """The limit of one worker. Owner: the engine core.

    Args:
        model: of the worker's step times, which its owner keeps up to date.
        token_budget: tokens of the largest step.
        max_num_seqs: its decodes.
        max_model_len: the longest sequence.
        num_kv_tokens: what all sequences together can attend to.
        block_size: tokens of a KV block.
        is_even: whether all full steps of prompts shall take about as long.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        token_budget: int,
        max_num_seqs: int,
        max_model_len: int,
        num_kv_tokens: int,
        block_size: int,
        is_even: bool = False,
    ) -> None:
        self._model = model
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._max_start = max(0, max_model_len - token_budget)
        self._num_kv_tokens = num_kv_tokens
        self._block_size = block_size
        self._is_even = is_even
        self._seen: StepCoefficients | None = None
        self._binds = False

    def left_ms(self, decodes: Iterable[ScheduledSequence]) -> float:
        """What a step with these decodes may spend on prompts; infinite where nothing limits it."""
        times = self._model.coefficients
        even_ms = times.prompt_ms(0, self._token_budget) if self._is_even else math.inf
        if not self._is_slow(times):
            return even_ms
        decoding = sum(times.decode_ms + (entry.start + 1) * times.context_ms for entry in decodes)
        return min(even_ms, LONGEST_STEP_MS - times.base_ms - times.experts_ms - decoding)

    def num_tokens(self, start: int, left_ms: float, *, first: bool) -> float:
        """The most tokens of a prompt, from `start` on, in what is left of a step; of its first chunk at least a block.
        Where steps shall be even, the number of whole blocks whose time is the closest."""
        if left_ms == math.inf:
            return math.inf
        fitting = self._model.coefficients.num_tokens(start, left_ms)
        if self._is_even and fitting < math.inf:
            fitting = (fitting + self._block_size // 2) // self._block_size * self._block_size
        return max(fitting, self._block_size) if first else fitting

    def prompt_ms(self, start: int, num_tokens: int) -> float:
        """What prompt tokens [start, start + num_tokens) add to a step."""
        return self._model.coefficients.prompt_ms(start, num_tokens)

    def expected_s(self, plan: StepPlan) -> float:
        """How long the step is predicted to take; 0 where none takes long."""
        times = self._model.coefficients
        return times.step_ms(plan.measured(0.0)) / 1e3 if self._is_slow(times) else 0.0

    def _is_slow(self, times: StepCoefficients) -> bool:
        """Whether there may be steps that take too long."""
        if times is not self._seen:
            self._seen = times
            decoding = self._max_num_seqs * times.decode_ms + self._num_kv_tokens * times.context_ms
            longest_ms = (
                times.base_ms + times.experts_ms + times.prompt_ms(self._max_start, self._token_budget) + decoding
            )
            self._binds = longest_ms > LONGEST_STEP_MS
        return self._binds
