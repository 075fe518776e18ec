"""Qwen2 and Qwen2.5, which have biases behind q, k and v, and Qwen3, which has a norm of each head instead."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import (
    WITHOUT_PREFIX,
    Family,
    check_silu,
    layer_windows,
    read_model,
    read_sizes,
)
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig, QkNorm
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope


def _read_qwen2(fields: JsonFields) -> ModelConfig:
    return _model(fields, qkv_bias=True, o_bias=False, qk_norm="none")


def _read_qwen3(fields: JsonFields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return _model(fields, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm="head")


def _model(
    fields: JsonFields, *, head_dim: int | None = None, qkv_bias: bool, o_bias: bool, qk_norm: QkNorm
) -> ModelConfig:
    sizes = read_sizes(fields, needs_kv_heads=True, head_dim=head_dim)
    rope = read_rope(fields, sizes.head_dim)
    check_silu(fields)
    ffn = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                scale=sizes.head_dim**-0.5, rope=rope, window=window, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm
            ),
            ffn=ffn,
        )
        for window in read_windows(fields, sizes.num_layers)
    )
    return read_model(fields, sizes, layers, max_positions=max_positions(fields, rope))


def read_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types`, else of those from `max_window_layers` on, where windows are used."""
    first = fields.integer("max_window_layers", 28, minimum=0)
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    if not fields.boolean("use_sliding_window", False):
        window = None
    slides = tuple(window is not None and layer >= first for layer in range(num_layers))
    return layer_windows(fields, num_layers, window, slides)


QWEN2 = Family(models="Qwen2, Qwen2.5", architectures=("Qwen2ForCausalLM",), model_types=("qwen2",), read=_read_qwen2)
QWEN3 = Family(
    models="Qwen3, dense; Qwen3-Embedding, Qwen3-Reranker",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    read=_read_qwen3,
    names=WITHOUT_PREFIX,
)
