"""RoPE settings from config.json, in the form of transformers 5 (`rope_parameters`) or 4 (`rope_scaling`, `rope_theta`
and others beside it)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import DEFAULT_ROPE_THETA, RopeConfig

KINDS = "default, linear, dynamic, llama3, yarn"


def read_rope(fields: JsonFields, default_theta: float = DEFAULT_ROPE_THETA) -> RopeConfig:
    """The settings of a model all of whose layers have the same.

    Raises:
        ConfigError: for a kind, or a field of a kind, that is not computed.
    """
    scaling, parameters = fields.value("rope_scaling"), fields.value("rope_parameters")
    parameters = scaling or parameters or {}
    if not isinstance(parameters, dict):
        raise fields.error(f"the rope parameters must be an object, not {parameters!r}")
    for name in ("rope_theta", "partial_rotary_factor"):
        if fields.has(name):
            parameters = {name: fields.value(name), **parameters}
    if fields.has("original_max_position_embeddings"):
        parameters = {
            **parameters,
            "original_max_position_embeddings": fields.value("original_max_position_embeddings"),
        }
    return rope_of(fields, parameters, default_theta)


def rope_of(fields: JsonFields, parameters: Mapping[str, Any], default_theta: float = DEFAULT_ROPE_THETA) -> RopeConfig:
    """The settings that one object of rope parameters holds. Raises as `read_rope` does."""
    rope = JsonFields(fields.file, dict(parameters))
    kind = rope.value("rope_type") or rope.value("type") or "default"
    rope.value("type")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("`partial_rotary_factor` other than 1 is not supported")
    theta = rope.number("rope_theta", default_theta)
    if kind == "default":
        config = RopeConfig(theta=theta)
    elif kind == "dynamic":
        rope.value("factor")
        config = RopeConfig(theta=theta)
    elif kind == "linear":
        config = RopeConfig(kind="linear", theta=theta, factor=rope.number("factor"))
    elif kind == "llama3":
        config = _llama3_rope(rope, theta, fields.integer("max_position_embeddings"))
    elif kind == "yarn":
        config = _yarn_rope(rope, theta, fields.integer("max_position_embeddings"))
    else:
        raise rope.error(f"rope type {kind!r} is not supported; supported are {KINDS}")
    rope.value("original_max_position_embeddings")  # of kinds that do not scale by it
    for name, value in rope.unread().items():
        raise rope.error(f"`{name}` = {value!r} is not known for rope type {kind!r}")
    return config


def max_positions(fields: JsonFields, rope: RopeConfig) -> int:
    """Longest sequence. Yarn often leaves `max_position_embeddings` at the length before scaling."""
    scaled = int(rope.original_max_positions * rope.factor) if rope.kind == "yarn" else 0
    return max(fields.integer("max_position_embeddings"), scaled)


def _llama3_rope(rope: JsonFields, theta: float, max_positions: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"`low_freq_factor` ({low}) must be less than `high_freq_factor` ({high})")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_positions=rope.integer("original_max_position_embeddings", max_positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_rope(rope: JsonFields, theta: float, max_positions: int) -> RopeConfig:
    original = rope.integer("original_max_position_embeddings", max_positions)
    factor = rope.number("factor", max_positions / original)
    mscales = rope.value("mscale"), rope.value("mscale_all_dim")
    if rope.has("attention_factor"):
        attention_factor = rope.number("attention_factor")
    elif all(mscales):
        attention_factor = _yarn_mscale(factor, rope.number("mscale")) / _yarn_mscale(
            factor, rope.number("mscale_all_dim")
        )
    else:
        attention_factor = _yarn_mscale(factor, 1.0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """The temperature of the YaRN paper (arXiv 2309.00071, equation 22), scaled by `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
