"""Rows of latent attention before they are written, for tests of `latent_rope_write`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from disagg.kernels.ops import LatentWrite


class LatentRows:
    """Tokens with slots in any order, every seventh one padding; rows and heads are slices of wider ones. A cache of
    NaN, layer 1 of three. `dims`: numbers of a latent, and of what is rotated."""

    def __init__(
        self,
        num_tokens: int,
        num_heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._random, self._device = torch.Generator().manual_seed(5), device
        (L, R), T, num_blocks = dims, num_tokens, num_tokens // 16 + 2
        self.latent, self.k = self.of(T, L + 3, dtype=dtype)[:, :L], self.of(T, R + 5, dtype=dtype)[:, 5:]
        self.absorbed = self.of(num_heads, T, L, dtype=dtype).transpose(0, 1)
        self.q = self.of(T, num_heads, 9 + R, dtype=dtype)[..., 9:]
        self.positions = torch.randint(0, 64, (T,), generator=self._random).to(device)
        self.slots = torch.randperm(num_blocks * 16, generator=self._random)[:T].to(device)
        self.slots[::7] = -1
        self.cos, self.sin = (self.of(64, R // 2, dtype=dtype).repeat(1, 2) for _ in range(2))
        self.cache = torch.full((num_blocks, 3, 1, 1, 16, L + R), math.nan, dtype=dtype, device=device)

    def of(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, generator=self._random).to(self._device, dtype)

    def write(self, ops: Any, cache: Tensor) -> Tensor | None:
        """Call the op of an implementation; the queries."""
        layer = LatentWrite(self.cos, self.sin, cache[:, 1, 0])
        args = (self.latent, self.k, self.absorbed, self.q, self.positions, self.slots, layer)
        found: Tensor | None = ops.latent_rope_write(*args)
        return found
