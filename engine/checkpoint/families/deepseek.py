"""DeepSeek V2 and V3, and what is published in the form of V3 (Moonlight, Kimi K2): latent attention; the first layers
have a dense MLP, all others experts, and one MLP that all tokens take."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, check_value, extra_layers, read_model
from disagg.engine.checkpoint.families.latent_fields import read_latent
from disagg.engine.checkpoint.families.routing_fields import read_routing
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import DenseConfig, ExpertsConfig, LayerConfig, ModelConfig
from disagg.kernels.routing import Routing

EXPERTS = "n_routed_experts"
GROUPS = {"groups": "n_group", "top_groups": "topk_group"}
TRAINING = ("aux_loss_alpha", "ep_size", "seq_aux")
"""Fields of the published config.json that are of training alone."""
METHODS = ("greedy", "group_limited_greedy")


def _read_v2(fields: JsonFields) -> ModelConfig:
    for name, value in {"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False}.items():
        check_value(fields, name, value)
    check_value(fields, "rope_interleave", True)
    return _model(fields, _routing_v2(fields), num_dense=0, num_shared=2)


def _routing_v2(fields: JsonFields) -> Routing:
    """Only one of the two methods has groups, whatever the fields say."""
    method, scale = fields.value("topk_method") or METHODS[0], fields.number("routed_scaling_factor", 1.0)
    if method not in METHODS:
        raise fields.error(f"`topk_method` {method!r} is not supported; supported are {' and '.join(METHODS)}")
    groups = {"groups": 1, "top_groups": 1}
    for field, name in GROUPS.items():
        fields.value(name)
        if method != METHODS[0]:
            groups[field] = fields.integer(name)
    return read_routing(fields, EXPERTS, GROUPS, scale=scale, **groups)


def _read_v3(fields: JsonFields) -> ModelConfig:
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        check_value(fields, name, value)
    for name in GROUPS.values():
        if fields.is_null(name):
            raise fields.error(f"`{name}` must not be null; experts without groups have 1")
    routing = read_routing(
        fields,
        EXPERTS,
        GROUPS,
        score="sigmoid",
        renormalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        groups=fields.integer("n_group", 8),
        top_groups=fields.integer("topk_group", 4),
        group_score="two_largest",
    )
    return _model(fields, routing, num_dense=3, num_shared=1, choice_bias=True, num_extra_layers=extra_layers(fields))


def _model(
    fields: JsonFields,
    routing: Routing,
    *,
    num_dense: int,
    num_shared: int,
    choice_bias: bool = False,
    num_extra_layers: int = 0,
) -> ModelConfig:
    """`num_dense` and `num_shared` are the family's defaults: of the layers that have a dense MLP, and of the experts
    that all tokens take."""
    sizes, attention, longest = read_latent(fields)
    check_value(fields, "moe_layer_freq", 1)
    for name in TRAINING:
        fields.value(name)
    features = fields.integer("moe_intermediate_size")
    shared_size = features * fields.integer("n_shared_experts", num_shared)
    dense = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    experts = ExpertsConfig(
        routing=routing, intermediate_size=features, choice_bias=choice_bias, shared_size=shared_size
    )
    num_dense = fields.integer("first_k_dense_replace", num_dense, minimum=0)
    layers = tuple(
        LayerConfig(attention=attention, ffn=dense if layer < num_dense else experts)
        for layer in range(sizes.num_layers)
    )
    return read_model(fields, sizes, layers, max_positions=longest, num_extra_layers=num_extra_layers)


DEEPSEEK_V2 = Family(
    models="DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2",
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    read=_read_v2,
)
DEEPSEEK_V3 = Family(
    models="DeepSeek-V3, DeepSeek-V3.1, DeepSeek-R1, Moonlight, Kimi K2",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3", "kimi_k2"),
    read=_read_v3,
)
