"""The thread that waits for copies out of the cache: what it answers, and what it leaves."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from disagg.engine.commands import (
    Add,
    Ended,
    Gather,
    Gathered,
    GatherFailed,
    Gathering,
    Pin,
    Pinned,
    Release,
    TokenSampled,
)
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.plan import Buffer, Copying
from disagg.engine.shell import engine_thread
from disagg.engine.shell.copy_watch import CopyWatch
from disagg.proto.messages import ONE_RANK, ParallelShape
from tests.support.engine import (
    BLOCK,
    GATEWAY,
    IDLE,
    VOCAB_SIZE,
    key_of,
    kv_of,
    make_core,
    make_prompt,
    make_spec,
    new_buffer,
)
from tests.unit.engine.shell.test_engine_thread import WAIT_S, FakeClock, Harness, SignallingRunner

KEY = key_of("a")
PROMPT = make_prompt(20)
LOST = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


@dataclass
class PlayedCopying(Copying):
    """Over when the test says so."""

    data: Buffer = None
    error: Exception | None = None
    over: threading.Event = field(default_factory=threading.Event)
    waited_for: threading.Event = field(default_factory=threading.Event)

    def is_done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        self.waited_for.set()
        assert self.over.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    def checksum(self) -> int:
        return UNKEYED(self.data)


class Copies:
    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Gathered] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[GatherFailed] = queue.SimpleQueue()
        self.now = 0.0
        self.watch = CopyWatch(self.answers.put, self.failures.put, lambda: self.now)


@pytest.fixture
def copies() -> Iterator[Copies]:
    it = Copies()
    yield it
    assert it.watch.stop(WAIT_S)


def test_copies_are_answered_in_their_order(copies: Copies) -> None:
    first, second = PlayedCopying(new_buffer(3)), PlayedCopying(new_buffer(5))
    for seq, copying in enumerate((first, second)):
        copies.watch.watch(Gathering(KEY, seq, copying, most_tokens=16 * seq))
    second.over.set()
    assert copies.watch.num_open == 2
    first.over.set()
    assert [copies.answers.get(timeout=WAIT_S) for _ in range(2)] == [
        Gathered(KEY, seq, ok=True, checksum=UNKEYED(copying.data), most_tokens=16 * seq)
        for seq, copying in enumerate((first, second))
    ]


def test_an_error_is_the_engines_and_the_next_copy_is_answered(copies: Copies) -> None:
    failing, good = PlayedCopying(error=LOST), PlayedCopying(new_buffer(5))
    copies.watch.watch(Gathering(KEY, 0, failing))
    copies.watch.watch(Gathering(KEY, 1, good))
    failing.over.set()
    good.over.set()
    assert copies.failures.get(timeout=WAIT_S) == GatherFailed(KEY, 0, LOST)
    assert copies.answers.get(timeout=WAIT_S).seq == 1


def test_a_stop_waits_for_the_copies_and_keeps_no_buffer(copies: Copies) -> None:
    copying = PlayedCopying(new_buffer(5))
    is_kept = weakref.ref(copying)
    copies.watch.watch(Gathering(KEY, 0, copying))
    assert not copies.watch.stop(0.0)
    assert is_kept() is not None
    copying.over.set()
    del copying
    assert copies.watch.stop(WAIT_S)
    assert (copies.watch.num_open, is_kept()) == (0, None)
    assert copies.answers.get(timeout=WAIT_S).ok


def test_without_a_copy_there_is_no_thread(copies: Copies) -> None:
    before = threading.active_count()
    assert copies.watch.stop(0.0)
    assert threading.active_count() == before


def test_the_time_of_a_wait_is_that_of_the_oldest_copy(copies: Copies) -> None:
    assert copies.watch.waiting_s() == 0.0
    first, second = PlayedCopying(new_buffer(3)), PlayedCopying(new_buffer(5))
    for seq, copying in enumerate((first, second)):
        copies.watch.watch(Gathering(KEY, seq, copying))
    assert first.waited_for.wait(WAIT_S)
    copies.now = 40.0
    assert copies.watch.waiting_s() == 40.0
    first.over.set()
    assert second.waited_for.wait(WAIT_S)
    assert copies.watch.waiting_s() == 0.0
    copies.now = 41.5
    assert copies.watch.waiting_s() == 1.5
    second.over.set()
    assert copies.watch.stop(WAIT_S)
    assert copies.watch.waiting_s() == 0.0


def test_a_copy_is_waited_for_from_the_end_of_the_last_step_before_it(copies: Copies) -> None:
    copies.watch.steps_ended(7)
    copying = PlayedCopying(new_buffer(3))
    copies.watch.watch(Gathering(KEY, 0, copying), num_steps_before=9)
    assert copying.waited_for.wait(WAIT_S)
    waits = []
    for now, num_steps in [(10.0, 7), (20.0, 8), (30.0, 9), (40.0, 10), (50.0, 30)]:
        copies.now = now
        copies.watch.steps_ended(num_steps)
        waits.append(copies.watch.waiting_s())
    assert waits == [10.0, 0.0, 0.0, 10.0, 20.0]
    copying.over.set()


# ---------------------------------------------------------------- with an engine


class CopyingRunner(FakeModelRunner):
    """Its gathers fill their buffers at once, and are over when the test says so."""

    def __init__(self, num_blocks: int = 10) -> None:
        super().__init__(num_blocks, BLOCK, 4096, VOCAB_SIZE)
        self.begun: queue.SimpleQueue[PlayedCopying] = queue.SimpleQueue()

    def start_gather(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying:
        self.gather(block_table, start, end, out, peer, group)
        copying = PlayedCopying(out)
        self.begun.put(copying)
        return copying


@contextmanager
def prefilled() -> Iterator[tuple[Harness, CopyingRunner]]:
    """An engine whose sequence `a` is computed and held; one copy of it is under way."""
    runner = CopyingRunner()
    harness = Harness(make_core(runner=runner))
    harness.thread.post(Add(make_spec("a", PROMPT), hold_after_prefill=True))
    harness.thread.start()
    while not any(type(event).__name__ == "PrefillComputed" for event in harness.batches.get(timeout=WAIT_S).events):
        pass
    harness.thread.post(Gather(KEY, 0, 0, 20, new_buffer(20)))
    yield harness, runner
    assert harness.thread.stop(WAIT_S)


def test_steps_go_on_while_a_copy_is_under_way_and_its_answer_waits_for_none() -> None:
    with prefilled() as (harness, runner):
        copying = runner.begun.get(timeout=WAIT_S)
        harness.thread.post(Add(make_spec("b", make_prompt(20, seed=1), max_tokens=3)))
        harness.events_until_ended()
        assert harness.thread.num_copies == 1
        assert harness.gathered.empty()
        computing = threading.Event()
        harness.thread.call(lambda core: computing.wait(WAIT_S))  # the engine is busy
        copying.over.set()
        assert harness.gathered.get(timeout=WAIT_S) == Gathered(KEY, 0, ok=True, checksum=UNKEYED(kv_of(PROMPT, 0, 20)))
        computing.set()
        harness.thread.post(Release(KEY))
        assert harness.thread.call(lambda core: core.audit()).result(WAIT_S) == (IDLE, [])


def test_a_sequence_that_goes_leaves_nothing_while_its_copy_is_under_way() -> None:
    with prefilled() as (harness, runner):
        copying = runner.begun.get(timeout=WAIT_S)
        harness.thread.post(Release(KEY))
        assert harness.thread.call(lambda core: core.audit()).result(WAIT_S) == (IDLE, [])
        copying.over.set()
        assert harness.gathered.get(timeout=WAIT_S).ok
    assert harness.thread.num_copies == 0


def test_a_copy_that_fails_ends_its_sequence() -> None:
    with prefilled() as (harness, runner):
        copying = runner.begun.get(timeout=WAIT_S)
        copying.error = RuntimeError("no memory")
        copying.over.set()
        assert harness.events_until_ended() == [
            Gathered(KEY, 0, ok=False),
            Ended(KEY, GATEWAY, "failed", "gather: RuntimeError: no memory"),
        ]
        assert harness.thread.call(lambda core: core.audit()).result(WAIT_S) == (IDLE, [])


@pytest.mark.parametrize("is_released", [False, True])
def test_a_lost_device_ends_the_worker(is_released: bool) -> None:
    with prefilled() as (harness, runner):
        copying = runner.begun.get(timeout=WAIT_S)
        if is_released:
            harness.thread.post(Release(KEY))
        copying.error = LOST
        copying.over.set()
        assert harness.crashes.get(timeout=WAIT_S) is LOST


def test_a_stop_waits_for_the_copies_of_the_engine() -> None:
    with prefilled() as (harness, runner):
        copying = runner.begun.get(timeout=WAIT_S)
        assert not harness.thread.stop(0.05)
        copying.over.set()


def test_a_copy_for_a_fetch_beside_a_stream_is_waited_for() -> None:
    """It begins where a step is planned, not with its command."""
    runner = CopyingRunner(num_blocks=400)
    harness = Harness(make_core(runner=runner))
    prompt, key = make_prompt(300), key_of("fetch")

    def run_until(kind: type) -> None:
        while not any(isinstance(event, kind) for event in harness.batches.get(timeout=WAIT_S).events):
            pass

    harness.thread.start()
    harness.thread.post(Add(make_spec("earlier", prompt, max_tokens=1)))
    run_until(Ended)
    harness.thread.post(Pin(make_spec(key.request_id, prompt[:288], max_tokens=1)))
    run_until(Pinned)
    harness.thread.post(Add(make_spec("stream", make_prompt(20, seed=5), max_tokens=4000)))
    run_until(TokenSampled)
    harness.thread.post(Gather(key, 0, 0, 16, new_buffer(16)))
    runner.begun.get(timeout=WAIT_S).over.set()
    answer = harness.gathered.get(timeout=WAIT_S)
    assert (answer.key, answer.seq, answer.ok) == (key, 0, True)
    assert harness.thread.stop(WAIT_S)


class StagesRunner(SignallingRunner):
    """Other ranks compute its steps, and have to make its copies: each is over when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: queue.SimpleQueue[PlayedCopying] = queue.SimpleQueue()

    def start_gather(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying:
        copying = PlayedCopying(out)
        self.begun.put(copying)
        return copying


def test_a_stage_that_hangs_while_it_copies_is_known_by_the_time_as_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step took 20 seconds, and does not count for the copy behind it."""
    clock = FakeClock()
    monkeypatch.setattr(engine_thread, "process_clock", lambda: clock)
    runner = StagesRunner()
    harness = Harness(make_core(runner=runner, roles=("prefill",)))
    harness.thread.post(Add(make_spec("a", PROMPT), hold_after_prefill=True))
    harness.thread.start()
    step = runner.launched.get(timeout=WAIT_S)
    harness.thread.post(Gather(KEY, 0, 0, 20, new_buffer(20)))
    copying = runner.begun.get(timeout=WAIT_S)
    assert copying.waited_for.wait(WAIT_S)
    clock.seconds += 20.0
    assert (harness.thread.turn_s(), harness.thread.doing()) == (20.0, "")
    runner.end(step)
    while not any(type(event).__name__ == "PrefillComputed" for event in harness.batches.get(timeout=WAIT_S).events):
        pass
    assert (harness.thread.turn_s(), harness.thread.doing()) == (0.0, "")
    clock.seconds += 31.0
    assert (harness.thread.turn_s(), harness.thread.doing()) == (31.0, "waiting for a copy of KV")
    copying.over.set()
    assert harness.gathered.get(timeout=WAIT_S).ok
    harness.thread.post(Release(KEY))
    assert harness.thread.stop(WAIT_S)
    assert harness.thread.turn_s() == 0.0
