"""Scheduling `slack` of a fast worker: `engine/core/slack.py` asked before a step, and for how many steps to come no
prompt will fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from disagg.engine.config import WorkerConfig
from disagg.engine.core.slack import STARVED_STEPS, Decode, Fitting, Slack, StepBudget, is_overdue, overdue_at
from disagg.proto.messages import StepSample, WorkerInfo
from disagg.simulator.fast.fast_room import FastSequence

_EVERY = 4
"""One of this many steps of a kind (prompts, decodes, both) is observed: fits with fewer steps are as good."""


class FastSlack:
    """Scheduling `slack` of one fast worker. Owner: the fast engine."""

    def __init__(self, config: WorkerConfig, info: WorkerInfo) -> None:
        self.slack: Slack[FastSequence] = Slack(info.calibration, config.max_itl_ms, info.block_size, info.expert_share)
        self._block_size = info.block_size
        self._now = 0.0
        self._budget = StepBudget(math.inf, math.inf, math.inf)
        self._num_without = 0
        """Number of steps without prompts since the last one with some."""
        self._new_answers: list[FastSequence] = []
        """Sequences whose first token was made since the last plan."""
        self._num_seen = [0, 0, 0, 0]
        """Number of steps of each kind so far."""
        self._blocked: tuple[FastSequence, float] | None = None
        """The prompt that found no room in the last plan, and the milliseconds that it needs."""

    # ------------------------------------------------------------ what happens

    def observe(self, step: StepSample) -> None:
        """Observe the time of one step."""
        kind = 2 * (step.prefill_tokens > 0) + (step.num_decodes > 0)
        if self._num_seen[kind] % _EVERY == 0:
            self.slack.observe(step)
        self._num_seen[kind] += 1

    def begins(self, sequence: FastSequence) -> None:
        """Note that a sequence begins to decode."""
        if sequence.first_at is None:
            self._new_answers.append(sequence)

    def stepped(self, num_steps: int) -> None:
        """Count `num_steps` ended steps without prompts, of which the plan has counted one."""
        self._num_without += num_steps - 1

    # ------------------------------------------------------------ a plan

    def advance(self, now: float) -> Iterator[FastSequence]:
        """Set the time of the next plan. Returns the waiting prompts whose position in the queue changes."""
        self._now = now
        for sequence in self._new_answers:
            sequence.first_at = now
        self._new_answers.clear()
        return self.slack.changed(now)

    def step_budget(self, decoding: Iterable[FastSequence], steps: int) -> StepBudget:
        """The budget for prompts of the next step beside the decoding sequences, after `steps` decode steps."""
        self._blocked = None
        self._budget = self.slack.step_budget([_decode(sequence, steps) for sequence in decoding], self._now)
        return self._budget

    def cannot_meet_ttft(self, sequence: FastSequence) -> bool:
        """Whether a started prompt still counts as one that cannot meet its TTFT target."""
        return sequence.cannot_meet_ttft and not is_overdue(sequence, self._now)

    def num_fitting(self, sequence: FastSequence, budget: int, step_budget: StepBudget) -> Fitting:
        """The most tokens of a prompt that fit into the next step."""
        return self.slack.num_fitting(sequence, sequence.computed, budget, step_budget, self._num_without, self._now)

    def joins(self, sequence: FastSequence, num_ended: int, num_left: int, step_budget: StepBudget) -> bool:
        """Whether a prompt joins a step in which other prompts end, see `Slack.saves_time`."""
        num_tokens = sequence.num_known - sequence.computed
        return self.slack.saves_time(sequence.computed, num_tokens, num_ended, num_left, step_budget)

    def finds_no_room(self, sequence: FastSequence, budget: int) -> None:
        """Note that the step has no room for this prompt, the first in order."""
        start = sequence.computed
        to_block = self._block_size - start % self._block_size
        num_tokens = min(to_block, sequence.num_known - start, budget)
        needed_ms = min(self.slack.prompt_ms(start, num_tokens), self._budget.most_ms)
        self._blocked = sequence, needed_ms

    def planned(self, *, has_prompts: bool) -> None:
        """Note that the plan is made."""
        self._num_without = 0 if has_prompts else self._num_without + 1

    # ------------------------------------------------------------ the steps to come

    def num_alike(self, most: int, growth_ms: float, until: Callable[[int], float]) -> int:
        """For how many steps, including the planned one and at most `most`, no prompt will find room, as far as the
        sequence with the least slack decides it.

        Args:
            growth_ms: predicted milliseconds by which each step is longer than the one before.
            until: when a number of steps is over, and the next one is planned.
        """
        if self._blocked is None or (least := self._budget.least) is None:
            return most
        sequence, needed_ms = self._blocked
        if is_overdue(sequence, self._now):
            most = min(most, max(1, STARVED_STEPS + 1 - self._num_without))
        changes = (overdue_at(sequence), self.slack.next_change)
        change = min((time for time in changes if time > self._now), default=math.inf)
        step_ms, slack = self._budget.step_ms, self.slack

        def ends(number: int) -> bool:
            then = until(number)
            if then >= change:
                return True
            later = Decode(least.sequence, least.num_output_tokens + number, least.num_attended + number)
            later_ms = step_ms + number * growth_ms
            return slack.longest_ms(later, later_ms, then) - later_ms >= needed_ms

        last = 1
        while last < most and not ends(last):
            last *= 2
        before, last = last // 2, min(last, most)
        while last - before > 1:
            middle = (before + last) // 2
            before, last = (before, middle) if ends(middle) else (middle, last)
        return last


def _decode(sequence: FastSequence, steps: int) -> Decode:
    num_done = sequence.sent + steps - sequence.reported_at
    return Decode(sequence, num_done, sequence.attends + steps - sequence.joined_at)
