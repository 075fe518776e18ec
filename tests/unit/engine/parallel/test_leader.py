"""Rank 0's runner over real followers, which are threads here."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest

from disagg.engine.commands import Add, Ended, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import calibrate
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.parallel.followers import RankLostError
from disagg.engine.parallel.leader import GroupRunner
from disagg.engine.parallel.staging import GroupBuffer, StagingParts
from disagg.engine.plan import ScheduledSequence, StepPlan, StepResult, WarmUp
from disagg.engine.rank_messages import Failed
from disagg.engine.runner import model_runner
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.proto.messages import BufferSize, ParallelShape
from tests.support.engine import VOCAB_SIZE, make_prompt, make_sequence, make_spec
from tests.support.rank_connections import FakeGroup, carry, fake_group
from tests.support.secret import checksum

PROMPT = make_prompt(70)
TABLE = [7, 2, 5, 0, 9]
CONFIG = WorkerConfig(worker_id="test-0", roles=("prefill", "decode"), model_path="fake", watermark=0.0)
HEAD_BYTES = 8
WIDTHS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4), (4, 4)]


def generate(runner: Any, num_tokens: int) -> list[int]:
    """Greedy tokens of two requests that run together, by the engine core."""
    core = EngineCore(runner, config=CONFIG)
    prompts = {name: make_prompt(40, seed) for seed, name in enumerate("ab")}
    for name, prompt in prompts.items():
        core.handle(Add(make_spec(name, prompt, max_tokens=num_tokens)), 0.0)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while core.has_work:
        for event in core.step(0.0):
            if isinstance(event, TokenSampled):
                tokens[event.key.request_id].append(event.token_id)
            else:
                assert isinstance(event, Ended), event
                assert event.reason == "length", event
    for name, prompt in prompts.items():
        assert tokens[name] == fake_generate(prompt, num_tokens, VOCAB_SIZE)
    return [token for each in tokens.values() for token in each]


def prefill(runner: Any) -> None:
    """The KV of `PROMPT` into the blocks of `TABLE`."""
    sequence = make_sequence(make_spec("a", PROMPT))
    sequence.block_table = list(TABLE)
    runner.run(StepPlan(prefills=(ScheduledSequence(sequence, 0, len(PROMPT), True),)))


def next_token(runner: Any) -> list[int]:
    """What `runner` samples behind `PROMPT`, whose KV it has in the blocks of `TABLE`: all of it is read back."""
    sequence = make_sequence(make_spec("a", PROMPT))
    sequence.block_table = list(TABLE)
    last = len(PROMPT) - 1
    result: StepResult = runner.run(StepPlan(decodes=(ScheduledSequence(sequence, last, 1, True),)))
    return result.token_ids


def whole_runner(num_kv_heads: int) -> FakeModelRunner:
    runner = FakeModelRunner(10, 16, 4096, VOCAB_SIZE, num_kv_heads=num_kv_heads)
    runner.checksum = checksum
    return runner


@pytest.mark.parametrize(
    ("size", "num_kv_heads", "ends"),
    [(2, 1, ()), (2, 4, ()), (4, 2, ()), (3, 3, ()), (1, 1, (2, 5)), (2, 2, (1, 5)), (1, 2, (1, 2, 3, 5))],
)
def test_a_group_computes_what_one_rank_does(size: int, num_kv_heads: int, ends: tuple[int, ...]) -> None:
    shape = ParallelShape(tp=size, stage_ends=ends)
    with fake_group(size, num_kv_heads, pp=shape.pp, num_layers=5, stage_ends=ends) as group:
        assert len(generate(group.runner, 20)) == 40
        assert group.runner.shape == shape
        whole = FakeModelRunner(1, 16, 16, num_kv_heads=num_kv_heads, num_layers=5)
        assert group.runner.layout == whole.layout
    assert group.faults == group.lost == []
    assert [rank.statuses for rank in group.ranks] == [[0]] * (shape.num_ranks - 1)
    assert all(rank.transports.is_closed for rank in group.ranks)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("sender_tp", "receiver_tp"), WIDTHS)
def test_the_kv_of_one_group_goes_on_in_another(sender_tp: int, receiver_tp: int, num_kv_heads: int) -> None:
    """Gathered on all ranks of one, moved slice by slice, scattered on all ranks of the other, and read back there."""
    start, end = 5, len(PROMPT) - 1
    plan = plan_pair(whole_runner(num_kv_heads).layout, ParallelShape(tp=sender_tp), ParallelShape(tp=receiver_tp))
    nbytes = plan.groups[0].token_bytes * (end - start)
    with fake_group(sender_tp, num_kv_heads) as source, fake_group(receiver_tp, num_kv_heads) as target:
        prefill(source.runner)
        sent, received = source.runner.new_staging(nbytes + 100), target.runner.new_staging(nbytes)
        told = source.runner.gather(TABLE, start, end, sent[:nbytes], target.runner.shape)
        moved = carry(plan.groups[0], nbytes, partial(source.part, sent), partial(target.part, received))
        assert told == checksum.combined([checksum(each) for each in moved])
        fill_below(target, start)
        target.runner.scatter(TABLE, start, end, received[:nbytes], source.runner.shape)
        assert next_token(target.runner) == fake_generate(PROMPT, 1, VOCAB_SIZE)
        for rank, runner in enumerate(runners(target)):  # rank 0 reads back only its own heads
            whole = whole_runner(num_kv_heads)
            prefill(whole)
            heads = runner.shard.kv_heads(num_kv_heads)
            assert np.array_equal(runner._pages_2HNB[:, :, TABLE], whole._pages_2HNB[:, heads][:, :, TABLE]), rank
    assert source.faults == target.faults == []


def runners(group: FakeGroup) -> list[FakeModelRunner]:
    local: Any = group.runner._local
    return [local, *(rank.runner for rank in group.ranks)]


def fill_below(group: FakeGroup, end: int) -> None:
    """What the target has before the transfer begins."""
    sequence = make_sequence(make_spec("a", PROMPT))
    sequence.block_table = list(TABLE)
    group.runner.run(StepPlan(prefills=(ScheduledSequence(sequence, 0, end, False),)))
    last = ScheduledSequence(sequence, len(PROMPT) - 1, 1, False)
    group.runner.run(StepPlan(prefills=(last,)))


@pytest.mark.parametrize(("size", "num_kv_heads"), [(2, 4), (4, 2)])
def test_a_group_is_calibrated_like_one_rank(size: int, num_kv_heads: int) -> None:
    with fake_group(size, num_kv_heads, num_blocks=200) as group:
        samples = calibrate(group.runner, CONFIG, lambda: 0.0)
        alone = calibrate(FakeModelRunner(200, 16, 4096, VOCAB_SIZE), CONFIG, lambda: 0.0)
    assert samples == alone


def test_cleared_staging_is_zero_on_all_ranks() -> None:
    with fake_group(2, 2) as group:
        buffer = group.runner.new_staging(2 * HEAD_BYTES * 16)
        prefill(group.runner)
        group.runner.gather(TABLE, 0, 16, buffer)
        buffer[:] = 0
        group.runner.scatter(TABLE, 0, 16, buffer)
        for runner in runners(group):
            assert not runner._pages_2HNB[:, :, TABLE[0]].any()
            assert runner._pages_2HNB[:, :, TABLE[1]].all()


def test_parts_of_a_dropped_buffer_are_freed_everywhere() -> None:
    with fake_group(2, 2) as group:
        staging: Any = group.ranks[0].follower._staging
        first, second = group.runner.new_staging(512), group.runner.new_staging(512)
        cut = first[:256]
        prefill(group.runner)
        for buffer in (cut, second):
            group.runner.gather(TABLE, 0, 16, buffer)
        assert staging._parts.keys() == {first.number, second.number}
        number = second.number
        del first, second, buffer
        gc.collect()
        group.runner.gather(TABLE, 0, 16, cut)
        assert number != cut.number
        assert staging._parts.keys() == {cut.number}


def test_group_buffers_are_cut_at_their_end_only() -> None:
    buffer = GroupBuffer(3, np.ones(10, dtype=np.uint8), 20)
    cut = buffer[:12]
    assert (cut.number, cut.nbytes, len(cut), cut.local is buffer.local) == (3, 12, 12, True)
    assert cut[:50].nbytes == 12
    for bad in (slice(1, 4), slice(None, None, 2)):
        with pytest.raises(ValueError, match="only be cut at its end"):
            buffer[bad]
    with pytest.raises(ValueError, match="only be filled as a whole"):
        buffer[:3] = 0
    with pytest.raises(ValueError, match="only be filled as a whole"):
        buffer[:] = 1
    assert buffer.local.all()


def test_parts_are_made_once_and_are_large_enough() -> None:
    parts = StagingParts(lambda nbytes: np.zeros(nbytes, dtype=np.uint8), lambda nbytes: nbytes // 2)
    first = parts(1, 32)
    assert parts(1, 16) is first
    assert first.nbytes == 16
    with pytest.raises(ValueError, match="staging buffer 1 has 16 bytes, not 17"):
        parts(1, 34)
    parts.free(1)
    parts.free(1)
    assert parts(1, 34).nbytes == 17


# ---------------------------------------------------------------- faults


def test_a_copy_that_fails_on_another_rank_is_a_fault_of_the_group() -> None:
    with fake_group(2, 2) as group:
        buffer = group.runner.new_staging(512)
        staging: Any = group.ranks[0].follower._staging
        staging._parts[buffer.number] = np.empty(3, dtype=np.uint8)
        for copy in (group.runner.gather, group.runner.scatter):
            with pytest.raises(RankLostError, match="rank 1: ValueError: the part of staging buffer 1 has 3 bytes"):
                copy(TABLE, 0, 16, buffer)
    assert len(group.faults) == 2


def test_a_copy_that_fails_here_only_waits_for_the_others_and_is_no_fault_of_the_group() -> None:
    def fail(*_: object) -> list[int]:
        raise ValueError("not here")

    with fake_group(2, 2) as group:
        prefill(group.runner)
        buffer = group.runner.new_staging(512)
        group.runner._local.gather_part = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(ValueError, match="not here"):
            group.runner.gather(TABLE, 0, 16, buffer)
        assert group.part(buffer, 1).any()
        generate(group.runner, 3)
    assert group.faults == []


def test_what_would_fail_on_every_rank_is_refused_before_any_is_told() -> None:
    with fake_group(2, 2) as group:
        small, buffer = group.runner.new_staging(255), group.runner.new_staging(512)
        for copy in (group.runner.gather, group.runner.scatter):
            with pytest.raises(ValueError, match=r"tokens \[0, 16\) take 256 bytes; the buffer has 255"):
                copy(TABLE, 0, 16, small)
            with pytest.raises(ValueError, match="a table of 1 blocks does not cover token 16"):
                copy(TABLE[:1], 0, 17, buffer)
        with pytest.raises(ValueError, match="cannot be shared by 3 ranks"):
            group.runner.gather(TABLE, 0, 16, buffer, ParallelShape(tp=3))
        generate(group.runner, 3)
    assert group.faults == []


def test_a_step_that_fails_here_leaves_the_others_inside_it_and_ends_the_group() -> None:
    class Broken(FakeModelRunner):
        def step(self, plan: StepPlan, arrays: Any) -> StepResult:
            raise RuntimeError("a rank is gone")

    with fake_group(2) as group:
        group.runner._local = Broken(10, 16, 4096, VOCAB_SIZE)
        with pytest.raises(RuntimeError, match="a rank is gone"):
            prefill(group.runner)
    assert [str(fault) for fault in group.faults] == ["a rank is gone"]


def test_warm_up_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is compiled at its first use on a GPU: chunks, batches, and copies of KV."""
    steps: list[tuple[int, int]] = []
    copies: list[str] = []
    compute, gather, scatter = FakeModelRunner.compute, FakeModelRunner.gather_part, FakeModelRunner.scatter_part

    def computed(runner: FakeModelRunner, arrays: Any) -> None:
        steps.append((arrays.num_decodes, sum(chunk.num_tokens for chunk in arrays.prefills)))
        compute(runner, arrays)

    def gathered(runner: FakeModelRunner, *arguments: Any) -> list[int]:
        copies.append(f"gather {runner.shard.rank}")
        return gather(runner, *arguments)

    def scattered(runner: FakeModelRunner, *arguments: Any) -> None:
        copies.append(f"scatter {runner.shard.rank}")
        scatter(runner, *arguments)

    monkeypatch.setattr(FakeModelRunner, "compute", computed)
    monkeypatch.setattr(FakeModelRunner, "gather_part", gathered)
    monkeypatch.setattr(FakeModelRunner, "scatter_part", scattered)
    with fake_group(2, 2) as group:
        group.runner._local.warm_up = WarmUp(chunks=(1, 4), batches=(1, 2, 3), copies=True)
        runner = GroupRunner(group.runner._local, group.followers, group.faults.append)
        model_runner.warm_up(runner)
    assert steps == [(0, 1), (1, 0), (0, 4), (1, 0), (2, 0), (3, 0), (1, 0), (1, 0)]
    assert sorted(copies) == ["gather 0", "gather 1", "scatter 0", "scatter 1"]


def test_a_follower_that_fails_ends_the_group_with_its_reason() -> None:
    with fake_group(3, 1) as group:
        group.connections[1].send(Failed(error="out of memory"))
        for rank in group.ranks:
            assert rank.join() == 3
        with pytest.raises(RankLostError, match="rank 2 is lost: out of memory"):
            group.runner.scatter(TABLE, 0, 16, group.runner.new_staging(512))
    assert [str(error) for error in group.lost] == ["rank 2 is lost: out of memory"]


def test_a_follower_that_dies_in_the_middle_of_a_copy_answers_it() -> None:
    with fake_group(2, 2) as group:
        connection = group.connections[0]
        group.ranks[0].runner.gather_part = lambda *_: connection.close()  # type: ignore[method-assign,assignment]
        with pytest.raises(RankLostError, match="rank 1 is lost"):
            group.runner.gather(TABLE, 0, 16, group.runner.new_staging(512))
    assert [str(error) for error in group.lost] == ["rank 1 is lost: it ended its connection"]


class SizedRank(FakeModelRunner):
    """A stage with one layer more than the one before it, and experts behind the first one."""

    @property
    def buffers(self) -> tuple[BufferSize, ...]:
        stage = self.shard.stage
        experts = (BufferSize("experts", 900 - 100 * stage),) if stage else ()
        return (BufferSize("kv", 1000 * (1 + stage)), *experts)


@pytest.mark.parametrize(
    ("pp", "expected"),
    [(1, {"kv": 1000}), (2, {"kv": 2000, "experts": 800}), (3, {"kv": 3000, "experts": 800})],
)
def test_buffers_are_those_of_the_stage_where_they_are_largest(pp: int, expected: dict[str, int]) -> None:
    with fake_group(2, make=SizedRank, pp=pp, num_layers=3) as group:
        assert {each.name: each.num_bytes for each in group.runner.buffers} == expected


def test_a_stage_that_is_lost_states_no_buffers() -> None:
    with fake_group(1, make=SizedRank, pp=2, num_layers=2) as group:
        group.connections[0].send(Failed(error="the device is gone"))
        with pytest.raises(RankLostError, match=r"ranks \[1\] do not say how large their buffers are"):
            _ = group.runner.buffers
