"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, whose files hold q, k, v and gate, up in one tensor each."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import (
    Family,
    TensorNames,
    check_silu,
    check_value,
    read_model,
    read_sizes,
)
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope

LONGROPE_NAMES = {"su": "longrope", "yarn": "longrope"}
"""Other names of longrope in these checkpoints."""


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields)
    rope = read_rope(fields, sizes.head_dim, is_partial=True, aliases=LONGROPE_NAMES, original_positions=4096)
    if rope.kind not in ("default", "longrope"):
        raise fields.error(f"rope type {rope.kind!r} is not that of a Phi-3 model; supported are default, longrope")
    check_silu(fields)
    for name in ("full_attn_mod", "interpolate_factor"):
        check_value(fields, name, 1)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    layer = LayerConfig(
        attention=AttentionConfig(scale=sizes.head_dim**-0.5, rope=rope, window=window),
        ffn=DenseConfig(intermediate_size=fields.integer("intermediate_size")),
    )
    layers = (layer,) * sizes.num_layers
    return read_model(fields, sizes, layers, max_positions=max_positions(fields, rope), eps=1e-5)


PHI_3 = Family(
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    read=_read,
    names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
