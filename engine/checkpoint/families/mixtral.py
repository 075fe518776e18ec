"""Mixtral: Mistral with experts in place of the MLP."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, TensorNames, check_silu, read_model, read_sizes
from disagg.engine.checkpoint.families.routing_fields import read_routing
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope

DEFAULT_THETA = 1e6


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, needs_kv_heads=True)
    rope = read_rope(fields, sizes.head_dim, DEFAULT_THETA)
    check_silu(fields)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    layer = LayerConfig(
        attention=AttentionConfig(scale=sizes.head_dim**-0.5, rope=rope, window=window),
        ffn=ExpertsConfig(
            routing=read_routing(fields, "num_local_experts", renormalize=True),
            intermediate_size=fields.integer("intermediate_size"),
        ),
    )
    return read_model(fields, sizes, (layer,) * sizes.num_layers, max_positions=max_positions(fields, rope), eps=1e-5)


MIXTRAL = Family(
    models="Mixtral 8x7B, Mixtral 8x22B",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    read=_read,
    names=TensorNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", of_expert=("w1", "w3", "w2")),
)
