"""The thread around an engine core: commands in order, calls between steps, and an end that leaves nobody waiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from disagg.engine.commands import Add, Command, End, Ended, Event, Gather, Gathered, Reserve, TokenSampled
from disagg.engine.core import idle_steps
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.plan import QueuedStep, StepPlan, StepQueue, StepResult
from disagg.engine.shell import engine_thread
from disagg.engine.shell.engine_thread import Batch, EngineStoppedError, EngineThread
from disagg.proto.messages import StepSample
from tests.support.engine import BLOCK, IDLE, VOCAB_SIZE, key_of, make_core, make_prompt, make_spec, new_buffer
from tests.support.queueing import HostQueuedStep, QueueingRunner
from tests.support.stages import StagedRunner

WAIT_S = 10.0
PROMPT = make_prompt(20)


class Harness:
    """An engine thread, and what it told."""

    def __init__(self, core: EngineCore, token_interval_s: float = 0.0) -> None:
        self.batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self.crashes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.gathered: queue.SimpleQueue[Gathered] = queue.SimpleQueue()
        self.thread = EngineThread(core, self.batches.put, self.crashes.put, self.gathered.put, token_interval_s)

    def events_until_ended(self) -> list[Any]:
        """All events up to the first `Ended`."""
        events: list[Any] = []
        while not any(isinstance(event, Ended) for event in events):
            events += self.batches.get(timeout=WAIT_S).events
        return events


@contextmanager
def running(core: EngineCore) -> Iterator[Harness]:
    harness = Harness(core)
    harness.thread.start()
    try:
        yield harness
    finally:
        assert harness.thread.stop(WAIT_S)


def test_a_sequence_runs_to_its_end_without_being_pushed() -> None:
    with running(make_core()) as harness:
        harness.thread.post(Add(make_spec("a", PROMPT, max_tokens=3)))
        events = harness.events_until_ended()
        tokens = [event.token_id for event in events if isinstance(event, TokenSampled)]
        assert tokens == fake_generate(PROMPT, 3, VOCAB_SIZE)
        assert harness.thread.call(lambda core: core.audit()).result(WAIT_S) == (IDLE, [])


def test_a_sequence_is_said_to_be_added_once_with_the_first_load_that_counts_it() -> None:
    with running(make_core(token_budget=32)) as harness:
        harness.thread.post(Add(make_spec("a", make_prompt(40), max_tokens=2)))
        batches = [harness.batches.get(timeout=WAIT_S) for _ in range(3)]
        harness.thread.post(Add(make_spec("b", make_prompt(40), max_tokens=1)))
        batches.append(harness.batches.get(timeout=WAIT_S))  # one step: the rest of its prompt is cached
    told = [(batch.added, batch.load.uncomputed_prompt_tokens) for batch in batches]
    assert told == [((key_of("a"),), 8), ((), 0), ((), 0), ((key_of("b"),), 0)]


def test_every_step_is_measured_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[StepSample] = []
    monkeypatch.setattr(EngineCore, "observe", lambda core, step: observed.append(step))
    with running(make_core(token_budget=32)) as harness:
        harness.thread.post(Add(make_spec("a", make_prompt(40), max_tokens=2)))
        steps = [step for _ in range(3) for step in harness.batches.get(timeout=WAIT_S).steps]
        shapes = [(s.prefill_tokens, s.prefill_attended, s.num_decodes, s.decode_context) for s in steps]
        assert shapes == [(32, 528, 0, 0), (8, 292, 0, 0), (0, 0, 1, 41)]
        assert all(step.ms > 0 for step in steps)
        assert observed == steps
        harness.thread.post(Reserve(make_spec("b", PROMPT)))
        assert harness.batches.get(timeout=WAIT_S).steps == ()


def test_a_step_that_failed_is_not_measured() -> None:
    core = make_core()
    core._runner.run = lambda plan: StepResult([])  # type: ignore[method-assign]
    with running(core) as harness:
        harness.thread.post(Add(make_spec("a", PROMPT)))
        assert harness.batches.get(timeout=WAIT_S).steps == ()


class AskingRunner(FakeModelRunner):
    """Asks for the KV that a step computes while it computes it."""

    def __init__(self) -> None:
        super().__init__(10, BLOCK, 4096, VOCAB_SIZE)
        self.ask: Callable[[StepPlan], None] = lambda plan: None

    def run(self, plan: StepPlan) -> StepResult:
        self.ask(plan)
        return super().run(plan)


def test_what_was_asked_for_during_a_step_is_gathered_before_the_next_one() -> None:
    runner = AskingRunner()
    harness = Harness(make_core(runner=runner, token_budget=32))

    def ask(plan: StepPlan) -> None:
        for seq, (start, end) in enumerate([(0, 16), (16, 32)]):
            harness.thread.post(Gather(plan.entries[0].sequence.key, seq, start, end, new_buffer(16)))

    runner.ask = ask
    for name in "ab":
        harness.thread.post(Add(make_spec(name, make_prompt(32, seed=ord(name))), hold_after_prefill=True))
    harness.thread.start()
    seen = [harness.batches.get(timeout=WAIT_S).events for _ in range(4)]
    assert [[(type(e).__name__, e.key.request_id) for e in events] for events in seen] == [
        [("ChunkPlanned", "a")],
        [("TokenSampled", "a"), ("PrefillComputed", "a"), ("Gathered", "a"), ("Gathered", "a")],
        [("ChunkPlanned", "b")],
        [("TokenSampled", "b"), ("PrefillComputed", "b"), ("Gathered", "b"), ("Gathered", "b")],
    ]
    assert all(event.ok for events in seen for event in events if isinstance(event, Gathered))
    assert harness.thread.stop(WAIT_S)


def test_what_peers_wait_for_is_told_before_the_step() -> None:
    harness = Harness(make_core())
    harness.thread.post(Add(make_spec("a", PROMPT)))
    harness.thread.post(Reserve(make_spec("b", PROMPT)))
    harness.thread.start()
    first, second = (harness.batches.get(timeout=WAIT_S) for _ in range(2))
    assert ([type(event).__name__ for event in first.events], first.steps) == (["Reserved"], ())
    assert len(second.steps) == 1
    assert harness.thread.stop(WAIT_S)


def test_what_comes_while_the_rest_is_told_does_not_wait_for_the_step() -> None:
    harness = Harness(make_core())
    told: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    answers = {"b": "c", "c": "d", "d": "e", "e": "f"}

    def deliver(batch: Batch) -> None:
        told.put(batch)
        for event in batch.events:
            if (name := answers.get(event.key.request_id)) is not None:
                harness.thread.post(Reserve(make_spec(name, PROMPT)))

    harness.thread._deliver = deliver
    harness.thread.post(Add(make_spec("a", PROMPT)))
    harness.thread.post(Reserve(make_spec("b", PROMPT)))
    harness.thread.start()
    seen = [told.get(timeout=WAIT_S) for _ in range(6)]
    requests = [[event.key.request_id for event in batch.events] for batch in seen]
    assert requests == [["b"], ["c"], ["d"], ["e"], ["a"], ["f"]]  # no flood holds a step up
    assert [len(batch.steps) for batch in seen] == [0, 0, 0, 0, 1, 0]
    assert harness.thread.stop(WAIT_S)


def test_tokens_that_nobody_waits_for_are_told_with_later_ones() -> None:
    harness = Harness(make_core(), token_interval_s=3600.0)
    harness.thread.post(Add(make_spec("a", PROMPT, max_tokens=5)))
    harness.thread.start()
    told = [harness.batches.get(timeout=WAIT_S) for _ in range(2)]
    indices = [[event.index for event in batch.events if isinstance(event, TokenSampled)] for batch in told]
    assert (indices, [len(batch.steps) for batch in told]) == ([[0], [1, 2, 3, 4]], [1, 4])
    assert harness.thread.stop(WAIT_S)


def test_tokens_do_not_wait_while_a_prompt_is_computed() -> None:
    runner = AskingRunner()
    harness = Harness(make_core(runner=runner), token_interval_s=3600.0)

    def ask(plan: StepPlan) -> None:
        if plan.decodes and plan.decodes[0].sequence.num_output_tokens == 3 and not plan.prefills:
            harness.thread.post(Add(make_spec("b", make_prompt(30), max_tokens=1)))

    runner.ask = ask
    harness.thread.post(Add(make_spec("a", PROMPT, max_tokens=6)))
    harness.thread.start()
    told = [harness.batches.get(timeout=WAIT_S) for _ in range(4)]
    tokens = [[(e.key.request_id, e.index) for e in batch.events if isinstance(e, TokenSampled)] for batch in told]
    assert tokens == [[("a", 0)], [("a", 1), ("a", 2), ("a", 3)], [("a", 4), ("b", 0)], [("a", 5)]]
    assert harness.thread.stop(WAIT_S)


def test_a_call_comes_after_the_commands_that_were_posted_before() -> None:
    harness = Harness(make_core())
    harness.thread.post(Reserve(make_spec("a", PROMPT)))
    answer = harness.thread.call(lambda core: core.load().num_waiting)
    harness.thread.start()
    assert answer.result(WAIT_S) == 1
    assert harness.thread.stop(WAIT_S)


def test_a_call_that_raises_hurts_only_its_caller() -> None:
    def fail(core: EngineCore) -> None:
        raise KeyError("mine")

    with running(make_core()) as harness:
        with pytest.raises(KeyError, match="mine"):
            harness.thread.call(fail).result(WAIT_S)
        assert harness.thread.call(lambda core: core.has_work).result(WAIT_S) is False


def test_a_deadline_wakes_an_idle_engine() -> None:
    with running(make_core()) as harness:
        harness.thread.post(Reserve(make_spec("a", PROMPT, timeout_s=0.02)))
        assert [event.reason for event in harness.events_until_ended() if isinstance(event, Ended)] == ["deadline"]


@pytest.mark.parametrize("timeout_s", [1e12, float("inf")])
def test_a_deadline_beyond_what_a_thread_can_wait_for_is_no_fault(timeout_s: float) -> None:
    with running(make_core()) as harness:
        harness.thread.post(Reserve(make_spec("far", PROMPT, timeout_s=timeout_s)))
        assert harness.batches.get(timeout=WAIT_S).events  # the engine sleeps now, for as long as it can
        harness.thread.post(Add(make_spec("a", PROMPT, max_tokens=1)))
        assert harness.events_until_ended()[-1].key == key_of("a")
        assert harness.crashes.empty()


def test_after_the_end_calls_are_refused_and_a_second_stop_is_fine() -> None:
    harness = Harness(make_core())
    harness.thread.start()
    assert harness.thread.stop(WAIT_S)
    assert harness.thread.stop(WAIT_S)
    with pytest.raises(EngineStoppedError):
        harness.thread.call(lambda core: core.load()).result(0)


def test_a_thread_that_never_started_stops_and_refuses_what_was_asked() -> None:
    harness = Harness(make_core())
    call = harness.thread.call(lambda core: core.load())
    assert harness.thread.stop(WAIT_S)
    with pytest.raises(EngineStoppedError):
        call.result(0)


class _Gate(FakeModelRunner):
    """A runner whose step waits."""

    def __init__(self) -> None:
        super().__init__(10, 16, 4096, vocab_size=VOCAB_SIZE)
        self.entered, self.opened = threading.Event(), threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return super().run(plan)


def test_a_stop_in_the_middle_of_a_step_says_that_it_is_not_over() -> None:
    runner = _Gate()
    harness = Harness(make_core(runner=runner))
    harness.thread.start()
    harness.thread.post(Add(make_spec("a", PROMPT)))
    assert runner.entered.wait(WAIT_S)
    call = harness.thread.call(lambda core: core.load())
    assert not harness.thread.stop(0.0)
    assert not call.done()  # the thread still runs, and answers itself
    runner.opened.set()
    assert harness.thread.stop(WAIT_S)
    with pytest.raises(EngineStoppedError):
        call.result(WAIT_S)


class _Broken(EngineCore):
    """A core with a bug."""

    def handle(self, command: Command, now: float) -> list[Any]:
        raise KeyError("a bug")


def test_a_crash_is_told_once_and_leaves_nobody_waiting() -> None:
    core = make_core()
    core.__class__ = _Broken
    harness = Harness(core)
    before = harness.thread.call(lambda core: core.load())
    harness.thread.post(Add(make_spec("a", PROMPT)))
    harness.thread.start()
    assert isinstance(harness.crashes.get(timeout=WAIT_S), KeyError)
    with pytest.raises(EngineStoppedError):
        before.result(WAIT_S)
    with pytest.raises(EngineStoppedError):
        harness.thread.call(lambda core: core.load()).result(WAIT_S)
    assert harness.thread.stop(WAIT_S)
    assert harness.crashes.empty()
    assert harness.batches.empty()


def test_an_idle_engine_checks_once_that_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_thread, "IDLE_CHECK_AFTER_S", 0.001)
    core = make_core()
    audits: queue.SimpleQueue[None] = queue.SimpleQueue()

    def unsound() -> tuple[dict[str, int], list[str]]:
        audits.put(None)
        return {"sequences": 0, "blocks_active": 3}, ["a finding"]

    monkeypatch.setattr(core, "audit", unsound)
    with running(core) as harness:
        harness.thread.post(Add(make_spec("a", PROMPT, max_tokens=3)))
        harness.events_until_ended()
        audits.get(timeout=WAIT_S)
    assert audits.empty()
    assert (
        "the engine is idle and its audit fails: a finding; 3 blocks_active are held without a sequence" in caplog.text
    )


def test_an_idle_engine_tells_steps_that_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_steps, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(engine_thread, "IDLE_CHECK_AFTER_S", 0.001)
    with running(make_core()) as harness:
        harness.thread.post(Add(make_spec("a", PROMPT, max_tokens=3)))
        harness.events_until_ended()
        steps = [harness.batches.get(timeout=WAIT_S).idle_step for _ in range(4)]
    found = [step for step in steps if step is not None]
    assert len(found) >= 3
    assert {(step.prefill_tokens, step.num_decodes) for step in found} == {(16, 0)}
    assert min(step.ms for step in found) > 0


class Turns:
    """An engine thread over a device that takes ten milliseconds a step, turned by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token_interval_s: float = 0.0, **options: Any) -> None:
        self.clock = FakeClock()
        monkeypatch.setattr(engine_thread, "process_clock", lambda: self.clock)
        self.core = make_core(runner=TimedRunner(self.clock, **options))
        self.harness = Harness(self.core, token_interval_s)
        self.told: list[Batch] = []

    def post(self, *commands: Command) -> None:
        for command in commands:
            self.harness.thread.post(command)

    def turn(self) -> None:
        self.harness.thread._turn()
        batches = self.harness.batches
        self.told += [batches.get_nowait() for _ in range(batches.qsize())]

    def until_idle(self) -> None:
        while self.harness.thread._inbox or self.core.has_work:
            self.turn()

    def steps_ms(self) -> list[float]:
        return [round(step.ms, 6) for batch in self.told for step in batch.steps]


def test_a_step_that_was_launched_ahead_is_measured_from_the_end_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the host does meanwhile, a millisecond for each plan, is not part of it."""
    turns = Turns(monkeypatch)
    plan_step = turns.core.plan_step

    def slow_plan_step(now: float) -> list[Event]:
        turns.clock.seconds += 0.001
        return plan_step(now)

    turns.core.plan_step = slow_plan_step  # type: ignore[method-assign]
    turns.post(Add(make_spec("a", PROMPT, max_tokens=5)))
    turns.until_idle()
    steps = [step for batch in turns.told for step in batch.steps]
    assert [(step.prefill_tokens, step.num_decodes) for step in steps] == [(20, 0), (0, 1), (0, 1), (0, 1), (0, 1)]
    assert turns.steps_ms() == [11.0, 11.0, 10.0, 10.0, 10.0]


def test_a_step_beside_which_a_command_was_carried_out_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy waits for the device: what comes after it took the time of both."""
    turns = Turns(monkeypatch)
    turns.post(Add(make_spec("a", PROMPT, max_tokens=9)))
    for _ in range(4):
        turns.turn()
    assert turns.steps_ms() == [10.0, 10.0, 10.0]
    turns.post(Reserve(make_spec("b", PROMPT)))
    turns.until_idle()
    assert turns.steps_ms() == [10.0] * (9 - 1)


def test_a_step_behind_one_that_failed_is_measured_from_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, failing={1: "result"})
    turns.post(Add(make_spec("a", PROMPT, max_tokens=9)))
    turns.until_idle()
    assert turns.steps_ms() == [10.0, 10.0, 10.0], "the prompt, the first step, and the one behind the second"


def test_a_turn_that_only_launches_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it break off what is kept for later."""
    turns = Turns(monkeypatch, token_interval_s=0.045)
    turns.post(Add(make_spec("a", PROMPT, max_tokens=10)))
    turns.until_idle()
    indices = [[event.index for event in batch.events if isinstance(event, TokenSampled)] for batch in turns.told]
    assert indices == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]


class FakeClock:
    """In place of the process's."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds


class TimedRunner(QueueingRunner):
    """Steps of ten milliseconds on a device that begins each when the last one has ended and it was launched."""

    def __init__(self, clock: FakeClock, **options: Any) -> None:
        super().__init__(20, **options)
        self._clock = clock
        self._free_at = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        self._clock.seconds += 0.01
        return super().run(plan)

    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        self._free_at = ends_at = max(self._free_at, self._clock.seconds) + 0.01
        launched = super().enqueue(plan, after)
        assert isinstance(launched, HostQueuedStep)
        wait = launched.wait

        def until_it_ends() -> None:
            self._clock.seconds = max(self._clock.seconds, ends_at)
            wait()

        launched.wait = until_it_ends
        return launched


def test_steps_that_are_under_way_together_share_the_time_in_which_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one passes four stages of a second each, and each one behind it comes a second later. Commands between
    them change nothing: they are carried out while the stages compute."""
    runner = StagedRunner(4, 200)
    monkeypatch.setattr(engine_thread, "process_clock", lambda: SimpleNamespace(now=lambda: runner.clock.now))
    core = make_core(runner=runner, roles=("prefill",), token_budget=64)
    harness = Harness(core)
    harness.thread.post(Add(make_spec("a", make_prompt(320)), hold_after_prefill=True))
    harness.thread._turn()
    while core.has_work:
        harness.thread.post(End(key_of("nobody"), "cancelled", ""))
        harness.thread._turn()
    steps = [step for _ in range(harness.batches.qsize()) for step in harness.batches.get_nowait().steps]
    assert [(step.prefill_tokens, step.ms) for step in steps] == [
        (64, 4000.0), (64, 1000.0), (64, 1000.0), (64, 1000.0), (64, 1000.0)
    ]  # fmt: skip


class SignalledStep(QueuedStep):
    """A step of other ranks, which a test ends."""

    def __init__(self, computed: StepResult) -> None:
        self._computed = computed
        self._ended_at: float | None = None

    @property
    def ended_at(self) -> float | None:
        return self._ended_at

    def end(self) -> None:
        self._ended_at = 1.0

    def result(self) -> StepResult:
        assert self._ended_at is not None, "the engine thread would wait here"
        return self._computed


class SignallingRunner(FakeModelRunner):
    """Its own step queue, whose steps end when a test says so."""

    kind: Literal["decodes", "prompts"] = "prompts"
    max_ahead, max_decodes = 4, 0

    def __init__(self) -> None:
        super().__init__(20, BLOCK, 4096, VOCAB_SIZE)
        self.launched: queue.SimpleQueue[SignalledStep] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None

    @property
    def step_queue(self) -> StepQueue | None:  # type: ignore[override]
        return self

    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        step = SignalledStep(self.run(plan))
        self.launched.put(step)
        return step

    def watch(self, wake: Callable[[], None]) -> bool:
        self.wake = wake
        return True

    def end(self, step: SignalledStep) -> None:
        step.end()
        self.wake()


def test_beside_steps_of_other_ranks_the_thread_waits_for_whichever_comes_first() -> None:
    """A prompt that comes is launched at once; and what is computed is told at once."""
    runner = SignallingRunner()
    with running(make_core(runner=runner, roles=("prefill",))) as harness:
        harness.thread.post(Add(make_spec("a", PROMPT), hold_after_prefill=True))
        first = runner.launched.get(timeout=WAIT_S)
        harness.thread.post(Add(make_spec("b", make_prompt(20, seed=1)), hold_after_prefill=True))
        second = runner.launched.get(timeout=WAIT_S)
        harness.thread.call(lambda core: core.has_work).result(WAIT_S)
        began = harness.thread._turn_began
        for _ in range(3):
            harness.thread.call(lambda core: core.has_work).result(WAIT_S)
        assert harness.thread._turn_began == began is not None, (
            "a step that never ends is known by the time of its turn"
        )
        told: list[tuple[str, str]] = []

        def wait_for(number: int) -> None:
            while len(told) < number:
                told.extend(
                    (type(event).__name__, event.key.request_id) for event in harness.batches.get(timeout=WAIT_S).events
                )

        wait_for(2)
        runner.end(first)
        wait_for(4)
        runner.end(second)
        wait_for(6)
    computed = [(kind, name) for name in "ab" for kind in ("TokenSampled", "PrefillComputed")]
    assert told == [("ChunkPlanned", "a"), ("ChunkPlanned", "b"), *computed]
