"""Sequences in a paged cache, for tests of attention: scattered blocks, and NaN in every slot that no token has.

Shapes: S sequences, N query heads, K KV heads, D head dim, B tokens of a block, M blocks of a table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNREADABLE_BLOCK = 2**30
"""Far outside any cache: a table entry that is read by mistake ends the test."""


class PagedCase:
    """Contexts of random K and V in layer 1 of a two-layer cache, and random queries."""

    def __init__(
        self,
        context_lens: list[int],
        *,
        heads: tuple[int, int],
        dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._random = torch.Generator(device).manual_seed(1)
        self.device, self.dtype, self.dim, self.scale = device, dtype, dim, dim**-0.5
        self.num_heads, K = heads
        widths = [-(-length // block_size) for length in context_lens]
        cache = torch.full((2, 2, sum(widths) + 1, K, block_size, dim), math.nan, dtype=dtype, device=device)
        cache = cache.permute(2, 0, 1, 3, 4, 5)  # the order in memory that `KvCache` has
        ids = (torch.randperm(sum(widths), generator=self._random, device=device) + 1).int()
        self.tables_SM = torch.zeros(len(context_lens), max(widths) + 1, dtype=torch.int32, device=device)
        """Padded with 0, as the reference wants it."""
        self.poisoned_tables_SM = torch.full_like(self.tables_SM, UNREADABLE_BLOCK)
        """Padded with entries that must not be read."""
        first = 0
        for row, (length, width) in enumerate(zip(context_lens, widths, strict=True)):
            blocks = ids[first : first + width]
            first += width
            self.tables_SM[row, :width] = self.poisoned_tables_SM[row, :width] = blocks
            tokens = torch.arange(length, device=device)
            kv = self._randn(2, length, K, dim)
            for part in (0, 1):
                cache[blocks.long()[tokens // block_size], 1, part, :, tokens % block_size] = kv[part]
        self.cache = cache if cache_dtype is None else cache.to(cache_dtype)
        self.keys_NKBD, self.values_NKBD = self.cache[:, 1, 0], self.cache[:, 1, 1]
        self.lens_S = torch.tensor(context_lens, dtype=torch.int32, device=device)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self.device).to(self.dtype)

    def queries(self, num_rows: int) -> Tensor:
        """[num_rows, N, D], as in a model a slice of wider rows."""
        return self._randn(num_rows, self.num_heads + 2, self.dim)[:, : self.num_heads]
