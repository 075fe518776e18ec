"""The thread that owns an `EngineCore`: nothing else touches model, cache or scheduler.

Each turn of the loop takes the commands that arrived and runs one step. Events for the asyncio side go out as a `Batch`
before the step and after it, or, where no stream waits for them, with those of the next steps (`TokenPacing`). With
nothing to do it sleeps until a command arrives, the next deadline of a sequence, or a step is due that shows how quick
the idle worker is; with nothing to launch beside steps of other ranks, until a command arrives or one is computed. A
step's plan is delivered when it begins, so that KV of it can be ordered meanwhile: it is copied as soon as it is
computed. Copies of a device are waited for by another thread (`copy_watch.py`), which delivers their answers itself.
The thread ends by `stop` or by a crash; calls that it did not reach are answered with `EngineStoppedError`.

A step is measured from when it was planned, or from the end of the step before it, if that was later: by how much it
lengthens the time in which the worker computes. So the times of steps that are under way together add up to that time.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from disagg.engine.commands import Add, Command, Event, Gather, Gathered, Gathering, Held
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.outbox import TokenPacing
from disagg.engine.core.reports import EngineTotals
from disagg.engine.shell.copy_watch import CopyWatch
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import AdapterState, KvEvent, Load, StepSample

logger = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_CHECK_AFTER_S = 1.0
"""A worker without a sequence for this long checks that nothing is held; under load the check would cost a millisecond
of every pause."""
MAX_ROUNDS = 4
"""How often a turn looks for commands before its step: one that comes later waits for the whole step."""
HELD_WAIT_S = 0.003
"""How long a step waits for the order to copy a sequence that was just held: its stream would wait for the whole step.
The asyncio thread answers at once unless it is busy."""
LONGEST_WAIT_S = 60.0
"""A deadline may lie further away than a condition variable can wait."""


class EngineStoppedError(RuntimeError):
    """The engine thread takes no calls any more."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the engine reports."""

    events: list[Event]
    kv_events: tuple[KvEvent, ...]
    load: Load
    steps: tuple[StepSample, ...] = ()
    """The steps that were run since the last batch."""
    totals: EngineTotals = field(default_factory=EngineTotals)
    """Totals as of this batch."""
    added: tuple[AttemptKey, ...] = ()
    """Sequences that `load` counts and that of no earlier batch did; they may have ended meanwhile."""
    adapters: tuple[AdapterState, ...] = ()
    """Adapters that are loaded."""
    idle_step: StepSample | None = None
    """Idle step, without sequences; see `core/idle_steps.py`."""


class EngineThread:
    """Runs `core` until `stop`. `deliver` is called on the engine thread, a few times per turn or once for several, and
    must neither block nor raise; `on_crash` too, at most once. `on_gathered` is called on another thread with the
    answers of copies that were only begun. `token_interval_s`: see `TokenPacing`."""

    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[Batch], None],
        on_crash: Callable[[BaseException], None],
        on_gathered: Callable[[Gathered], None],
        token_interval_s: float = 0.0,
    ) -> None:
        self._core = core
        self._deliver = deliver
        self._on_crash = on_crash
        self._inbox: deque[tuple[float, Command]] = deque()
        """Commands with the time at which each was posted: from then on its sequence waits."""
        self._calls: deque[tuple[Callable[[EngineCore], Any], concurrent.futures.Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._pacing = TokenPacing(token_interval_s)
        self._kept_events: list[Event] = []
        self._kept_steps: list[StepSample] = []
        """What steps resulted in and was not delivered yet; empty while the thread sleeps."""
        self._kept_added: list[AttemptKey] = []
        """Sequences that were added and not delivered yet."""
        self._clock = process_clock().now
        self._copies = CopyWatch(on_gathered, self.post, self._clock)
        self._stopping = False
        self._step_ended = 0.0
        self._commands_done = 0.0
        self._is_unchecked = False
        """There is no sequence, and since the last one it was not checked that nothing is held."""
        self._turn_began: float | None = None
        """Start of the current turn; None between two turns. Turns that wait for the same step count as one."""
        self._is_interrupted = False
        """The last turn waited for a step and ended before it."""
        self._expected_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start to handle commands and run steps."""
        self._core.watch_steps(self._notify)
        self._thread.start()

    def post(self, command: Command) -> None:
        """Queue a command; commands are handled in order. Any thread."""
        with self._wake:
            self._inbox.append((self._clock(), command))
            self._wake.notify()

    def call(self, function: Callable[[EngineCore], T]) -> concurrent.futures.Future[T]:
        """Run `function(core)` on the engine thread, between steps and after the commands posted before. Any thread.
        The future may raise `EngineStoppedError`, or what `function` raises."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._wake:
            if self._stopping:
                future.set_exception(EngineStoppedError("the engine has stopped"))
            else:
                self._calls.append((function, future))
                self._wake.notify()
        return future

    def turn_s(self) -> float:
        """Duration of the current turn so far, or of the wait for a copy out of the cache, if that is longer; 0 between
        two turns without such a copy. Any thread."""
        return max(self._present_turn_s(), self._copies.waiting_s())

    def doing(self) -> str:
        """What takes as long as `turn_s` says, for the log; empty for a step. Any thread."""
        return "waiting for a copy of KV" if self._copies.waiting_s() > self._present_turn_s() else ""

    def expected_s(self) -> float:
        """Predicted duration of the current turn; 0 where no turn lasts long, or a copy is waited for. Any thread."""
        return 0.0 if self.doing() else self._expected_s

    def _present_turn_s(self) -> float:
        began = self._turn_began
        return 0.0 if began is None else self._clock() - began

    @property
    def num_copies(self) -> int:
        """Copies out of the cache that are not over. Any thread."""
        return self._copies.num_open

    def stop(self, timeout_s: float) -> bool:
        """End the loop after the running step, and the copies that it began; whether all ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._refuse_calls()  # Those of a thread that was never started.
        return self._copies.stop(timeout_s)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if not self._is_interrupted:
                    self._turn_began = self._clock()
                self._turn()
                if not self._is_interrupted:
                    self._turn_began = None
        except BaseException as error:
            self._on_crash(error)
        finally:
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        with self._wake:
            self._stopping = True
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStoppedError("the engine has stopped"))

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; false when the thread shall end."""
        with self._wake:
            while not (self._inbox or self._calls or self._stopping or self._core.has_work):
                now, deadline = self._clock(), self._core.next_deadline
                if self._is_unchecked and (deadline is None or deadline > now + IDLE_CHECK_AFTER_S):
                    if not self._wake.wait(IDLE_CHECK_AFTER_S):
                        self._check_idle()
                    continue
                due = min(self._core.idle_step_at(now), math.inf if deadline is None else deadline)
                if due == math.inf:
                    self._wake.wait()
                    continue
                wait_s = due - now
                if wait_s <= 0:
                    break
                self._wake.wait(min(LONGEST_WAIT_S, wait_s))
            return not self._stopping

    def _check_idle(self) -> None:
        self._is_unchecked = False
        counts, problems = self._core.audit()
        counts = {**counts, "copies": counts.get("copies", 0) + self.num_copies}
        problems += [f"{count} {name} are held without a sequence" for name, count in counts.items() if count]
        if problems:
            logger.error("the engine is idle and its audit fails: %s", "; ".join(problems))

    def _turn(self) -> None:
        rounds = MAX_ROUNDS
        while rounds and self._handle_arrived():
            rounds -= 1
        started = self._clock()
        planned = self._watched(self._core.plan_step(started))
        self._expected_s = self._core.expected_s
        if planned or (self._core.planned.prefills and (self._kept_events or self._kept_steps)):
            self._deliver_all(planned)
        self._is_interrupted = not self._wait_for_step()
        if self._is_interrupted:
            return
        events = self._core.run_step()
        self._copies.steps_ended(self._core.num_steps_done)
        if not events and self._core.idle_step_at(started) <= started:
            self._idle_step()
            return
        self._is_unchecked = self._core.is_idle
        self._end_step(events + self._serve_gathers())

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _wait_for_step(self) -> bool:
        """Where there is nothing to launch: wait until a step under way is computed, or something arrives; whether
        `run_step` may be called now."""
        core = self._core
        if not core.is_waiting_for_step:
            return True
        with self._wake:
            self._wake.wait_for(
                lambda: self._inbox or self._calls or self._stopping or not core.is_waiting_for_step, LONGEST_WAIT_S
            )
            return not core.is_waiting_for_step

    def _idle_step(self) -> None:
        core, began = self._core, self._clock()
        plan = core.begin_idle_step()
        is_done = core.run_idle_step(plan)
        now = self._clock()
        step = plan.measured((now - began) * 1e3) if is_done else None
        core.end_idle_step(step, now)
        totals, adapters = core.totals(), core.adapters()
        self._deliver(Batch([], core.drain_kv_events(), core.load(), totals=totals, adapters=adapters, idle_step=step))

    def _handle_arrived(self) -> bool:
        """Handle what arrived; whether anything had. Events go out now: peers must not wait for a step for them."""
        with self._wake:
            commands, self._inbox = self._inbox, deque()
            num_calls = len(self._calls)
        events: list[Event] = []
        for posted_at, command in commands:
            events += self._handle(command, posted_at)
            if isinstance(command, Add):
                self._kept_added.append(command.spec.key)
        for _ in range(num_calls):  # one by one, so that none is lost where a turn crashes
            function, future = self._calls.popleft()
            _resolve(future, function, self._core)
        if events:
            self._deliver_all(events)
        if any(isinstance(event, Held) and event.ok for event in events):
            self._wait_for_gathers()
        if not (commands or num_calls):
            return False
        self._commands_done = self._clock()
        return True

    def _wait_for_gathers(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._stopping, HELD_WAIT_S)

    def _end_step(self, events: list[Event]) -> None:
        """Deliver what the step resulted in, or keep it for the next time."""
        core, now = self._core, self._clock()
        if not core.finished:
            if events or not core.has_work:  # else a step was launched, and there is nothing to deliver
                self._step_ended = now
                self._deliver_all(events)
            return
        step_s = 0.0
        for each in core.finished:
            ended = now if each.ended_at is None else each.ended_at
            step_s = ended - max(each.began, self._step_ended)
            self._step_ended = ended
            if each.ended_at is not None or self._commands_done <= each.began:  # else their copies are part of it
                step = each.plan.measured(step_s * 1e3)
                core.observe(step)
                self._kept_steps.append(step)
        if core.has_work and self._pacing.may_wait(events, step_s, now):
            self._kept_events += events
        else:
            self._pacing.flushed(now)
            self._deliver_all(events)

    def _serve_gathers(self) -> list[Event]:
        """Copy KV that was computed in the step and ordered during it, before any other command."""
        events: list[Event] = []
        while (posted := self._next_gather()) is not None:
            events += self._handle(posted[1], posted[0])
        return events

    def _handle(self, command: Command, posted_at: float) -> list[Event]:
        return self._watched(self._core.handle(command, posted_at))

    def _watched(self, events: list[Event]) -> list[Event]:
        """The events without copies that were only begun: their answers come by themselves."""
        for event in events:
            if isinstance(event, Gathering):
                self._copies.watch(event, self._core.num_steps_done + self._core.num_steps_under_way)
        return [event for event in events if not isinstance(event, Gathering)]

    def _next_gather(self) -> tuple[float, Command] | None:
        with self._wake:
            return self._inbox.popleft() if self._inbox and isinstance(self._inbox[0][1], Gather) else None

    def _deliver_all(self, events: list[Event]) -> None:
        """Deliver everything that was kept, `events` last."""
        core = self._core
        events, self._kept_events = self._kept_events + events, []
        steps, self._kept_steps = tuple(self._kept_steps), []
        added, self._kept_added = tuple(self._kept_added), []
        batch = Batch(events, core.drain_kv_events(), core.load(), steps, core.totals(), added, core.adapters())
        self._deliver(batch)


def _resolve(future: concurrent.futures.Future[Any], function: Callable[[EngineCore], Any], core: EngineCore) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(core))
    except Exception as error:
        future.set_exception(error)
