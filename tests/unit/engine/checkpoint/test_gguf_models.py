"""GGUF files of each architecture become the checkpoint that they were made from.

A tiny model of transformers is written as llama.cpp's converter would: names by the `gguf` package, rows of Q and K in
pairs, 1 added to Gemma's norms, experts in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from disagg.engine.checkpoint import convert
from disagg.engine.checkpoint.families.registry import SUPPORTED_ARCHITECTURES
from disagg.engine.checkpoint.gguf_models import GGUF_MODELS, read_config
from disagg.kernels.mxfp4 import FP4_VALUES
from disagg.proto.errors import ConfigError
from tests.support.checkpoints import TOKENS, write_tokenizer

HEADS, KV_HEADS, LAYERS = 4, 2, 2
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Write = Callable[[gguf.GGUFWriter], None]


@dataclass(frozen=True)
class Case:
    """A model, its architecture in GGUF files, and what the metadata has beside the sizes."""

    family: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    write: Write = lambda writer: None
    has_pairs: bool = False
    norm_offset: float = 0.0
    tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def write_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def write_gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(16)


def write_gemma3(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_sliding_window(16)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def write_phi3(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_dimension_count(16)
    writer.add_sliding_window(32)


def write_granite(writer: gguf.GGUFWriter) -> None:
    writer.add_attention_scale(0.5)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.25)
    writer.add_logit_scale(8.0)


def write_experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def write_mixtral(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)


def write_qwen3_moe(writer: gguf.GGUFWriter) -> None:
    write_experts(writer)
    writer.add_key_length(32)
    writer.add_value_length(32)


def write_gpt_oss(writer: gguf.GGUFWriter) -> None:
    write_qwen3_moe(writer)
    writer.add_rope_freq_base(150000.0)
    writer.add_sliding_window(16)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def llama3_factors() -> np.ndarray[Any, Any]:
    """As llama.cpp's converter computes them, for heads of 16 and `LLAMA3`."""
    factors = []
    for index in range(8):
        wavelength = 2 * np.pi * 500000.0 ** (2 * index / 16)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, dtype=np.float32)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG, SHORT = [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 16.0, 32.0], [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5]

CASES = {
    "llama": Case("Llama", "llama", has_pairs=True),
    "llama3": Case(
        "Llama",
        "llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
        lambda writer: writer.add_rope_freq_base(500000.0),
        has_pairs=True,
        tensors={"rope_freqs.weight": llama3_factors()},
    ),
    "mixtral": Case(
        "Mixtral",
        "llama",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        write_mixtral,
        has_pairs=True,
    ),
    "qwen2": Case("Qwen2", "qwen2", {"rope_parameters": None}),
    "qwen3": Case(
        "Qwen3",
        "qwen3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
        write_yarn,
    ),
    "qwen3_moe": Case(
        "Qwen3Moe",
        "qwen3moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        write_qwen3_moe,
    ),
    "gemma2": Case(
        "Gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True},
        write_gemma2,
        norm_offset=1,
    ),
    "gemma3": Case(
        "Gemma3Text",
        "gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        write_gemma3,
        norm_offset=1,
    ),
    "phi3": Case(
        "Phi3",
        "phi3",
        {
            "sliding_window": 32,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "long_factor": LONG,
                "short_factor": SHORT,
            },
        },
        write_phi3,
        tensors={
            "rope_factors_long.weight": np.array(LONG, dtype=np.float32),
            "rope_factors_short.weight": np.array(SHORT, dtype=np.float32),
        },
    ),
    "granite": Case(
        "Granite",
        "granite",
        {
            "attention_multiplier": 0.5,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
        },
        write_granite,
        has_pairs=True,
    ),
    "smollm3": Case("SmolLM3", "smollm3", {"num_hidden_layers": 5}, has_pairs=True),
    "gpt_oss": Case(
        "GptOss",
        "gpt-oss",
        {
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        write_gpt_oss,
    ),
}


def make_model(case: Case, folder: Path) -> Any:
    """Save a random model; returns its config. Every weight is exact in bf16, also less and plus 1."""
    config = getattr(transformers, f"{case.family}Config")(**{**SIZES, **case.changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-63, 64, parameter.shape) / 64)
    model.to(torch.bfloat16).save_pretrained(folder)
    return config


def write_gguf(case: Case, config: Any, stored: dict[str, Tensor], path: Path) -> None:
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if case.architecture in ("smollm3", "qwen2", "qwen3", "granite"):
        writer.add_rope_freq_base(10000.0 if case.architecture != "smollm3" else 2000000.0)
    case.write(writer)
    write_tokenizer(writer, "smollm", None)
    for name, tensor in {**gguf_tensors(case, config, stored), **case.tensors}.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(case: Case, config: Any, stored: dict[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    written: dict[str, Any] = {}
    experts: dict[str, list[Any]] = {}
    for name, tensor in stored.items():
        values = tensor.float().numpy()
        base, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, suffix = name, "weight"
        if base.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):  # gpt-oss
            kind, end = ("bias", "_bias") if base.endswith("_bias") else ("weight", "")
            both = values if end else values.transpose(0, 2, 1)
            prefix = f"blk.{base.split('.')[2]}.ffn"
            written[f"{prefix}_gate_exps.{kind}"], written[f"{prefix}_up_exps.{kind}"] = both[:, 0::2], both[:, 1::2]
            continue
        if base.endswith("experts.down_proj"):
            values = values.transpose(0, 2, 1)
        if base.endswith("down_proj_bias"):
            base, suffix = base.removesuffix("_bias"), "bias"
        if re.search(r"experts\.\d+\.", base):
            experts.setdefault(re.sub(r"experts\.\d+\.", "experts.", base), []).append(values)
            continue
        own = names.get_name(base)
        assert own is not None, base
        if case.has_pairs and re.search(r"attn_[qk]$", own):
            heads = HEADS if own.endswith("q") else KV_HEADS
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if own.endswith("norm"):
            values = values + case.norm_offset
        written[f"{own}.{suffix}"] = values
    for base, each in experts.items():
        written[f"{names.get_name(base)}.weight"] = np.stack(each)
    return written


IRRELEVANT = {
    "architectures",
    "dtype",
    "transformers_version",
    "initializer_range",
    "use_cache",
    "pad_token_id",
    "_name_or_path",
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_the_checkpoint_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    config = make_model(case, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    path, target = tmp_path / "x.gguf", tmp_path / "out"
    write_gguf(case, config, stored, path)

    reader = convert.open_gguf(path)
    model, metadata = convert.model_of(reader, path)
    fields = read_config(model, metadata, len(TOKENS))
    found = transformers.AutoConfig.for_model(model.model_type, **fields, **convert.token_ids(reader))
    assert type(found) is type(config)
    wanted, got = ({key: each for key, each in of.to_dict().items() if key not in IRRELEVANT} for of in (config, found))
    assert rounded(got) == rounded({**wanted, "head_dim": found.head_dim})

    outputs = convert.checkpoint_outputs(model, metadata.tensors, HEADS, KV_HEADS)
    assert {key: output.shape for key, output in outputs.items()} == {
        key: tuple(tensor.shape) for key, tensor in stored.items()
    }
    for key, output in outputs.items():
        values = np.concatenate([np.array(piece) for piece in output.pieces()])
        assert np.array_equal(values.reshape(output.shape), stored[key].float().numpy()), key

    if model.architecture in SUPPORTED_ARCHITECTURES:
        target.mkdir()
        convert.convert_gguf(path, target)
        converted = load_file(target / "model.safetensors")
        assert converted.keys() == stored.keys()
        assert all(torch.equal(converted[key], tensor) for key, tensor in stored.items())


def rounded(value: Any) -> Any:
    """Numbers as fp32 keeps them."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("write", "tensors", "message"),
    [
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            {},
            "`rope.scaling.type` 'longrope' is not sup",
        ),
        (lambda w: w.add_clamp_kqv(8.0), {}, "`llama.attention.clamp_kqv` = 8.0 is not known"),
        (lambda w: w.add_value_length(8), {}, "keys and values of unequal length are not supported"),
        (lambda w: w.add_rope_dimension_count(8), {}, "`rope.dimension_count` 8 is not the head size, 16"),
        (
            lambda w: w.add_float32("llama.attention.key_length", 16.5),
            {},
            "key_length` must be a whole number, not 16.5",
        ),
        (
            lambda w: None,
            {"rope_freqs.weight": np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.float32)},
            "rope_freqs.weight has factors of no known scaling",
        ),
    ],
)
def test_what_a_file_asks_for_and_is_not_known_is_refused(
    tmp_path: Path, write: Write, tensors: dict[str, Any], message: str
) -> None:
    case = Case("Llama", "llama", write=write, has_pairs=True, tensors=tensors)
    config = make_model(case, tmp_path / "model")
    write_gguf(case, config, load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "x.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=message):
        convert.convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def five_bits(blocks: np.ndarray[Any, Any], *, has_minimum: bool) -> Tensor:
    """Q5_0 and Q5_1 by the definition of ggml: scale, perhaps a minimum, 32 highest bits, 16 bytes of lower ones."""
    data = torch.from_numpy(blocks).view(-1, blocks.shape[-1])
    start = 4 if has_minimum else 2
    scale = data[:, :2].contiguous().view(torch.float16).float()
    high = (data[:, start : start + 4, None].int() >> torch.arange(8, dtype=torch.int32) & 1).flatten(1)
    low = torch.cat([data[:, start + 4 :] & 15, data[:, start + 4 :] >> 4], dim=1).int()
    numbers = (low + 16 * high).float()
    if has_minimum:
        return numbers * scale + data[:, 2:4].contiguous().view(torch.float16).float()
    return (numbers - 16) * scale


def microscaling(blocks: np.ndarray[Any, Any]) -> Tensor:
    """MXFP4 of ggml: an exponent, then 16 bytes of numbers 0 to 15 in their lower, 16 to 31 in their higher bits."""
    data = torch.from_numpy(blocks).view(-1, blocks.shape[-1])
    codes = torch.cat([data[:, 1:] & 15, data[:, 1:] >> 4], dim=1).long()
    values = torch.tensor(FP4_VALUES, dtype=torch.float64)[codes] * 2.0 ** (data[:, :1].double() - 127)
    return values.float()


TYPES = ("MXFP4", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "IQ4_XS")


@pytest.mark.filterwarnings("ignore:invalid value")  # random scales may be infinite
@pytest.mark.parametrize("name", TYPES)
def test_numbers_of_each_type_are_those_of_another_implementation(tmp_path: Path, name: str) -> None:
    """Random blocks, read as a conversion does, beside the dequantizer of transformers, or the definition."""
    from transformers.integrations.gguf.dequant import dequantize

    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(5).integers(0, 256, (6, 512 // block, size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks.reshape(6, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = {tensor.name: tensor for tensor in convert.open_gguf(tmp_path / "x.gguf").tensors}
    outputs = convert.checkpoint_outputs(GGUF_MODELS["llama"], tensors, HEADS, KV_HEADS)
    output = outputs["model.layers.0.mlp.up_proj.weight"]
    assert output.shape == (6, 512)
    found = torch.from_numpy(np.concatenate(list(output.pieces())))
    if name.startswith("Q5_") and name != "Q5_K":
        expected = five_bits(blocks, has_minimum=name == "Q5_1").view(6, 512)
    elif name == "MXFP4":
        expected = microscaling(blocks).view(6, 512)
    else:
        expected = dequantize(torch.from_numpy(blocks).flatten(), int(kind)).view(6, 512)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, equal_nan=True)
