"""KV caches that cannot be are refused before a worker is started, with the field and both sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.cluster.config import memory
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.config.memory import PoolCache, machine_memory
from disagg.cluster.config.schema import PoolConfig
from disagg.cluster.control.plan import plan_cluster
from disagg.engine.adapters.modules import slot_bytes
from disagg.engine.cache_groups import PoolLimits, model_layout, window_pools
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import ExpertsConfig
from disagg.engine.config import WeightsSource, WorkerConfig
from disagg.engine.runner.loaded_weights import load_weights
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.runner.model.parameters import ExpertsParameters
from disagg.engine.sharding.model_shards import rank_model, with_whole_experts
from disagg.engine.sharding.shards import Shard
from disagg.engine.sharding.stages import layer_weights, stage_ends, stage_ranges
from disagg.kernels.cpu.linear import NativeExpertWeight
from disagg.kernels.experts import ExpertWeight
from disagg.proto.errors import ConfigError
from tests.support.pooled_models import BERT, write_json
from tests.support.quantized import quantize_checkpoint
from tests.support.tiny_models import make_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


def refusal(path: Path | str, raw: dict[str, Any], memory_bytes: int | None = 16 * GIB) -> str:
    """What is wrong with a configuration; empty for nothing."""
    config = parse_config({"model": {"path": str(path)}, **raw})
    try:
        plan_cluster(config, (0, 1), memory_bytes=memory_bytes)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "elastic"])
def test_a_cache_that_holds_no_block_is_refused(checkpoint: Path, mode: str) -> None:
    model = read_model_config(checkpoint)
    block_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 16 * 2
    name = {"disaggregated": "decode", "colocated": "colocated", "elastic": "workers"}[mode]
    for num_bytes, is_refused in ((1, True), (block_bytes - 1, True), (block_bytes, False)):
        found = refusal(checkpoint, {"mode": mode, "pools": {name: {"kv_cache_bytes": num_bytes}}})
        wrong = f"pools.{name}.kv_cache_bytes: {num_bytes} bytes hold no block of 16 tokens of this model, which takes "
        assert found == (f"{wrong}{block_bytes}" if is_refused else "")
    assert refusal(checkpoint, {"mode": mode, "pools": {name: {"kv_cache_bytes": 1, "num_blocks": 4}}}) == ""


@pytest.mark.parametrize("field", ["host_bytes", "disk"])
def test_a_tier_that_does_not_hold_the_longest_sequence_is_refused(
    checkpoint: Path, tmp_path: Path, field: str
) -> None:
    model = read_model_config(checkpoint)
    needed = 2 * 128 * 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    for num_bytes in (needed - 1, needed):
        tiers = {field: num_bytes if field == "host_bytes" else {"path": str(tmp_path / "kv"), "bytes": num_bytes}}
        raw = {"model": {"path": str(checkpoint), "max_model_len": 200}, "kv_cache": {"tiers": tiers}}
        name = "host_bytes" if field == "host_bytes" else "disk.bytes"
        wrong = (
            f"kv_cache.tiers.{name}: {num_bytes} is less than the KV of max_model_len 200 in pools.prefill, {needed}"
        )
        assert refusal(checkpoint, raw) == (wrong if num_bytes < needed else "")


def test_the_smallest_cache_has_windows_beside_its_block(tmp_path: Path) -> None:
    path = make_checkpoint("gemma3", tmp_path)
    found = refusal(path, {"pools": {"decode": {"kv_cache_bytes": 1000}}})
    assert found.startswith("pools.decode.kv_cache_bytes: 1000 bytes hold no block of 16 tokens of this model, ")
    assert found.endswith(" with the windows of one sequence and one step of 512 tokens")


def test_an_encoder_has_no_cache(checkpoint: Path, tmp_path: Path) -> None:
    for name, content in (("config.json", BERT), ("tokenizer.json", {})):
        write_json(tmp_path / name, content)
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    for size in ({"kv_cache_bytes": 1}, {"kv_cache_bytes": 64 * GIB}, {"num_blocks": 1 << 30}):
        raw = {"mode": "colocated", "pools": {"colocated": size}}
        assert refusal(tmp_path, raw) == ""
        assert refusal(checkpoint, raw) != ""


def test_caches_that_the_machine_cannot_hold_are_refused(checkpoint: Path) -> None:
    large = {"pools": {"decode": {"size": 2, "kv_cache_bytes": 8 * GIB}}}
    assert refusal(checkpoint, large) == (
        "pools.decode.kv_cache_bytes: 16.0 GiB for 2 workers; the KV caches of all workers take 17.0 GiB, and this "
        "machine has 16.0 GiB"
    )
    assert refusal(checkpoint, large, 17 * GIB) == ""
    assert refusal(checkpoint, large, None) == ""  # the workers may be on other machines
    blocks = refusal(checkpoint, {"pools": {"prefill": {"num_blocks": 10**9}}})
    assert blocks.startswith("pools.prefill.num_blocks: ")
    assert blocks.endswith("and this machine has 16.0 GiB")


def test_what_experts_need_beside_weights_counts(tmp_path: Path) -> None:
    """Rows of a step of 512 tokens, each with four experts of 40 features and 64 inputs."""
    path = make_checkpoint("qwen3_moe", tmp_path)
    needed = read_model_config(path).scratch_bytes(512, 2)
    assert needed == pytest.approx(512 * 4 * (4 * 64 + 2 * 40 * 2 + 4 * 40), rel=0.8)
    caches = {"prefill": {"kv_cache_bytes": GIB}, "decode": {"kv_cache_bytes": GIB}}
    assert refusal(path, {"pools": caches}, 2 * GIB + 2 * needed) == ""
    assert "KV caches of all workers take" in refusal(path, {"pools": caches}, 2 * GIB + 2 * needed - 1)


def notes(path: Path, raw: dict[str, Any]) -> tuple[str, ...]:
    return plan_cluster(parse_config({"model": {"path": str(path)}, **raw}), (0, 1)).memory


def test_each_pool_of_windows_is_stated(tmp_path: Path, checkpoint: Path) -> None:
    """Gemma 3 of four layers, three of them with a window of 16 tokens, on two ranks that have a head each."""
    path = make_checkpoint("gemma3", tmp_path)
    pools = {"prefill": {"num_blocks": 100, "tp": 2}, "decode": {"kv_cache_bytes": 1 << 20}}
    prefill, decode = notes(path, {"pools": pools})
    model = read_model_config(path)
    layout = model_layout(model, "bfloat16", 2)
    full, window = layout.groups
    (blocks,) = window_pools(layout, 100, 16, PoolLimits(256, 512))
    sizes = [num * 16 * group.bytes_per_token / 2 / 2**20 for num, group in ((100, full), (blocks, window))]
    assert prefill == (
        f"pools.prefill: each rank has KV of all tokens in 100 blocks (1600 tokens, {sizes[0]:.1f} MiB), KV of the "
        f"last {window.window} tokens in {blocks} blocks ({blocks * 16} tokens, {sizes[1]:.1f} MiB)"
    )
    assert decode.startswith("pools.decode: each rank has KV of all tokens in ")
    assert notes(checkpoint, {}) == ()


def test_the_memory_of_each_stage_is_stated_and_adds_up(checkpoint: Path) -> None:
    """Qwen 3 of three layers on two stages of two ranks, whose weights and KV are those of one rank, each once."""
    model = read_model_config(checkpoint)
    layer = sum(layer_weights(model, each) for each in model.layers) // model.num_layers
    embedding = model.vocab_size * model.hidden_size
    assert stage_ends(model, 2) == (2, 3)
    kv = 2 * model.num_kv_heads * model.head_dim * 16 * 2
    weights, caches = [(2 * layer + embedding) * 2 // 2, (layer + embedding) * 2 // 2], [2 * 64 * kv // 2, 64 * kv // 2]
    pools = {"prefill": {"kv_cache_bytes": caches[0], "tp": 2, "pp": 2}, "decode": {"num_blocks": 64}}
    assert notes(checkpoint, {"pools": pools}) == tuple(
        f"pools.prefill: each rank of stage {stage}, {layers}, has weights of {weights[stage] / 2**20:.1f} MiB, "
        f"KV of all tokens in 64 blocks (1024 tokens, {caches[stage] / 2**20:.1f} MiB)"
        for stage, layers in enumerate(("layers 0 to 1", "layers 2 to 2"))
    )
    both = 2 * 3 * 64 * kv
    assert refusal(checkpoint, {"pools": pools}, both) == ""
    assert "KV caches of all workers take" in refusal(checkpoint, {"pools": pools}, both - 1)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 3), (2, 2)])
def test_a_stage_loads_and_allocates_what_was_planned(kind: str, tp: int, pp: int, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    model = read_model_config(path)
    pool = PoolConfig(tp=tp, pp=pp, num_blocks=40)
    cache = PoolCache("prefill", pool, model, stage_ranges(stage_ends(model, pp)), "bfloat16", 2, 2)
    worker = WorkerConfig(worker_id="w", roles=("prefill",), model_path=str(path), tp=tp, pp=pp, dtype="bfloat16")
    for number, stage in enumerate(cache.stages):
        shard = Shard(0, tp, number, pp)
        loaded = load_weights(worker.weights, model, torch.device("cpu"), shard)
        assert sum(matrices(loaded.parameters).values()) == stage.weights
        blocks = window_pools(cache.layout, 40, 16, PoolLimits(256, worker.step_tokens))
        ends = stage_ends(model, pp)
        kv = KvCache(cache.layout, 40, 16, torch.device("cpu"), shard, window_blocks=blocks, stage_ends=ends)
        assert kv.nbytes == stage.kv


def matrices(parameters: Any) -> dict[int, int]:
    """Bytes of each matrix by its address."""
    if isinstance(parameters, torch.Tensor):
        return {parameters.data_ptr(): parameters.nbytes} if parameters.dim() > 1 and parameters.numel() else {}
    if isinstance(parameters, list | tuple):
        return {key: size for each in parameters for key, size in matrices(each).items()}
    if not dataclasses.is_dataclass(parameters):
        return {}
    return matrices([getattr(parameters, field.name) for field in dataclasses.fields(parameters)])


def test_the_largest_stage_decides_how_many_blocks_there_are(checkpoint: Path) -> None:
    model = read_model_config(checkpoint)
    of_layer = 2 * model.num_kv_heads * model.head_dim * 16 * 2
    pools = {"decode": {"pp": 2, "kv_cache_bytes": 2 * of_layer - 1}}
    assert refusal(checkpoint, {"pools": pools}) == (
        f"pools.decode.kv_cache_bytes: {2 * of_layer - 1} bytes hold no block of 16 tokens of this model, which takes "
        f"{2 * of_layer}"
    )
    pools["decode"]["kv_cache_bytes"] += 1
    assert refusal(checkpoint, {"pools": pools}) == ""


def test_a_stage_has_only_the_windows_of_its_layers(tmp_path: Path) -> None:
    """Gemma 3 of four layers, the last of which keeps all tokens."""
    path = make_checkpoint("gemma3", tmp_path)
    model = read_model_config(path)
    full, window = model_layout(model, "bfloat16", 2).groups
    pools = {"prefill": {"num_blocks": 100, "pp": 4}, "decode": {"kv_cache_bytes": 1 << 20, "pp": 4}}
    plan = plan_cluster(parse_config({"model": {"path": str(path)}, "pools": pools}), (0, 1))
    found = plan.memory
    prefill, decode = (PoolLimits(256, worker.step_tokens) for worker in plan.workers)
    blocks = window_pools(model_layout(model, "bfloat16", 2), 100, 16, prefill)[0]
    one_window = blocks * 16 * window.bytes_per_token / len(window.layers) / 2**20
    for layer, note in enumerate(found[:4]):
        kept = (
            f"all tokens in 100 blocks (1600 tokens, {1600 * full.bytes_per_token / len(full.layers) / 2**20:.1f} MiB)"
            if layer in full.layers
            else f"the last {window.window} tokens in {blocks} blocks ({blocks * 16} tokens, {one_window:.1f} MiB)"
        )
        assert note.startswith(f"pools.prefill: each rank of stage {layer}, layers {layer} to {layer}, has weights of ")
        assert note.endswith(f"MiB, KV of {kept}")
    (num_blocks,) = {note.split(" KV of all tokens in ")[1].split()[0] for note in found[4:] if " of all " in note}
    (num_windows,) = {note.split(" tokens in ")[1].split()[0] for note in found[4:] if " of the last " in note}
    assert (int(num_windows),) == window_pools(model_layout(model, "bfloat16", 2), int(num_blocks), 16, decode)


@pytest.mark.parametrize(("quantization", "num_ranks", "weight_bytes"), [("none", 2, 2), ("int8", 1, 1)])
def test_what_each_rank_has_of_experts_is_stated(
    quantization: str, num_ranks: int, weight_bytes: int, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path)
    raw = {"mode": "colocated", "model": {"path": str(path), "quantization": quantization}}
    config = parse_config({**raw, "pools": {"colocated": {"tp": num_ranks, "ep": num_ranks > 1}}})
    (found,) = plan_cluster(config, (0, 1)).memory
    rank = rank_model(with_whole_experts(read_model_config(path)), Shard(0, num_ranks))
    experts = [layer.ffn for layer in rank.layers if isinstance(layer.ffn, ExpertsConfig)]
    weights = sum(3 * rank.hidden_size * len(ffn.held) * ffn.intermediate_size for ffn in experts)
    assert found == (
        f"pools.colocated: each rank has experts of {weights * weight_bytes / 2**20:.1f} MiB and "
        f"{rank.scratch_bytes(512, 2) / 2**20:.1f} MiB to compute them"
    )


def test_experts_in_mxfp4_count_as_they_are_loaded(tmp_path: Path) -> None:
    path = make_checkpoint("gpt_oss", tmp_path, dtype=torch.bfloat16)
    quantize_checkpoint("mxfp4", path)
    model, sizes = read_model_config(path), dict[str, float]()
    for quantization in ("none", "stored"):
        raw = {"mode": "colocated", "model": {"path": str(path), "quantization": quantization}}
        (cache,) = plan_cluster(parse_config(raw), (0, 1)).memory
        assert (
            f"experts of {sizes.setdefault(quantization, loaded_experts(path, quantization)) / 2**20:.1f} MiB" in cache
        )
    assert sizes["none"] == model.num_expert_weights * 2
    assert sizes["stored"] == model.num_expert_weights * 17 / 32


def loaded_experts(path: Path, quantization: Any) -> int:
    """Bytes of packed weights of experts."""
    source = WeightsSource(str(path), "bfloat16", quantization, False)
    layers = load_weights(source, read_model_config(path), torch.device("cpu")).parameters.layers
    experts = [layer.ffn for layer in layers if isinstance(layer.ffn, ExpertsParameters)]
    return sum(
        each.nbytes for ffn in experts for each in (packed(ffn.gate_up_weight_L2IH), packed(ffn.down_weight_LHI))
    )


def packed(weight: ExpertWeight) -> torch.Tensor:
    assert isinstance(weight, NativeExpertWeight)
    return weight.packed


def test_slots_of_adapters_count(checkpoint: Path) -> None:
    """Of a rank of two: half of what q, k, v, gate and up give, and half of what o and down take."""
    model = read_model_config(checkpoint)
    pools = {"prefill": {"kv_cache_bytes": GIB, "tp": 2}, "decode": {"kv_cache_bytes": GIB}}
    config = {"pools": pools, "adapters": {"folder": "adapters", "max_loaded": 3, "max_rank": 20}}
    whole, half = (3 * slot_bytes(model, Shard(0, size), 20, 2) for size in (1, 2))
    hidden, q, kv, inner = 64, 128, 64, 96
    numbers = 32 * (3 * hidden + q + 2 * kv + q + hidden + 2 * hidden + 2 * inner + inner + hidden)
    assert whole == 3 * model.num_layers * (numbers * 2 + 7 * 8)
    assert half < whole
    assert notes(checkpoint, config) == (
        f"pools.prefill: each rank has slots for 3 adapters of {half / 2**20:.1f} MiB",
        f"pools.decode: each rank has slots for 3 adapters of {whole / 2**20:.1f} MiB",
    )
    assert refusal(checkpoint, config, 3 * GIB + 2 * half + whole) == ""
    assert "KV caches of all workers take" in refusal(checkpoint, config, 3 * GIB + 2 * half + whole - 1)


def test_what_is_measured_on_a_gpu_and_what_has_no_cache_is_taken(checkpoint: Path) -> None:
    cuda = {"prefill": {"device": "cuda:0"}, "decode": {"device": "cuda:1", "kv_cache_bytes": 80 * GIB}}
    assert refusal(checkpoint, {"pools": cuda}) == ""
    assert refusal("fake", {"pools": {"decode": {"kv_cache_bytes": 1}}}) == ""


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       16384000 kB\nMemFree:  5 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "limit")
    found = []
    for limit in (None, "max\n", "2147483648\n"):
        if limit is not None:
            (tmp_path / "limit").write_text(limit)
        found.append(machine_memory())
    assert found == [16384000 * 1024, 16384000 * 1024, 2 * GIB]


def test_tiers_of_host_memory_count(checkpoint: Path) -> None:
    tiers = {"kv_cache": {"tiers": {"host_bytes": "8GiB"}}, "pools": {"prefill": {"size": 2}}}
    assert refusal(checkpoint, tiers, 16 * GIB).startswith("pools.prefill.kv_cache_bytes: 18.0 GiB for 2 workers; ")
    assert refusal(checkpoint, tiers, 20 * GIB) == ""
    assert notes(checkpoint, tiers) == ("pools.prefill: each worker keeps up to 8192.0 MiB of KV in host memory",)


def test_buffers_of_files_count(checkpoint: Path) -> None:
    """Eight of 128 tokens, beside two caches of 1 GiB."""
    model = read_model_config(checkpoint)
    staging = 8 * 128 * 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    tiers = {"kv_cache": {"tiers": {"disk": {"path": "/kv", "bytes": "1GiB"}}}}
    assert refusal(checkpoint, tiers, 2 * GIB + staging - 1).startswith("pools.prefill.kv_cache_bytes: ")
    assert refusal(checkpoint, tiers, 2 * GIB + staging) == ""


@pytest.mark.parametrize(("key", "value"), [("tiers", {"host_bytes": "1GiB"}), ("fetch", True)])
def test_the_kv_of_a_model_with_windows_is_neither_kept_nor_fetched(key: str, value: object, tmp_path: Path) -> None:
    model = make_checkpoint("gemma3", tmp_path)
    assert refusal(model, {"kv_cache": {key: value}}) == (
        f"kv_cache.{key}: is for models without windows; the model of pools.prefill has 2 cache groups"
    )


def test_latents_in_8_bits_are_refused(tmp_path: Path) -> None:
    model = {"path": str(make_checkpoint("deepseek_v2", tmp_path)), "kv_cache_dtype": "int8"}
    assert refusal("", {"model": model}) == (
        "model.kv_cache_dtype: int8 is not supported for latent attention, which this model has"
    )


def test_a_block_in_8_bits_counts_its_scales(checkpoint: Path) -> None:
    model = read_model_config(checkpoint)
    block_bytes = 16 * 2 * model.num_layers * model.num_kv_heads * (model.head_dim + 2)
    pools = {"decode": {"kv_cache_bytes": block_bytes - 1}}
    raw = {"model": {"path": str(checkpoint), "kv_cache_dtype": "int8"}, "pools": pools}
    assert refusal("", raw).endswith(f"of this model, which takes {block_bytes}")
