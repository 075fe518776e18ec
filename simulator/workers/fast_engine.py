"""The scheduler and the steps of a fast worker: it jumps over decode steps in which nothing changes.

    inbox ──> reserve, add, join, release ──> next step: prompts in work, one step at a time
                                                       no prompts: n steps at once, until an answer ends, blocks run
                                                       short, or something comes; that waits for the end of its step

The rules are those of the real scheduler (`engine/core/scheduler.py`, `policy.py`, `blocks/kv_cache_manager.py`):
order, budget, chunks, tails, admission, reserves, preemption, suspension. A sequence that decodes is a place in the
count of steps at which it ends; contexts are one sum.

Times between two steps of a jump follow a line (`_jump_length` sees to it that they nearly do).
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import accumulate, repeat

from disagg.engine.blocks.swap import slot_tokens_for
from disagg.engine.config import WorkerConfig
from disagg.engine.core.policy import PASS_S, before_tail, chunk_length
from disagg.engine.core.slack import UNLIMITED, Room
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import EndReason, StepSample, WorkerInfo
from disagg.proto.step_times.interface import StepTimes, StepWork
from disagg.simulator.workers.chunk_run import ChunkRun
from disagg.simulator.workers.fast_room import FastRoom, FastSequence
from disagg.simulator.workers.fast_slack import FastSlack
from disagg.simulator.workers.reports import Reports
from disagg.simulator.workers.surroundings import Surroundings
from disagg.simulator.world.machine import RunningStep

TELL_S = 1.0
"""Tokens of running answers are sent together after so long."""
MAX_JUMP = 1024
_BEND = 0.002
"""By what share the step in the middle of a jump may differ from the line between its ends."""


class FastEngine(ABC):
    """The rules of the real scheduler on counts and sums. Messages are the subclass's, `FastWorker`."""

    _reports: Reports

    def __init__(self, world: Surroundings, config: WorkerConfig, info: WorkerInfo, times: StepTimes) -> None:
        self.config = config
        self.info = info
        self.is_dead = False
        self._world = world
        self._loop = world.loop
        self._answers = world.answers
        self._step_times = times
        self._machine = world.machine
        if self._machine is not None:
            self._machine.listen(info.worker_id, self._on_neighbour)
        self._room = FastRoom(config, info, world.answers)
        self._slack = FastSlack(config, info) if config.scheduling == "slack" else None
        self._blocks = self._room.blocks
        self._max_model_len = info.max_model_len
        self._max_num_seqs = config.num_places
        self._bytes_per_token = info.kv_layout.bytes_per_token
        slot_tokens = slot_tokens_for(info.block_size)
        self._swap_slots = config.swap_bytes // (slot_tokens * self._bytes_per_token)
        self._slot_tokens = slot_tokens
        self._inbox: deque[tuple[Callable[[FastSequence], None], FastSequence]] = deque()
        self._sequences: dict[AttemptKey, FastSequence] = {}
        self._waiting: list[tuple[tuple[float, ...], int, FastSequence]] = []
        self._num_waiting = 0
        self._num_reserved = 0
        self._num_preempted = 0
        self._started: list[FastSequence] = []
        self._resumed: list[FastSequence] = []
        """Their KV is copied back before the step that is planned; they decode from the next one on."""
        self._decoding: dict[FastSequence, None] = {}
        self._ends: list[tuple[int, int, FastSequence]] = []
        self._steps = 0
        """Decode steps since the start."""
        self._attends = 0
        """Tokens that the next decode step attends to, of all that decode."""
        self._times: list[float] = []
        """When clients have the tokens of each decode step, from number `_first_time` on."""
        self._first_time = 0
        self._safe_until = 0
        """Until this count of steps no sequence needs a block beyond its promise."""
        self._is_busy = False
        self._jump: tuple[float, float, float, int] | None = None
        """Of the jump under way: its start, its first step's time, the growth from step to step, its steps."""
        self._chunks: tuple[FastSequence, ChunkRun] | None = None
        """The run of chunks under way, and whose they are."""
        self._version = 0
        """Of the plan for the end of the jump, or of the run."""
        self._serial = 0
        self._num_steps = 0
        self.num_preemptions = 0
        """Since its start."""
        self._copy_s = 0.0
        """Of copies that are to be made before the next step."""
        self._copy_token_s = self._bytes_per_token * world.overheads.copy_byte_s
        self._told_at = 0.0
        self._gap_s = world.overheads.step_s
        """Between two steps."""
        self._to_client_s = world.overheads.message_s + world.overheads.token_s

    @abstractmethod
    def _computed(self, sequence: FastSequence) -> None:
        """The prompt is computed and its first token sampled."""

    @abstractmethod
    def _send_kv(self, sequence: FastSequence, *, is_complete: bool) -> None:
        """A step has computed a part of a prompt for another worker, or the rest of it."""

    @abstractmethod
    def _tell_tokens(self, sequence: FastSequence) -> None:
        """Send what it made since the last time."""

    @abstractmethod
    def _end(self, sequence: FastSequence, reason: EndReason, detail: str = "") -> None:
        """Drop it and tell the gateway."""

    @abstractmethod
    def _flush(self) -> None:
        """Send what there is for the gateway."""

    # ------------------------------------------------------------ between two steps

    def _post(self, what: Callable[[FastSequence], None], sequence: FastSequence) -> None:
        self._inbox.append((what, sequence))
        if self._jump is not None:
            self._cut()
        elif self._chunks is not None:
            self._cut_chunks(self._chunks[1])
        else:
            self._wake()

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._loop.at(self._loop.now, self._turn)

    def _turn(self) -> None:
        if self.is_dead:
            return
        self._jump = None
        while self._inbox:
            what, sequence = self._inbox.popleft()
            what(sequence)
        resumed, self._resumed = self._resumed, []
        for sequence in resumed:
            if sequence.phase == "resumed":
                self._decode(sequence)
        self._plan()
        self._flush()

    def _queue(self, sequence: FastSequence) -> None:
        self._num_waiting += 1
        self._push(sequence)
        if self._slack is not None and sequence.num_preemptions == 0:
            self._slack.slack.waits(sequence)

    def _push(self, sequence: FastSequence) -> None:
        """Into the queue, or to a new place in it."""
        sequence.order = self._order(sequence)
        self._serial += 1
        heapq.heappush(self._waiting, (sequence.order, self._serial, sequence))

    def _order(self, sequence: FastSequence) -> tuple[float, ...]:
        is_long = sequence.holds and sequence.num_given > self.config.token_budget
        is_first = sequence.num_preemptions == 0
        return (-sequence.spec.priority, is_first, sequence.is_hopeless, sequence.arrival + PASS_S * is_long)

    def _release(self, sequence: FastSequence) -> None:
        """Drop it and all that it holds. Idempotent."""
        if sequence.phase == "over":
            return
        if sequence.phase == "waiting":
            self._num_preempted -= sequence.num_preemptions > 0 and sequence.order != ()
            self._num_waiting -= sequence.order != ()
            self._give_back_swap(sequence)
            if self._slack is not None:
                self._slack.slack.leaves(sequence)
        elif sequence.phase == "prefill":
            self._started.remove(sequence)
        elif sequence.phase == "reserved":
            self._num_reserved -= 1
        elif sequence.phase == "decode":
            self._sync(sequence)
            del self._decoding[sequence]
            self._attends -= sequence.attends + self._steps - sequence.joined_at
            self._room.keep_answer(sequence)
        self._room.let_go(sequence)
        sequence.phase = "over"
        del self._sequences[sequence.key]

    # ------------------------------------------------------------ steps

    def _plan(self) -> None:
        num_decodes = len(self._decoding)
        num_preemptions = self._num_preempted
        if num_decodes and self._steps >= self._safe_until:
            self._make_safe()
            num_decodes = len(self._decoding)
        may_admit = self._num_preempted == num_preemptions
        alone_first = self.config.scheduling in ("prefill_first", "static")
        if self.config.scheduling == "static":
            may_admit = False
            if not (self._decoding or self._started or self._resumed):
                self._form_batch()
        budget = self.config.token_budget - (0 if alone_first else num_decodes)
        prefills: list[tuple[FastSequence, int, int]] = []
        room = UNLIMITED if self._slack is None else self._slack_room(self._slack)
        if self._started or self._num_waiting:
            prefills = self._plan_prefills(budget, may_admit, room)
        if self._slack is not None:
            self._slack.planned(has_prompts=bool(prefills))
        if prefills:
            if alone_first:
                num_decodes = 0
            num_decodes = num_decodes and len(self._decoding)
            if len(prefills) == 1 and self._begin_chunks(*prefills[0], num_decodes, budget, room):
                return
            tokens = sum(n for _, _, n in prefills)
            attended = sum(n * start + n * (n + 1) // 2 for _, start, n in prefills)
            work = StepWork(tokens, attended, num_decodes, self._attends if num_decodes else 0, len(prefills))
            step_s = self._step_times.step_s(work)
            copy_s = self._take_copy_s()
            running = None
            if self._machine is not None:
                self._machine.occupy(self.info.worker_id, "prefill")
                running = self._machine.running(self.info.worker_id, "prefill", copy_s + step_s)
            self._loop.after(copy_s + step_s, self._end_step, prefills, work, step_s, running)
        elif self._decoding:
            self._begin_jump()
        elif self._resumed:
            self._loop.after(self._take_copy_s(), self._turn)
        else:
            self._is_busy = False
            if self._machine is not None:
                self._machine.occupy(self.info.worker_id, None)

    def _form_batch(self) -> None:
        while (head := self._head()) is not None and self._admit(head):
            pass

    def _slack_room(self, slack: FastSlack) -> Room:
        for sequence in slack.advance(self._loop.now):
            self._push(sequence)
        if not (self._started or self._num_waiting):
            return UNLIMITED
        for sequence in self._started:
            if sequence.is_hopeless and not slack.is_hopeless(sequence):
                sequence.is_hopeless = False
                sequence.order = self._order(sequence)
        return slack.room(self._decoding, self._steps)

    def _begin_jump(self) -> None:
        num_steps, first_s, growth_s = self._jump_length()
        if self._machine is not None:
            factor, num_decodes = self._machine.stretch(self.info.worker_id), len(self._decoding)
            first_s, growth_s = factor * first_s, factor * growth_s
            self._gap_s = self._world.overheads.step_s + self._machine.gap_s(self.info.worker_id, num_decodes)
            self._machine.occupy(self.info.worker_id, "decode", num_decodes, first_s + self._gap_s)
        self._jump = (self._loop.now + self._take_copy_s(), first_s, growth_s, num_steps)
        if self._slack is not None and (self._started or self._num_waiting):
            num_steps = self._slack.num_alike(num_steps, growth_s * 1e3, lambda n: self._boundary(n) + self._gap_s)
            self._jump = (self._jump[0], first_s, growth_s, num_steps)
        self._version += 1
        self._loop.at(self._boundary(num_steps), self._end_jump, self._version)

    def _take_copy_s(self) -> float:
        copy_s, self._copy_s = self._copy_s, 0.0
        return copy_s

    def _jump_length(self) -> tuple[int, float, float]:
        """How many steps to take at once; the first one's time, and by how much each takes longer than the one
        before."""
        num_decodes, attends = len(self._decoding), self._attends
        step_s = self._step_times.step_s
        first_s = step_s(StepWork(0, 0, num_decodes, attends))
        most = min(MAX_JUMP, self._next_end() - self._steps, self._safe_until - self._steps, int(TELL_S / first_s) + 1)
        if most <= 1:
            return 1, first_s, 0.0
        while True:
            last_s = step_s(StepWork(0, 0, num_decodes, attends + (most - 1) * num_decodes))
            if most <= 8:
                break
            middle = most // 2
            middle_s = step_s(StepWork(0, 0, num_decodes, attends + middle * num_decodes))
            straight_s = first_s + (last_s - first_s) * middle / (most - 1)
            if abs(middle_s - straight_s) <= _BEND * middle_s:
                break
            most //= 2
        return most, first_s, (last_s - first_s) / (most - 1)

    def _next_end(self) -> int:
        ends = self._ends
        while ends[0][2].phase != "decode" or ends[0][2].end_at != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0]

    def _boundary(self, number: int) -> float:
        """When step `number`, from 1, of the jump ends."""
        assert self._jump is not None
        start, first_s, growth_s, _ = self._jump
        between_s = self._gap_s
        return start + number * first_s + growth_s * number * (number - 1) / 2 + between_s * (number - 1)

    def _on_neighbour(self) -> None:
        """Another worker of the machine does something else now: the pace of this one changes."""
        if self._jump is not None:
            self._cut()

    def _cut(self) -> None:
        """Something came: the jump ends with the step that is under way, or with the one before, where that is over and
        the next one has not begun."""
        assert self._jump is not None
        start, first_s, growth_s, num_steps = self._jump
        between_s = self._gap_s
        passed = self._loop.now - between_s
        number = max(1, math.ceil((self._loop.now - start) / (first_s + between_s)))
        while number > 1 and self._boundary(number - 1) >= passed:
            number -= 1
        while number < num_steps and self._boundary(number) < passed:
            number += 1
        if number < num_steps:
            self._jump = (start, first_s, growth_s, number)
            self._version += 1
            self._loop.at(self._boundary(number), self._end_jump, self._version)

    def _end_jump(self, version: int) -> None:
        if version != self._version or self._jump is None or self.is_dead:
            return
        start, first_s, growth_s, num_steps = self._jump
        ended = self._boundary(num_steps)
        self._jump = None
        between_s = self._gap_s
        if num_steps == 1:
            self._times.append(ended + self._to_client_s)
        else:
            durations = accumulate(repeat(growth_s, num_steps - 2), initial=first_s + between_s + growth_s)
            self._times += accumulate(durations, initial=start + first_s + self._to_client_s)
        sample = StepSample(first_s * 1e3, 0, 0, len(self._decoding), self._attends)
        self._reports.offer(sample)
        if self._slack is not None:
            self._slack.observe(sample)
            self._slack.stepped(num_steps)
        self._stepped(num_steps)
        self._next_turn(ended)

    def _take_in(self, until: float) -> None:
        """Of the jump under way, the steps that are over by then, but for the last one."""
        if self._jump is None:
            return
        start, first_s, growth_s, num_steps = self._jump
        number = int((until - start) / (first_s + self._gap_s))
        while number > 0 and self._boundary(number) > until:
            number -= 1
        number = min(number, num_steps - 1)
        if number <= 0:
            return
        self._times += [self._boundary(each) + self._to_client_s for each in range(1, number + 1)]
        self._jump = self._boundary(number) + self._gap_s, first_s + number * growth_s, growth_s, num_steps - number
        if self._slack is not None:
            self._slack.stepped(number + 1)
        self._stepped(number)

    def _next_turn(self, ended: float) -> None:
        """The step before it ended then."""
        self._flush()
        self._loop.at(ended + self._gap_s, self._turn)

    def _stepped(self, num_steps: int) -> None:
        """So many decode steps were done."""
        self._steps += num_steps
        self._num_steps += num_steps
        self._attends += num_steps * len(self._decoding)
        steps, ends = self._steps, self._ends
        while ends and ends[0][0] <= steps:
            _, _, sequence = heapq.heappop(ends)
            if sequence.phase == "decode" and sequence.end_at <= steps:
                self._tell_tokens(sequence)
                self._end(sequence, self._finish_reason(sequence))
                self._reports.note()
        if not self._decoding:
            self._times.clear()
            self._first_time = steps
        elif self._loop.now - self._told_at >= TELL_S:
            self._told_at = self._loop.now
            self._reports.note()
            for sequence in self._decoding:
                self._tell_tokens(sequence)
            self._times.clear()
            self._first_time = steps

    def _end_step(
        self,
        prefills: list[tuple[FastSequence, int, int]],
        work: StepWork,
        step_s: float,
        running: RunningStep | None,
    ) -> None:
        if self.is_dead:
            return
        if running is not None and self._machine is not None:
            if behind_s := self._machine.behind_s(running):
                self._loop.after(behind_s, self._end_step, prefills, work, step_s, running)
                return
            step_s = self._loop.now - running.began_at
            num_tokens = work.num_decodes + sum(start + number == each.num_known for each, start, number in prefills)
            self._machine.gateway_worked(self.info.worker_id, num_tokens)
            self._gap_s = self._world.overheads.step_s + self._machine.gap_s(self.info.worker_id, num_tokens)
        sample = StepSample(step_s * 1e3, *work[:4])
        self._reports.offer(sample)
        self._reports.note()
        if self._slack is not None:
            self._slack.observe(sample)
        if work.num_decodes:
            self._times.append(self._loop.now + self._to_client_s)
            self._stepped(1)
        else:
            self._num_steps += 1
        for sequence, start, num_tokens in prefills:
            if sequence.phase != "prefill":
                continue  # its pair was lost meanwhile
            sequence.computed = start + num_tokens
            self._room.publish(sequence)
            is_complete = sequence.computed == sequence.num_known
            if is_complete:
                self._started.remove(sequence)
                self._computed(sequence)
            if sequence.holds and sequence.phase != "over":
                self._send_kv(sequence, is_complete=is_complete)
        self._next_turn(self._loop.now)

    # ------------------------------------------------------------ runs of chunks

    def _begin_chunks(
        self, sequence: FastSequence, start: int, num_tokens: int, num_decodes: int, budget: int, room: Room
    ) -> bool:
        """Take several steps of this prompt together, where more than one will be alike."""
        is_last = sequence.num_known - start - num_tokens <= budget
        may_change = self._machine is not None or self._resumed or any(each.is_hopeless for each in self._started)
        if is_last or sequence.holds or room.ms < math.inf or may_change:
            return False
        most = min(self._next_end(), self._safe_until) - self._steps if num_decodes else MAX_JUMP
        others_need = self._others_need(sequence)
        if most <= 1 or budget - num_tokens >= others_need:
            return False
        run = ChunkRun(
            self._step_times,
            self._loop.now + self._take_copy_s(),
            self._gap_s,
            start=start,
            num_tokens=num_tokens,
            num_known=sequence.num_known,
            budget=budget,
            block_size=self.info.block_size,
            num_decodes=num_decodes,
            attends=self._attends if num_decodes else 0,
            most=most,
            others_need=others_need,
            until=math.inf if self._slack is None else self._slack.slack.next_change,
        )
        self._chunks = sequence, run
        self._version += 1
        self._loop.at(run.ended, self._end_chunks, self._version)
        return True

    def _others_need(self, sequence: FastSequence) -> float:
        """Tokens of the budget with which another prompt than this one would begin or go on."""
        others = [other for other in self._started if other is not sequence]
        head = self._head()
        if not others:
            return math.inf if head is None else 1
        first = min(others, key=lambda other: other.order)
        if head is not None and head.order < first.order:
            return 1
        block_size, num_left = self.info.block_size, first.num_known - first.computed
        return min(num_left, block_size - first.computed % block_size)

    def _cut_chunks(self, run: ChunkRun) -> None:
        """Something came."""
        num_steps = len(run.steps)
        run.cut(self._loop.now)
        if len(run.steps) < num_steps:
            self._version += 1
            self._loop.at(run.ended, self._end_chunks, self._version)

    def _end_chunks(self, version: int) -> None:
        if version != self._version or self._chunks is None or self.is_dead:
            return
        (sequence, run), self._chunks = self._chunks, None
        first = run.steps[0]
        sample = StepSample(first.step_s * 1e3, *first.work[:4])
        self._reports.offer(sample)
        self._reports.note()
        if self._slack is not None:
            self._slack.observe(sample)
        if first.work.num_decodes:
            self._times += [step.ended + self._to_client_s for step in run.steps]
            self._stepped(len(run.steps))
        else:
            self._num_steps += len(run.steps)
        if sequence.phase == "prefill":
            sequence.computed += sum(step.num_tokens for step in run.steps)
            self._room.extend(sequence, sequence.computed)
            self._room.publish(sequence)
        self._next_turn(run.ended)

    # ------------------------------------------------------------ prompts

    def _plan_prefills(
        self, budget: int, may_admit: bool, room: Room = UNLIMITED
    ) -> list[tuple[FastSequence, int, int]]:
        """(sequence, first token, number of tokens) of each prompt in the next step, as the real scheduler plans it."""
        started = deque(sorted(self._started, key=lambda sequence: sequence.order))
        planned: list[tuple[FastSequence, int, int]] = []
        slack, num_ended = self._slack, 0
        block_size, tail_tokens = self.info.block_size, self.config.tail_tokens
        while budget > 0:
            head = self._head() if may_admit else None
            is_new = head is not None and (not started or head.order < started[0].order)
            sequence = head if is_new else started[0] if started else None
            if sequence is None:
                break
            num_behind = self._num_waiting + len(started)
            if slack is not None and num_ended and not slack.joins(sequence, num_ended, num_behind, room):
                break
            if is_new and slack is not None and not sequence.swapped:
                fitting = slack.num_fitting(sequence, budget, room)
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
                most, is_exact = slack.num_fitting(sequence, budget, room)
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
                room = room.less(slack.slack.prompt_ms(start, num_tokens))
                num_ended += num_tokens == num_left and sequence.spec.targets is not None
            if tail_tokens and sequence.holds:
                longest = tail_tokens + block_size - 1
                is_tail = start > sequence.cached_tokens and num_tokens <= longest
                if is_tail if num_tokens == num_left else num_left - num_tokens <= longest:
                    break
        return planned

    def _is_alone(self) -> bool:
        return len(self._sequences) - self._num_offered() <= self._num_waiting

    def _num_offered(self) -> int:
        """Attempts that the engine does not have yet, or not any more."""
        return sum(s.phase == "offered" or (s.phase == "waiting" and s.order == ()) for s in self._sequences.values())

    def _head(self) -> FastSequence | None:
        waiting = self._waiting
        while waiting and (waiting[0][2].phase != "waiting" or waiting[0][2].order is not waiting[0][0]):
            heapq.heappop(waiting)
        return waiting[0][2] if waiting else None

    def _num_places(self) -> int:
        num_running = len(self._decoding) + len(self._started) + len(self._resumed)
        return self._max_num_seqs - num_running - self._num_reserved

    def _admit(self, sequence: FastSequence) -> bool:
        """The head of the queue begins, if there is room."""
        if self._num_places() < 1 or not self._room.place(sequence, self._is_alone):
            return False
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        if self._slack is not None:
            self._slack.slack.leaves(sequence)
        if sequence.num_preemptions:
            self._num_preempted -= 1
            self._reports.note()
        if sequence.queue_s is None:
            sequence.queue_s = self._loop.now - sequence.arrival
        if sequence.swapped:
            self._copy_s += max(0, sequence.swapped - sequence.computed) * self._copy_token_s
            sequence.computed = sequence.swapped
            self._give_back_swap(sequence)
            self._room.publish(sequence)
            sequence.phase = "resumed"
            self._resumed.append(sequence)
        else:
            sequence.phase = "prefill"
            self._started.append(sequence)
        return True

    # ------------------------------------------------------------ decoding

    def _decode(self, sequence: FastSequence) -> None:
        """It is in the batch; its latest token is known and has no KV."""
        sequence.phase = "decode"
        sequence.joined_at = sequence.told_at = self._steps
        sequence.attends = sequence.num_known + 1
        sequence.end_at = self._steps + self._num_left(sequence)
        self._attends += sequence.attends
        self._decoding[sequence] = None
        if self._slack is not None:
            self._slack.begins(sequence)
        self._serial += 1
        heapq.heappush(self._ends, (sequence.end_at, self._serial, sequence))
        safe = self._room.safe_steps(sequence)
        self._safe_until = safe if len(self._decoding) == 1 else min(safe, self._safe_until)

    def _num_left(self, sequence: FastSequence) -> int:
        """Output tokens that are still to come, the latest one made."""
        request_id = sequence.key.request_id
        num_tokens = min(self._answers.num_tokens(request_id), sequence.spec.sampling.max_tokens)
        return min(num_tokens - sequence.sent, self._max_model_len - sequence.num_known - 1)

    def _finish_reason(self, sequence: FastSequence) -> EndReason:
        sampling = sequence.spec.sampling
        is_stopped = sampling.stop_token_ids and self._answers.num_tokens(sequence.key.request_id) == sequence.sent
        return "stop" if is_stopped else "length"

    def _sync(self, sequence: FastSequence) -> None:
        """Note the tokens and blocks of the steps that were done."""
        sequence.computed = sequence.num_known + self._steps - sequence.joined_at
        self._room.extend(sequence, sequence.computed)

    def _make_safe(self) -> None:
        """Before the next step: sequences that outgrew their promise get a block; where there is none, others are
        preempted for them, as `Scheduler._plan_decodes` does."""
        for sequence in list(self._decoding):
            if sequence.phase != "decode":
                continue  # preempted for one before it
            self._sync(sequence)
            while sequence.phase == "decode" and self._room.safe_steps(sequence) <= self._steps:
                if self._blocks.num_available >= self._blocks.per_block:
                    self._room.extend(sequence, sequence.computed + 1)
                else:
                    self._preempt(self._victim())
        self._safe_until = min(map(self._room.safe_steps, self._decoding), default=0)

    def _victim(self) -> FastSequence:
        """Who is preempted first: lowest priority, fewest output tokens, newest."""
        running = [*self._decoding, *(sequence for sequence in self._started if not sequence.holds)]
        return min(running, key=lambda s: (s.spec.priority, self._num_output(s), -s.arrival))

    def _num_output(self, sequence: FastSequence) -> int:
        return sequence.sent + (self._steps - sequence.told_at if sequence.phase == "decode" else 0)

    def _preempt(self, sequence: FastSequence) -> None:
        self.num_preemptions += 1
        self._reports.note()
        if sequence.phase == "decode":
            self._sync(sequence)
            self._tell_tokens(sequence)
            del self._decoding[sequence]
            self._attends -= sequence.attends + self._steps - sequence.joined_at
            self._room.keep_answer(sequence)
            sequence.num_known = sequence.computed
            is_decoding = True
        else:
            self._started.remove(sequence)
            is_decoding = False
        slots = -(-sequence.computed // self._slot_tokens)
        if is_decoding and slots <= self._swap_slots:
            self._swap_slots -= slots
            sequence.swapped = sequence.computed
            self._copy_s += sequence.computed * self._copy_token_s
        elif "prefill" not in self.config.roles:
            sequence.phase = "held"
            self._end(sequence, "preempted", "the KV blocks went to a sequence that is ahead")
            return
        elif is_decoding:
            sequence.num_known += 1  # its latest token, too
        self._room.let_go(sequence)
        sequence.computed = 0
        sequence.phase = "waiting"
        sequence.num_preemptions += 1
        self._num_preempted += 1
        self._queue(sequence)

    def _give_back_swap(self, sequence: FastSequence) -> None:
        if sequence.swapped:
            self._swap_slots += -(-sequence.swapped // self._slot_tokens)
            sequence.swapped = 0
