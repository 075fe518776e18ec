"""The runner around the decoder: what it reports, order of samples, block tables that change, KV that moves away."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from disagg.engine.batch_arrays import BatchArrays
from disagg.engine.checkpoint.checkpoint import model_fingerprint
from disagg.engine.config import WorkerConfig
from disagg.engine.plan import NO_TOKEN, ModelRunner, ScheduledSequence, StepPlan, StepResult, WarmUp
from disagg.engine.request import Sequence
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.replay import Scored
from disagg.engine.runner.model_runner import TorchModelRunner, _warm_up_of, warm_up
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError
from disagg.proto.messages import KvLayout, RoleName, TokenLogprobs
from tests.support.stepping import (
    assert_logits_close,
    chunk,
    decode,
    generate,
    last_token,
    make_runner,
    make_sequence,
    prefill,
)
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint, reference_generate

PROMPT = [(11 * i * i + 2 * i + 1) % VOCAB_SIZE for i in range(75)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> TorchModelRunner:
    return make_runner(folder)


def test_it_reports_what_it_holds(folder: Path, runner: TorchModelRunner) -> None:
    protocol: ModelRunner = runner
    assert protocol.layout == KvLayout.dense(
        num_layers=3, num_kv_heads=2, head_dim=32, dtype="float32", bytes_per_token=3 * 2 * 2 * 32 * 4
    )
    assert (protocol.num_blocks, protocol.block_size, protocol.vocab_size) == (64, 16, VOCAB_SIZE)
    assert protocol.fingerprint == model_fingerprint(folder, "float32")
    assert runner.model_config.eos_token_ids == (256,)


def test_a_start_loads_no_compiler_of_torch(folder: Path) -> None:
    """Nor `transformers`: each would cost a worker more time and memory than torch itself."""
    program = f"""
import sys
from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.factories import make_runner, warm_up
config = WorkerConfig(worker_id="w", roles=("decode",), model_path={str(folder)!r}, dtype="bfloat16", num_blocks=8)
warm_up(make_runner(config), config)
print([name for name in ("torch", "torch._dynamo", "torch._inductor", "sympy", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['torch']\n"


def test_construction_sets_the_number_of_compute_threads(folder: Path) -> None:
    torch.set_num_threads(2)
    make_runner(folder)
    assert torch.get_num_threads() == 1


def test_bytes_size_the_cache(folder: Path) -> None:
    block_bytes = 32 * 3 * 2 * 2 * 32 * 2
    runner = make_runner(folder, num_blocks=None, kv_cache_bytes=9 * block_bytes + 5, block_size=32, dtype="bfloat16")
    assert (runner.num_blocks, runner.max_model_len) == (9, 9 * 32)


@pytest.mark.parametrize(("num_blocks", "expected"), [(64, 1024), (1000, 2048)])
def test_the_longest_sequence_is_bounded_by_model_and_cache(folder: Path, num_blocks: int, expected: int) -> None:
    assert make_runner(folder, num_blocks=num_blocks).max_model_len == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 2049, "num_blocks": 1000}, "max_model_len 2049 is more than the model's 2048"),
        ({"max_model_len": 1025}, "max_model_len 1025 is more than the 1024 tokens of the KV cache"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"device": "abacus"}, "device 'abacus' is not a torch device"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_runner(folder, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'cuda': this torch sees no CUDA device"):
        make_runner(folder, device="cuda")


def test_a_window_does_not_bound_the_longest_sequence(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 100}))
    assert make_runner(folder).max_model_len == 1024


def test_longrope_takes_its_long_factors_where_sequences_may_be_longer(tmp_path: Path) -> None:
    """KV of both is not the same, so fingerprints differ; what is not asked for is computed as the checkpoint means
    it."""
    folder = make_checkpoint("phi3_longrope", tmp_path)
    short, asked, long = (make_runner(folder, max_model_len=length) for length in (None, 128, 129))
    assert (short.max_model_len, asked.max_model_len, long.max_model_len) == (128, 128, 129)
    assert short.fingerprint == asked.fingerprint != long.fingerprint
    with pytest.raises(ConfigError, match="max_model_len 2049 is more than the model's 2048"):
        make_runner(folder, max_model_len=2049, num_blocks=1000)


def test_run_gives_one_token_per_sampling_entry_in_the_order_of_the_plan(
    folder: Path, runner: TorchModelRunner
) -> None:
    prompts = [PROMPT[:18], PROMPT[20:61], PROMPT[3:]]
    first_ids = [reference_generate(folder, prompt, 2)[0] for prompt in prompts]
    decoding = make_sequence(prompts[0], [10, 11])
    unfinished, ending = make_sequence(prompts[1], [20, 21, 22]), make_sequence(prompts[2], [30, 32, 33, 34, 35])
    assert runner.run(StepPlan(prefills=(chunk(decoding, 0, 18),))) == StepResult(first_ids[0][:1])
    decoding.token_ids.append(first_ids[0][0])

    plan = StepPlan(decodes=(last_token(decoding),), prefills=(chunk(unfinished, 0, 40), chunk(ending, 0, 72)))
    assert runner.run(plan) == StepResult([first_ids[0][1], first_ids[2][0]])
    assert runner.run(StepPlan(prefills=(chunk(unfinished, 40, 41),))) == StepResult(first_ids[1][:1])


def test_logprobs_are_of_the_logits_before_the_sampler_edits_them(runner: TorchModelRunner) -> None:
    forced = make_sequence(PROMPT[:18], [10, 11], logprobs=4, logit_bias=((5, 100.0),), temperature=0.7)
    silent = make_sequence(PROMPT[:20], [20, 21])
    plan = StepPlan(prefills=(chunk(silent, 0, 20), chunk(forced, 0, 18)))
    logprobs = torch.log_softmax(runner.forward(plan)[1].float(), dim=-1)
    top = logprobs.topk(4)

    result = runner.run(plan)

    assert result.token_ids[1] == 5
    assert result.logprobs == {
        1: TokenLogprobs(float(logprobs[5]), tuple(top.indices.tolist()), tuple(top.values.tolist()))
    }


def test_steps_without_samples_or_entries_give_nothing(runner: TorchModelRunner) -> None:
    assert runner.run(StepPlan(prefills=(chunk(make_sequence(PROMPT, BLOCKS), 0, 30),))) == StepResult([])
    assert runner.run(StepPlan()) == StepResult([])


def test_a_block_table_that_changed_in_place_is_read_again(runner: TorchModelRunner) -> None:
    """As after a preemption: the same sequence, in the same row of the batch, in as many other blocks."""
    expected = generate(runner, make_sequence(PROMPT, BLOCKS), 6)
    sequence = make_sequence(PROMPT, BLOCKS)
    sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    before = decode(runner, [sequence], 2)[0]

    sequence.block_table[:] = [50, 51, 52, 53, 54, 55, 56]
    prefill(runner, sequence)
    _overwrite(runner, BLOCKS)
    after = decode(runner, [sequence], 3)[0]

    assert_logits_close(torch.cat((before, after)), expected[1:])


def test_a_block_table_that_grows_is_read_again(runner: TorchModelRunner) -> None:
    expected = generate(runner, make_sequence(PROMPT[:15], BLOCKS), 5)
    sequence = make_sequence(PROMPT[:15], [60])
    sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    first = decode(runner, [sequence], 1)[0]

    sequence.block_table.append(61)
    rest = decode(runner, [sequence], 3)[0]

    assert_logits_close(torch.cat((first, rest)), expected[1:])


def test_batches_may_shrink_and_grow(runner: TorchModelRunner) -> None:
    """Rows of the kept table pass from one sequence to another."""
    prompts = [PROMPT[i : i + 17 + i] for i in range(12)]
    expected = []
    for prompt in prompts:
        alone = make_sequence(prompt, [62, 63, 61])
        generate(runner, alone, 5)
        expected.append(alone.token_ids)
    sequences = [make_sequence(prompt, [3 * i, 3 * i + 1, 3 * i + 2]) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        sequence.token_ids.append(int(prefill(runner, sequence).argmax()))

    for batch in (sequences[3:], sequences[:5], sequences[::-1], sequences[:3] + sequences[5:], sequences[3:5]):
        decode(runner, batch, 1)
    for sequence, token_ids in zip(sequences, expected, strict=True):
        decode(runner, [sequence], len(token_ids) - sequence.num_tokens)
        assert sequence.token_ids == token_ids


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("chunk_ends", [[75], [16, 64, 75], [7, 40, 41, 75]])
def test_a_sequence_moves_to_another_runner_and_goes_on_exactly(
    folder: Path, runner: TorchModelRunner, block_size: int, chunk_ends: list[int]
) -> None:
    expected_ids, expected_logits = reference_generate(folder, PROMPT, 8)
    sender = make_sequence(PROMPT, BLOCKS)
    token_id = int(prefill(runner, sender).argmax())

    other = make_runner(folder, block_size=block_size)
    receiver = make_sequence([*PROMPT, token_id], [30, 7, 12, 45, 1, 22, 3])
    _move(runner, sender, other, receiver, chunk_ends)
    logits = decode(other, [receiver], 7)[0]

    assert receiver.token_ids[len(PROMPT) :] == expected_ids
    assert_logits_close(logits, expected_logits[1:])


def test_moved_bytes_are_equal_and_in_canonical_order(folder: Path, runner: TorchModelRunner) -> None:
    """[layer][k|v][head][token][dim]: a later token of head 0 comes before the first token of head 1."""
    sequence = make_sequence(PROMPT, BLOCKS)
    prefill(runner, sequence)
    token_bytes = runner.layout.bytes_per_token
    whole, first, second = (runner.new_staging(token_bytes * count) for count in (75, 20, 55))
    runner.gather(BLOCKS, 0, 75, whole)
    runner.gather(BLOCKS, 0, 20, first)
    runner.gather(BLOCKS, 20, 75, second)

    assert whole.dtype == np.uint8
    shaped = [part.view(np.float32).reshape(3, 2, 2, -1, 32) for part in (first, second, whole)]
    np.testing.assert_array_equal(np.concatenate(shaped[:2], axis=3), shaped[2])
    key_cache, _ = runner._cache.layer(2)
    np.testing.assert_array_equal(shaped[2][2, 0, 1, 33], key_cache[BLOCKS[2], 1, 1].numpy())

    other = make_runner(folder, block_size=32)
    other.scatter([5, 4, 3], 0, 75, whole)
    back = other.new_staging(token_bytes * 75)
    other.gather([5, 4, 3], 0, 75, back)
    np.testing.assert_array_equal(back, whole)


def test_half_precision_moves_unchanged(folder: Path) -> None:
    runner, other = (make_runner(folder, dtype="bfloat16", block_size=size) for size in (16, 32))
    prefill(runner, make_sequence(PROMPT, BLOCKS))
    sent, received = (runner.new_staging(runner.layout.bytes_per_token * 75) for _ in range(2))
    runner.gather(BLOCKS, 0, 75, sent)
    other.scatter([2, 1, 0], 0, 75, sent)
    other.gather([2, 1, 0], 0, 75, received)
    assert len(set(sent.tolist())) > 100
    np.testing.assert_array_equal(received, sent)


def test_staging_may_be_larger_but_not_smaller(runner: TorchModelRunner) -> None:
    prefill(runner, make_sequence(PROMPT, BLOCKS))
    nbytes = 10 * runner.layout.bytes_per_token
    exact, large, small = (runner.new_staging(size) for size in (nbytes, nbytes + 100, nbytes - 1))
    large[:] = 77
    runner.gather(BLOCKS, 20, 30, exact)
    runner.gather(BLOCKS, 20, 30, large)

    np.testing.assert_array_equal(large[:nbytes], exact)
    assert (large[nbytes:] == 77).all()
    for move in (runner.gather, runner.scatter):
        with pytest.raises(ValueError, match=rf"tokens \[20, 30\) take {nbytes} bytes; the buffer has {nbytes - 1}"):
            move(BLOCKS, 20, 30, small)
        with pytest.raises(ValueError, match="not within 7 blocks of 16"):
            move(BLOCKS, 104, 114, exact)


def test_warm_up_touches_only_the_head_of_block_0(folder: Path) -> None:
    runner = make_runner(folder)
    cache = runner._cache.tensor_NL2KBD
    cache.fill_(7.0)

    warm_up(runner)

    assert not cache[0, :, :, :, :9].eq(7.0).any()
    assert cache[0, :, :, :, 9:].eq(7.0).all()
    assert cache[1:].eq(7.0).all()


def test_warm_up_computes_a_token_behind_a_context(folder: Path) -> None:
    runner = make_runner(folder)
    runner.warm_up = WarmUp(suffix_of=50)
    cache = runner._cache.tensor_NL2KBD
    cache.fill_(7.0)
    warm_up(runner)
    assert not cache[3, :, :, :, 1].eq(7.0).any()
    assert cache[3, :, :, :, 2:].eq(7.0).all()


@pytest.mark.parametrize("block_size", [16, 64])
def test_warm_up_of_a_gpu_has_blocks_for_all_its_tokens(folder: Path, block_size: int) -> None:
    """A chunk that fills its last block is followed by a token in the next one."""
    runner = make_runner(folder, block_size=block_size, num_blocks=1024 // block_size)
    runner.warm_up = _warm_up_of(torch.device("cuda:0"), Shard(0, 1), runner._config)
    cache = runner._cache.tensor_NL2KBD
    cache.fill_(7.0)

    warm_up(runner)

    is_left_T = cache.eq(7.0).all(dim=-1).all(dim=3).all(dim=2)[:, 0].flatten()
    last_of_suffix = runner.max_model_len - 1
    assert is_left_T.logical_not().nonzero().flatten().tolist() == [*range(129), last_of_suffix]


@pytest.mark.parametrize(
    ("device", "size", "role", "batches"),
    [
        ("cuda:0", 2, "decode", (1, 2, 4, 6)),
        ("cuda:0", 2, "prefill", (1,)),
        ("cuda:0", 1, "decode", (1,)),  # captured
        ("cpu", 2, "decode", (1,)),
    ],
)
def test_what_a_worker_computes_before_the_first_request(
    device: str, size: int, role: RoleName, batches: tuple[int, ...]
) -> None:
    config = WorkerConfig(worker_id="test-0", roles=(role,), model_path="/m", max_num_seqs=6)
    found = _warm_up_of(torch.device(device), Shard(0, size), config)
    assert (found.batches, found.copies, len(found.chunks)) == (batches, device != "cpu", 1 if device == "cpu" else 8)
    assert found.suffix_of == (0 if device == "cpu" else 2048)


def test_a_chunk_that_samples_nothing_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class PlayedEvent:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    runner = make_runner(folder)
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    runner._computed = Mark(pinned=True)  # as on a GPU
    sequence = make_sequence(PROMPT, BLOCKS)
    assert runner.run(StepPlan(prefills=(ScheduledSequence(sequence, 0, 5, samples=False),))).token_ids == []
    assert calls == ["record", "synchronize"]
    runner.run(StepPlan(prefills=(ScheduledSequence(sequence, 5, len(PROMPT) - 5, samples=True),)))
    assert calls == ["record", "synchronize"]


def test_a_row_that_is_not_finite_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raised here would end a worker of several ranks."""
    runner = make_runner(folder)
    good, bad = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT[:5], [7])
    entries = (ScheduledSequence(good, 0, len(PROMPT), samples=True), ScheduledSequence(bad, 0, 5, samples=True))
    plan = StepPlan(prefills=entries)
    expected = runner.run(plan).token_ids[0]
    score = runner._score

    def spoilt(arrays: BatchArrays) -> Scored:
        logits_SV = score(arrays).logits_SV.clone()
        logits_SV[1, 3] = float("nan")
        return Scored(logits_SV, None)

    monkeypatch.setattr(runner, "_score", spoilt)
    assert runner.run(plan) == StepResult([expected, NO_TOKEN], faults={1: "model"})


def test_a_copy_into_the_cache_is_waited_for_or_answered_by_its_event(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class PlayedEvent:
        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            calls.append("query")
            return len(calls) > 2

        def synchronize(self) -> None:
            calls.append("synchronize")

    runner = make_runner(folder)
    buffer = runner.new_staging(5 * runner.layout.bytes_per_token)
    assert runner.start_scatter(BLOCKS, 0, 5, buffer) is None
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    runner._device = torch.device("cuda", 0)  # where its tensors are not
    copying = runner.start_scatter(BLOCKS, 0, 5, buffer)
    assert copying is not None
    assert [copying.is_done(), copying.is_done()] == [False, True]
    assert calls == ["record", "query", "query"]
    calls.clear()
    runner.scatter(BLOCKS, 0, 5, buffer)
    assert calls == ["record", "synchronize"]


def test_a_buffer_is_kept_until_it_was_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is freed may be handed out again, for another stream to write to."""
    monkeypatch.setattr(torch.cuda, "Event", MagicMock)
    runner = make_runner(folder)
    buffer = torch.zeros(5 * runner.layout.bytes_per_token, dtype=torch.uint8)
    runner._device = torch.device("cuda", 0)
    copying, is_kept = runner.start_scatter(BLOCKS, 0, 5, buffer), weakref.ref(buffer)
    del buffer
    assert is_kept() is not None
    del copying
    assert is_kept() is None


def _overwrite(runner: TorchModelRunner, blocks: list[int]) -> None:
    for block in blocks:
        runner._cache.tensor_NL2KBD[block] = float("nan")


def _move(
    source: TorchModelRunner, sent: Sequence, target: TorchModelRunner, received: Sequence, chunk_ends: list[int]
) -> None:
    start = 0
    for end in chunk_ends:
        buffer = source.new_staging((end - start) * source.layout.bytes_per_token)
        source.gather(sent.block_table, start, end, buffer)
        target.scatter(received.block_table, start, end, buffer)
        start = end
