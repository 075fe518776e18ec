"""GLM-4.5: rope of half of each head, perhaps norms of the heads; the first layers have a dense MLP, all others experts
that are chosen by sigmoids, and one MLP that all tokens take."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, check_silu, read_model, read_sizes
from disagg.engine.checkpoint.families.routing_fields import read_routing
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, ExpertsConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope

ROUTING_FIELDS = {"groups": "n_group", "top_groups": "topk_group"}


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields)
    rope = read_rope(fields, sizes.head_dim, is_partial=True, default_share=0.5)
    check_silu(fields)
    attention = AttentionConfig(
        scale=sizes.head_dim**-0.5,
        rope=rope,
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm="head" if fields.boolean("use_qk_norm", False) else "none",
    )
    dense = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    experts, num_dense = _experts(fields), fields.integer("first_k_dense_replace", 1, minimum=0)
    layers = tuple(
        LayerConfig(attention=attention, ffn=dense if layer < num_dense else experts)
        for layer in range(sizes.num_layers)
    )
    return read_model(
        fields,
        sizes,
        layers,
        max_positions=max_positions(fields, rope),
        eps=1e-5,
        num_extra_layers=_extra_layers(fields),
    )


def _experts(fields: JsonFields) -> ExpertsConfig:
    features = fields.integer("moe_intermediate_size")
    routing = read_routing(
        fields,
        "n_routed_experts",
        ROUTING_FIELDS,
        score="sigmoid",
        renormalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_score="two_largest",
    )
    shared_size = features * fields.integer("n_shared_experts", 1)
    return ExpertsConfig(routing=routing, intermediate_size=features, choice_bias=True, shared_size=shared_size)


def _extra_layers(fields: JsonFields) -> int:
    """Layers that predict further tokens, which transformers 5 counts under another name."""
    name = "num_nextn_predict_layers" if fields.has("num_nextn_predict_layers") else "num_mtp_layers"
    return fields.integer(name, 1, minimum=0)


GLM_4_MOE = Family(
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    read=_read,
)
