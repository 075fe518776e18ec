"""The steps of a fast worker: it jumps over decode steps in which nothing changes.

    inbox ──> reserve, add, join, release ──> next step: prompts in work, one step at a time
                                                       no prompts: n steps at once, until an answer ends, blocks run
                                                       short, or something comes; that waits for the end of its step

On a worker of several stages a step of prompts alone begins once the one before it has left the first stage, with at
most as many under way as there are stages; steps with decodes begin when none is under way.

What a step computes is decided by `fast_scheduler.py`. Times between two steps of a jump follow a line (`_jump_length`
sees to it that they nearly do).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import accumulate, repeat

from disagg.engine.config import WorkerConfig
from disagg.engine.core.slack import StepBudget
from disagg.proto.messages import EndReason, StepSample, WorkerInfo
from disagg.simulator.fast.chunk_run import ChunkRun
from disagg.simulator.fast.fast_room import FastRoom, FastSequence
from disagg.simulator.fast.fast_scheduler import FastScheduler, PlannedPrompt
from disagg.simulator.fast.fast_slack import FastSlack
from disagg.simulator.world.machine import RunningStep
from disagg.simulator.world.reports import Reports
from disagg.simulator.world.surroundings import Surroundings
from disagg.step_times.interface import StagedTimes, StepTimes, StepWork
from disagg.step_times.pipeline import Pipeline

TELL_S = 1.0
"""Seconds after which the tokens of running answers are sent together."""
MAX_JUMP = 1024
_BEND = 0.002
"""Share by which the step in the middle of a jump may differ from the line between its ends."""


class FastEngine(ABC):
    """An engine whose time advances by steps or by jumps. The subclass `FastWorker` handles its messages."""

    _reports: Reports

    def __init__(self, world: Surroundings, config: WorkerConfig, info: WorkerInfo, times: StepTimes) -> None:
        self.config = config
        self.info = info
        self.is_dead = False
        self._world = world
        self._loop = world.loop
        self._answers = world.answers
        self._step_times = times
        self._staged = times if isinstance(times, StagedTimes) else None
        self._pipeline = Pipeline(1 if self._staged is None else self._staged.num_stages)
        self._num_under_way = 0
        """Number of steps that are in the stages of a worker of several ones."""
        self._waits_for_stages = False
        """Whether the next step begins when no other one is under way."""
        self._machine = world.machine
        if self._machine is not None:
            self._machine.listen(info.worker_id, self._on_neighbour)
        self._room = FastRoom(config, info, world.answers)
        self._slack = FastSlack(config, info) if config.scheduling == "slack" else None
        self._blocks = self._room.blocks
        self._max_model_len = info.max_model_len
        self._kv_layout = info.kv_layout
        self._scheduler = FastScheduler(
            world,
            config,
            info,
            self._room,
            self._slack,
            note=lambda: self._reports.note(),
            tell_tokens=self._tell_tokens,
            end=self._end,
        )
        self._sequences = self._scheduler.sequences
        self._decoding = self._scheduler.decoding
        self._inbox: deque[tuple[Callable[[FastSequence], None], FastSequence]] = deque()
        self._times: list[float] = []
        """When clients have the tokens of each decode step, from step number `_first_time` on."""
        self._first_time = 0
        self._is_busy = False
        self._jump: tuple[float, float, float, int] | None = None
        """The current jump: its start, the seconds of its first step, the seconds by which each further step is longer,
        and the number of steps."""
        self._chunks: tuple[FastSequence, ChunkRun] | None = None
        """The current run of chunks, and the sequence whose prompt it computes."""
        self._version = 0
        """Version of the planned end of the jump or of the run; a plan with an older one is void."""
        self._num_steps = 0
        self._reported_at = 0.0
        self._gap_s = world.overheads.step_s
        """Seconds between two steps."""
        self._to_client_s = world.overheads.message_s + world.overheads.token_s

    @abstractmethod
    def _computed(self, sequence: FastSequence) -> None:
        """Handle a prompt that is computed, with its first token sampled."""

    @abstractmethod
    def _send_kv(self, sequence: FastSequence, num_computed: int, *, is_complete: bool) -> None:
        """Send KV of a prompt for another worker, of which `num_computed` tokens are computed: of a part that a step
        has computed, or of all the rest."""

    @abstractmethod
    def _tell_tokens(self, sequence: FastSequence) -> None:
        """Send the tokens that the sequence made since the last call."""

    @abstractmethod
    def _end(self, sequence: FastSequence, reason: EndReason, detail: str = "") -> None:
        """Release the sequence and tell the gateway that it ended."""

    @abstractmethod
    def _flush(self) -> None:
        """Send all queued messages to the gateway."""

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the worker's start."""
        return self._scheduler.num_preemptions

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
        self._scheduler.resume()
        self._begin_step()
        self._flush()

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        scheduler = self._scheduler
        if self._num_under_way and (self._decoding or scheduler.resumed):
            self._waits_for_stages = True
            return
        prefills, num_decodes, budget, step_budget = scheduler.plan()
        if prefills and self._staged is not None and not num_decodes:
            self._launch(prefills, self._staged)
        elif prefills:
            if len(prefills) == 1 and self._begin_chunks(*prefills[0], num_decodes, budget, step_budget):
                return
            work = _work_of(prefills, num_decodes, scheduler.attends if num_decodes else 0)
            step_s = self._step_times.step_s(work)
            copy_s = scheduler.take_copy_s()
            running = None
            if self._machine is not None:
                self._machine.occupy(self.info.worker_id, "prefill")
                running = self._machine.running(self.info.worker_id, "prefill", copy_s + step_s)
            self._loop.after(copy_s + step_s, self._end_step, prefills, work, step_s, running)
        elif self._decoding:
            self._begin_jump()
        elif scheduler.resumed:
            self._loop.after(scheduler.take_copy_s(), self._turn)
        else:
            self._is_busy = False
            if self._machine is not None:
                self._machine.occupy(self.info.worker_id, None)

    def _begin_jump(self) -> None:
        num_steps, first_s, growth_s = self._jump_length()
        if self._machine is not None:
            factor, num_decodes = self._machine.stretch(self.info.worker_id), len(self._decoding)
            first_s, growth_s = factor * first_s, factor * growth_s
            self._gap_s = self._world.overheads.step_s + self._machine.gap_s(self.info.worker_id, num_decodes)
            self._machine.occupy(self.info.worker_id, "decode", num_decodes, first_s + self._gap_s)
        self._jump = (self._loop.now + self._scheduler.take_copy_s(), first_s, growth_s, num_steps)
        if self._slack is not None and (self._scheduler.started or self._scheduler.num_waiting):
            num_steps = self._slack.num_alike(num_steps, growth_s * 1e3, lambda n: self._boundary(n) + self._gap_s)
            self._jump = (self._jump[0], first_s, growth_s, num_steps)
        self._version += 1
        self._loop.at(self._boundary(num_steps), self._end_jump, self._version)

    def _jump_length(self) -> tuple[int, float, float]:
        """The number of steps to take at once, the seconds of the first one, and those by which each is longer than the
        one before."""
        scheduler = self._scheduler
        num_decodes, attends = len(self._decoding), scheduler.attends
        step_s = self._step_times.step_s
        first_s = step_s(StepWork(0, 0, num_decodes, attends))
        num_safe = min(scheduler.next_end(), scheduler.safe_until) - scheduler.steps
        most = min(MAX_JUMP, num_safe, int(TELL_S / first_s) + 1)
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

    def _boundary(self, number: int) -> float:
        """When step `number`, from 1, of the jump ends."""
        assert self._jump is not None
        start, first_s, growth_s, _ = self._jump
        between_s = self._gap_s
        return start + number * first_s + growth_s * number * (number - 1) / 2 + between_s * (number - 1)

    def _on_neighbour(self) -> None:
        """Adjust the pace, because another worker of the machine has changed what it does."""
        if self._jump is not None:
            self._cut()

    def _cut(self) -> None:
        """End the jump because of an event: with the step that is under way, or with the one before it if that has
        ended and the next one has not begun."""
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
        sample = StepSample(first_s * 1e3, 0, 0, len(self._decoding), self._scheduler.attends)
        self._reports.offer(sample)
        if self._slack is not None:
            self._slack.observe(sample)
            self._slack.stepped(num_steps)
        self._stepped(num_steps)
        self._next_turn(ended)

    def _take_in(self, until: float) -> None:
        """Apply the steps of the current jump that ended before `until`, except the last one."""
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
        """Plan the next turn after a step that ended at `ended`."""
        self._flush()
        self._loop.at(ended + self._gap_s, self._turn)

    def _stepped(self, num_steps: int) -> None:
        """Apply `num_steps` decode steps."""
        scheduler = self._scheduler
        scheduler.stepped(num_steps)
        self._num_steps += num_steps
        while (sequence := scheduler.next_ended()) is not None:
            self._tell_tokens(sequence)
            self._end(sequence, scheduler.finish_reason(sequence))
            self._reports.note()
        if not self._decoding:
            self._times.clear()
            self._first_time = scheduler.steps
        elif self._loop.now - self._reported_at >= TELL_S:
            self._reported_at = self._loop.now
            self._reports.note()
            for sequence in self._decoding:
                self._tell_tokens(sequence)
            self._times.clear()
            self._first_time = scheduler.steps

    def _end_step(
        self,
        prefills: list[PlannedPrompt],
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
            if sequence.computed == sequence.num_known:
                self._scheduler.started.remove(sequence)
            self._passed(sequence, sequence.computed)
        self._next_turn(self._loop.now)

    def _passed(self, sequence: FastSequence, num_computed: int) -> None:
        """Handle a step of a prompt whose first `num_computed` tokens are computed with it."""
        self._room.publish(sequence)
        is_complete = num_computed == sequence.num_known
        if is_complete:
            self._computed(sequence)
        if sequence.holds and sequence.phase != "over":
            self._send_kv(sequence, num_computed, is_complete=is_complete)

    # ------------------------------------------------------------ steps that follow each other through the stages

    def _launch(self, prefills: list[PlannedPrompt], times: StagedTimes) -> None:
        """Begin a step of prompts; the next one is planned when it has left the first stage."""
        work = _work_of(prefills, 0, 0)
        stages_s = times.stages_s(work)
        ended = self._pipeline.launch(self._loop.now + self._scheduler.take_copy_s(), stages_s)
        self._num_under_way += 1
        sample = StepSample(max(stages_s) * 1e3, *work[:4])
        self._loop.at(self._pipeline.next_at, self._end_first_stage, prefills)
        self._loop.at(ended, self._end_launched, prefills, sample)

    def _end_first_stage(self, prefills: list[PlannedPrompt]) -> None:
        """Let the prompts go on with their next chunks."""
        if self.is_dead:
            return
        for sequence, start, num_tokens in prefills:
            if sequence.phase != "prefill":
                continue  # its pair was lost meanwhile
            sequence.computed = start + num_tokens
            if sequence.computed == sequence.num_known:
                self._scheduler.started.remove(sequence)
                sequence.phase = "passing"
        self._next_turn(self._loop.now)

    def _end_launched(self, prefills: list[PlannedPrompt], sample: StepSample) -> None:
        """Handle a step that the last stage has ended."""
        if self.is_dead:
            return
        self._num_under_way -= 1
        self._reports.offer(sample)
        self._reports.note()
        if self._slack is not None:
            self._slack.observe(sample)
        self._num_steps += 1
        for sequence, start, num_tokens in prefills:
            if sequence.phase in ("prefill", "passing"):
                self._passed(sequence, start + num_tokens)
        self._flush()
        if not self._waits_for_stages:
            self._wake()
        elif self._num_under_way == 0:
            self._waits_for_stages = False
            self._next_turn(self._loop.now)

    # ------------------------------------------------------------ runs of chunks

    def _begin_chunks(
        self,
        sequence: FastSequence,
        start: int,
        num_tokens: int,
        num_decodes: int,
        budget: int,
        step_budget: StepBudget,
    ) -> bool:
        """Compute several steps of this prompt together, if more than one will be alike. Returns whether it does."""
        is_last = sequence.num_known - start - num_tokens <= budget
        scheduler = self._scheduler
        may_change = (
            self._machine is not None or scheduler.resumed or any(s.cannot_meet_ttft for s in scheduler.started)
        )
        if is_last or sequence.holds or step_budget.ms < math.inf or may_change:
            return False
        most = min(scheduler.next_end(), scheduler.safe_until) - scheduler.steps if num_decodes else MAX_JUMP
        others_need = scheduler.others_need(sequence)
        if most <= 1 or budget - num_tokens >= others_need:
            return False
        run = ChunkRun(
            self._step_times,
            self._loop.now + scheduler.take_copy_s(),
            self._gap_s,
            start=start,
            num_tokens=num_tokens,
            num_known=sequence.num_known,
            budget=budget,
            block_size=self.info.block_size,
            num_decodes=num_decodes,
            attends=scheduler.attends if num_decodes else 0,
            most=most,
            others_need=others_need,
            until=math.inf if self._slack is None else self._slack.slack.next_change,
        )
        self._chunks = sequence, run
        self._version += 1
        self._loop.at(run.ended, self._end_chunks, self._version)
        return True

    def _cut_chunks(self, run: ChunkRun) -> None:
        """End the run of chunks early, because of an event."""
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


def _work_of(prefills: list[PlannedPrompt], num_decodes: int, decode_context: int) -> StepWork:
    """The work of a step of these prompts beside decodes."""
    tokens = sum(n for _, _, n in prefills)
    attended = sum(n * start + n * (n + 1) // 2 for _, start, n in prefills)
    return StepWork(tokens, attended, num_decodes, decode_context, len(prefills))
