"""Olmo 3: norms of the outputs of attention and MLP instead of their inputs, norms of all of q and all of k, and
windows in three of four layers, which have a rope of their own."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, check_silu, layer_windows, read_model, read_sizes
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    max_positions,
    read_ropes_by_kind,
)


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields)
    theta = fields.number("rope_theta", 500000.0)
    ropes = read_ropes_by_kind(fields, sizes.head_dim, {FULL_ATTENTION: theta, SLIDING_ATTENTION: theta})
    check_silu(fields)
    bias = fields.boolean("attention_bias", False)
    ffn = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    slides = tuple((layer + 1) % 4 != 0 for layer in range(sizes.num_layers))
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                scale=sizes.head_dim**-0.5,
                rope=ropes[FULL_ATTENTION if layer_window is None else SLIDING_ATTENTION],
                window=layer_window,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm="whole",
            ),
            ffn=ffn,
            norms="after",
        )
        for layer_window in layer_windows(fields, sizes.num_layers, window, slides)
    )
    longest = max_positions(fields, ropes[FULL_ATTENTION])
    return read_model(fields, sizes, layers, max_positions=longest, eps=1e-5)


OLMO_3 = Family(models="Olmo 3", architectures=("Olmo3ForCausalLM",), model_types=("olmo3",), read=_read)
