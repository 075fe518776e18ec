"""Captured decode steps, and steps with prompts computed together: the bits of the decoder's own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from disagg.engine.plan import NO_TOKEN, StepPlan
from disagg.engine.request import Sequence
from disagg.engine.runner.model.batch import to_batch
from disagg.engine.runner.model.replay import Scored
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import dispatch
from tests.support.stepping import chunk, last_token, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def new_runner(folder: Path, dtype: str = "bfloat16", **changes: int) -> TorchModelRunner:
    runner = make_runner(folder, dtype=dtype, **changes)
    if dispatch.packing_name(torch.bfloat16) is None:
        pytest.skip("no C++ products here")
    return runner


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [(seed * i * i + 3 * i + seed) % VOCAB_SIZE for i in range(num_tokens)]


def sequences(runner: TorchModelRunner) -> list[Sequence]:
    made = [
        make_sequence(prompt(1, 18), [9, 2]),
        make_sequence(prompt(2, 15), [31, 0]),
        make_sequence(prompt(3, 47), [17, 5, 40, 33]),
    ]
    for sequence in made:
        logits = prefill(runner, sequence)
        sequence.token_ids.append(int(logits.argmax()))
    return made


def of_the_decoder(runner: TorchModelRunner, plan: StepPlan) -> Tensor:
    """The logits of a plan, computed op by op."""
    logits = runner._decoder.forward(to_batch(runner.arrays(plan), runner._decoder.attention))
    assert logits is not None
    return logits


def step(runner: TorchModelRunner, batch: list[Sequence]) -> None:
    """One decode step, captured or replayed, against the decoder's own; each sequence grows."""
    plan = StepPlan(decodes=tuple(map(last_token, batch)))
    expected = of_the_decoder(runner, plan)
    kv = runner._cache.tensor_NL2KBD.clone()
    found = runner.forward(plan)
    assert torch.equal(found, expected)
    assert torch.equal(runner._cache.tensor_NL2KBD, kv)
    result = runner.run(plan)
    assert result.token_ids == expected.float().argmax(-1).tolist()
    for sequence, token in zip(batch, result.token_ids, strict=True):
        sequence.token_ids.append(token)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replays_have_the_bits_of_the_decoder(folder: Path, dtype: str) -> None:
    runner = new_runner(folder, dtype)
    a, b, c = sequences(runner)
    for batch in ([a, b, c], [a, b, c], [c], [c, a], [b, c], [a], [c, b, a]):
        step(runner, batch)
    assert runner._replayed is not None
    assert len(runner._replayed._captured) == 3


def test_steps_with_prompts_or_of_too_many_sequences_are_the_decoders(folder: Path) -> None:
    runner = new_runner(folder, max_num_seqs=2)
    batch = sequences(runner)
    step(runner, batch)
    joining = make_sequence(prompt(4, 20), [50, 51])
    runner.run(StepPlan(decodes=(last_token(batch[0]),), prefills=(chunk(joining, 0, 20),)))
    assert runner._replayed is not None
    assert len(runner._replayed._captured) == 0
    step(runner, batch[:2])
    assert len(runner._replayed._captured) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_without_a_token_changes_no_other_row_of_a_captured_step(folder: Path, dtype: str) -> None:
    """Nor of a replay, with the largest logits found in the capture and without."""
    runner = new_runner(folder, dtype)
    a, b, c = sequences(runner)
    bad = make_sequence(a.token_ids, a.block_table, repetition_penalty=1e-38, logprobs=2)
    asking = make_sequence(b.token_ids, b.block_table, logprobs=1)
    expected = runner.run(StepPlan(decodes=(last_token(asking), last_token(c))))
    for _ in range(2):
        found = runner.run(StepPlan(decodes=tuple(map(last_token, (bad, asking, c)))))
        assert found.token_ids == [NO_TOKEN, *expected.token_ids]
        assert found.logprobs == {1: expected.logprobs[0]}
        assert found.faults == {0: "request"}


def plans(batch: list[Sequence]) -> list[StepPlan]:
    """Steps with prompts, of every kind: alone, several, unfinished, beside decodes."""
    new = [make_sequence(prompt(seed, 20), [50 + 2 * seed, 51 + 2 * seed]) for seed in range(4)]
    return [
        StepPlan(prefills=(chunk(new[0], 0, 20),)),
        StepPlan(prefills=(chunk(new[1], 0, 16),)),
        StepPlan(decodes=(last_token(batch[0]),), prefills=(chunk(new[1], 16, 19),)),
        StepPlan(decodes=(last_token(batch[0]), last_token(batch[1])), prefills=(chunk(new[1], 19, 20),)),
        StepPlan(prefills=(chunk(new[2], 0, 20), chunk(new[3], 0, 7))),
        StepPlan(decodes=(last_token(batch[2]),), prefills=(chunk(new[3], 7, 20), chunk(new[2], 4, 20))),
    ]


def test_steps_with_prompts_have_the_bits_of_the_decoder(folder: Path) -> None:
    runner, other = new_runner(folder), new_runner(folder)
    made = zip(plans(sequences(runner)), plans(sequences(other)), strict=True)
    for plan, other_plan in [*made, *zip(plans(sequences(runner)), plans(sequences(other)), strict=True)]:
        expected = of_the_decoder(other, other_plan)
        found = runner.forward(plan)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
        assert torch.equal(runner._cache.tensor_NL2KBD, other._cache.tensor_NL2KBD)
    assert runner._replayed is not None
    assert runner._replayed._capturer is not None


def test_a_step_with_prompts_that_cannot_be_noted_is_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, other = new_runner(folder), new_runner(folder)
    monkeypatch.setattr(dispatch._choice().native.__class__, "paged_prefill_attention", lambda *_, **__: None)
    for plan, other_plan in zip(plans(sequences(runner)), plans(sequences(other)), strict=True):
        expected = of_the_decoder(other, other_plan)
        assert torch.equal(runner.forward(plan), expected)
    assert sum("op by op" in record.getMessage() for record in caplog.records) == 2  # of either runner, once


def test_a_kernel_that_declines_later_ends_the_noting_and_not_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, other = new_runner(folder), new_runner(folder)
    steps = list(zip(plans(sequences(runner)), plans(sequences(other)), strict=True))
    for index, (plan, other_plan) in enumerate([*steps, steps[0], steps[2]]):
        if index == len(steps):
            monkeypatch.setattr(dispatch._choice().native.__class__, "paged_prefill_attention", lambda *_, **__: None)
        expected = of_the_decoder(other, other_plan)
        assert torch.equal(runner.forward(plan), expected)
    assert [record.getMessage() for record in caplog.records if "op by op" in record.getMessage()] == [
        "decode steps cannot be captured, computing every step op by op from now on (slower): "
        "paged_prefill_attention: the kernel does not take these tensors (torch.bfloat16)"
    ]


def test_a_step_that_cannot_be_captured_is_computed_and_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = new_runner(folder)
    batch = sequences(runner)
    step(runner, batch)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch._choice().native.__class__, "paged_decode_attention", lambda *_, **__: None)
        step(runner, batch[:2])  # the reference takes the op: what it does is not on a tape
        step(runner, batch)
    warnings = [record.getMessage() for record in caplog.records if "op by op" in record.getMessage()]
    assert len(warnings) == 1
    assert "is not one of the C++ kernels" in warnings[0]
    assert runner._replayed is not None
    assert len(runner._replayed._captured) == 0


def test_without_the_cpp_kernels_nothing_is_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "disagg.engine.runner.model.replay")
    monkeypatch.setattr(dispatch, "native_library", lambda: None)
    runner = make_runner(folder)
    step(runner, sequences(runner))
    assert [record.getMessage() for record in caplog.records if record.name == "disagg.engine.runner.model.replay"] == [
        "decode steps are not captured on this device, computing every step op by op: the C++ kernels are not in use"
    ]


def test_a_block_outside_the_cache_is_refused_by_a_replay_too(folder: Path) -> None:
    runner = new_runner(folder)
    a, _, _ = sequences(runner)
    step(runner, [a])
    a.block_table[:] = [9, 64]
    for _ in range(2):
        with pytest.raises(IndexError, match=r"^token 0: its slot or its position is outside the cache$"):
            runner.run(StepPlan(decodes=(last_token(a),)))
    outside = make_sequence(prompt(4, 20), [50, 64])
    for _ in range(2):
        with pytest.raises(IndexError, match=r"^token 16: its slot or its position is outside the cache$"):
            runner.run(StepPlan(prefills=(chunk(outside, 0, 20),)))
    a.block_table[:] = [9, 2]
    step(runner, [a])


def test_rows_that_fill_up_a_bucket_are_dropped() -> None:
    scored = Scored(torch.arange(8.0).view(4, 2), torch.ones(4, dtype=torch.int64))
    assert scored.first(4) is scored
    logits_SV, largest_S = scored.first(3)
    assert logits_SV.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert largest_S is not None
    assert largest_S.tolist() == [1, 1, 1]
