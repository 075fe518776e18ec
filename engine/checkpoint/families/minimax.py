"""MiniMax M2: one norm of all of q and one of all of k, rope of a part of each head, experts that are chosen by
sigmoids."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import (
    Family,
    TensorNames,
    check_silu,
    check_value,
    read_model,
    read_sizes,
)
from disagg.engine.checkpoint.families.routing_fields import read_routing
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope

DEFAULT_THETA = 5e6
SUPPORTED = {
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
"""Fields of the published config.json whose other values are other models."""
UNUSED = (
    *("layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode"),  # of parts that M2 does not have
    *("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),  # of layers that are not in the checkpoint
)


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields, head_dim=128)
    share = fields.integer("rotary_dim", sizes.head_dim) / sizes.head_dim
    rope = read_rope(fields, sizes.head_dim, DEFAULT_THETA, is_partial=True, default_share=share)
    check_silu(fields)
    _check_supported(fields, sizes.num_layers)
    routing = read_routing(fields, "num_local_experts", score="sigmoid", renormalize=True)
    layer = LayerConfig(
        attention=AttentionConfig(scale=sizes.head_dim**-0.5, rope=rope, qk_norm="whole"),
        ffn=ExpertsConfig(routing=routing, intermediate_size=fields.integer("intermediate_size"), choice_bias=True),
    )
    return read_model(fields, sizes, (layer,) * sizes.num_layers, max_positions=max_positions(fields, rope))


def _check_supported(fields: JsonFields, num_layers: int) -> None:
    for name, value in SUPPORTED.items():
        check_value(fields, name, value)
    check_value(fields, "attn_type_list", [1] * num_layers)
    for name in UNUSED:
        fields.value(name)


MINIMAX_M2 = Family(
    models="MiniMax-M2",
    architectures=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2", "minimax"),
    read=_read,
    names=TensorNames(
        router="block_sparse_moe.gate",
        choice_bias="block_sparse_moe.e_score_correction_bias",
        experts="block_sparse_moe.experts",
        of_expert=("w1", "w3", "w2"),
    ),
)
