"""The rules of the real scheduler (`engine/core/scheduler.py`, `policy.py`, `blocks/kv_cache_manager.py`) on counts and
sums: order, budget, chunks, tails, admission, reserves, preemption, suspension.

    queue ──plan: there is room──> started ──the prompt is computed──> decoding ──> over
      ^                                                                   │ │
      └──────────── preempted: recomputed, or copied back (resumed) ──────┘ └─> over, where another worker goes on

A decoding sequence is represented by the count of steps at which it ends, and all contexts by one sum.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from disagg.engine.blocks.swap import slot_tokens_for
from disagg.engine.config import WorkerConfig
from disagg.engine.core.policy import PASS_S, before_tail, chunk_length
from disagg.engine.core.slack import UNLIMITED, StepBudget, may_be_in_time
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import EndReason, WorkerInfo
from disagg.simulator.fast.fast_room import FastRoom, FastSequence
from disagg.simulator.fast.fast_slack import FastSlack
from disagg.simulator.world.surroundings import Surroundings

PlannedPrompt = tuple[FastSequence, int, int]
"""A sequence, the first of its tokens in a step, and how many the step computes."""


class FastPlan(NamedTuple):
    """The work of one step."""

    prefills: list[PlannedPrompt]
    num_decodes: int
    """Sequences that decode beside the prompts; all that decode if there are no prompts."""
    budget: int
    """Most prompt tokens of the step."""
    step_budget: StepBudget
    """The time that prompts may take, by the slack of the decodes."""


class FastScheduler:
    """Keeps the state of each sequence, and plans the next step.

    Args:
        room: the blocks of the sequences.
        slack: decides about prompts with scheduling `slack`; else None.
        note: called after a change that the worker reports.
        tell_tokens: sends the tokens so far of a sequence that no longer decodes.
        end: releases a sequence and tells the gateway that it ended.
    """

    def __init__(
        self,
        world: Surroundings,
        config: WorkerConfig,
        info: WorkerInfo,
        room: FastRoom,
        slack: FastSlack | None,
        *,
        note: Callable[[], None],
        tell_tokens: Callable[[FastSequence], None],
        end: Callable[[FastSequence, EndReason, str], None],
    ) -> None:
        self._config = config
        self._loop = world.loop
        self._answers = world.answers
        self._note = note
        self._tell_tokens = tell_tokens
        self._end = end
        self._room = room
        self._slack = slack
        self._blocks = room.blocks
        self._block_size = info.block_size
        self._max_model_len = info.max_model_len
        self._max_num_seqs = config.num_places
        self._kv_layout = info.kv_layout
        self._copy_byte_s = world.overheads.copy_byte_s
        self._slot_tokens = slot_tokens_for(info.block_size)
        self._swap_slots = config.swap_bytes // info.kv_layout.bytes_of(self._slot_tokens)
        self.sequences: dict[AttemptKey, FastSequence] = {}
        self.num_waiting = 0
        self.num_reserved = 0
        self.num_preempted = 0
        self.started: list[FastSequence] = []
        self.resumed: list[FastSequence] = []
        """Sequences whose KV is copied back before the next step; they decode from the step after it on."""
        self.decoding: dict[FastSequence, None] = {}
        self.steps = 0
        """Number of decode steps since the start."""
        self.attends = 0
        """Number of tokens that the next decode step attends to, over all decoding sequences."""
        self.safe_until = 0
        """The count of decode steps up to which no sequence needs a block beyond its promise."""
        self.num_preemptions = 0
        """Number of preemptions since the worker's start."""
        self.copy_s = 0.0
        """Seconds of the copies to make before the next step."""
        self._waiting: list[tuple[tuple[float, ...], int, FastSequence]] = []
        self._ends: list[tuple[int, int, FastSequence]] = []
        self._serial = 0

    # ------------------------------------------------------------ the queue

    def queue(self, sequence: FastSequence) -> None:
        """Add a new or a preempted sequence to the queue."""
        self.num_waiting += 1
        self._push(sequence)
        if self._slack is not None and sequence.num_preemptions == 0:
            self._slack.slack.waits(sequence)

    def _push(self, sequence: FastSequence) -> None:
        """Add a sequence to the queue, or move it to another position."""
        sequence.order = self._order(sequence)
        self._serial += 1
        heapq.heappush(self._waiting, (sequence.order, self._serial, sequence))

    def _order(self, sequence: FastSequence) -> tuple[float, ...]:
        is_long = sequence.holds and sequence.num_given > self._config.token_budget
        is_first = sequence.num_preemptions == 0
        return (-sequence.spec.priority, is_first, sequence.cannot_meet_ttft, sequence.arrival + PASS_S * is_long)

    def release(self, sequence: FastSequence) -> None:
        """Drop a sequence and release all that it holds. Idempotent."""
        if sequence.phase == "over":
            return
        if sequence.phase == "waiting":
            self.num_preempted -= sequence.num_preemptions > 0 and sequence.order != ()
            self.num_waiting -= sequence.order != ()
            self._give_back_swap(sequence)
            if self._slack is not None:
                self._slack.slack.leaves(sequence)
        elif sequence.phase == "prefill":
            self.started.remove(sequence)
        elif sequence.phase == "reserved":
            self.num_reserved -= 1
        elif sequence.phase == "decode":
            self._sync(sequence)
            del self.decoding[sequence]
            self.attends -= sequence.attends + self.steps - sequence.joined_at
            self._room.keep_answer(sequence)
        self._room.let_go(sequence)
        sequence.phase = "over"
        del self.sequences[sequence.key]

    def uncomputed(self) -> list[FastSequence]:
        """The sequences whose prompt is not completely computed."""
        return [*self.started, *(s for order, _, s in self._waiting if s.phase == "waiting" and s.order is order)]

    # ------------------------------------------------------------ the next step

    def plan(self) -> FastPlan:
        """Plan the next step."""
        num_decodes = len(self.decoding)
        num_preemptions = self.num_preempted
        if num_decodes and self.steps >= self.safe_until:
            self._make_safe()
            num_decodes = len(self.decoding)
        may_admit = self.num_preempted == num_preemptions
        alone_first = self._config.scheduling in ("prefill_first", "static")
        if self._config.scheduling == "static":
            may_admit = False
            if not (self.decoding or self.started or self.resumed):
                self._form_batch()
        budget = self._config.token_budget - (0 if alone_first else num_decodes)
        prefills: list[PlannedPrompt] = []
        step_budget = UNLIMITED if self._slack is None else self._slack_budget(self._slack)
        if self.started or self.num_waiting:
            prefills = self._plan_prefills(budget, may_admit, step_budget)
        if self._slack is not None:
            self._slack.planned(has_prompts=bool(prefills))
        if prefills:
            num_decodes = 0 if alone_first else num_decodes and len(self.decoding)
        return FastPlan(prefills, num_decodes, budget, step_budget)

    def _form_batch(self) -> None:
        while (head := self.head()) is not None and self._admit(head):
            pass

    def _slack_budget(self, slack: FastSlack) -> StepBudget:
        for sequence in slack.advance(self._loop.now):
            self._push(sequence)
        if not (self.started or self.num_waiting):
            return UNLIMITED
        for sequence in self.started:
            if sequence.cannot_meet_ttft and not slack.cannot_meet_ttft(sequence):
                sequence.cannot_meet_ttft = False
                sequence.order = self._order(sequence)
        return slack.step_budget(self.decoding, self.steps)

    def others_need(self, sequence: FastSequence) -> float:
        """Tokens of the budget with which a prompt other than this one would begin or continue; infinite without
        one."""
        others = [other for other in self.started if other is not sequence]
        head = self.head()
        if not others:
            return math.inf if head is None else 1
        first = min(others, key=lambda other: other.order)
        if head is not None and head.order < first.order:
            return 1
        block_size, num_left = self._block_size, first.num_known - first.computed
        return min(num_left, block_size - first.computed % block_size)

    def _plan_prefills(self, budget: int, may_admit: bool, step_budget: StepBudget = UNLIMITED) -> list[PlannedPrompt]:
        """The prompts of the next step, as the real scheduler plans them."""
        started = deque(sorted(self.started, key=lambda sequence: sequence.order))
        planned: list[PlannedPrompt] = []
        slack, num_ended = self._slack, 0
        block_size, tail_tokens = self._block_size, self._config.tail_tokens
        while budget > 0:
            head = self.head() if may_admit else None
            is_new = head is not None and (not started or head.order < started[0].order)
            sequence = head if is_new else started[0] if started else None
            if sequence is None:
                break
            num_behind = self.num_waiting + len(started)
            if slack is not None and num_ended and not slack.joins(sequence, num_ended, num_behind, step_budget):
                break
            if is_new and slack is not None and not sequence.swapped:
                fitting = slack.num_fitting(sequence, budget, step_budget)
                if not fitting.may_begin(sequence.num_known, block_size):
                    if not planned:
                        slack.finds_no_room(sequence, budget)
                    break
            if is_new:
                may_admit = self._admit(sequence)
                if not may_admit or sequence.phase != "prefill":
                    continue
            else:
                started.popleft()
            start, num_left = sequence.computed, sequence.num_known - sequence.computed
            most, first = budget, not planned
            if slack is not None:
                most, is_exact = slack.num_fitting(sequence, budget, step_budget)
                first = first and is_exact
            num_tokens = chunk_length(start, num_left, most, block_size, first=first)
            if sequence.holds and num_tokens == num_left:
                num_tokens = before_tail(start, num_tokens, tail_tokens, block_size)
            if num_tokens == 0:
                if slack is not None and not planned:
                    slack.finds_no_room(sequence, budget)
                break
            self._room.extend(sequence, start + num_tokens)
            planned.append((sequence, start, num_tokens))
            budget -= num_tokens
            if slack is not None:
                step_budget = step_budget.less(slack.slack.prompt_ms(start, num_tokens))
                num_ended += num_tokens == num_left and may_be_in_time(sequence, self._loop.now)
            if tail_tokens and sequence.holds:
                longest = tail_tokens + block_size - 1
                is_tail = start > sequence.cached_tokens and num_tokens <= longest
                if is_tail if num_tokens == num_left else num_left - num_tokens <= longest:
                    break
        return planned

    def is_alone(self) -> bool:
        """Whether nothing runs that could release blocks later."""
        return len(self.sequences) - self._num_offered() <= self.num_waiting

    def _num_offered(self) -> int:
        """Number of attempts that the engine does not have yet, or no longer has."""
        return sum(s.phase == "offered" or (s.phase == "waiting" and s.order == ()) for s in self.sequences.values())

    def head(self) -> FastSequence | None:
        """The first sequence of the queue; None when it is empty."""
        waiting = self._waiting
        while waiting and (waiting[0][2].phase != "waiting" or waiting[0][2].order is not waiting[0][0]):
            heapq.heappop(waiting)
        return waiting[0][2] if waiting else None

    def num_places(self) -> int:
        """How many more sequences may run."""
        num_running = len(self.decoding) + len(self.started) + len(self.resumed)
        return self._max_num_seqs - num_running - self.num_reserved

    def _admit(self, sequence: FastSequence) -> bool:
        """Start the head of the queue, if there is room. Returns whether it was started."""
        if self.num_places() < 1 or not self._room.place(sequence, self.is_alone):
            return False
        heapq.heappop(self._waiting)
        self.num_waiting -= 1
        if self._slack is not None:
            self._slack.slack.leaves(sequence)
        if sequence.num_preemptions:
            self.num_preempted -= 1
            self._note()
        if sequence.queue_s is None:
            sequence.queue_s = self._loop.now - sequence.arrival
        if sequence.swapped:
            if sequence.swapped > sequence.computed:
                num_bytes = self._kv_layout.bytes_of(sequence.swapped, sequence.computed)
                self.copy_s += num_bytes * self._copy_byte_s
            sequence.computed = sequence.swapped
            self._give_back_swap(sequence)
            self._room.publish(sequence)
            sequence.phase = "resumed"
            self.resumed.append(sequence)
        else:
            sequence.phase = "prefill"
            self.started.append(sequence)
        return True

    # ------------------------------------------------------------ decoding

    def resume(self) -> None:
        """Let the sequences that were copied back decode from now on."""
        resumed, self.resumed = self.resumed, []
        for sequence in resumed:
            if sequence.phase == "resumed":
                self.decode(sequence)

    def next_end(self) -> int:
        """The count of decode steps at which the next answer ends."""
        ends = self._ends
        while ends[0][2].phase != "decode" or ends[0][2].end_at != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0]

    def stepped(self, num_steps: int) -> None:
        """Count `num_steps` decode steps."""
        self.steps += num_steps
        self.attends += num_steps * len(self.decoding)

    def next_ended(self) -> FastSequence | None:
        """A sequence that has made its last token and still counts as decoding; None without one."""
        steps, ends = self.steps, self._ends
        while ends and ends[0][0] <= steps:
            _, _, sequence = heapq.heappop(ends)
            if sequence.phase == "decode" and sequence.end_at <= steps:
                return sequence
        return None

    def take_copy_s(self) -> float:
        """Return the seconds of the copies before the next step, and reset them."""
        copy_s, self.copy_s = self.copy_s, 0.0
        return copy_s

    def decode(self, sequence: FastSequence) -> None:
        """Add a sequence to the batch. Its latest token is known and has no KV yet."""
        sequence.phase = "decode"
        sequence.joined_at = sequence.reported_at = self.steps
        sequence.attends = sequence.num_known + 1
        sequence.end_at = self.steps + self.num_left(sequence)
        self.attends += sequence.attends
        self.decoding[sequence] = None
        if self._slack is not None:
            self._slack.begins(sequence)
        self._serial += 1
        heapq.heappush(self._ends, (sequence.end_at, self._serial, sequence))
        safe = self._room.safe_steps(sequence)
        self.safe_until = safe if len(self.decoding) == 1 else min(safe, self.safe_until)

    def num_left(self, sequence: FastSequence) -> int:
        """Number of output tokens still to come, with the latest one already made."""
        request_id = sequence.key.request_id
        num_tokens = min(self._answers.num_tokens(request_id), sequence.spec.sampling.max_tokens)
        return min(num_tokens - sequence.sent, self._max_model_len - sequence.num_known - 1)

    def finish_reason(self, sequence: FastSequence) -> EndReason:
        """Why the answer of a sequence ended that has made its last token."""
        sampling = sequence.spec.sampling
        is_stopped = sampling.stop_token_ids and self._answers.num_tokens(sequence.key.request_id) == sequence.sent
        return "stop" if is_stopped else "length"

    def _sync(self, sequence: FastSequence) -> None:
        """Update the tokens and blocks of a decoding sequence to the present step."""
        sequence.computed = sequence.num_known + self.steps - sequence.joined_at
        self._room.extend(sequence, sequence.computed)

    def _make_safe(self) -> None:
        """Give sequences that outgrew their promise a block before the next step. Where none is free, other sequences
        are preempted, as `Scheduler._plan_decodes` does."""
        for sequence in list(self.decoding):
            if sequence.phase != "decode":
                continue  # preempted for one before it
            self._sync(sequence)
            while sequence.phase == "decode" and self._room.safe_steps(sequence) <= self.steps:
                if self._room.can_extend(sequence, sequence.computed + 1):
                    self._room.extend(sequence, sequence.computed + 1)
                else:
                    self._preempt(self._victim())
        self.safe_until = min(map(self._room.safe_steps, self.decoding), default=0)

    def _victim(self) -> FastSequence:
        """The sequence to preempt first: lowest priority, then fewest output tokens, then newest."""
        running = [*self.decoding, *(sequence for sequence in self.started if not sequence.holds)]
        return min(running, key=lambda s: (s.spec.priority, self._num_output(s), -s.arrival))

    def _num_output(self, sequence: FastSequence) -> int:
        return sequence.sent + (self.steps - sequence.reported_at if sequence.phase == "decode" else 0)

    def _preempt(self, sequence: FastSequence) -> None:
        self.num_preemptions += 1
        self._note()
        if sequence.phase == "decode":
            self._sync(sequence)
            self._tell_tokens(sequence)
            del self.decoding[sequence]
            self.attends -= sequence.attends + self.steps - sequence.joined_at
            self._room.keep_answer(sequence)
            sequence.num_known = sequence.computed
            is_decoding = True
        else:
            self.started.remove(sequence)
            is_decoding = False
        slots = -(-sequence.computed // self._slot_tokens)
        if is_decoding and slots <= self._swap_slots:
            self._swap_slots -= slots
            sequence.swapped = sequence.computed
            self.copy_s += self._kv_layout.bytes_of(sequence.computed) * self._copy_byte_s
        elif "prefill" not in self._config.roles:
            sequence.phase = "held"
            self._end(sequence, "preempted", "the KV blocks went to a sequence that is ahead")
            return
        elif is_decoding:
            sequence.num_known += 1  # its latest token, too
        self._room.let_go(sequence)
        sequence.computed = 0
        sequence.phase = "waiting"
        sequence.num_preemptions += 1
        self.num_preempted += 1
        self.queue(sequence)

    def _give_back_swap(self, sequence: FastSequence) -> None:
        if sequence.swapped:
            self._swap_slots += -(-sequence.swapped // self._slot_tokens)
            sequence.swapped = 0
