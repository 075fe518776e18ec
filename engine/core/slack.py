"""How long the next step may take, by the targets of the sequences that decode (scheduling `slack`). Pure.

A TPOT target is the mean over a whole answer, so a sequence that decodes faster saves time. What all sequences of a
worker have saved, each its slack (`step_times/pace.py`), may be spent on prompts, in one long chunk as well as in
many short ones: the next step may take as long as the least slack. A deadline of the request counts as that of its last
token. A sequence that would be late even alone on the worker cannot meet its TPOT target: it holds nothing back, as one
without a target.
Without targets that can be met nothing limits a step but the token budget, and decodes and chunks are those of
`decode_first`.

Prompts: one that would miss its TTFT target even if it were computed at once (`cannot_meet_ttft`) goes behind the
others of its priority, until it has waited for OVERDUE times its target. So that no flow of answers starves one that
has waited so long, it gets up to a block of tokens after STARVED_STEPS steps without prompts, whatever the slack.

The first token of a prompt waits for the end of its step. So behind prompts that can still meet their TTFT target and
end in a step, another one joins it only if that saves those behind, which wait for a step less, at least the time that
it costs those before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Generic, NamedTuple, Protocol, TypeVar

from disagg.engine.core.policy import LazyHeap
from disagg.proto.messages import SequenceSpec, StepSample
from disagg.step_times.pace import slack_ms, tokens_left
from disagg.step_times.step_model import StepModel

OVERDUE = 2.0
STARVED_STEPS = 8
USUAL_TTFT_S = 10.0
"""TTFT target of sequences without one, in seconds, for the time at which a prompt is overdue."""


class SlackSequence(Protocol):
    """What counts of a sequence here: `engine.request.Sequence`, and those of the simulator's fast engine."""

    spec: SequenceSpec
    deadline: float | None
    arrival: float
    first_at: float | None
    cannot_meet_ttft: bool

    @property
    def num_given_tokens(self) -> int:
        """Tokens that were known when it came."""
        ...

    def __hash__(self) -> int: ...


S = TypeVar("S", bound=SlackSequence)


class Decode(NamedTuple):
    """One sequence that decodes, before a step."""

    sequence: SlackSequence
    num_output_tokens: int
    num_attended: int
    """Tokens that its next decode attends to."""


class StepBudget(NamedTuple):
    """Milliseconds of prompt tokens that a step may have beside its decodes."""

    ms: float
    """Time for prompts within the targets and `max_itl_ms`; negative if there is none."""
    most_ms: float
    """Time for prompts within `max_itl_ms` alone; time for one block if the decodes leave less than that of a token."""
    step_ms: float
    """Duration of the step without prompts."""
    least: Decode | None = None
    """The sequence with the least slack; None where nothing decodes."""

    def less(self, ms: float) -> StepBudget:
        """The rest after `ms` of it is taken."""
        return StepBudget(self.ms - ms, self.most_ms - ms, self.step_ms, self.least)


UNLIMITED = StepBudget(math.inf, math.inf, math.inf)


class Fitting(NamedTuple):
    """How much of a prompt fits into a step."""

    num_tokens: int
    is_exact: bool
    """Whether to take so many also where they fill no block: unless it is slack that limits them, which can be saved
    up."""

    def may_begin(self, num_tokens: int, block_size: int) -> bool:
        """Whether a waiting prompt of `num_tokens` tokens may begin."""
        return self.is_exact or self.num_tokens >= min(num_tokens, block_size)


class Slack(Generic[S]):
    """The step times of a worker, and what its sequences' targets leave of them. Owner: the scheduler.

    Args:
        calibration: steps that were measured at the start.
        max_itl_ms: how long a step with prompts may take while sequences decode, unless the decodes alone take longer.
        block_size: tokens of a KV block.
        expert_share: share of the model's experts that a token chooses.
    """

    def __init__(
        self, calibration: Seq[StepSample], max_itl_ms: float | None, block_size: int, expert_share: float = 0.0
    ) -> None:
        self.model = StepModel(calibration, expert_share)
        self._max_itl_ms = math.inf if max_itl_ms is None else max_itl_ms
        self._block_size = block_size
        self._changes: LazyHeap[S] = LazyHeap()
        """Waiting prompts by when they can no longer meet their TTFT target or become overdue."""

    def observe(self, step: StepSample) -> None:
        """A step was measured."""
        self.model.observe(step)

    # ------------------------------------------------------------ steps

    def step_budget(self, decodes: Seq[Decode], now: float) -> StepBudget:
        """The time that prompts may take in the next step beside these decodes."""
        times = self.model.coefficients
        base_ms, decode_ms, context_ms = times.base_ms, times.decode_ms, times.context_ms
        if not decodes:
            return StepBudget(math.inf, math.inf, base_ms + times.experts_ms)
        step_ms = base_ms + sum([decode_ms + decode.num_attended * context_ms for decode in decodes])
        unread_ms = 0.0
        if times.experts_ms:  # A prompt's rows read all experts.
            step_ms += times.experts_of(len(decodes))
            unread_ms = times.experts_ms - times.experts_of(len(decodes))
        most_ms = self._max_itl_ms - step_ms - unread_ms
        if most_ms < self.prompt_ms(0, 1):
            most_ms = self.prompt_ms(0, self._block_size)
        least, longest_ms = decodes[0], math.inf
        for decode in decodes:
            its_ms = self.longest_ms(decode, step_ms, now)
            if its_ms < longest_ms:
                least, longest_ms = decode, its_ms
        return StepBudget(min(most_ms, longest_ms - step_ms - unread_ms), most_ms, step_ms, least)

    def longest_ms(self, decode: Decode, step_ms: float, now: float) -> float:
        """How long the next step may take for this sequence's sake, if all later ones take `step_ms`, or less."""
        sequence, num_done, num_attended = decode
        targets = sequence.spec.targets
        if targets is None:
            return math.inf
        rest = tokens_left(num_done, sequence.spec.sampling.max_tokens, targets.output_tokens)
        due, paced_s = math.inf if sequence.deadline is None else sequence.deadline, 0.0
        if targets.tpot_s is not None and sequence.first_at is not None:
            paced_s = targets.tpot_s * (num_done - 1 + rest)
            due = min(due, sequence.first_at + paced_s)
        times = self.model.coefficients
        alone_ms = times.base_ms + times.decode_ms + num_attended * times.context_ms
        if times.experts_ms:
            alone_ms += times.experts_of(1)
        longest_ms = slack_ms((due - now) * 1e3, rest, step_ms, alone_ms, paced_s * 1e3)
        return math.inf if longest_ms is None else longest_ms

    def prompt_ms(self, start: int, num_tokens: int) -> float:
        """What prompt tokens [start, start + num_tokens) add to a step."""
        return self.model.coefficients.prompt_ms(start, num_tokens)

    def num_tokens(self, start: int, room_ms: float) -> float:
        """The most tokens of a prompt, from `start` on, that add at most `room_ms`: a whole number, or infinite."""
        return self.model.coefficients.num_tokens(start, room_ms)

    def num_fitting(
        self, sequence: S, start: int, budget: int, step_budget: StepBudget, num_without: int, now: float
    ) -> Fitting:
        """The most tokens of a prompt, from `start` on, in the next step; `num_without` steps before it had none."""
        if step_budget.ms == math.inf:
            return Fitting(budget, True)
        most = self.num_tokens(start, step_budget.ms)
        is_exact = most >= budget or step_budget.ms == step_budget.most_ms
        if most < self._block_size and num_without >= STARVED_STEPS and is_overdue(sequence, now):
            most, is_exact = min(self._block_size, max(1, self.num_tokens(start, step_budget.most_ms))), True
        return Fitting(budget if most >= budget else int(most), is_exact)

    def saves_time(self, start: int, num_tokens: int, num_ended: int, num_left: int, step_budget: StepBudget) -> bool:
        """Whether a prompt of which so many tokens are left should join a step in which `num_ended` prompts end that
        can still meet their targets, of `num_left` behind them the first."""
        return num_ended == 0 or num_ended * self.prompt_ms(start, num_tokens) <= num_left * step_budget.step_ms

    # ------------------------------------------------------------ the order of prompts

    def waits(self, sequence: S) -> None:
        """A prompt that was never begun waits from now on."""
        due = _first_due(sequence)
        if due < math.inf:
            times = self.model.coefficients
            alone_s = (times.base_ms + times.experts_ms + self.prompt_ms(0, sequence.num_given_tokens)) / 1e3
            self._changes.push((due - alone_s,), sequence)

    def leaves(self, sequence: S) -> None:
        """It does not wait any more. Nothing happens where it did not."""
        self._changes.discard(sequence)

    @property
    def next_change(self) -> float:
        """When the next waiting prompt can no longer meet its TTFT target or becomes overdue; infinite if none does."""
        head = self._changes.peek()
        return math.inf if head is None else head[0][0]

    def changed(self, now: float) -> Iterator[S]:
        """Waiting prompts whose place changes: `cannot_meet_ttft` was set or reset."""
        while (head := self._changes.peek()) is not None and head[0][0] <= now:
            sequence = head[1]
            sequence.cannot_meet_ttft = not is_overdue(sequence, now)
            if sequence.cannot_meet_ttft:
                self._changes.push((overdue_at(sequence),), sequence)
            else:
                self._changes.discard(sequence)
            yield sequence


def may_be_in_time(sequence: SlackSequence, now: float) -> bool:
    """Whether a prompt has a TTFT target that it can still meet."""
    return now < _first_due(sequence) < math.inf and not sequence.cannot_meet_ttft


def _first_due(sequence: SlackSequence) -> float:
    """When the first token is due; infinite without a target for it, or where it is out."""
    targets = sequence.spec.targets
    if targets is None or targets.ttft_s is None or targets.streamed_s is not None:
        return math.inf
    return sequence.arrival - targets.age_s + targets.ttft_s


def overdue_at(sequence: SlackSequence) -> float:
    """When a prompt has waited for `OVERDUE` times its target."""
    targets = sequence.spec.targets
    if targets is None:
        return sequence.arrival + OVERDUE * USUAL_TTFT_S
    ttft_s = USUAL_TTFT_S if targets.ttft_s is None else targets.ttft_s
    return sequence.arrival - targets.age_s + OVERDUE * ttft_s


def is_overdue(sequence: SlackSequence, now: float) -> bool:
    """Whether that time has come."""
    return now >= overdue_at(sequence)
