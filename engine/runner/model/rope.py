"""Rotary position embedding: inverse frequencies by kind of scaling, and the table of cosines and sines.

The table is made once, in fp32, and rounded to the model's dtype, as transformers rounds what it computes for a batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from disagg.engine.checkpoint.model_config import LayerConfig, ModelConfig, RopeConfig


class RopeTable(NamedTuple):
    """cos and sin of every position, [positions, rotated dims], the second half equal to the first; and the factor of
    the rotated q at every position, where there is one."""

    cos_PR: Tensor
    sin_PR: Tensor
    query_scale_P: Tensor | None


class RopeTables:
    """The tables of a model up to `max_len`, one for each rope that its layers have."""

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        dims = {layer.attention.rope: _rope_dim(config, layer) for layer in config.layers}
        self._tables = {rope: _table(rope, dim, max_len, dtype, device) for rope, dim in dims.items()}

    def of(self, rope: RopeConfig | None) -> RopeTable:
        """The table of a layer."""
        return self._tables[rope]


def _rope_dim(config: ModelConfig, layer: LayerConfig) -> int:
    """Numbers of a head of which the rope rotates its share."""
    latent = layer.attention.latent
    return config.head_dim if latent is None else latent.rope_dim


def _table(rope: RopeConfig | None, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """Without rope, tables of no columns."""
    if rope is None:
        none_P0 = torch.empty((max_len, 0), dtype=dtype, device=device)
        return RopeTable(none_P0, none_P0, None)
    positions_P = torch.arange(max_len, dtype=torch.float32)
    angle_PF = positions_P[:, None] * inverse_frequencies(rope, rope.rotary_dim(head_dim), max_len)
    angle_PR = torch.cat((angle_PF, angle_PF), dim=-1)
    factor, query_scale_P = rope.attention_factor, None
    if rope.query_beta:
        steps_P = torch.floor(positions_P / rope.original_max_positions)
        query_scale_P = (1 + rope.query_beta * torch.log(1 + steps_P)).to(device, dtype)
    return RopeTable(
        (angle_PR.cos() * factor).to(device, dtype), (angle_PR.sin() * factor).to(device, dtype), query_scale_P
    )


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, max_len: int = 0) -> Tensor:
    """Radians per position of each rotated pair, fp32 [rotary_dim / 2]. `max_len` chooses between the factors of
    longrope."""
    exponent_F = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    if rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_max_positions else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponent_F)
    frequency_F = 1.0 / rope.theta**exponent_F
    if rope.kind == "linear":
        return frequency_F / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequency_F, rope)
    if rope.kind == "yarn":
        return _yarn(frequency_F, rope, rotary_dim)
    return frequency_F


def _llama3(frequency_F: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: wavelengths that fit the original context often stay, long ones are stretched, a ramp lies between."""
    turns_F = rope.original_max_positions / (2 * math.pi / frequency_F)
    keep_F = ((turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return _blend(frequency_F, keep_F, rope.factor)


def _yarn(frequency_F: Tensor, rope: RopeConfig, rotary_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): pairs up to `low` stay, from `high` on they are stretched, else a ramp."""

    def pair_that_turns(num_turns: float) -> float:
        """The fractional pair index whose angle makes `num_turns` turns over the original context."""
        wavelength = rope.original_max_positions / num_turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low or 0.001
    stretch_F = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return _blend(frequency_F, 1.0 - stretch_F, rope.factor)


def _blend(frequency_F: Tensor, keep_F: Tensor, factor: float) -> Tensor:
    """From stretched (`keep` 0) to unchanged (1).

    One unit in the last place is a visible angle after 100,000 positions, so this rounds as transformers does.
    """
    return (1.0 - keep_F) * frequency_F / factor + keep_F * frequency_F
