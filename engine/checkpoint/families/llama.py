"""Llama, and what is published under its architecture: SmolLM, SmolLM2, Yi, DeepSeek's distillations."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, check_silu, read_model, read_sizes
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields)
    rope = read_rope(fields, sizes.head_dim)
    check_silu(fields)
    bias = fields.boolean("attention_bias", False)
    layer = LayerConfig(
        attention=AttentionConfig(scale=sizes.head_dim**-0.5, rope=rope, qkv_bias=bias, o_bias=bias),
        ffn=DenseConfig(intermediate_size=fields.integer("intermediate_size"), bias=fields.boolean("mlp_bias", False)),
    )
    return read_model(fields, sizes, (layer,) * sizes.num_layers, max_positions=max_positions(fields, rope))


LLAMA = Family(
    models="Llama 2, 3, 3.1, 3.2 (1B, 3B) and 3.3, SmolLM, SmolLM2, Yi",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    read=_read,
)
