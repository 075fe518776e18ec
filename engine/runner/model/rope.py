"""Rotary position embedding: inverse frequencies by kind of scaling, and the table of cosines and sines.

The table is made once, in fp32, and rounded to the model's dtype, as transformers rounds what it computes for a batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from disagg.engine.checkpoint.model_config import ModelConfig, RopeConfig


class RopeTable(NamedTuple):
    """cos and sin of every position, [positions, head_dim], the second half equal to the first."""

    cos_PD: Tensor
    sin_PD: Tensor


class RopeTables:
    """The tables of a model up to `max_len`, one for each rope that its layers have."""

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        ropes = dict.fromkeys(layer.attention.rope for layer in config.layers)
        self._tables = {rope: _table(rope, config.head_dim, max_len, dtype, device) for rope in ropes}

    def of(self, rope: RopeConfig) -> RopeTable:
        """The table of a layer."""
        return self._tables[rope]


def _table(rope: RopeConfig, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    angle_PF = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    angle_PD = torch.cat((angle_PF, angle_PF), dim=-1)
    factor = rope.attention_factor
    return RopeTable((angle_PD.cos() * factor).to(device, dtype), (angle_PD.sin() * factor).to(device, dtype))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, fp32 [head_dim / 2]."""
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency_F = 1.0 / rope.theta**exponent_F
    if rope.kind == "linear":
        return frequency_F / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequency_F, rope)
    if rope.kind == "yarn":
        return _yarn(frequency_F, rope, head_dim)
    return frequency_F


def _llama3(frequency_F: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: wavelengths that fit the original context often stay, long ones are stretched, a ramp lies between."""
    turns_F = rope.original_max_positions / (2 * math.pi / frequency_F)
    keep_F = ((turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return _blend(frequency_F, keep_F, rope.factor)


def _yarn(frequency_F: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): pairs up to `low` stay, from `high` on they are stretched, else a ramp."""

    def pair_that_turns(num_turns: float) -> float:
        """The fractional pair index whose angle makes `num_turns` turns over the original context."""
        wavelength = rope.original_max_positions / num_turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretch_F = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return _blend(frequency_F, 1.0 - stretch_F, rope.factor)


def _blend(frequency_F: Tensor, keep_F: Tensor, factor: float) -> Tensor:
    """From stretched (`keep` 0) to unchanged (1).

    One unit in the last place is a visible angle after 100,000 positions, so this rounds as transformers does.
    """
    return (1.0 - keep_F) * frequency_F / factor + keep_F * frequency_F
