"""The turns of a real engine core in virtual time: what a worker's engine thread does, without a thread.

    post ──> inbox ──> turn: commands, plan ──> step, as long as the model of step times says ──> what it sampled
                                           └──> several steps that are alike, at once         ──> the next turn

Steps are planned by the real scheduler, on real blocks (`engine/shell/engine_thread.py` has the turn that serves). What
a step samples is sent only after it has ended.

Decode steps that are alike (`engine/core/steps.py: num_alike`) are applied together, for up to `jump_s`; a command that
comes meanwhile ends the jump with the step under way. They are reported together, and before the router places a
request: `catch_up`.

Left out: several ranks (their time is in the step model), steps launched ahead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from disagg.engine.commands import Add, Command, Event, Gather, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.outbox import Outbox, TokenPacing
from disagg.engine.core.reports import PendingPrompts
from disagg.engine.plan import StepPlan
from disagg.engine.tiers.sizes import extent_bytes
from disagg.engine.tiers.store import TierParts
from disagg.proto.ids import AttemptKey, Incarnation, WorkerId
from disagg.proto.messages import Load, StepSample, TierName, WorkerInfo, WorkerMetrics
from disagg.router.requests import events
from disagg.simulator.exact.tier_folder import Files, TierFolder
from disagg.simulator.exact.timed_runner import TimedRunner
from disagg.simulator.world.machine import Kind, RunningStep
from disagg.simulator.world.reports import Reports
from disagg.simulator.world.surroundings import Surroundings

MAX_ROUNDS = 4
"""Most times that a turn looks for more commands before its step, as in `EngineThread`."""


def register(
    config: WorkerConfig,
    runner: TimedRunner,
    max_model_len: int,
    calibration: tuple[StepSample, ...],
    incarnation: str,
    tiers: tuple[TierName, ...] = (),
) -> WorkerInfo:
    """The info with which a worker registers, as `engine/shell/worker.py` makes it."""
    return WorkerInfo(
        worker_id=WorkerId(config.worker_id),
        incarnation=Incarnation(incarnation),
        roles=config.roles,
        is_elastic=config.is_elastic,
        address=f"{config.worker_id}:1",
        pid=1,
        fingerprint=runner.fingerprint,
        kv_layout=runner.layout,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_seqs=config.num_places,
        token_budget=config.token_budget,
        max_model_len=max_model_len,
        calibration=calibration,
        decode_reserve_tokens=config.decode_reserve_tokens,
        watermark_blocks=config.watermark_blocks(runner.num_blocks),
        scheduling=config.scheduling,
        max_itl_ms=config.max_itl_ms,
        expert_share=runner.expert_share,
        tiers=tiers,
        fetches=config.fetch,
    )


@dataclass(slots=True)
class _Jump:
    """Consecutive decode steps that are alike. All but the last one are applied together; the last one runs as any
    other."""

    plan: StepPlan
    samples: list[StepSample]
    """The sample of each step."""
    ends: list[float]
    """When each step ends."""
    num_done: int = 0
    """Number of steps already applied."""


class ExactEngine(ABC):
    """A real engine core in virtual time. The subclass `ExactWorker` handles its events and messages. `jump_s`: the
    longest time for which similar decode steps are applied together. `files`: what is in the folder of the disk tier,
    where `config` has one."""

    def __init__(
        self,
        world: Surroundings,
        config: WorkerConfig,
        runner: TimedRunner,
        calibration: tuple[StepSample, ...],
        incarnation: str,
        jump_s: float,
        files: Files,
    ) -> None:
        self.config = config
        self._jump_s = jump_s
        self.is_dead = False
        self._world = world
        self._loop = world.loop
        self._runner = runner
        self._folder: TierFolder | None = None
        if config.tiers is not None and config.tiers.disk is not None:
            most = config.tiers.disk.bytes // extent_bytes(runner.layout, runner.shape.tp)
            self._folder = TierFolder(world.loop, world.tier_times, files, most, self.post)
        self.core = EngineCore(
            runner, config=config, calibration=calibration, tier_parts=TierParts(self._copy_clock, self._folder)
        )
        self.info = register(config, runner, self.core.max_model_len, calibration, incarnation, self.core.tiers)
        self._outbox = Outbox()
        self._pacing = TokenPacing(config.token_interval_s)
        self._pending_prompts = PendingPrompts()
        self._inbox: deque[tuple[float, Command]] = deque()
        self._untold: list[Event] = []
        self._is_busy = False
        """Whether a turn is under way or planned."""
        self._running: RunningStep | None = None
        self._step = StepSample(0.0)
        """The latest step with its time."""
        self._jump: _Jump | None = None
        self._rests_until = math.inf
        """When the engine next checks whether an idle step is due."""
        self._is_over = False
        self._ended_at: float | None = None
        """When the last step of a jump ended; None from the next turn on. A command may have come since."""
        self._reports = Reports(
            self._loop,
            self.info.worker_id,
            self.info.incarnation,
            config.report_interval_s,
            config.report_idle_s,
            self.load,
            self.core.drain_kv_events,
            self.metrics if self.core.tiers or config.fetch else None,
            lambda report: world.to_gateway(events.WorkerReported(report)),
        )

    @abstractmethod
    def _on_event(self, event: Event) -> None:
        """Handle any event of the engine other than a sampled token."""

    @abstractmethod
    def _owns(self, key: AttemptKey) -> bool:
        """Whether the worker has the attempt, in any role."""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Send the first report, begin to measure idle steps, and have the folder of a tier read."""
        self._reports.start(self.core.prefix_snapshot())
        if self.core.next_deadline is not None:
            self._wake()
        self._rest()

    def stop_reporting(self) -> None:
        """Stop reports and idle steps, because the run is over."""
        self._reports.stop()
        self._is_over = True

    def die(self) -> None:
        """End without a message; `Pair.close` closes the pairs of others."""
        self.is_dead = True
        self._reports.stop()
        if self._folder is not None:
            self._folder.close()
        if self._running is not None and self._world.machine is not None:
            self._world.machine.end(self._running)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the worker's start."""
        return self.core.totals().preemptions

    def load(self) -> Load:
        """The load of the engine, and of prompts that it does not count yet."""
        self._advance(self._loop.now)
        load = self.core.load()
        num_more = self._pending_prompts.num_tokens(self._owns)
        if not num_more:
            return load
        return Load(**{**_fields(load), "uncomputed_prompt_tokens": load.uncomputed_prompt_tokens + num_more})

    # ------------------------------------------------------------ the engine's turns

    def post(self, command: Command) -> None:
        """Queue a command for the engine."""
        self._inbox.append((self._loop.now, command))
        if self._jump is not None:
            self._cut(self._jump)
        self._wake()

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._loop.at(self._loop.now, self._turn)

    def _turn(self) -> None:
        if self.is_dead:
            return
        rounds = MAX_ROUNDS
        while rounds and self._handle_arrived():
            rounds -= 1
        planned = self.core.plan_step(self._loop.now)
        plan = self.core.planned
        if planned or (plan.prefills and self._untold):
            self._tell(planned)
        copy_s, step_s = self._take_copy_s(), 0.0
        if not copy_s and not self._untold and not self._inbox and self._begin_jump(plan):
            return
        if plan.entries:
            self._step = self._runner.timed(plan)
            step_s = self._step.ms / 1e3
        if plan.entries and self._world.machine is not None:
            kind: Kind = "prefill" if plan.prefills else "decode"
            self._running = self._world.machine.begin(self.info.worker_id, kind, copy_s + step_s)
        if plan.entries or copy_s:
            self._loop.after(copy_s + step_s, self._end_step)
        else:
            self._end_step()

    def _handle_arrived(self) -> bool:
        if not self._inbox:
            return False
        commands, self._inbox = self._inbox, deque()
        told: list[Event] = []
        for posted_at, command in commands:
            told += self.core.handle(command, posted_at)
            if isinstance(command, Add):
                self._pending_prompts.added((command.spec.key,))
        if told:
            self._tell(told)
        else:
            self._reports.note()
        return True

    def _end_step(self) -> None:
        if self.is_dead or self._falls_behind(self._end_step):
            return
        if self._running is not None:
            self._step = replace(self._step, ms=(self._loop.now - self._running.began_at) * 1e3)
            self._running = None
        happened = self.core.run_step()
        while self._inbox and isinstance(self._inbox[0][1], Gather):
            posted_at, command = self._inbox.popleft()
            happened += self.core.handle(command, posted_at)
        copy_s = self._take_copy_s()
        if copy_s:
            self._ended_at = None
            self._loop.after(copy_s, self._end_turn, happened)
        else:
            self._end_turn(happened)

    def _falls_behind(self, end: Callable[..., None], *args: Any) -> bool:
        """Whether neighbours delay the end of the running step. Then `end` is called again."""
        if self._running is None:
            return False
        machine = self._world.machine
        assert machine is not None
        if behind_s := machine.behind_s(self._running):
            self._loop.after(behind_s, end, *args)
            return True
        machine.end(self._running)
        return False

    def _end_turn(self, happened: list[Event]) -> None:
        if self.is_dead:
            return
        plan = self.core.last_plan
        now, is_busy = self._loop.now, self.core.has_work
        if plan.entries:
            self.core.observe(self._step)
            self._reports.offer(self._step)
            self._reports.note()
        if is_busy and plan.entries and self._pacing.may_wait(happened, self._step.ms / 1e3, now):
            self._untold += happened
        else:
            self._pacing.flushed(now)
            self._tell(happened)
        ended_at = now if self._ended_at is None else self._ended_at
        self._ended_at = None
        if self._inbox or self.core.has_work:
            self._loop.at(ended_at + self._gap_s(happened) if plan.entries else now, self._turn)
            return
        self._is_busy = False
        if (deadline := self.core.next_deadline) is not None:
            self._loop.at(deadline, self._wake)
        self._rest()

    def _gap_s(self, happened: Sequence[Event]) -> float:
        """Seconds until the next step."""
        gap_s, machine = self._world.overheads.step_s, self._world.machine
        if machine is not None:
            gap_s += machine.gap_s(self.info.worker_id, sum(isinstance(event, TokenSampled) for event in happened))
        return gap_s

    def _take_copy_s(self) -> float:
        copy_s = self._copy_s()
        self._runner.num_copied_bytes = self._runner.num_host_bytes = 0
        return copy_s

    def _copy_s(self) -> float:
        """Seconds of the copies since the last step."""
        runner, copy_byte_s = self._runner, self._world.overheads.copy_byte_s
        if self.config.tiers is None:
            return (runner.num_copied_bytes + runner.num_host_bytes) * copy_byte_s
        return runner.num_copied_bytes * copy_byte_s + self._world.tier_times.copy_s(runner.num_host_bytes)

    def _copy_clock(self) -> float:
        """A clock on which copies take time, though the event loop has not come to their end."""
        return self._loop.now + self._copy_s()

    def metrics(self) -> WorkerMetrics:
        """The counters of tiers and fetches. The router takes the others from steps and requests."""
        totals = self.core.totals()
        return WorkerMetrics(
            loaded_tokens=totals.loaded_tokens,
            dropped_extents=totals.dropped_extents,
            tiers=totals.tiers,
            fetched_tokens=totals.fetched_tokens,
            fetches=dict(totals.fetches),
        )

    def _tell(self, happened: list[Event]) -> None:
        """Pass events of the engine to the roles and the gateway."""
        if self._untold:
            happened, self._untold = self._untold + happened, []
        for event in happened:
            if isinstance(event, TokenSampled):
                self._outbox.token(event.gateway_id, event.key, event.index, event.token_id)
            else:
                self._on_event(event)
        self._reports.note()
        self.flush()

    def flush(self) -> None:
        """Send what is in the outbox."""
        for update in self._outbox.flush().values():
            self._world.to_gateway(events.FromWorker(self.info.worker_id, self.info.incarnation, update))

    # ------------------------------------------------------------ steps without sequences

    def _rest(self) -> None:
        """Plan the next idle step, while there is no other work."""
        due = self.core.idle_step_at(self._loop.now)
        if due < self._rests_until and not self._is_over:
            self._rests_until = due
            self._loop.at(due, self._begin_idle_step)

    def _begin_idle_step(self) -> None:
        self._rests_until = math.inf
        if self.is_dead or self._is_busy or self._is_over:
            return
        if self.core.idle_step_at(self._loop.now) > self._loop.now:
            self._rest()
            return
        self._is_busy = True
        plan = self.core.begin_idle_step()
        step = self._runner.timed(plan) if self.core.run_idle_step(plan) else None
        step_s = 0.0 if step is None else step.ms / 1e3
        if self._world.machine is not None:
            self._running = self._world.machine.begin(self.info.worker_id, "prefill", step_s)
        self._loop.after(step_s, self._end_idle_step, step)

    def _end_idle_step(self, step: StepSample | None) -> None:
        if self.is_dead or self._falls_behind(self._end_idle_step, step):
            return
        if step is not None and self._running is not None:
            step = replace(step, ms=(self._loop.now - self._running.began_at) * 1e3)
        self._running = None
        self.core.end_idle_step(step, self._loop.now)
        self._is_busy = False
        if step is not None:
            self._reports.add(step)
            self._reports.note()
        if self._inbox:
            self._wake()
        else:
            self._rest()

    # ------------------------------------------------------------ steps that are alike

    def _begin_jump(self, plan: StepPlan) -> bool:
        """Begin a jump if more than one step from `plan` on are alike. Not where each step depends on other workers of
        its machine, or tokens of several steps are sent together anyway."""
        if self.config.token_interval_s or self._world.machine is not None:
            return False
        num_alike = self.core.num_alike
        for entry in plan.decodes if num_alike else ():
            if entry.sequence.spec.sampling.stop_token_ids:
                num_left = self._runner.num_left(entry.sequence)
                num_alike = min(num_alike, num_left - 1)
        if num_alike < 2:
            return False
        deadline = self.core.next_deadline
        until, end = min(self._loop.now + self._jump_s, math.inf if deadline is None else deadline), self._loop.now
        samples: list[StepSample] = []
        ends: list[float] = []
        for sample in self._runner.timed_alike(plan, num_alike):
            end = (end + self._world.overheads.step_s if ends else end) + sample.ms / 1e3
            if end >= until:
                break
            samples.append(sample)
            ends.append(end)
        if len(ends) < 2:
            return False
        self._jump = _Jump(plan, samples, ends)
        self._loop.at(ends[-1], self._end_jump, self._jump, len(ends))
        return True

    def _cut(self, jump: _Jump) -> None:
        """End a jump because a command came: with the step that is under way, or with the one before it if that has
        ended and the next one has not begun."""
        number = bisect_left(jump.ends, self._loop.now - self._world.overheads.step_s) + 1
        if number < len(jump.ends):
            del jump.ends[number:]
            self._loop.at(jump.ends[-1], self._end_jump, jump, number)

    def _advance(self, until_s: float) -> None:
        """Apply the steps of the current jump that ended before `until_s`, except the last one."""
        jump = self._jump
        if jump is None:
            return
        num_steps = min(bisect_right(jump.ends, until_s), len(jump.ends) - 1) - jump.num_done
        if num_steps <= 0:
            return
        self._plan_again()
        first = jump.num_done
        jump.num_done += num_steps
        self._untold += self.core.run_alike(self._runner.rows(self.core.planned, num_steps))
        for sample, end in zip(jump.samples[first : jump.num_done], jump.ends[first:], strict=False):
            self._reports.add_past_step(sample, end)
        self._note_times(jump, first, jump.num_done)

    def _note_times(self, jump: _Jump, first: int, last: int) -> None:
        overheads, num_decodes = self._world.overheads, len(jump.plan.decodes)
        times = [end + overheads.message_s + num_decodes * overheads.token_s for end in jump.ends[first:last]]
        for entry in jump.plan.decodes:
            sequence = entry.sequence
            index = entry.start + 1 + first - sequence.num_prompt_tokens
            self._world.answers.note_times(sequence.spec.request_id, index, list(times))

    def _end_jump(self, jump: _Jump, num_steps: int) -> None:
        if self.is_dead or self._jump is not jump or num_steps != len(jump.ends):
            return
        self._advance(self._loop.now)
        if self._world.overheads.token_s:
            self._tell_late()  # a client waits for the whole of an update: the last step gets one of its own
        self._note_times(jump, num_steps - 1, num_steps)
        self._ended_at = jump.ends[-1]
        self._step = jump.samples[num_steps - 1]
        self._jump = None
        self._plan_again()
        self._end_step()

    def _plan_again(self) -> None:
        """Plan the next step of a jump if those before it were applied."""
        if not self.core.planned.entries:
            happened = self.core.plan_step(self._loop.now)
            assert not happened, happened

    def catch_up(self) -> None:
        """Send the gateway what it would have received by now if each step of a jump were reported on its own."""
        if self._jump is None:
            return
        self._advance(self._loop.now - self._world.overheads.message_s)
        if self._untold:
            self._tell_late()
            self._reports.force_report(lambda report: self._world.gateway_now(events.WorkerReported(report)))

    def _tell_late(self) -> None:
        untold, self._untold = self._untold, []
        for event in untold:
            assert isinstance(event, TokenSampled)
            self._outbox.token(event.gateway_id, event.key, event.index, event.token_id)
        for update in self._outbox.flush().values():
            self._world.gateway_now(events.FromWorker(self.info.worker_id, self.info.incarnation, update))


def _fields(load: Load) -> dict[str, int]:
    return {name: getattr(load, name) for name in load.__struct_fields__}
