"""Granite 3 and its dense kin: Llama with multipliers of embeddings, outputs of branches, scores and logits."""

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
        attention=AttentionConfig(
            scale=fields.number("attention_multiplier", 1.0), rope=rope, qkv_bias=bias, o_bias=bias
        ),
        ffn=DenseConfig(intermediate_size=fields.integer("intermediate_size"), bias=fields.boolean("mlp_bias", False)),
    )
    return read_model(
        fields,
        sizes,
        (layer,) * sizes.num_layers,
        max_positions=max_positions(fields, rope),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )


GRANITE = Family(models="Granite 3, dense", architectures=("GraniteForCausalLM",), model_types=("granite",), read=_read)
