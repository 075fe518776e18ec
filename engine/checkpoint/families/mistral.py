"""Mistral, whose layers all have one window, or none."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, check_silu, read_model, read_sizes
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope

DEFAULT_WINDOW = 4096


def _read(fields: JsonFields) -> ModelConfig:
    sizes, rope = read_sizes(fields, needs_kv_heads=True), read_rope(fields)
    check_silu(fields)
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", DEFAULT_WINDOW)
    layer = LayerConfig(
        attention=AttentionConfig(scale=sizes.head_dim**-0.5, rope=rope, window=window),
        ffn=DenseConfig(intermediate_size=fields.integer("intermediate_size")),
    )
    return read_model(fields, sizes, (layer,) * sizes.num_layers, max_positions=max_positions(fields, rope))


MISTRAL = Family(architectures=("MistralForCausalLM",), model_types=("mistral",), read=_read)
