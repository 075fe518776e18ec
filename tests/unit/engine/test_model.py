"""The decoder against transformers, and against itself in other batches: in fp32, tokens are equal and logits close."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disagg.engine.batch_arrays import BatchBuilder
from disagg.engine.checkpoint.model_config import RopeConfig
from disagg.engine.plan import StepPlan
from disagg.engine.runner.model import batch as batch_module
from disagg.engine.runner.model.batch import to_batch
from disagg.engine.runner.model.rope import inverse_frequencies
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import attention as providers
from disagg.kernels.attention import OwnKernels
from disagg.kernels.ops import AttentionSpec
from disagg.kernels.triton.ops import TritonOps
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
from tests.support.tiny_models import KINDS, VOCAB_SIZE, make_checkpoint, reference_generate, reference_logits

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(150)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40, 63, 11, 8, 26, 50]
OTHER_BLOCKS = [1, 3, 60, 4, 6, 33, 7, 10, 12, 13, 44, 14]
FAMILIES = ("llama", "qwen2", "qwen3")
SPEC = AttentionSpec(
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    block_size=4,
    scale=0.25,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def runners(folders: dict[str, Path]) -> dict[str, TorchModelRunner]:
    return {kind: make_runner(folders[kind]) for kind in FAMILIES}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_logits_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    expected_ids, expected_logits = reference_generate(folders[kind], PROMPT, 24)
    assert len(set(expected_ids)) > 12

    sequence = make_sequence(PROMPT, BLOCKS)
    logits = generate(make_runner(folders[kind]), sequence, 24)

    assert sequence.token_ids[len(PROMPT) :] == expected_ids
    assert_logits_close(logits, expected_logits)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17])
def test_prompts_around_a_block_edge(
    folders: dict[str, Path], runners: dict[str, TorchModelRunner], num_tokens: int
) -> None:
    expected_ids, expected_logits = reference_generate(folders["llama"], PROMPT[:num_tokens], 3)

    sequence = make_sequence(PROMPT[:num_tokens], BLOCKS)
    logits = generate(runners["llama"], sequence, 3)

    assert sequence.token_ids[num_tokens:] == expected_ids
    assert_logits_close(logits, expected_logits)


def test_logits_deep_in_a_long_context_are_those_of_transformers(folders: dict[str, Path]) -> None:
    """Rope tables and scaled frequencies far from position 0, beyond the original context of llama3 and yarn."""
    token_ids = (PROMPT * 7)[:1000]
    for kind in ("llama", "llama3_rope", "llama_yarn_rope"):
        expected = reference_logits(folders[kind], token_ids)[-1]
        logits = prefill(make_runner(folders[kind]), make_sequence(token_ids, list(range(64))), chunk_tokens=256)
        assert_logits_close(logits, expected)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [64, 37, 149, 1])
def test_prefill_in_chunks_is_prefill_at_once(
    runners: dict[str, TorchModelRunner], kind: str, chunk_tokens: int
) -> None:
    whole, parts = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT, OTHER_BLOCKS)
    expected = generate(runners[kind], whole, 4)

    logits = generate(runners[kind], parts, 4, chunk_tokens=chunk_tokens)

    assert parts.token_ids == whole.token_ids
    assert_logits_close(logits, expected)


@pytest.mark.parametrize("kind", FAMILIES)
def test_decoding_in_a_batch_is_decoding_alone(runners: dict[str, TorchModelRunner], kind: str) -> None:
    runner = runners[kind]
    prompts = [PROMPT[:3], PROMPT[40:71], PROMPT[5:53], PROMPT[100:116]]
    tables = [[20], [21, 22, 23], [24, 25, 27, 28], [29, 30]]
    alone = [make_sequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    expected = [generate(runner, sequence, 12) for sequence in alone]

    together = [make_sequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    for sequence in together:
        sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    logits = decode(runner, together, 11)

    for one, other, wanted, got in zip(alone, together, expected, logits, strict=True):
        assert other.token_ids == one.token_ids
        assert_logits_close(got, wanted[1:])


@pytest.mark.parametrize("kind", FAMILIES)
def test_decodes_and_prefill_chunks_share_a_step(runners: dict[str, TorchModelRunner], kind: str) -> None:
    """Two decodes, a chunk that ends its prompt, and one that does not: each as if it were alone."""
    runner = runners[kind]
    first, second = make_sequence(PROMPT[:20], [20, 21]), make_sequence(PROMPT[60:100], [22, 23, 24])
    ending, going_on = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT[10:], OTHER_BLOCKS)
    expected = [generate(runner, make_sequence(s.token_ids, s.block_table), 2) for s in (first, second)]
    expected_ending = prefill(runner, make_sequence(ending.token_ids, ending.block_table))
    expected_going_on = prefill(runner, make_sequence(going_on.token_ids, going_on.block_table))
    for sequence in (first, second):
        sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    runner.forward(StepPlan(prefills=(chunk(ending, 0, 90), chunk(going_on, 0, 33))))

    plan = StepPlan(
        decodes=(last_token(first), last_token(second)), prefills=(chunk(going_on, 33, 70), chunk(ending, 90, 150))
    )
    logits = runner.forward(plan)

    wanted = torch.stack([expected[0][1], expected[1][1], expected_ending])
    assert_logits_close(logits, wanted)
    assert_logits_close(prefill(runner, going_on, start=70), expected_going_on)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_cached_prefix_is_not_computed_again(runners: dict[str, TorchModelRunner], kind: str) -> None:
    """The second sequence shares the first one's blocks of 64 tokens and computes only what follows."""
    runner = runners[kind]
    prefill(runner, make_sequence(PROMPT, BLOCKS))
    token_ids = PROMPT[:64] + PROMPT[100:137]
    expected = generate(runner, make_sequence(token_ids, OTHER_BLOCKS), 5)

    sharing = make_sequence(token_ids, [*BLOCKS[:4], 51, 52, 53])
    logits = generate(runner, sharing, 5, start=64)

    assert_logits_close(logits, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_fp32(folders: dict[str, Path], dtype: str) -> None:
    """Logits have a standard deviation of about 4 here."""
    expected = reference_logits(folders["llama"], PROMPT)[-1]
    runner = make_runner(folders["llama"], dtype=dtype)

    sequence = make_sequence(PROMPT[:-1], BLOCKS)
    prefill(runner, sequence)
    sequence.token_ids.append(PROMPT[-1])
    logits = runner.forward(StepPlan(decodes=(last_token(sequence),)))[0]

    assert logits.dtype is getattr(torch, dtype)
    error = (logits.float() - expected).pow(2).mean().sqrt()
    assert error < (0.5 if dtype == "bfloat16" else 0.05)


def test_a_batch_in_full() -> None:
    """Blocks of 4; the row of the second decode held a longer table at the step before."""
    builder = BatchBuilder(4, max_model_len=40)
    long, short = make_sequence(list(range(30, 40)), [8, 6, 4]), make_sequence([50, 51, 52], [7])
    filling = make_sequence(list(range(100, 107)), [3, 9])
    builder.arrays(StepPlan(decodes=(last_token(short), last_token(long))))

    plan = StepPlan(decodes=(last_token(long), last_token(short)), prefills=(chunk(filling, 2, 6), chunk(short, 0, 3)))
    arrays = builder.arrays(plan)
    batch = to_batch(arrays, OwnKernels(SPEC))

    assert batch.token_ids_T.tolist() == [39, 52, 102, 103, 104, 105, 50, 51, 52]
    assert batch.positions_T.tolist() == [9, 2, 2, 3, 4, 5, 0, 1, 2]
    assert batch.slot_mapping_T.tolist() == [17, 30, 14, 15, 36, 37, 28, 29, 30]
    assert batch.num_decodes == 2
    assert batch.block_tables_SM.tolist() == [[8, 6, 4], [7, 0, 0]]
    assert batch.context_lens_S.tolist() == [10, 3]
    assert batch.prefills is not None
    assert [(part.rows, part.start, part.block_table_M.tolist()) for part in batch.prefills.chunks] == [
        (slice(2, 6), 2, [3, 9]),
        (slice(6, 9), 0, [7]),
    ]
    assert batch.sample_rows is not None
    assert batch.sample_rows.tolist() == [0, 1, 8]
    assert {tensor.dtype for tensor in (batch.token_ids_T, batch.positions_T, batch.slot_mapping_T)} == {torch.int64}
    assert {tensor.dtype for tensor in (batch.block_tables_SM, batch.context_lens_S)} == {torch.int32}


def test_a_batch_whose_rows_all_sample_names_none() -> None:
    sequence = make_sequence([5, 6], [1])
    plan = StepPlan(decodes=(last_token(sequence),), prefills=(chunk(sequence, 1, 2),))
    arrays = BatchBuilder(4, max_model_len=40).arrays(plan)
    assert arrays.sample_rows is None
    assert to_batch(arrays, OwnKernels(SPEC)).sample_rows is None


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is copied from tensor to tensor: where to, and whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in func.__name__:
            options = kwargs or {}
            self.made.append((str(options.get("device")), bool(options.get("non_blocking"))))
        return func(*args, **(kwargs or {}))


def test_a_batch_with_prompts_crosses_to_a_device_as_one_copy() -> None:
    sequence = make_sequence(list(range(30, 40)), [8, 6, 4])
    plan = StepPlan(decodes=(last_token(sequence),), prefills=(chunk(sequence, 2, 6), chunk(sequence, 0, 2)))
    arrays = BatchBuilder(4, max_model_len=40).arrays(plan)
    with Copies() as copies:
        to_batch(arrays, OwnKernels(replace(SPEC, device="meta")))
    assert copies.made == [("meta", True)]


def test_the_copy_has_the_list_of_work_and_every_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU in place of the device."""
    monkeypatch.setattr(batch_module, "_on_device", batch_module.copied_at_once)
    monkeypatch.setattr(providers, "plan_prefills", TritonOps().plan_prefills)
    sequences = [make_sequence(list(range(30, 40)), [8, 6, 4]), make_sequence([50, 51, 52], [7])]
    plan = StepPlan(
        decodes=(last_token(sequences[0]),), prefills=(chunk(sequences[0], 2, 6), chunk(sequences[1], 0, 2))
    )
    arrays = BatchBuilder(4, max_model_len=40).arrays(plan)
    found = to_batch(arrays, OwnKernels(SPEC))
    assert found.prefills is not None
    (planned,) = found.prefills.planned.values()
    assert planned.numbers.tolist() == planned.work.numbers.tolist()
    assert planned.block_tables.tolist() == [8, 6, 7]
    assert [part.block_table_M.tolist() for part in found.prefills.chunks] == [[8, 6], [7]]
    assert planned.work.items[:, [0, 1, 2, 3]].tolist() == [[1, 4, 2, 0], [5, 2, 0, 2]]
    assert found.sample_rows is not None
    tensors = (found.token_ids_T, found.positions_T, found.slot_mapping_T, found.block_tables_SM, found.context_lens_S)
    expected = (
        arrays.token_ids_T,
        arrays.positions_T,
        arrays.slot_mapping_T,
        arrays.block_tables_SM,
        arrays.context_lens_S,
        arrays.sample_rows,
    )
    for tensor, array in zip((*tensors, found.sample_rows), expected, strict=True):
        assert array is not None
        assert torch.equal(tensor, torch.from_numpy(array))
    memories = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, planned.numbers, planned.block_tables)}
    assert len(memories) == 1
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (planned.numbers, planned.block_tables))


ROPES: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "default": ({"rope_theta": 1e6}, RopeConfig(theta=1e6)),
    "linear": ({"rope_type": "linear", "factor": 4.0}, RopeConfig(kind="linear", factor=4.0)),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        RopeConfig(kind="llama3", theta=500000.0, factor=32.0, original_max_positions=8192),
    ),
    "yarn": (
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        RopeConfig(kind="yarn", theta=1e6, factor=4.0, original_max_positions=32768),
    ),
    "yarn_untruncated": (
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        RopeConfig(
            kind="yarn",
            theta=150000.0,
            factor=32.0,
            original_max_positions=4096,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_frequencies_at_real_sizes_are_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, rope = ROPES[kind]
    config: Any = LlamaConfig(
        head_dim=128, max_position_embeddings=131072, rope_parameters={"rope_theta": 10000.0, **parameters}
    )
    assert torch.equal(inverse_frequencies(rope, 128), LlamaRotaryEmbedding(config).inv_freq)
