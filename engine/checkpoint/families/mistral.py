"""Mistral, whose layers all have one window, or none; Ministral, whose layers may differ; Ministral 3, which scales q
by its position."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import (
    Family,
    Sizes,
    check_silu,
    layer_windows,
    read_model,
    read_sizes,
)
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig, RopeConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope

DEFAULT_WINDOW = 4096


def _read_mistral(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, needs_kv_heads=True)
    windows = (read_window(fields),) * sizes.num_layers
    return _model(fields, sizes, read_rope(fields, sizes.head_dim), windows)


def _read_ministral(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, needs_kv_heads=True)
    window = read_window(fields)
    windows = layer_windows(fields, sizes.num_layers, window, (window is not None,) * sizes.num_layers)
    return _model(fields, sizes, read_rope(fields, sizes.head_dim), windows)


def _read_ministral3(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, needs_kv_heads=True, head_dim=128)
    windows = (fields.integer("sliding_window") if fields.has("sliding_window") else None,) * sizes.num_layers
    return _model(fields, sizes, read_rope(fields, sizes.head_dim, query_beta=True), windows, eps=1e-5)


def read_window(fields: JsonFields) -> int | None:
    """`sliding_window`, whose null is none."""
    return None if fields.is_null("sliding_window") else fields.integer("sliding_window", DEFAULT_WINDOW)


def _model(
    fields: JsonFields, sizes: Sizes, rope: RopeConfig, windows: tuple[int | None, ...], eps: float = 1e-6
) -> ModelConfig:
    check_silu(fields)
    ffn = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    layers = tuple(
        LayerConfig(attention=AttentionConfig(scale=sizes.head_dim**-0.5, rope=rope, window=window), ffn=ffn)
        for window in windows
    )
    return read_model(fields, sizes, layers, max_positions=max_positions(fields, rope), eps=eps)


MISTRAL = Family(
    models="Mistral 7B, Mistral Nemo, Mistral Small 3",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    read=_read_mistral,
)
MINISTRAL = Family(
    models="Ministral 8B", architectures=("MinistralForCausalLM",), model_types=("ministral",), read=_read_ministral
)
MINISTRAL_3 = Family(
    models="Ministral 3, text alone",
    architectures=("Ministral3ForCausalLM",),
    model_types=("ministral3",),
    read=_read_ministral3,
)
