"""Gemma 2 and the text of Gemma 3: norms before and behind attention and MLP by one more than their weights, gelu,
embeddings times the root of the hidden size, windows; Gemma 2 with soft caps, Gemma 3 with norms of heads and two
ropes."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import (
    Family,
    Sizes,
    TensorNames,
    check_value,
    layer_windows,
    read_model,
    read_sizes,
)
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import (
    AttentionConfig,
    DenseConfig,
    LayerConfig,
    ModelConfig,
    QkNorm,
    RopeConfig,
)
from disagg.engine.checkpoint.rope_fields import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    max_positions,
    read_rope,
    read_ropes_by_kind,
)


def _read_gemma2(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, head_dim=256)
    check_value(fields, "sliding_window_size", fields.value("sliding_window") or 4096)  # published beside it
    rope = read_rope(fields, sizes.head_dim)
    ropes = {FULL_ATTENTION: rope, SLIDING_ATTENTION: rope}
    soft_cap = None if fields.is_null("attn_logit_softcapping") else fields.number("attn_logit_softcapping", 50.0)
    final = None if fields.is_null("final_logit_softcapping") else fields.number("final_logit_softcapping", 30.0)
    return _model(fields, sizes, ropes, 2, soft_cap, final, "none")


def _read_gemma3(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, head_dim=256)
    thetas = {
        FULL_ATTENTION: fields.number("rope_theta", 1000000.0),
        SLIDING_ATTENTION: fields.number("rope_local_base_freq", 10000.0),
    }
    ropes = read_ropes_by_kind(fields, sizes.head_dim, thetas)
    final = fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None
    every = fields.integer("sliding_window_pattern", 6)
    return _model(fields, sizes, ropes, every, None, final, "head")


def _model(
    fields: JsonFields,
    sizes: Sizes,
    ropes: dict[str, RopeConfig],
    every: int,
    soft_cap: float | None,
    logits_soft_cap: float | None,
    qk_norm: QkNorm,
) -> ModelConfig:
    """`every`: all layers but each n-th have a window, unless `layer_types` says otherwise."""
    for name in ("hidden_activation", "hidden_act"):
        check_value(fields, name, "gelu_pytorch_tanh")
    bias = fields.boolean("attention_bias", False)
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    slides = tuple((layer + 1) % every != 0 for layer in range(sizes.num_layers))
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    ffn = DenseConfig(intermediate_size=fields.integer("intermediate_size"), activation="gelu_tanh")
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                scale=scale,
                rope=ropes[FULL_ATTENTION if layer_window is None else SLIDING_ATTENTION],
                window=layer_window,
                soft_cap=soft_cap,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=qk_norm,
            ),
            ffn=ffn,
            norms="both",
        )
        for layer_window in layer_windows(fields, sizes.num_layers, window, slides)
    )
    return read_model(
        fields,
        sizes,
        layers,
        max_positions=max_positions(fields, ropes[FULL_ATTENTION]),
        is_tied=True,
        plus_one_norms=True,
        embedding_multiplier=sizes.hidden_size**0.5,
        rounds_embedding_multiplier=True,
        logits_soft_cap=logits_soft_cap,
    )


_NAMES = TensorNames(ffn_norm="pre_feedforward_layernorm")

GEMMA_2 = Family(
    models="Gemma 2", architectures=("Gemma2ForCausalLM",), model_types=("gemma2",), read=_read_gemma2, names=_NAMES
)
GEMMA_3 = Family(
    models="Gemma 3 270M and 1B",
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    read=_read_gemma3,
    names=_NAMES,
)
