"""Attention of the query tokens of one sequence over its paged context, causal with an offset.

The query tokens are the last ones of its context: those before them (a cached prefix, earlier chunks) are
seen by all of them. A program has a tile of rows, which are tokens x the query heads of one KV head, so that K and V
are read once for the whole group. Tiles of the context that all rows see need no mask and come first; those at the
diagonal follow. Programs start with the last tile of queries, which has the most to do.

Where a block of the cache holds whole tiles, the tiles without a mask are fetched by the copy engine (TMA), as boxes.
That leaves registers for a tile of 128 rows on four warps, so that two programs fit on a multiprocessor: one has its
softmax computed while the other has its GEMMs.

Shapes: T query tokens, M rows of a tile, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from disagg.kernels.triton.attend import attend, attend_boxes, nothing_yet, write_rows
from disagg.kernels.triton.jit import jit


@partial(jit, do_not_specialize=["num_tokens", "context_len"])
def _prefill_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_boxes: tl.tensor,
    value_boxes: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    context_len: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    rows_per_block: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    BOXES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(1)
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    offset = context_len - num_tokens

    rows_M = tl.arange(0, ROWS)
    dims_D = tl.arange(0, DIM_PADDED)
    tokens_M = first_token + rows_M // GROUP
    held_MD = ((rows_M < TOKENS * GROUP) & (tokens_M < num_tokens))[:, None] & (dims_D < DIM)[None, :]
    heads_M = head * GROUP + rows_M % GROUP
    at_M = tokens_M.to(tl.int64) * q_stride + heads_M * DIM
    q_MD = tl.load(q_ptr + at_M[:, None] + dims_D[None, :], mask=held_MD, other=0.0)
    limit_M = tl.minimum(offset + tokens_M + 1, context_len)
    at_head = head * KV_BLOCK * DIM
    cache = (context_len, table_ptr, key_ptr + at_head, value_ptr + at_head, block_stride, score_scale)
    num_full_tiles = (offset + first_token + 1) // TILE
    num_tiles = tl.cdiv(tl.minimum(offset + first_token + TOKENS, context_len), TILE)

    state = nothing_yet(ROWS, DIM_PADDED)
    if BOXES:
        boxes = (key_boxes, value_boxes, head, rows_per_block)
        state = attend_boxes(q_MD, *state, num_full_tiles, table_ptr, *boxes, score_scale, TILE, KV_BLOCK)
    else:
        state = attend(q_MD, *state, limit_M, 0, num_full_tiles, *cache, TILE, KV_BLOCK, DIM, DIM_PADDED, False)
    state = attend(q_MD, *state, limit_M, num_full_tiles, num_tiles, *cache, TILE, KV_BLOCK, DIM, DIM_PADDED, True)
    out_at_M = (tokens_M.to(tl.int64) * HEADS * GROUP + heads_M) * DIM
    write_rows(out_ptr, out_at_M[:, None] + dims_D[None, :], held_MD, state[0], state[1], value_scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """How the prefill kernel is launched."""

    rows: int
    """Tokens x heads of the group that a program holds; a power of two, at least 16 and the group."""
    tile: int
    """Tokens of the context that are read at a time; a power of two."""
    num_warps: int
    num_stages: int
    boxes: bool
    """Whether full tiles are fetched by the copy engine; only where a block of the cache is one tile or several."""


def prefill_shape(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, block_size: int, group: int, max_query_len: int
) -> PrefillShape:
    """128 rows, and fewer where the longest chunk has not that many or the products are fp32.

    Two tiles of the context are in shared memory. Larger tiles than these spill registers.
    """
    dim_padded = triton.next_power_of_2(dim)
    smallest = triton.next_power_of_2(max(16, group))
    wanted = triton.next_power_of_2(max(smallest, max_query_len * group))
    if q_dtype == torch.float32:
        return PrefillShape(rows=smallest, tile=32, num_warps=4, num_stages=3, boxes=False)
    if wanted < 128:
        tile = 8192 // max(128, dim_padded)
        return PrefillShape(rows=wanted, tile=tile, num_warps=4, num_stages=5, boxes=False)
    if kv_dtype == q_dtype and dim in (64, 128) and block_size % 64 == 0:
        return PrefillShape(rows=128, tile=64, num_warps=4, num_stages=3, boxes=True)
    tile = 128 if dim_padded <= 128 else 64
    return PrefillShape(rows=128, tile=tile, num_warps=8, num_stages=3, boxes=False)


def _boxes(cache_NKBD: Tensor, tile: int) -> TensorDescriptor:
    """The cache as rows of D, from the view's first to its last, of which `tile` are fetched at a time."""
    num_blocks, K, block_size, D = cache_NKBD.shape
    num_rows = (num_blocks - 1) * (cache_NKBD.stride(0) // D) + K * block_size
    return TensorDescriptor(cache_NKBD, [num_rows, D], [D, 1], [tile, D])


def prefill_attention(
    q_TND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    block_table_M: Tensor,
    context_len: int,
    score_scale: float,
    value_scale: float,
    shape: PrefillShape,
    out_TND: Tensor | None = None,
) -> Tensor:
    """[T, N, D]; arguments that `attention` has checked, `score_scale` with log2(e) in it. The queries are the last T
    tokens of the context."""
    T, N, D = q_TND.shape
    _, K, block_size, _ = key_cache_NKBD.shape
    out_TND = torch.empty((T, N, D), dtype=q_TND.dtype, device=q_TND.device) if out_TND is None else out_TND
    tokens = shape.rows // (N // K)
    _prefill_kernel[(triton.cdiv(T, tokens), K)](
        q_TND,
        key_cache_NKBD,
        value_cache_NKBD,
        _boxes(key_cache_NKBD, shape.tile) if shape.boxes else None,
        _boxes(value_cache_NKBD, shape.tile) if shape.boxes else None,
        block_table_M,
        out_TND,
        T,
        context_len,
        q_TND.stride(0),
        key_cache_NKBD.stride(0),
        key_cache_NKBD.stride(0) // D,
        score_scale,
        value_scale,
        BOXES=shape.boxes,
        HEADS=K,
        GROUP=N // K,
        ROWS=shape.rows,
        TILE=shape.tile,
        KV_BLOCK=block_size,
        DIM=D,
        DIM_PADDED=triton.next_power_of_2(D),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out_TND
