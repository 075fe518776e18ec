from __future__ import annotations

import numpy as np
import pytest

from disagg.engine.fake_runner import FakeModelRunner, fake_generate, fake_logprobs
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.plan import Buffer, ScheduledSequence, StepPlan, StepResult
from disagg.engine.rank_messages import decode_step, encode_step
from disagg.engine.request import Sequence
from disagg.engine.sharding.kv_routes import head_slices
from disagg.engine.sharding.shards import Shard
from disagg.proto.messages import ParallelShape, TokenLogprobs
from tests.support.engine import VOCAB_SIZE, kv_of, make_prompt, make_sequence, make_spec

PROMPT = make_prompt(40)


def make_runner() -> FakeModelRunner:
    return FakeModelRunner(10, 16, 4096, VOCAB_SIZE)


def sequence_on(block_table: list[int]) -> Sequence:
    sequence = make_sequence(make_spec("a", PROMPT))
    sequence.block_table = block_table
    return sequence


def prefill(runner: FakeModelRunner, sequence: Sequence, start: int, end: int) -> list[int]:
    entry = ScheduledSequence(sequence, start, end - start, end == sequence.num_tokens)
    return runner.run(StepPlan(prefills=(entry,))).token_ids


def decode(runner: FakeModelRunner, sequence: Sequence, num_tokens: int) -> list[int]:
    output = []
    for _ in range(num_tokens):
        last = sequence.num_tokens - 1
        output += runner.run(StepPlan(decodes=(ScheduledSequence(sequence, last, 1, True),))).token_ids
        sequence.token_ids.append(output[-1])
    return output


def test_known_answers() -> None:
    assert fake_generate((1, 2, 3), 4, 1000) == [733, 274, 833, 313]
    assert fake_generate((1, 2, 3), 2) == [16733, 5949]


def test_output_depends_on_every_token_and_its_place() -> None:
    answers = {tuple(fake_generate(prompt, 3)) for prompt in [(1, 2, 3), (2, 1, 3), (1, 2, 4), (1, 2), (1, 2, 3, 3)]}
    assert len(answers) == 5


def test_generate_continues_itself() -> None:
    output = fake_generate(PROMPT, 10, VOCAB_SIZE)
    assert fake_generate([*PROMPT, *output[:6]], 4, VOCAB_SIZE) == output[6:]
    assert all(0 <= token_id < VOCAB_SIZE for token_id in output)


@pytest.mark.parametrize("cuts", [(40,), (16, 40), (7, 33, 39, 40)])
def test_chunks_and_block_tables_do_not_change_the_output(cuts: tuple[int, ...]) -> None:
    runner, sequence = make_runner(), sequence_on([9, 2, 5, 0])
    start, output = 0, []
    for end in cuts:
        output += prefill(runner, sequence, start, end)
        start = end
    sequence.token_ids += output
    output += decode(runner, sequence, 5)
    assert output == fake_generate(PROMPT, 6, VOCAB_SIZE)


def test_a_batch_answers_in_the_order_of_its_entries() -> None:
    runner = make_runner()
    first, second = sequence_on([0, 1, 2]), make_sequence(make_spec("b", make_prompt(20, seed=1)))
    second.block_table = [3, 4]
    prefill(runner, first, 0, 39)
    plan = StepPlan(
        decodes=(ScheduledSequence(first, 39, 1, True),), prefills=(ScheduledSequence(second, 0, 20, True),)
    )
    expected = [*fake_generate(PROMPT, 1, VOCAB_SIZE), *fake_generate(make_prompt(20, seed=1), 1, VOCAB_SIZE)]
    assert runner.run(plan) == StepResult(expected)


def test_known_logprobs() -> None:
    assert fake_logprobs(35, 0) == TokenLogprobs(-1.546875)
    assert fake_logprobs(999, 3, 1000) == TokenLogprobs(-1.609375, (999, 0, 1), (-1.609375, -2.609375, -3.609375))
    assert fake_logprobs(2, 1, 1000, token_id=1) == TokenLogprobs(-51.03125, (2,), (-1.03125,))
    assert fake_logprobs(1, 9, 2) == TokenLogprobs(-1.015625, (1, 0), (-1.015625, -2.015625))


def test_logprobs_come_for_those_that_ask() -> None:
    runner = make_runner()
    prompts = [make_prompt(20, seed=seed) for seed in range(3)]
    first_ids = [fake_generate(prompt, 1, VOCAB_SIZE)[0] for prompt in prompts]
    entries = []
    for index, (prompt, num_top) in enumerate(zip(prompts, (2, -1, 0), strict=True)):
        sequence = make_sequence(make_spec(str(index), prompt, logprobs=num_top))
        sequence.block_table = [2 * index, 2 * index + 1]
        entries.append(ScheduledSequence(sequence, 0, 20, True))
    assert runner.run(StepPlan(prefills=tuple(entries))) == StepResult(
        first_ids,
        {0: fake_logprobs(first_ids[0], 2, VOCAB_SIZE), 2: fake_logprobs(first_ids[2], 0, VOCAB_SIZE)},
    )


def test_a_bias_forces_and_bans() -> None:
    (greedy_id,) = fake_generate(PROMPT, 1, VOCAB_SIZE)
    banned = (greedy_id, -100.0)
    assert fake_generate(PROMPT, 3, VOCAB_SIZE, [(7, 100.0)]) == [7, 7, 7]
    assert fake_generate(PROMPT, 1, VOCAB_SIZE, [banned]) == [greedy_id + 1]
    assert fake_generate(PROMPT, 1, VOCAB_SIZE, [banned, (greedy_id + 1, -100.0)]) == [greedy_id + 2]
    assert fake_generate(PROMPT, 1, VOCAB_SIZE, [(greedy_id + 2, 1.5)]) == [greedy_id]
    assert fake_generate(PROMPT, 1, VOCAB_SIZE, [(greedy_id + 2, 1.5), (greedy_id + 2, 1.0)]) == [greedy_id + 2]
    runner, sequence = make_runner(), make_sequence(make_spec("a", PROMPT, logit_bias=[(7, 100.0)], logprobs=1))
    sequence.block_table = [0, 1, 2]
    result = runner.run(StepPlan(prefills=(ScheduledSequence(sequence, 0, 40, True),)))
    assert result == StepResult([7], {0: fake_logprobs(greedy_id, 1, VOCAB_SIZE, token_id=7)})


@pytest.mark.parametrize("damage", ["lost", "stale", "exchanged", "moved"])
def test_damaged_kv_gives_another_token(damage: str) -> None:
    runner, sequence = make_runner(), sequence_on([4, 7, 1])
    prefill(runner, sequence, 0, 39)
    match damage:
        case "lost":
            sequence.block_table[0] = 9
        case "stale":
            runner.scatter([7], 3, 4, kv_of([0] * 20, 19, 20))
        case "exchanged":
            sequence.block_table[:2] = [7, 4]
        case "moved":
            runner.scatter([4], 3, 4, kv_of(PROMPT, 4, 5))
    assert prefill(runner, sequence, 39, 40) != fake_generate(PROMPT, 1, VOCAB_SIZE)


def test_gather_is_canonical_and_scatter_its_inverse() -> None:
    source, target = make_runner(), make_runner()
    sequence = sequence_on([8, 3, 6])
    prefill(source, sequence, 0, 40)
    for start, end in [(0, 5), (5, 32), (32, 40)]:
        buffer = source.new_staging((end - start) * source.layout.bytes_per_token)
        source.gather([8, 3, 6], start, end, buffer)
        np.testing.assert_array_equal(buffer, kv_of(PROMPT, start, end))
        target.scatter([1, 0, 2], start, end, buffer)
    sequence.block_table = [1, 0, 2]
    assert prefill(target, sequence, 39, 40) == fake_generate(PROMPT, 1, VOCAB_SIZE)


def test_a_larger_buffer_is_filled_from_its_start_and_a_smaller_one_refused() -> None:
    runner = make_runner()
    prefill(runner, sequence_on([0, 1, 2]), 0, 40)
    buffer = np.full(48, 255, dtype=np.uint8)
    runner.gather([0, 1, 2], 10, 14, buffer)
    np.testing.assert_array_equal(buffer[:32], kv_of(PROMPT, 10, 14))
    assert buffer[32:].tolist() == [255] * 16
    with pytest.raises(ValueError, match="4 tokens of KV are 32 bytes, the buffer has 31"):
        runner.gather([0, 1, 2], 10, 14, buffer[:31])
    with pytest.raises(ValueError, match="buffer has 8"):
        runner.scatter([0, 1, 2], 10, 12, buffer[:8])


def test_the_layout_adds_up() -> None:
    (group,) = make_runner().layout.groups
    words = len(group.layers) * group.num_heads * (group.key_dim + group.value_dim)
    assert (group.dtype, group.bytes_per_token, words) == ("fake", 8, 2)


def test_steps_take_the_time_they_are_told() -> None:
    slept: list[float] = []
    runner = FakeModelRunner(
        10, 16, 4096, VOCAB_SIZE, step_time_s=lambda plan: plan.num_tokens * 0.5, sleep=slept.append
    )
    prefill(runner, sequence_on([0, 1, 2]), 0, 40)
    assert slept == [20.0]


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        FakeModelRunner(10, 16, 4096, 0)


# ---------------------------------------------------------------- several heads, several ranks


def ranks_of(num_kv_heads: int, size: int) -> list[FakeModelRunner]:
    shards = [Shard(rank, size) for rank in range(size)]
    return [FakeModelRunner(10, 16, 4096, VOCAB_SIZE, num_kv_heads=num_kv_heads, shard=shard) for shard in shards]


def run_together(ranks: list[FakeModelRunner], sequence: Sequence, start: int, end: int) -> list[int]:
    entry = ScheduledSequence(sequence, start, end - start, end == sequence.num_tokens)
    plan = StepPlan(prefills=(entry,))
    arrays = ranks[0].arrays(plan)
    for runner in ranks[1:]:
        runner.compute(decode_step(encode_step(arrays)))
    return ranks[0].step(plan, arrays).token_ids


def move(source: list[FakeModelRunner], target: list[FakeModelRunner], tables: tuple[list[int], list[int]]) -> None:
    """Tokens [3, 40) from one worker to another, each slice from its sender to its receiver."""
    layout, num_tokens = source[0].layout, 37
    head_bytes = layout.bytes_per_token // layout.groups[0].num_heads * num_tokens
    slices = head_slices(layout.groups[0].num_heads, len(source), len(target))
    parts: list[Buffer] = []
    for sender, runner in enumerate(source):
        part = runner.new_staging(sum(e.num_heads for e in slices if e.sender == sender) * head_bytes)
        checksums = runner.gather_part(tables[0], 3, 40, part, ParallelShape(tp=len(target)))
        pieces = np.split(part, np.cumsum([e.num_heads * head_bytes for e in slices if e.sender == sender]))[:-1]
        assert checksums == [UNKEYED(piece) for piece in pieces]
        parts.append(iter(pieces))
    arrived: list[list[Buffer]] = [[] for _ in target]
    for each in slices:
        arrived[each.receiver].append(next(parts[each.sender]))
    for runner, pieces in zip(target, arrived, strict=True):
        part = np.concatenate(pieces)
        runner.scatter_part(tables[1], 3, 40, part, ParallelShape(tp=len(source)))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4])
def test_heads_and_ranks_do_not_change_the_output(num_kv_heads: int) -> None:
    for size in (1, num_kv_heads, 2 * num_kv_heads):
        ranks, sequence = ranks_of(num_kv_heads, size), sequence_on([9, 2, 5, 0])
        assert run_together(ranks, sequence, 0, 33) == []
        assert run_together(ranks, sequence, 33, 40) == fake_generate(PROMPT, 1, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("num_kv_heads", "source_size", "target_size"),
    [(4, 1, 1), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 4, 2), (4, 2, 4), (2, 4, 2), (2, 2, 4), (2, 4, 4), (6, 3, 2)],
)
def test_kv_moves_between_workers_of_any_widths(num_kv_heads: int, source_size: int, target_size: int) -> None:
    """Every rank of the target leads once, so that each one's heads are read back."""
    source = ranks_of(num_kv_heads, source_size)
    run_together(source, sequence_on([9, 2, 5]), 0, 40)
    for leader in range(target_size):
        target = ranks_of(num_kv_heads, target_size)
        sequence = sequence_on([1, 0, 7])
        run_together(target, sequence, 0, 3)
        target = [target[leader], *target[:leader], *target[leader + 1 :]]
        move(source, sorted(target, key=lambda runner: runner.shard.rank), ([9, 2, 5], [1, 0, 7]))
        assert run_together(target, sequence, 39, 40) == fake_generate(PROMPT, 1, VOCAB_SIZE)


def test_a_worker_of_one_rank_gathers_and_scatters_whole() -> None:
    (source,), (target,) = ranks_of(2, 1), ranks_of(2, 1)
    sequence = sequence_on([1, 0, 2])
    prefill(source, sequence, 0, 40)
    buffer = source.new_staging(40 * source.layout.bytes_per_token)
    assert source.gather([1, 0, 2], 0, 40, buffer) == UNKEYED(buffer)
    np.testing.assert_array_equal(buffer.view(np.uint32).reshape(2, 2, 40)[0, 0], PROMPT)
    target.scatter([1, 0, 2], 0, 40, buffer)
    assert prefill(target, sequence, 39, 40) == fake_generate(PROMPT, 1, VOCAB_SIZE)
    halves = source.new_staging(40 * source.layout.bytes_per_token)
    parts = source.gather_part([1, 0, 2], 0, 40, halves, ParallelShape(tp=2))
    assert parts == [UNKEYED(half) for half in np.split(halves, 2)]
    assert source.gather([1, 0, 2], 0, 40, halves, ParallelShape(tp=2)) == UNKEYED.combined(parts)


@pytest.mark.parametrize("damage", ["exchanged", "one lost"])
def test_damaged_heads_give_another_token(damage: str) -> None:
    (runner,) = ranks_of(2, 1)
    sequence = sequence_on([1, 0, 2])
    prefill(runner, sequence, 0, 40)
    buffer = runner.new_staging(40 * runner.layout.bytes_per_token)
    runner.gather([1, 0, 2], 0, 40, buffer)
    words = buffer.view(np.uint32).reshape(2, 2, 40)
    if damage == "exchanged":
        words[:] = words[:, ::-1].copy()
    else:
        words[:, 1, 7] = 0
    runner.scatter([1, 0, 2], 0, 40, buffer)
    assert prefill(runner, sequence, 39, 40) != fake_generate(PROMPT, 1, VOCAB_SIZE)


def test_ranks_take_the_number_of_blocks_that_all_have() -> None:
    (runner, _) = ranks_of(2, 2)
    runner.join(None, 7)
    assert (runner.num_blocks, runner.shape) == (7, ParallelShape(tp=2))
    assert runner.layout == ranks_of(2, 1)[0].layout


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads must be positive, not 0"):
        FakeModelRunner(10, 16, 4096, VOCAB_SIZE, num_kv_heads=0)
    with pytest.raises(ValueError, match="3 cannot be divided among 2 ranks"):
        FakeModelRunner(10, 16, 4096, VOCAB_SIZE, num_kv_heads=3, shard=Shard(0, 2))
