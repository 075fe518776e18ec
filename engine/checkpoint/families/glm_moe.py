"""GLM-4.5 and GLM-4.7-Flash: the first layers have a dense MLP, all others experts that are chosen by sigmoids, and one
MLP that all tokens take. GLM-4.5 has rope of half of each head, and perhaps norms of the heads; GLM-4.7-Flash has
latent attention."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import (
    Family,
    check_silu,
    check_value,
    extra_layers,
    read_model,
    read_sizes,
)
from disagg.engine.checkpoint.families.latent_fields import LatentDefaults, read_latent
from disagg.engine.checkpoint.families.routing_fields import read_routing
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, ExpertsConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope

ROUTING_FIELDS = {"groups": "n_group", "top_groups": "topk_group"}
EPS = 1e-5
KINDS = ("dense", "sparse")


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
    num_dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    is_dense = tuple(layer < num_dense for layer in range(sizes.num_layers))
    return read_model(
        fields,
        sizes,
        _layers(fields, attention, is_dense, scale=1.0),
        max_positions=max_positions(fields, rope),
        eps=EPS,
        num_extra_layers=extra_layers(fields),
    )


def _read_flash(fields: JsonFields) -> ModelConfig:
    sizes, attention, longest = read_latent(fields, LatentDefaults(query_rank=768, key_dim=192, value_dim=256))
    check_value(fields, "topk_method", "noaux_tc")
    layers = _layers(fields, attention, _dense_layers(fields, sizes.num_layers), scale=1.8)
    return read_model(fields, sizes, layers, max_positions=longest, eps=EPS, num_extra_layers=extra_layers(fields))


def _dense_layers(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has a dense MLP: by kinds, or by the number of the first ones."""
    num_dense, kinds = fields.integer("first_k_dense_replace", 1, minimum=0), fields.value("mlp_layer_types")
    if kinds is None:
        return tuple(layer < num_dense for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in KINDS for kind in kinds):
        raise fields.error(f"`mlp_layer_types` must have {KINDS} for each of the {num_layers} layers, not {kinds!r}")
    return tuple(kind == "dense" for kind in kinds)


def _layers(
    fields: JsonFields, attention: AttentionConfig, is_dense: tuple[bool, ...], *, scale: float
) -> tuple[LayerConfig, ...]:
    """`scale` is the family's default of the factor of the experts' weights."""
    dense = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    experts = _experts(fields, scale)
    return tuple(LayerConfig(attention=attention, ffn=dense if here else experts) for here in is_dense)


def _experts(fields: JsonFields, scale: float) -> ExpertsConfig:
    features = fields.integer("moe_intermediate_size")
    routing = read_routing(
        fields,
        "n_routed_experts",
        ROUTING_FIELDS,
        score="sigmoid",
        renormalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", scale),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_score="two_largest",
    )
    shared_size = features * fields.integer("n_shared_experts", 1)
    return ExpertsConfig(routing=routing, intermediate_size=features, choice_bias=True, shared_size=shared_size)


GLM_4_MOE = Family(
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    read=_read,
)
GLM_4_MOE_LITE = Family(
    models="GLM-4.7-Flash",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    read=_read_flash,
)
