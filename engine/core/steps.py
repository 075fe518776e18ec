"""Runs the steps of a scheduler: one after the other, or, where the runner has a step queue, some steps ahead. Pure.

    synchronous  plan n ── run n ── apply n ── plan n+1 ── run n+1 ── ...
    ahead        plan n ── enqueue n ── plan n+1 ── enqueue n+1 ── wait for n, apply n ── plan n+2 ── enqueue n+2 ── ...

Ahead (vLLM: async scheduling), the device has its next step before it has finished the last one: the work of the host
between two steps (events, the next plan, its copies) costs the device no time; and of a worker with stages, each stage
has a step (`StepQueue.max_ahead`). Tokens are the same in both modes.

While steps are under way the scheduler does not count them: sequences are as they were before those, plus the blocks
that they write to, and `Sequence.num_launched_tokens`. The next step is planned (`plan_ahead`) before their tokens are
known, by the kind of the queue:

Decodes. The tokens of the step under way are *pending*: inputs that are on the device only. Only decodes are planned
ahead, and only where nothing unknown decides what they compute: log-probabilities and edited logits depend on the
tokens before them. Nothing is planned ahead while a waiting prompt could be admitted, or where a token needs a block
that only a preemption frees, or where drafts are worth more than the time between two steps; then a call only finishes
the step under way, and the next one plans with all tokens known. A sequence that reaches its length with the pending
token is not planned again. One that ends by a stop id is found a step late: `Scheduler.apply` drops its row.

Prompts (ADR 101). All their ids are known, so chunks are planned like any others, one behind the other, as long as all
sequences end with their first token here (the prefill role). What steps under way have computed is not in the prefix
cache yet. The results are taken in order: all that are known, and where as many steps are under way as may be, the
oldest, once it is computed.

A sequence may end, by a command, its deadline or a fault, while steps under way write to its blocks. These may have
another owner at once, because everything that is done with them from then on is ordered behind those steps, on each
rank; and nobody finds what those wrote, because blocks are published when a step is applied, and `Scheduler.apply`
drops the rows of sequences that ended.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from disagg.engine.commands import Ended, Event, TokenSampled
from disagg.engine.core.policy import is_full
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.core.scheduler_audit import check_plan
from disagg.engine.core.step_means import StepMeans
from disagg.engine.plan import (
    BadLogitsError,
    ModelRunner,
    QueuedStep,
    ScheduledSequence,
    StepPlan,
    StepQueue,
    StepResult,
    is_fatal,
)
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.sampling_rules import edits_logits, ends_with_prompt

# ---------------------------------------------------------------- plans


NOTHING = StepPlan()


def can_enqueue(plan: StepPlan, queue: StepQueue) -> bool:
    """Whether a step is of the kind that the queue takes, and needs nothing but ids: the known ones, and its decodes'
    own last tokens."""
    if queue.kind == "prompts":
        entries = plan.entries
        return bool(entries) and all(not entry.drafts and ends_with_prompt(entry.sequence) for entry in entries)
    if plan.prefills or not 0 < len(plan.decodes) <= queue.max_decodes:
        return False
    return all(not entry.drafts and _needs_ids_only(entry.sequence) for entry in plan.decodes)


def plan_ahead(scheduler: Scheduler, queue: StepQueue) -> StepPlan:
    """The step behind those that were queued and are not applied yet. Empty where these must come first, or where
    nothing is left behind them."""
    if queue.kind == "decodes":
        return plan_decodes_ahead(scheduler, queue.max_decodes)
    plan = scheduler.schedule_prompts()
    check_plan(scheduler, plan)
    return plan


def plan_decodes_ahead(scheduler: Scheduler, max_decodes: int) -> StepPlan:
    """`plan_ahead` of decodes, behind one step of decodes. Blocks that were allocated before it was found that there is
    no such step stay with their sequences."""
    if len(scheduler.running) > max_decodes or (scheduler.scheduling != "static" and scheduler.would_admit()):
        return NOTHING
    planned: list[ScheduledSequence] = []
    for sequence in scheduler.running.values():
        num_pending = sequence.num_launched_tokens
        if sequence.is_leaving or (num_pending and is_full(sequence, scheduler.max_model_len, num_pending)):
            continue
        if sequence.num_uncomputed_tokens != 1 or not _needs_ids_only(sequence):
            return NOTHING
        end = sequence.num_tokens + num_pending
        if not scheduler.kv_cache.can_extend(sequence, end):
            return NOTHING
        scheduler.kv_cache.extend(sequence, end)
        planned.append(ScheduledSequence(sequence, end - 1, 1, samples=True))
    plan = StepPlan(decodes=tuple(planned))
    if scheduler.would_draft(plan, max_decodes):
        return NOTHING
    check_plan(scheduler, plan)
    return plan


def num_prompt_steps(runner: ModelRunner) -> int:
    """How many steps of prompts may be under way together."""
    step_queue = runner.step_queue
    return 1 if step_queue is None or step_queue.kind != "prompts" else 1 + step_queue.max_ahead


def num_alike(scheduler: Scheduler, plan: StepPlan) -> int:
    """How many steps from `plan` on, which was just made, compute one token each for the same sequences and end none of
    them, whatever is sampled; 0 where that is not known. Only a command, a deadline or a stop id changes that: so many
    steps may be launched without a look between them."""
    decodes = plan.decodes
    if plan.prefills or not decodes or len(decodes) < len(scheduler.running) or len(scheduler.waiting):
        return 0
    if scheduler.speculation is not None:
        return 0
    most, block_size = sys.maxsize, scheduler.blocks.block_size
    for entry in decodes:
        sequence, num_tokens = entry.sequence, entry.end
        if not _needs_ids_only(sequence):
            return 0
        room = (len(sequence.block_table) + sequence.reserved_blocks) * block_size - num_tokens + 1
        answer = sequence.spec.sampling.max_tokens - sequence.num_output_tokens - 1
        most = min(most, room, answer, scheduler.max_model_len - num_tokens - 1)
    return max(0, most)


def _needs_ids_only(sequence: Sequence) -> bool:
    """Whether its next tokens depend on nothing but the ids before them, which the device has. Once that is so it stays
    so: a sequence outgrows the mask of its stop ids."""
    spec = sequence.spec
    if sequence.hold_after_prefill or spec.pooling is not None:
        return False
    return not (spec.sampling.logprobs >= 0 or edits_logits(sequence))


# ---------------------------------------------------------------- steps


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose result was taken in."""

    plan: StepPlan
    began: float
    """The `now` of the `run` that began it."""
    ended_at: float | None
    """As of `QueuedStep`: None where it ended with its call of `run`."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    plan: StepPlan
    queued: QueuedStep
    began: float


class Steps:
    """The steps of one worker. Owner: the engine core."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._under_way: deque[_UnderWay] = deque()
        """Steps whose results are not known, in the order of their launches."""
        self._is_watched = False
        self.finished: list[FinishedStep] = []
        """What the last call of `run` finished, but for steps that failed."""
        self.num_done = 0
        self.num_sampled = 0
        self.means = StepMeans()

    @property
    def is_under_way(self) -> bool:
        """Whether a step was queued whose tokens are not known yet."""
        return bool(self._under_way)

    @property
    def num_under_way(self) -> int:
        """How many such steps there are."""
        return len(self._under_way)

    @property
    def oldest(self) -> StepPlan:
        """The first of the steps under way; empty without any."""
        return self._under_way[0].plan if self._under_way else NOTHING

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on any thread, when a step under way is computed, where that is noticed."""
        step_queue = self._runner.step_queue
        self._is_watched = step_queue is not None and step_queue.watch(wake)

    @property
    def is_awaited(self) -> bool:
        """Whether steps are under way of which none is computed yet, and `wake` will be called."""
        return self._is_watched and bool(self._under_way) and self._under_way[0].queued.ended_at is None

    def plan(self) -> StepPlan:
        """What to compute next. Empty where that is nothing, or where a step under way must be finished first."""
        if not self._under_way:
            plan = self._scheduler.schedule()
            check_plan(self._scheduler, plan)
            return plan
        step_queue = self._runner.step_queue
        if step_queue is None or len(self._under_way) > step_queue.max_ahead:  # None: captures were disabled.
            return NOTHING
        return plan_ahead(self._scheduler, step_queue)

    def run(self, plan: StepPlan, now: float) -> list[Event]:
        """Compute or queue a plan, and finish those of the steps that were under way that are computed; the oldest in
        any case where nothing was queued, or too many are under way. What came of the finished ones."""
        self.finished = []
        step_queue = self._runner.step_queue
        if not plan.entries:
            return self._finish_queued(most_left=len(self._under_way) - 1)
        if step_queue is not None and can_enqueue(plan, step_queue):
            error = self._enqueue(step_queue, plan, now)
            events = self._finish_queued(most_left=0 if error is not None else step_queue.max_ahead)
            # The tokens of the steps before come first, also where this one could not be queued.
            return events if error is None else events + self._failed(plan, error)
        assert not self._under_way, "a step is run while another one is under way"
        return self._finish(plan, lambda: self._runner.run(plan), now)

    def run_alike(self, plan: StepPlan, rows: Iterable[Seq[int]]) -> list[TokenSampled]:
        """Take in steps like `plan`, the first one included, that were computed together: of each step the tokens of
        its decodes. At most `num_alike` of them. All is then as if each had been planned and run."""
        events = self._scheduler.apply_alike(plan, rows)
        num_each = len(plan.decodes)
        num_steps = len(events) // num_each
        self.num_done += num_steps
        self.num_sampled += len(events)
        self.means.observe(num_each, num_each, num_each, num_steps)
        return events

    def _enqueue(self, step_queue: StepQueue, plan: StepPlan, now: float) -> Exception | None:
        """Queue a step; why that failed, or None."""
        try:
            queued = step_queue.enqueue(plan, self._under_way[-1].queued if self._under_way else None)
        except Exception as error:
            return error
        self._under_way.append(_UnderWay(plan, queued, now))
        for entry in plan.entries:
            entry.sequence.num_launched_tokens += entry.num_tokens
        return None

    def _finish_queued(self, most_left: int) -> list[Event]:
        """Finish steps under way in their order: all that are computed, and others until `most_left` are left."""
        events: list[Event] = []
        while self._under_way and (len(self._under_way) > most_left or self._under_way[0].queued.ended_at is not None):
            step = self._under_way.popleft()
            for entry in step.plan.entries:
                entry.sequence.num_launched_tokens -= entry.num_tokens
            events += self._finish(step.plan, step.queued.result, step.began, step.queued)
        return events

    def _finish(
        self, plan: StepPlan, wait: Callable[[], StepResult], began: float, queued: QueuedStep | None = None
    ) -> list[Event]:
        """A step that fails ends its sequences: what it wrote to their blocks is unknown, and none of it was
        published. A row that nothing can be sampled from ends its own sequence only (`Scheduler.apply`)."""
        num_sampled = sum([entry.samples for entry in plan.entries])
        self.num_done += 1
        try:
            result = wait()
            if len(result.token_ids) != num_sampled:
                raise RuntimeError(f"{len(result.token_ids)} tokens were sampled instead of {num_sampled}")
            _check_logits(plan, result)
        except Exception as error:
            return self._failed(plan, error)
        self.finished.append(FinishedStep(plan, began, None if queued is None else queued.ended_at))
        events = self._scheduler.apply(plan, result)
        num_tokens = sum(isinstance(event, TokenSampled) for event in events)
        self.num_sampled += num_tokens
        if plan.decodes:
            keys = {entry.sequence.key for entry in plan.decodes}
            if plan.prefills:  # whose first tokens are not of a decode
                num_tokens = sum(isinstance(event, TokenSampled) and event.key in keys for event in events)
            self.means.observe(len(keys), len(plan.decodes), num_tokens)
        return events

    def _failed(self, plan: StepPlan, error: Exception) -> list[Event]:
        return [
            failed(self._scheduler, entry.sequence, "step", error)
            for entry in plan.entries
            if entry.sequence.state is not SequenceState.ENDED
        ]


def _check_logits(plan: StepPlan, result: StepResult) -> None:
    """Raise BadLogitsError if the model gave nothing good in any row of several: then the device is at fault, or
    something that the rows share. Sequences that ended before do not count."""
    live = [entry for entry in plan.entries if entry.samples and entry.sequence.state is not SequenceState.ENDED]
    num_sequences = len({entry.sequence for entry in live})
    if num_sequences > 1 and sum(fault == "model" for fault in result.faults.values()) == len(live):
        raise BadLogitsError(f"the model's logits are not finite in any of {len(live)} rows")


def failed(scheduler: Scheduler, sequence: Sequence, what: str, error: Exception) -> Ended:
    """End a sequence whose step or copy raised. Raises `error` where the device cannot be used any more, which ends the
    worker: it would fail everything that comes, be empty, and so be given more."""
    if is_fatal(error):
        raise error
    _log.error("%s of %s failed", what, sequence.key, exc_info=error)
    return scheduler.end(sequence, "failed", f"{what}: {type(error).__name__}: {error}")
