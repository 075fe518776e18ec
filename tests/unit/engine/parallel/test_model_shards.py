"""A model on several ranks computes what it computes on one: ranks as threads, fp32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.config import WorkerConfig
from disagg.engine.plan import StepPlan
from disagg.engine.runner.model.kv_cache import kv_layout
from disagg.engine.runner.model_runner import TorchModelRunner, warm_up
from disagg.engine.runner.weight_targets import Target, checkpoint_tensors
from disagg.engine.runner.weights import load_parameters
from disagg.engine.sharding.model_shards import rank_model, vocab_part, with_whole_experts
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.errors import ConfigError
from tests.support.stepping import assert_logits_close, chunk, generate, last_token, make_runner, make_sequence, prefill
from tests.support.tiny_models import EXPERT_KINDS, VOCAB_SIZE, make_checkpoint
from tests.unit.engine.parallel.ranks import Exchange, ThreadCollective, running_ranks

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(75)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40]
SHARDED = ("llama", "llama_tied", "llama_bias", "llama_odd_vocab", "qwen2", "qwen3", "qwen3_bias")
"""Of these, four ranks share the two KV heads of all but the one with the odd vocabulary, which has four."""
WIDTHS = (2, 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in (*SHARDED, *EXPERT_KINDS)}


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    """Logits have a standard deviation of about 4; only the order of fp32 sums differs."""
    assert actual.shape == expected.shape
    assert (actual - expected).square().mean().sqrt() < 1e-5
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0.0)


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("kind", SHARDED)
def test_tokens_and_logits_are_those_of_one_rank(folders: dict[str, Path], kind: str, size: int) -> None:
    whole = make_sequence(PROMPT, BLOCKS)
    expected = generate(make_runner(folders[kind]), whole, 20, chunk_tokens=33)
    assert len(set(whole.token_ids[len(PROMPT) :])) > 8

    sequence = make_sequence(PROMPT, BLOCKS)
    with running_ranks(folders[kind], size) as ranks:
        logits = generate(ranks, sequence, 20, chunk_tokens=33)

    assert sequence.token_ids == whole.token_ids
    assert_same_logits(logits, expected)


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_ranks_with_whole_experts_give_the_same_tokens(folders: dict[str, Path], kind: str, size: int) -> None:
    whole, sequence = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT, BLOCKS)
    runner = make_runner(folders[kind])
    expected = generate(runner, whole, 20, chunk_tokens=33)
    with running_ranks(folders[kind], size, ep=True) as ranks:
        logits = generate(ranks, sequence, 20, chunk_tokens=33)
        counts = [each._decoder.expert_counts for each in ranks.runners]
    assert sequence.token_ids == whole.token_ids
    assert_logits_close(logits, expected)
    for of_rank in counts:
        assert all(torch.equal(a, b) for a, b in zip(of_rank, runner._decoder.expert_counts, strict=True))


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("mixtral", 16, "tp is 16, by which `num_attention_heads` of this model \\(4\\) cannot be divided"),
        ("llama", 2, "ep is true, but LlamaForCausalLM has no experts"),
        ("qwen3_moe", 1, "ep: with tp 1 a rank has all experts of its layers; set tp to at least 2, or leave ep out"),
    ],
)
def test_whole_experts_that_cannot_be_divided_are_refused(
    folders: dict[str, Path], kind: str, size: int, message: str
) -> None:
    config = WorkerConfig(
        worker_id="test-0", roles=("prefill",), model_path=str(folders[kind]), num_blocks=8, tp=size, ep=True
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        TorchModelRunner(config, Shard(0, size))


def test_more_ranks_than_experts_are_refused(folders: dict[str, Path]) -> None:
    model = with_whole_experts(read_model_config(folders["mixtral"]))
    model = dataclasses.replace(model, num_heads=16, num_kv_heads=16)
    with pytest.raises(ConfigError, match=r"^tp is 16, by which `num_experts` of this model \(8\) cannot be divided$"):
        rank_model(model, Shard(0, 16))


@pytest.mark.parametrize("kind", ["llama_bias", "llama_odd_vocab"])
def test_decodes_and_prefill_chunks_share_a_step(folders: dict[str, Path], kind: str) -> None:
    """A decode, a chunk that ends its prompt and one that does not; then a step that samples nothing."""
    plans: list[StepPlan] = []
    decoding, ending, going_on = (
        make_sequence([*PROMPT[:20], 3], [20, 21]),
        make_sequence(PROMPT, BLOCKS),
        make_sequence(PROMPT[10:], [1, 3, 60, 4, 6]),
    )
    plans.append(StepPlan(prefills=(chunk(decoding, 0, 20), chunk(ending, 0, 40))))
    plans.append(StepPlan((last_token(decoding),), (chunk(going_on, 0, 33), chunk(ending, 40, 75))))
    plans.append(StepPlan(prefills=(chunk(going_on, 33, 40),)))
    runner = make_runner(folders[kind])
    with running_ranks(folders[kind], 4) as ranks:
        for plan, num_samples in zip(plans, (0, 2, 0), strict=True):
            expected, logits = runner.forward(plan), ranks.forward(plan)
            assert logits.shape == (num_samples, runner.vocab_size)
            if num_samples:
                assert_same_logits(logits, expected)


def test_rank_0_samples_as_one_rank_does(folders: dict[str, Path]) -> None:
    """Also where the best token is among the last of a padded vocabulary."""
    folder = folders["llama_odd_vocab"]
    plain = make_sequence(PROMPT, BLOCKS, temperature=0.9, seed=5, top_p=0.8, logprobs=2)
    forced = make_sequence(PROMPT[:30], [20, 21], logit_bias=((VOCAB_SIZE + 2, 100.0),))
    plan = StepPlan(prefills=(chunk(plain, 0, 75), chunk(forced, 0, 30)))
    expected = make_runner(folder).run(plan)
    with running_ranks(folder, 2) as ranks:
        result = ranks.run(plan)
    assert result.token_ids == expected.token_ids
    assert result.token_ids[1] == VOCAB_SIZE + 2
    assert result.logprobs[0].top_ids == expected.logprobs[0].top_ids
    assert result.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=1e-4)


def test_half_precision_is_as_close_on_two_ranks_as_on_one(folders: dict[str, Path]) -> None:
    expected = prefill(make_runner(folders["llama_bias"]), make_sequence(PROMPT, BLOCKS))
    with running_ranks(folders["llama_bias"], 2, dtype="bfloat16") as ranks:
        logits = prefill(ranks, make_sequence(PROMPT, BLOCKS))
    assert logits.dtype is torch.bfloat16
    assert (logits.float() - expected).square().mean().sqrt() < 0.5


def test_ranks_meet_twice_a_layer_and_at_the_embedding(folders: dict[str, Path]) -> None:
    with running_ranks(folders["llama"], 2) as ranks:
        ranks.forward(StepPlan(prefills=(chunk(make_sequence(PROMPT, BLOCKS), 0, 75),)))
        assert [collective.num_reduced for collective in ranks.collectives] == [1 + 2 * 3] * 2


def test_a_rank_that_leaves_fails_the_others(folders: dict[str, Path]) -> None:
    config = WorkerConfig(
        worker_id="test-0", roles=("prefill",), model_path=str(folders["llama"]), dtype="float32", num_blocks=8
    )
    exchange, runner = Exchange(2), TorchModelRunner(config, Shard(0, 2))
    runner.join(ThreadCollective(exchange, 0), 8)
    ThreadCollective(exchange, 1).close()
    with pytest.raises(RuntimeError):
        runner.forward(StepPlan(prefills=(chunk(make_sequence([1, 2], [0]), 0, 2),)))


def test_ranks_report_the_whole_model(folders: dict[str, Path]) -> None:
    """Peers compare layout and fingerprint, and the model is the same however it is divided."""
    whole = make_runner(folders["qwen3"])
    with running_ranks(folders["qwen3"], 4) as ranks:
        for rank, runner in enumerate(ranks.runners):
            assert (runner.layout, runner.fingerprint) == (whole.layout, whole.fingerprint)
            assert (runner.vocab_size, runner.max_model_len) == (whole.vocab_size, whole.max_model_len)
            assert (runner.shape.tp, runner.shard) == (4, Shard(rank, 4))


@pytest.mark.parametrize(("size", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_memory_holds_more_blocks_of_fewer_heads(folders: dict[str, Path], size: int, heads: int) -> None:
    layout = kv_layout(read_model_config(folders["llama"]), "float32")
    block_bytes = layout.bytes_per_token * 16 // 2 * heads
    config = WorkerConfig(
        worker_id="test-0",
        roles=("prefill",),
        model_path=str(folders["llama"]),
        dtype="float32",
        kv_cache_bytes=7 * block_bytes + 1,
    )
    runner = TorchModelRunner(config, Shard(0, size))
    assert (runner.num_blocks, runner.max_model_len) == (7, 7 * 16)


def test_ranks_take_the_number_of_blocks_that_all_have(folders: dict[str, Path]) -> None:
    config = WorkerConfig(
        worker_id="test-0", roles=("prefill",), model_path=str(folders["llama"]), num_blocks=8, max_model_len=100
    )
    runner = TorchModelRunner(config, Shard(1, 2))
    with pytest.raises(ConfigError, match="max_model_len 100 is more than the 96 tokens of the KV cache"):
        runner.join(ThreadCollective(Exchange(2), 1), 6)
    runner.join(ThreadCollective(Exchange(2), 1), 7)
    assert (runner.num_blocks, runner.max_model_len) == (7, 100)


def test_warm_up_is_a_step_of_all_ranks(folders: dict[str, Path]) -> None:
    with running_ranks(folders["llama"], 2) as ranks:
        for runner in ranks.runners:
            runner._cache.tensor_NL2KBD.fill_(7.0)
        as_runner: Any = ranks
        warm_up(as_runner)
        for runner in ranks.runners:
            assert not runner._cache.tensor_NL2KBD[0, :, :, :, :9].eq(7.0).any()
            assert runner._cache.tensor_NL2KBD[1:].eq(7.0).all()


# ---------------------------------------------------------------- what each rank reads


def of_ranks(folder: Path, config: ModelConfig, size: int) -> list[dict[str, Target]]:
    cpu = torch.device("cpu")
    shards = [Shard(rank, size) for rank in range(size)]
    parameters = [load_parameters(folder, config, torch.float32, cpu, shard) for shard in shards]
    return [checkpoint_tensors(config, each, shard) for each, shard in zip(parameters, shards, strict=True)]


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("kind", ["llama_bias", "llama_odd_vocab", "qwen3"])
def test_ranks_divide_the_checkpoint(folders: dict[str, Path], kind: str, size: int) -> None:
    """Side by side in the order of ranks, parts make the tensor; of a KV head that ranks share, each has all of it."""
    config = read_model_config(folders[kind])
    ranks = of_ranks(folders[kind], config, size)
    stored = load_file(folders[kind] / "model.safetensors")
    assert all(rank.keys() == stored.keys() for rank in ranks)
    for name, tensor in stored.items():
        parts = [rank[name] for rank in ranks]
        if not parts[0].parts:
            assert all(torch.equal(part.parameter, tensor) for part in parts), name
            continue
        shared = size // config.num_kv_heads if "k_proj" in name or "v_proj" in name else 1
        pieces = [part.parameter for part in parts[:: max(1, shared)]]
        assert torch.equal(torch.cat(pieces, dim=parts[0].dim), tensor), name
        assert all(torch.equal(part.parameter, pieces[rank // max(1, shared)]) for rank, part in enumerate(parts)), name


def test_the_padding_of_the_vocabulary_is_zero(folders: dict[str, Path]) -> None:
    config = read_model_config(folders["llama_odd_vocab"])
    parameters = load_parameters(folders["llama_odd_vocab"], config, torch.float32, torch.device("cpu"), Shard(3, 4))
    assert config.vocab_size == 387
    assert parameters.embedding_VH.shape[0] == 97
    assert parameters.embedding_VH[95].any()
    assert not parameters.embedding_VH[96].any()


@pytest.mark.parametrize(("vocab_size", "size"), [(387, 4), (384, 4), (5, 4), (2, 4), (7, 1)])
def test_every_token_id_is_on_one_rank(folders: dict[str, Path], vocab_size: int, size: int) -> None:
    config = dataclasses.replace(read_model_config(folders["llama"]), vocab_size=vocab_size)
    shards = [Shard(rank, size) for rank in range(size)]
    parts = [vocab_part(config, shard) for shard in shards]
    assert [token_id for part in parts for token_id in part] == list(range(vocab_size))
    assert {rank_model(config, shard).vocab_size for shard in shards} == {-(-vocab_size // size)}


def test_one_rank_is_the_model_itself(folders: dict[str, Path]) -> None:
    config = read_model_config(folders["qwen2"])
    assert rank_model(config, WHOLE) is config


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({}, 3, r"tp is 3, by which `num_attention_heads` of this model \(4\) cannot be divided"),
        ({"intermediate_size": 98}, 4, r"tp is 4, by which `intermediate_size` of this model \(98\) cannot be divided"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16},
            2,
            r"tp is 2, neither a divisor nor a multiple of `num_key_value_heads` of this model \(3\)",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_its_weights_are_read(
    tmp_path: Path, sizes: dict[str, Any], size: int, message: str
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    config = WorkerConfig(worker_id="test-0", roles=("prefill",), model_path=str(folder), num_blocks=4)
    with pytest.raises(ConfigError, match=message):
        TorchModelRunner(config, Shard(0, size))
