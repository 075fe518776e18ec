"""Sequences in a paged cache, for tests of attention: scattered blocks, and NaN in every slot that no token has.

Shapes: S sequences, N query heads, K KV heads, D head dim, B tokens of a block, M blocks of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from disagg.kernels import kv_rows
from disagg.kernels.ops import AttentionForm, AttentionSpec, PlannedPrefills, PrefillChunk, Prefills
from disagg.kernels.prefill_work import ChunkPlace, PrefillWork

UNREADABLE_BLOCK = 2**30
"""Far outside any cache: a table entry that is read by mistake ends the test."""


def prompts(*chunks: tuple[Tensor, int, int], first_row: int = 0) -> Prefills:
    """Chunks of (block table, start, number of tokens), one behind the other in the batch."""
    made, row = [], first_row
    for table_M, start, num_tokens in chunks:
        made.append(PrefillChunk(slice(row, row + num_tokens), start, table_M))
        row += num_tokens
    return Prefills(tuple(made))


NAN_BYTE = 0x7E
"""Two of it are an fp16 NaN: what a slot in 8 bits is filled with that no token has."""


class PagedCase:
    """Contexts of random K and V in layer 1 of a two-layer cache, and random queries. With `value_dim` the values are
    the first numbers of the keys, as in latent attention."""

    def __init__(
        self,
        context_lens: list[int],
        *,
        heads: tuple[int, int],
        dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        value_dim: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._random = torch.Generator(device).manual_seed(1)
        self.device, self.dtype, self.dim, self.form = device, dtype, dim, AttentionForm(dim**-0.5)
        self.num_heads, K = heads
        self.value_dim, planes = (dim, 2) if value_dim is None else (value_dim, 1)
        widths = [-(-length // block_size) for length in context_lens]
        cache = torch.full((2, planes, sum(widths) + 1, K, block_size, dim), math.nan, dtype=dtype, device=device)
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
            kv = self._randn(planes, length, K, dim)
            for part in range(planes):
                cache[blocks.long()[tokens // block_size], 1, part, :, tokens % block_size] = kv[part]
        self.cache = cache if cache_dtype is None else _in_dtype(cache, cache_dtype)
        self.keys_NKBD, self.values_NKBD = self.cache[:, 1, 0], self.cache[:, 1, planes - 1]
        if self.value_dim != dim:
            self.values_NKBD = self.values_NKBD[..., : self.value_dim]
        self.lens_S = torch.tensor(context_lens, dtype=torch.int32, device=device)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self.device).to(self.dtype)

    def queries(self, num_rows: int) -> Tensor:
        """[num_rows, N, D], as in a model a slice of wider rows."""
        return self._randn(num_rows, self.num_heads + 2, self.dim)[:, : self.num_heads]

    def forget(self, sequence: int, first: int) -> None:
        """Take the tokens before `first` away: the blocks that hold nothing else, and the slots of the others."""
        block_size = self.keys_NKBD.shape[2]
        block, offset = divmod(first, block_size)
        for cache in (self.keys_NKBD, self.values_NKBD):
            nothing = NAN_BYTE if cache.dtype == torch.int8 else math.nan
            cache[self.tables_SM[sequence, :block].long()] = nothing
            cache[self.tables_SM[sequence, block].long(), :, :offset] = nothing
        self.tables_SM[sequence, :block] = 0
        self.poisoned_tables_SM[sequence, :block] = UNREADABLE_BLOCK

    def prompts(self, chunks: list[tuple[int, int]], first_row: int = 0) -> Prefills:
        """For each sequence (start, number of tokens), for the reference."""
        tables = self.tables_SM[: len(chunks)]
        return prompts(*((table_M, *chunk) for table_M, chunk in zip(tables, chunks, strict=True)), first_row=first_row)

    def planned(
        self, prefills: Prefills, plan: Callable[[list[ChunkPlace], AttentionSpec, int | None], PrefillWork]
    ) -> PlannedPrefills:
        """Their plan, with tables that end in entries that must not be read."""
        tables, places, first = [], [], 0
        for chunk, table_M in zip(prefills.chunks, self.poisoned_tables_SM, strict=False):
            places.append(ChunkPlace(chunk.rows.start, chunk.rows.stop - chunk.rows.start, chunk.start, first))
            tables.append(table_M)
            first += len(table_M)
        _, K, block_size, _ = self.keys_NKBD.shape
        spec = AttentionSpec(
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            kv_dtype=str(self.cache.dtype).removeprefix("torch."),
            num_heads=self.num_heads,
            num_kv_heads=K,
            head_dim=self.dim,
            block_size=block_size,
            scale=self.form.scale,
            value_dim=None if self.value_dim == self.dim else self.value_dim,
        )
        work = plan(places, spec, self.form.window)
        numbers = torch.from_numpy(work.numbers).to(self.device)
        return PlannedPrefills(work, numbers, torch.cat(tables))


def _in_dtype(cache_NL2KBD: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache in the order in memory that `KvCache` has, in another dtype."""
    if dtype != torch.int8:
        return cache_NL2KBD.to(dtype)
    return kv_rows.quantized_rows(cache_NL2KBD.permute(1, 2, 0, 3, 4, 5)).permute(2, 0, 1, 3, 4, 5)
