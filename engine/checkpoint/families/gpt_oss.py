"""gpt-oss: attention with sinks, windows in every second layer, and experts whose gates are clamped, with biases
everywhere."""

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
from disagg.engine.checkpoint.families.routing_fields import read_routing
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope
from disagg.kernels.routing import GatedActivation

DEFAULT_THETA = 150000.0


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, head_dim=64)
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        raise fields.error("`rope_scaling` is missing")  # yarn, which every published model states
    rope = read_rope(fields, sizes.head_dim, DEFAULT_THETA)
    check_silu(fields)
    check_value(fields, "experts_per_token", fields.value("num_experts_per_tok"))
    fields.value("initial_context_length")  # what the rope parameters say, too
    bias, window = fields.boolean("attention_bias", True), fields.integer("sliding_window", 128)
    experts = ExpertsConfig(
        routing=read_routing(fields, "num_local_experts", score="softmax_of_top"),
        intermediate_size=fields.integer("intermediate_size"),
        activation=GatedActivation(
            kind="clamped_swiglu",
            alpha=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0),
        ),
        bias=True,
        router_bias=True,
    )
    slides = tuple(layer % 2 == 0 for layer in range(sizes.num_layers))
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                scale=sizes.head_dim**-0.5, rope=rope, window=layer_window, sinks=True, qkv_bias=bias, o_bias=bias
            ),
            ffn=experts,
        )
        for layer_window in layer_windows(fields, sizes.num_layers, window, slides)
    )
    return read_model(fields, sizes, layers, max_positions=max_positions(fields, rope), eps=1e-5)


GPT_OSS = Family(
    models="gpt-oss-20b, gpt-oss-120b",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    read=_read,
    names=TensorNames(router="mlp.router", experts_are_one=True),
)
