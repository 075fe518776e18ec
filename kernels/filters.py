"""How rows of logits are sampled on a device: the parameters of every row, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """How each row is sampled; all tensors on the logits' device, so that a captured graph reads new values."""

    temperatures_R: Tensor
    """fp32; below 1e-5 is greedy."""
    top_k_R: Tensor
    """int32; 0 keeps all."""
    top_p_R: Tensor
    """fp64; 1 keeps all."""
    min_p_R: Tensor
    """fp64; 0 keeps all."""
    seeds_R: Tensor
    """int64, the bits of the seed modulo 2^64."""
    indices_R: Tensor
    """int64, from 0: how many tokens the row's sequence has drawn."""
