"""Qwen2-MoE and Qwen3-MoE: the attention of Qwen2 and Qwen3; some layers have a dense MLP. Qwen2's tokens all take one
more MLP, which has a gate."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import (
    Family,
    TensorNames,
    check_silu,
    check_value,
    layer_windows,
    read_model,
    read_sizes,
)
from disagg.engine.checkpoint.families.routing_fields import count_of_experts, read_routing
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    QkNorm,
)
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope


def _read_qwen2(fields: JsonFields) -> ModelConfig:
    bias = fields.boolean("qkv_bias", True)
    experts = _experts(fields, shared_size=fields.integer("shared_expert_intermediate_size"), shared_gate=True)
    num_layers, last = fields.integer("num_hidden_layers"), fields.integer("max_window_layers", 28, minimum=0)
    slides = tuple(layer % 2 == 0 and layer < last for layer in range(num_layers))
    windows = layer_windows(fields, num_layers, *_window(fields, 4096, slides))
    return _model(fields, experts, windows, qkv_bias=bias)


def _read_qwen3(fields: JsonFields) -> ModelConfig:
    bias, num_layers = fields.boolean("attention_bias", False), fields.integer("num_hidden_layers")
    check_value(fields, "use_qk_norm", True)  # of Qwen3-Coder, as the next one
    check_value(fields, "shared_expert_intermediate_size", 0)
    window, slides = _window(fields, 4096, (True,) * num_layers)
    windows = tuple(window if is_sliding else None for is_sliding in slides)
    return _model(fields, _experts(fields), windows, qkv_bias=bias, o_bias=bias, qk_norm="head")


def _window(fields: JsonFields, default: int, slides: tuple[bool, ...]) -> tuple[int | None, tuple[bool, ...]]:
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", default, minimum=0)
    is_used = fields.boolean("use_sliding_window", False) and bool(window)
    return (window, slides) if is_used else (None, (False,) * len(slides))


def _experts(fields: JsonFields, shared_size: int = 0, shared_gate: bool = False) -> ExpertsConfig:
    renormalize = fields.boolean("norm_topk_prob", False)
    return ExpertsConfig(
        routing=read_routing(fields, count_of_experts(fields), renormalize=renormalize),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_size=shared_size,
        shared_gate=shared_gate,
    )


def _model(
    fields: JsonFields,
    experts: ExpertsConfig,
    windows: tuple[int | None, ...],
    *,
    qkv_bias: bool,
    o_bias: bool = False,
    qk_norm: QkNorm = "none",
) -> ModelConfig:
    sizes = read_sizes(fields, needs_kv_heads=True)
    rope = read_rope(fields, sizes.head_dim)
    check_silu(fields)
    dense = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    is_sparse = _sparse_layers(fields, sizes.num_layers)
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                scale=sizes.head_dim**-0.5, rope=rope, window=window, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm
            ),
            ffn=experts if has_experts else dense,
        )
        for window, has_experts in zip(windows, is_sparse, strict=True)
    )
    return read_model(fields, sizes, layers, max_positions=max_positions(fields, rope))


def _sparse_layers(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in dense):
        raise fields.error(f"`mlp_only_layers` must be a list of layers below {num_layers}, not {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


QWEN2_MOE = Family(
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    read=_read_qwen2,
    names=TensorNames(shared="mlp.shared_expert"),
)
QWEN3_MOE = Family(
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    read=_read_qwen3,
)
