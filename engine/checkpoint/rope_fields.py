"""RoPE settings from config.json, in the form of transformers 5 (`rope_parameters`) or 4 (`rope_scaling`, `rope_theta`
and others beside it)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import DEFAULT_ROPE_THETA, RopeConfig

MAX_TEMPERATURE = 1e6
"""Largest temperature of yarn for `mscale_all_dim`, whose square multiplies scores; that of published models is below
2."""
KINDS = "default, linear, dynamic, llama3, yarn, longrope"


def read_rope(
    fields: JsonFields,
    head_dim: int,
    default_theta: float = DEFAULT_ROPE_THETA,
    *,
    is_partial: bool = False,
    default_share: float = 1.0,
    query_beta: bool = False,
    aliases: Mapping[str, str] | None = None,
    original_positions: int | None = None,
) -> RopeConfig:
    """The settings of a model all of whose layers have the same.

    Args:
        is_partial, query_beta: whether the family has rope of a part of the head, and a scale of q by its position.
        default_share: the family's default of that part.
        aliases: the family's other names of kinds.
        original_positions: the family's default of `original_max_position_embeddings`.

    Raises:
        ConfigError: for a kind, or a field of a kind, that is not computed.
    """
    parameters = fields.value("rope_scaling") or fields.value("rope_parameters") or {}
    fields.value("rope_parameters")
    if not isinstance(parameters, dict):
        raise fields.error(f"the rope parameters must be an object, not {parameters!r}")
    for name in ("rope_theta", "partial_rotary_factor"):
        if fields.has(name):
            parameters = {name: fields.value(name), **parameters}
    if original_positions is not None or fields.has("original_max_position_embeddings"):
        original = fields.integer("original_max_position_embeddings", original_positions)
        parameters = {**parameters, "original_max_position_embeddings": original}
    parameters = {"partial_rotary_factor": default_share, **parameters}
    for name in ("rope_type", "type"):
        if not isinstance(parameters.get(name), str | None):
            raise fields.error(f"rope type {parameters[name]!r} is not supported")
        if aliases and parameters.get(name) in aliases:
            parameters = {**parameters, name: aliases[parameters[name]]}
    return _rope(fields, parameters, head_dim, default_theta, is_partial, query_beta)


def read_ropes_by_kind(fields: JsonFields, head_dim: int, thetas: Mapping[str, float]) -> dict[str, RopeConfig]:
    """The settings of each kind of layer, of which `thetas` has the defaults. Scaling in the form of transformers 4 is
    that of layers with full attention. Raises as `read_rope` does."""
    nested, scaling = fields.value("rope_parameters") or {}, fields.value("rope_scaling") or {}
    for name, value in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise fields.error(f"`{name}` must be an object, not {value!r}")
    ropes = {}
    for kind in nested:
        if kind not in thetas:
            raise fields.error(f"`rope_parameters` has {kind!r}; the kinds of layers are {', '.join(thetas)}")
        if not isinstance(nested[kind], dict | None):
            raise fields.error(f"`rope_parameters.{kind}` must be an object, not {nested[kind]!r}")
    for kind, theta in thetas.items():
        parameters = {**(nested.get(kind) or {}), **(scaling if kind == FULL_ATTENTION else {})}
        ropes[kind] = _rope(fields, parameters, head_dim, theta, False, False)
    return ropes


FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


def _rope(
    fields: JsonFields,
    parameters: Mapping[str, Any],
    head_dim: int,
    default_theta: float,
    is_partial: bool,
    query_beta: bool,
) -> RopeConfig:
    """The settings that one object of rope parameters holds."""
    rope = JsonFields(fields.file, dict(parameters))
    kind = rope.value("rope_type") or rope.value("type") or "default"
    rope.value("type")
    share = rope.number("partial_rotary_factor", 1.0)
    if share != 1.0 and not is_partial:
        raise rope.error(f"`partial_rotary_factor` other than 1 is not supported, here {share}")
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise rope.error(f"`partial_rotary_factor` {share} of a head of {head_dim} leaves {rotary_dim} dims to rotate")
    values: dict[str, Any] = {"theta": rope.number("rope_theta", default_theta), "share": share}
    max_positions = fields.integer("max_position_embeddings")
    if kind == "linear":
        values |= {"kind": kind, "factor": rope.number("factor")}
    elif kind == "llama3":
        values |= _llama3(rope, max_positions)
    elif kind == "yarn":
        values |= _yarn(rope, max_positions)
    elif kind == "longrope":
        values |= _longrope(rope, max_positions, rotary_dim // 2)
    elif kind == "dynamic":
        rope.value("factor")
    elif kind != "default":
        raise rope.error(f"rope type {kind!r} is not supported; supported are {KINDS}")
    if query_beta:
        values["query_beta"] = rope.number("llama_4_scaling_beta")
        values["original_max_positions"] = rope.integer("original_max_position_embeddings")
        if rope.integer("max_position_embeddings", max_positions) != max_positions:
            other = rope.value("max_position_embeddings")
            raise rope.error(f"`max_position_embeddings` is {max_positions}, and {other} in the rope parameters")
    rope.value("original_max_position_embeddings")  # of kinds that do not scale by it
    for name, value in rope.unread().items():
        raise rope.error(f"`{name}` = {value!r} is not known for rope type {kind!r}")
    return RopeConfig(**values)


def max_positions(fields: JsonFields, rope: RopeConfig) -> int:
    """Longest sequence. Yarn often leaves `max_position_embeddings` at the length before scaling."""
    scaled = int(rope.original_max_positions * rope.factor) if rope.kind == "yarn" else 0
    return max(fields.integer("max_position_embeddings"), scaled)


def latent_scale(fields: JsonFields, rope: RopeConfig) -> float:
    """The factor of the scores of latent attention: with yarn, the square of the temperature for `mscale_all_dim`."""
    parameters = fields.value("rope_scaling") or fields.value("rope_parameters") or {}
    if rope.kind != "yarn" or not parameters.get("mscale_all_dim"):
        return 1.0
    mscale = JsonFields(fields.file, parameters).number("mscale_all_dim")
    temperature = _yarn_mscale(rope.factor, mscale)
    if temperature > MAX_TEMPERATURE:
        raise fields.error(f"`mscale_all_dim` {mscale} makes a temperature of more than {MAX_TEMPERATURE:g}")
    return temperature**2


def _llama3(rope: JsonFields, max_positions: int) -> dict[str, Any]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"`low_freq_factor` ({low}) must be less than `high_freq_factor` ({high})")
    return {
        "kind": "llama3",
        "factor": rope.number("factor"),
        "original_max_positions": rope.integer("original_max_position_embeddings", max_positions),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _yarn(rope: JsonFields, max_positions: int) -> dict[str, Any]:
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
    return {
        "kind": "yarn",
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": attention_factor,
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.boolean("truncate", True),
    }


def _longrope(rope: JsonFields, max_positions: int, num_pairs: int) -> dict[str, Any]:
    original = rope.integer("original_max_position_embeddings", max_positions, minimum=2)
    factor = rope.number("factor", max_positions / original)
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "kind": "longrope",
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": rope.number("attention_factor", stretch),
        "short_factors": _factors(rope, "short_factor", num_pairs),
        "long_factors": _factors(rope, "long_factor", num_pairs),
    }


def _factors(rope: JsonFields, name: str, num_pairs: int) -> tuple[float, ...]:
    """One positive number for each rotated pair."""
    values = rope.value(name)
    if not isinstance(values, list) or len(values) != num_pairs:
        count = len(values) if isinstance(values, list) else repr(values)
        raise rope.error(f"`{name}` must have one number for each of the {num_pairs} rotated pairs, not {count}")
    return tuple(JsonFields(rope.file, {name: value}).number(name) for value in values)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """The temperature of the YaRN paper (arXiv 2309.00071, equation 22), scaled by `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
