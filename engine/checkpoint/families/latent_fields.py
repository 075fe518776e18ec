"""Latent attention, from fields of config.json whose names all its families share."""

from __future__ import annotations

from typing import NamedTuple

from disagg.engine.checkpoint.families.family import Sizes, check_silu, check_value
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, LatentConfig
from disagg.engine.checkpoint.rope_fields import latent_scale, max_positions, read_rope


class LatentDefaults(NamedTuple):
    """A family's defaults of the sizes of a head."""

    query_rank: int = 1536
    key_dim: int = 128
    value_dim: int = 128


DEEPSEEK = LatentDefaults()


class LatentFields(NamedTuple):
    """What is read: sizes, the attention of all layers, and the longest sequence."""

    sizes: Sizes
    attention: AttentionConfig
    max_positions: int


def read_latent(fields: JsonFields, defaults: LatentDefaults = DEEPSEEK) -> LatentFields:
    """Raises `ConfigError` where the fields contradict each other, or name what is not computed."""
    query_rank = None if fields.is_null("q_lora_rank") else fields.integer("q_lora_rank", defaults.query_rank)
    latent = LatentConfig(
        latent_dim=fields.integer("kv_lora_rank", 512),
        rope_dim=fields.integer("qk_rope_head_dim", 64),
        key_dim=fields.integer("qk_nope_head_dim", defaults.key_dim),
        value_dim=fields.integer("v_head_dim", defaults.value_dim),
        query_rank=query_rank,
        interleaved=fields.boolean("rope_interleave", True),
    )
    if latent.rope_dim % 2:
        raise fields.error(f"`qk_rope_head_dim` must be even, not {latent.rope_dim}")
    num_heads = fields.integer("num_attention_heads")
    for name, value in (
        ("num_key_value_heads", num_heads),
        ("head_dim", latent.rope_dim),
        ("qk_head_dim", latent.query_dim),
        ("attention_bias", False),
    ):
        check_value(fields, name, value)
    check_silu(fields)
    rope = read_rope(fields, latent.rope_dim)
    attention = AttentionConfig(
        scale=latent.query_dim**-0.5 * latent_scale(fields, rope),
        rope=rope,
        latent=latent,
    )
    sizes = Sizes(fields.integer("hidden_size"), fields.integer("num_hidden_layers"), num_heads, 1, latent.cache_dim)
    return LatentFields(sizes, attention, max_positions(fields, rope))
