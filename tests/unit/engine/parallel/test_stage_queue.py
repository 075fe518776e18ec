"""Steps of prompts on real followers, which are threads here, in stages: what is launched, and what is waited for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from disagg.engine.batch_arrays import BatchArrays
from disagg.engine.commands import Add, PrefillComputed, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.parallel.followers import RankLostError
from disagg.engine.plan import ScheduledSequence, StepPlan, StepQueue
from disagg.engine.rank_messages import Failed
from disagg.engine.sharding.shards import Shard
from tests.support.engine import VOCAB_SIZE, make_prompt, make_sequence, make_spec
from tests.support.rank_connections import WAIT_S, RankGroup, rank_group

PROMPT = make_prompt(70)
CONFIG = WorkerConfig(worker_id="test-0", roles=("prefill",), model_path="fake", watermark=0.0, token_budget=32, pp=2)


class GatedRank(FakeModelRunner):
    """A rank that computes when it is allowed to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: queue.SimpleQueue[BatchArrays] = queue.SimpleQueue()
        self.allowed = threading.Semaphore(0)

    def compute(self, arrays: BatchArrays) -> None:
        self.steps.put(arrays)
        assert self.allowed.acquire(timeout=WAIT_S)
        super().compute(arrays)


@contextmanager
def staged_group(stages: int, tp: int = 1) -> Iterator[RankGroup[GatedRank]]:
    new = partial(GatedRank, 20, 16, 4096, VOCAB_SIZE, num_layers=stages)
    runners = [new(shard=Shard.of_number(number, tp, stages)) for number in range(stages * tp)]
    with rank_group(runners, 20) as group:
        try:
            yield group
        finally:
            for rank in group.ranks:
                allow(rank.runner, 100)


def allow(runner: GatedRank, number: int) -> None:
    runner.allowed.release(number)


def queue_of(group: RankGroup[GatedRank]) -> StepQueue:
    assert group.runner.step_queue is not None
    return group.runner.step_queue


def chunk(start: int, end: int) -> StepPlan:
    sequence = make_sequence(make_spec("a", PROMPT), hold=True)
    sequence.block_table = [7, 2, 5, 0, 9]
    return StepPlan(prefills=(ScheduledSequence(sequence, start, end - start, end == len(PROMPT)),))


def test_a_step_is_launched_before_the_stages_have_computed_the_last_one() -> None:
    with staged_group(2) as group:
        steps = queue_of(group)
        woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        assert steps.watch(lambda: woken.put(None))
        assert (steps.kind, steps.max_ahead) == ("prompts", 2)
        first = steps.enqueue(chunk(0, 32), None)
        second = steps.enqueue(chunk(32, 70), first)
        assert (first.ended_at, second.ended_at) == (None, None)
        allow(group.ranks[0].runner, 1)
        woken.get(timeout=WAIT_S)
        assert first.ended_at is not None
        assert second.ended_at is None
        assert first.result().token_ids == []
        allow(group.ranks[0].runner, 1)
        woken.get(timeout=WAIT_S)
        assert second.result().token_ids == fake_generate(PROMPT, 1, VOCAB_SIZE)
        assert first.ended_at < (second.ended_at or 0.0)
        assert group.faults == group.lost == []


def test_the_last_stage_says_when_a_step_is_computed() -> None:
    """Of four ranks in two stages the third one; the others are not asked."""
    with staged_group(2, tp=2) as group:
        first = queue_of(group).enqueue(chunk(0, 32), None)
        allow(group.ranks[1].runner, 1)
        first.result()
        for other in (group.ranks[0].runner, group.ranks[2].runner):
            assert other.steps.get(timeout=WAIT_S).num_decodes == 0


def test_a_core_has_a_step_in_each_stage() -> None:
    with staged_group(3) as group:
        for rank in group.ranks:
            allow(rank.runner, 100)
        core = EngineCore(group.runner, config=CONFIG)
        prompts = {name: make_prompt(90, seed=seed) for seed, name in enumerate("abc")}
        for name, prompt in prompts.items():
            core.handle(Add(make_spec(name, prompt), hold_after_prefill=True), 0.0)
        events = []
        while core.has_work:
            events += core.step(0.0)
        tokens = {event.key.request_id: event.token_id for event in events if isinstance(event, TokenSampled)}
        assert tokens == {name: fake_generate(prompt, 1, VOCAB_SIZE)[0] for name, prompt in prompts.items()}
        assert sum(isinstance(event, PrefillComputed) for event in events) == 3
        assert group.faults == []


def test_one_stage_alone_has_no_queue() -> None:
    with staged_group(1, tp=2) as group:
        assert group.runner.step_queue is None


def test_a_lost_stage_fails_what_is_under_way_and_ends_the_worker() -> None:
    with staged_group(2) as group:
        steps = queue_of(group)
        first = steps.enqueue(chunk(0, 32), None)
        group.connections[0].send(Failed(error="the device is gone"))
        with pytest.raises(RankLostError, match="the device is gone"):
            first.result()
        assert first.ended_at is not None, "nobody waits for it any longer"
        assert len(group.faults) == 1
        assert [str(error) for error in group.lost] == ["rank 1 is lost: the device is gone"]


def test_a_launch_that_fails_ends_the_worker() -> None:
    def fail(plan: StepPlan, arrays: BatchArrays) -> Any:
        raise RuntimeError("no memory")

    with staged_group(2) as group:
        group.runner._local.launch = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no memory"):
            queue_of(group).enqueue(chunk(0, 32), None)
        assert [str(error) for error in group.faults] == ["no memory"]


def test_a_copy_waits_for_the_step_before_it_and_the_next_launch_does_not_wait_for_the_copy() -> None:
    """It has what the step computed: what is there later, too."""
    with staged_group(2) as group:
        steps, nbytes = queue_of(group), 2 * 32 * 8
        first = steps.enqueue(chunk(0, 32), None)
        copying = group.runner.start_gather([7, 2, 5, 0, 9], 0, 32, group.runner.new_staging(nbytes))
        assert not isinstance(copying, int)
        second = steps.enqueue(chunk(32, 70), first)
        assert not copying.is_done()
        allow(group.ranks[0].runner, 1)
        copying.wait()
        assert copying.is_done()
        assert second.ended_at is None
        allow(group.ranks[0].runner, 1)
        second.result()
        later = group.runner.gather([7, 2, 5, 0, 9], 0, 32, group.runner.new_staging(nbytes))
        assert copying.checksum() == later


def test_a_copy_of_a_lost_stage_fails() -> None:
    with staged_group(2) as group:
        queue_of(group).enqueue(chunk(0, 32), None)
        copying = group.runner.start_gather([7, 2, 5, 0, 9], 0, 32, group.runner.new_staging(2 * 32 * 8))
        assert not isinstance(copying, int)
        group.connections[0].send(Failed(error="the device is gone"))
        with pytest.raises(RankLostError, match="the device is gone"):
            copying.wait()
        assert len(group.faults) == 1
