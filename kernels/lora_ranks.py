"""Ranks of LoRA adapters for which memory is allocated. Without torch."""

from __future__ import annotations

RANK_ALIGNMENT = 16
"""Kernels compute several ranks at a time."""


def aligned_rank(rank: int) -> int:
    """The rank for which memory is allocated: the next multiple of `RANK_ALIGNMENT`."""
    return -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT
