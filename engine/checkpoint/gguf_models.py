"""The architectures of GGUF files that become checkpoints: names of tensors, and config.json from the metadata.

A new architecture is an entry of `GGUF_MODELS`. Source: the GGUF specification, and what llama.cpp's converter changes
in a checkpoint: names; the order of rotary rows (`has_rotary_pairs`); 1 added to norms (`adds_one_to_norms`); the
experts of a layer in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disagg.engine.checkpoint.gguf_metadata import GgufMetadata

Config = dict[str, Any]

TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become fields of config.json."""
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FOUR_NORMS: Mapping[str, str] = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
GPT_OSS_NAMES: Mapping[str, str] = {
    **{name: own for name, own in LAYER_NAMES.items() if name.startswith("attn_")},
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
EXPERT_NAMES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """One architecture of GGUF files."""

    architecture: str
    """The class of transformers, which config.json names."""
    model_type: str
    config: Callable[[GgufMetadata], Config]
    """Fields of config.json beside those of `read_config`."""
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    experts: tuple[str, str, str] | None = None
    """Names of gate, up and down of each expert, with {} for its number; None where a layer has none."""
    has_fused_experts: bool = False
    """The checkpoint has the experts of a layer in one tensor, [experts, in, out], gate and up in turns (gpt-oss)."""
    has_rotary_pairs: bool = False
    """Rows of Q and K are stored with rotary pairs side by side; the checkpoint has first halves, then second ones."""
    adds_one_to_norms: bool = False


def read_config(model: GgufModel, metadata: GgufMetadata, vocab_size: int) -> Config:
    """The fields of config.json.

    Raises:
        ConfigError: a key is missing, or one is not known; names it.
    """
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // max(1, heads))
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.error("keys and values of unequal length are not supported")
    metadata.leave_aside("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
    config: Config = {
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
    }
    config |= model.config(metadata)
    rotary = metadata.integer("rope.dimension_count", head_dim)
    if rotary != round(head_dim * config.get("partial_rotary_factor", 1.0)):
        raise metadata.error(f"`rope.dimension_count` {rotary} is not the head size, {head_dim}")
    metadata.refuse_unread()
    return config


# ---------------------------------------------------------------- parts of a configuration


def _rope(metadata: GgufMetadata, theta: float = 10000.0) -> Config:
    """Rope as `rope_theta` and, where it is scaled, `rope_scaling`."""
    config: Config = {"rope_theta": metadata.number("rope.freq_base", theta)}
    kind = metadata.text("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        scaling: Config = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
            scaling["beta_fast"] = metadata.number("rope.scaling.yarn_beta_fast", 32.0)
            scaling["beta_slow"] = metadata.number("rope.scaling.yarn_beta_slow", 1.0)
        config["rope_scaling"] = scaling
    elif kind == "none":
        metadata.leave_aside("rope.scaling.factor", "rope.scaling.original_context_length")
    else:
        raise metadata.error(f"`rope.scaling.type` {kind!r} is not supported; supported: none, linear, yarn")
    if "rope_freqs.weight" in metadata.tensors:
        config["rope_scaling"] = _llama3_scaling(metadata, config["rope_theta"])
    return config


LLAMA3_ORIGINAL_POSITIONS = 8192
"""Length of the pretraining of every Llama 3.1, 3.2 and 3.3, as Meta published them."""


def _llama3_scaling(metadata: GgufMetadata, theta: float) -> Config:
    """The scaling whose factors the file has, one for each frequency: that of Llama 3.1 to 3.3, with any `factor`."""
    found = np.asarray(metadata.tensors["rope_freqs.weight"].data, dtype=np.float64).reshape(-1)
    scaling: Config = {
        "rope_type": "llama3",
        "factor": round(float(found.max(initial=0.0)), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_POSITIONS,
    }
    wavelengths = 2 * math.pi * theta ** (np.arange(len(found)) / len(found))
    turns = LLAMA3_ORIGINAL_POSITIONS / wavelengths
    smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not len(found) or not np.allclose(found, expected, rtol=1e-4):
        raise metadata.error("rope_freqs.weight has factors of no known scaling; import the safetensors version")
    return scaling


def _dense(metadata: GgufMetadata) -> Config:
    return {"intermediate_size": metadata.integer("feed_forward_length"), **_rope(metadata)}


def _experts(metadata: GgufMetadata) -> Config:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


def _llama(metadata: GgufMetadata) -> Config:
    metadata.leave_aside("expert_used_count")
    has_bias = "blk.0.attn_output.bias" in metadata.tensors
    return {**_dense(metadata), "attention_bias": has_bias}


def _mixtral(metadata: GgufMetadata) -> Config:
    counts = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": None,
    }
    return {**_dense(metadata), **counts}


def _qwen(metadata: GgufMetadata) -> Config:
    return {**_dense(metadata), "use_sliding_window": False}


def _gemma(metadata: GgufMetadata, large_layers: int) -> Config:
    """Scores are scaled by the head size, but in the model of `large_layers` layers by the hidden size over the heads,
    which the file does not say."""
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    is_large = metadata.integer("block_count") == large_layers
    return {
        "intermediate_size": metadata.integer("feed_forward_length"),
        "query_pre_attn_scalar": hidden // heads if is_large else metadata.integer("attention.key_length"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(metadata: GgufMetadata) -> Config:
    caps = {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }
    return {**_gemma(metadata, large_layers=46), **_rope(metadata), **caps}


def _gemma3(metadata: GgufMetadata) -> Config:
    pattern = metadata.integer("attention.sliding_window_pattern", 6)
    local = metadata.number("rope.freq_base_swa", 10000.0)
    return {
        **_gemma(metadata, large_layers=62),
        **_rope(metadata, theta=1e6),
        "rope_local_base_freq": local,
        "layer_types": [
            "sliding_attention" if layer % pattern else "full_attention"
            for layer in range(1, metadata.integer("block_count") + 1)
        ],
    }


def _phi3(metadata: GgufMetadata) -> Config:
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    original = metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length"))
    head_dim = metadata.integer("attention.key_length", hidden // max(1, heads))
    config: Config = {
        "intermediate_size": metadata.integer("feed_forward_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "original_max_position_embeddings": original,
        "sliding_window": metadata.integer("attention.sliding_window", 0) or None,
    }
    if (rotary := metadata.integer("rope.dimension_count", head_dim)) != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if "rope_factors_long.weight" in metadata.tensors:
        long, short = (
            np.asarray(metadata.tensors[f"rope_factors_{length}.weight"].data, dtype=np.float64).reshape(-1)
            for length in ("long", "short")
        )
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": [round(each, 6) for each in long.tolist()],
            "short_factor": [round(each, 6) for each in short.tolist()],
        }
        if metadata.has("rope.scaling.attn_factor"):
            config["rope_scaling"]["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return config


def _granite(metadata: GgufMetadata) -> Config:
    return {
        **_dense(metadata),
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _qwen3_moe(metadata: GgufMetadata) -> Config:
    return {**_qwen(metadata), **_experts(metadata)}


def _gpt_oss(metadata: GgufMetadata) -> Config:
    metadata.leave_aside("feed_forward_length")
    rope = _rope(metadata, theta=150000.0)
    if "rope_scaling" in rope:
        rope["rope_scaling"]["truncate"] = False
    return {
        **rope,
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "attention_bias": True,
    }


# ---------------------------------------------------------------- architectures

MIXTRAL = GgufModel(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    config=_mixtral,
    layer_names={**LAYER_NAMES, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts=tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),  # type: ignore[arg-type]
    has_rotary_pairs=True,
)

GGUF_MODELS: Mapping[str, GgufModel] = {
    "llama": GgufModel(architecture="LlamaForCausalLM", model_type="llama", config=_llama, has_rotary_pairs=True),
    "qwen2": GgufModel(architecture="Qwen2ForCausalLM", model_type="qwen2", config=_qwen),
    "qwen3": GgufModel(architecture="Qwen3ForCausalLM", model_type="qwen3", config=_qwen),
    "qwen3moe": GgufModel(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        config=_qwen3_moe,
        layer_names={**LAYER_NAMES, "ffn_gate_inp": "mlp.gate"},
        experts=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    ),
    "gemma2": GgufModel(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        config=_gemma2,
        layer_names=FOUR_NORMS,
        adds_one_to_norms=True,
    ),
    "gemma3": GgufModel(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        config=_gemma3,
        layer_names=FOUR_NORMS,
        adds_one_to_norms=True,
    ),
    "phi3": GgufModel(architecture="Phi3ForCausalLM", model_type="phi3", config=_phi3, layer_names=FUSED_NAMES),
    "granite": GgufModel(
        architecture="GraniteForCausalLM", model_type="granite", config=_granite, has_rotary_pairs=True
    ),
    "smollm3": GgufModel(architecture="SmolLM3ForCausalLM", model_type="smollm3", config=_dense, has_rotary_pairs=True),
    "gpt-oss": GgufModel(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        config=_gpt_oss,
        layer_names=GPT_OSS_NAMES,
        has_fused_experts=True,
    ),
}
"""By `general.architecture`."""


def gguf_model(architecture: str, metadata: GgufMetadata) -> GgufModel | None:
    """The model of an architecture; `llama` is also the name of Mixtral. None for one that is not supported."""
    if architecture == "llama" and metadata.has("expert_count") and metadata.integer("expert_count") > 0:
        return MIXTRAL
    return GGUF_MODELS.get(architecture)
