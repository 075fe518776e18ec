"""Attention of the chunks of several prompts over their paged contexts, causal with an offset, in one launch.

The query tokens of a chunk are the last ones of its context: those before them (a cached prefix, earlier chunks) are
seen by all of them, but for their windows. A program has an item of the step's list (`prefill_work`): a tile of rows,
which are tokens x the query heads of one KV head, so that K and V are read once for the whole group; in latent
attention x a part of the query heads (`heads`). Tiles of the context that all rows see need no mask and come first,
behind those in which windows begin; those at the diagonal follow. An item that is cut leaves unnormalised fp32 sums,
the sum of weights and the largest score of each piece, which a second kernel joins.

Where a block of the cache holds whole tiles, the tiles without a mask are fetched by the copy engine (TMA), as boxes.
That leaves registers for a tile of 128 rows on four warps, so that two programs fit on a multiprocessor: one has its
softmax computed while the other has its GEMMs.

Shapes: T tokens of the batch, W items, J items that are cut, M rows of a tile, D dim of the values, R further dim of
the keys in latent attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from disagg.kernels.ops import AttentionForm
from disagg.kernels.prefill_work import ITEM_FIELDS, JOIN_FIELDS, PrefillWork
from disagg.kernels.settings.triton_shapes import PrefillChange
from disagg.kernels.triton.attend import (
    attend,
    attend_boxes,
    first_seen,
    load_rows,
    nothing_yet,
    with_sinks,
    write_rows,
)
from disagg.kernels.triton.heads import MUCH_SHARED_BYTES, HeadTiles, head_tiles
from disagg.kernels.triton.jit import jit

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_JOIN_FIELDS = tl.constexpr(JOIN_FIELDS)
AS_BUILT_IN = PrefillChange()
_JOINED_ROWS = 16
"""Rows of a program of the joining kernel."""


@jit
def _prefill_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_boxes: tl.tensor,
    value_boxes: tl.tensor,
    tables_ptr: tl.tensor,
    items_ptr: tl.tensor,
    sinks_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
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
    TAIL: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    item_ptr = items_ptr + tl.program_id(0) * _ITEM_FIELDS
    row, num_tokens, position = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    table_ptr = tables_ptr + tl.load(item_ptr + 3)
    first_tile, end_tile = tl.load(item_ptr + 4), tl.load(item_ptr + 5)

    rows_M = tl.arange(0, ROWS)
    dims_D = tl.arange(0, DIM_PADDED)
    tokens_M = rows_M // GROUP
    heads_M = head * GROUP + rows_M % GROUP
    held_M = tokens_M < num_tokens
    at_M = (row + tokens_M).to(tl.int64) * q_stride + heads_M * (DIM + TAIL)
    q_MD = load_rows(q_ptr, at_M, held_M, DIM, DIM_PADDED, True)
    q_tail_MR, at_head = None, head * KV_BLOCK * DIM
    if TAIL:
        q_tail_MR = load_rows(q_ptr + DIM, at_M, held_M, TAIL, TAIL_PADDED, True)
        at_head *= 0
    queries = (q_MD, q_tail_MR)
    num_full_tiles = tl.maximum(tl.minimum((position + 1) // TILE, end_tile), first_tile)

    state = nothing_yet(ROWS, DIM_PADDED, WINDOW)
    if WINDOW:
        # Tiles before which some window begins.
        length = position + num_tokens
        limit_M = tl.minimum(position + tokens_M + 1, length)
        cut_tile = (first_seen(length - 1, WINDOW) + TILE - 1) // TILE
        cut_tile = tl.minimum(tl.maximum(cut_tile, first_tile), num_full_tiles)
        begin = first_seen(position, WINDOW)
        cache = (begin, length, table_ptr, key_ptr + at_head, value_ptr + at_head, block_stride, score_scale)
        tiles = (first_tile, cut_tile)
        state = attend(
            *queries, *state, limit_M, *tiles, *cache, TILE, KV_BLOCK, DIM, DIM_PADDED, TAIL, TAIL_PADDED, True,
            WINDOW, SOFT_CAP,
        )  # fmt: skip
        first_tile = cut_tile
    if BOXES:
        boxes = (table_ptr, key_boxes, value_boxes, head, rows_per_block)
        state = attend_boxes(q_MD, *state, first_tile, num_full_tiles, *boxes, score_scale, TILE, KV_BLOCK, SOFT_CAP)
    else:
        length = position + num_tokens
        limit_M = tl.minimum(position + tokens_M + 1, length)
        whole = (length, table_ptr, key_ptr + at_head, value_ptr + at_head, block_stride, score_scale)
        tiles = (first_tile, num_full_tiles)
        state = attend(
            *queries, *state, limit_M, *tiles, 0, *whole, TILE, KV_BLOCK, DIM, DIM_PADDED, TAIL, TAIL_PADDED, False,
            WINDOW, SOFT_CAP,
        )  # fmt: skip

    # The item is read again, as volatile, or what is needed from here on would take registers of the loop above.
    row, num_tokens = tl.load(item_ptr, volatile=True), tl.load(item_ptr + 1, volatile=True)
    position, piece = tl.load(item_ptr + 2, volatile=True), tl.load(item_ptr + 6, volatile=True)
    first_tile, end_tile = tl.load(item_ptr + 4, volatile=True), tl.load(item_ptr + 5, volatile=True)
    table_ptr = tables_ptr + tl.load(item_ptr + 3, volatile=True)
    num_full_tiles = tl.maximum(tl.minimum((position + 1) // TILE, end_tile), first_tile)
    length = position + num_tokens
    limit_M = tl.minimum(position + tokens_M + 1, length)
    begin = first_seen(position, WINDOW)
    cache = (begin, length, table_ptr, key_ptr + at_head, value_ptr + at_head, block_stride, score_scale)
    tiles = (num_full_tiles, end_tile)
    state = attend(
        *queries, *state, limit_M, *tiles, *cache, TILE, KV_BLOCK, DIM, DIM_PADDED, TAIL, TAIL_PADDED, True, WINDOW,
        SOFT_CAP,
    )  # fmt: skip
    held_M = tokens_M < num_tokens
    held_MD = held_M[:, None] & (dims_D < DIM)[None, :]
    if piece < 0:
        out_at_M = ((row + tokens_M).to(tl.int64) * HEADS * GROUP + heads_M) * DIM
        sums_MD, mass_M = state[0], state[1]
        if sinks_ptr is not None:
            sums_MD, mass_M = with_sinks(*state, sinks_ptr, heads_M, held_M)
        write_rows(out_ptr, out_at_M[:, None] + dims_D[None, :], held_MD, sums_MD, mass_M, value_scale)
    else:
        kept_M = (piece * HEADS + head) * ROWS + rows_M
        tl.store(sums_ptr + kept_M[:, None] * DIM + dims_D[None, :], state[0], mask=held_MD)
        tl.store(stats_ptr + kept_M * 2, state[1], mask=held_M)
        tl.store(stats_ptr + kept_M * 2 + 1, state[2], mask=held_M)


@jit
def _join_prefill_kernel(
    joins_ptr: tl.tensor,
    sinks_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    value_scale: tl.tensor,
    piece_rows: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """A program for each (item that is cut, KV head, JOINED rows of it)."""
    join_ptr = joins_ptr + tl.program_id(0) * _JOIN_FIELDS
    row, num_tokens = tl.load(join_ptr), tl.load(join_ptr + 1)
    first_piece, num_pieces = tl.load(join_ptr + 2), tl.load(join_ptr + 3)
    head = tl.program_id(1)
    rows_M = tl.program_id(2) * JOINED + tl.arange(0, JOINED)
    dims_D = tl.arange(0, DIM_PADDED)
    tokens_M = rows_M // GROUP
    held_M = tokens_M < num_tokens
    held_MD = held_M[:, None] & (dims_D < DIM)[None, :]
    sums_MD = tl.zeros([JOINED, DIM_PADDED], tl.float32)
    mass_M = tl.zeros([JOINED], tl.float32)
    top_M = tl.full([JOINED], float("-inf"), tl.float32)
    for piece in range(first_piece, first_piece + num_pieces):
        kept_M = (piece * HEADS + head) * piece_rows + rows_M
        piece_mass_M = tl.load(stats_ptr + kept_M * 2, mask=held_M, other=0.0)
        piece_top_M = tl.load(stats_ptr + kept_M * 2 + 1, mask=held_M, other=0.0)
        piece_MD = tl.load(sums_ptr + kept_M[:, None] * DIM + dims_D[None, :], mask=held_MD, other=0.0)
        new_top_M = tl.maximum(top_M, piece_top_M)
        shrink_M, weight_M = tl.exp2(top_M - new_top_M), tl.exp2(piece_top_M - new_top_M)
        mass_M = mass_M * shrink_M + piece_mass_M * weight_M
        sums_MD = sums_MD * shrink_M[:, None] + piece_MD * weight_M[:, None]
        top_M = new_top_M
    if sinks_ptr is not None:
        sums_MD, mass_M = with_sinks(sums_MD, mass_M, top_M, sinks_ptr, head * GROUP + rows_M % GROUP, held_M)
    out_at_M = ((row + tokens_M).to(tl.int64) * HEADS + head) * GROUP + rows_M % GROUP
    write_rows(out_ptr, out_at_M[:, None] * DIM + dims_D[None, :], held_MD, sums_MD, mass_M, value_scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """Launch parameters of the prefill kernel."""

    rows: int
    """Tokens x heads of the group that a program holds; a power of two, at least 16 and the group."""
    tile: int
    """Tokens of the context that are read at a time; a power of two."""
    num_warps: int
    num_stages: int
    boxes: bool
    """Whether full tiles are fetched by the copy engine; only where a block of the cache is one tile or several."""

    @property
    def programs_at_once(self) -> int:
        """Programs that run at once on a multiprocessor."""
        return 2 if self.boxes else 1


def prefill_shape(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    block_size: int,
    group: int,
    max_query_len: int,
    change: PrefillChange = AS_BUILT_IN,
) -> PrefillShape:
    """Launch 128 rows, or fewer where the longest chunk is shorter or the products are fp32; `change` is for 128.

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
    boxed = PrefillShape(rows=128, tile=64, num_warps=4, num_stages=2, boxes=True)
    loaded = PrefillShape(rows=128, tile=128 if dim_padded <= 128 else 64, num_warps=8, num_stages=3, boxes=False)
    fits = kv_dtype == q_dtype and dim in (64, 128) and block_size % (change.tile or boxed.tile) == 0
    chosen = boxed if fits and change.boxes is not False else loaded
    return PrefillShape(
        rows=max(smallest, change.rows or chosen.rows),
        tile=change.tile or chosen.tile,
        num_warps=change.warps or chosen.num_warps,
        num_stages=change.stages or chosen.num_stages,
        boxes=chosen.boxes,
    )


def latent_prefill_shape(heads: HeadTiles, q_dtype: torch.dtype, max_query_len: int, shared_bytes: int) -> PrefillShape:
    """Launch 64 rows, or fewer where the longest chunk is shorter or the products are fp32, on eight warps, among whose
    registers the sums are divided."""
    if q_dtype == torch.float32:
        return PrefillShape(rows=heads.rows, tile=16, num_warps=8, num_stages=3, boxes=False)
    rows = max(heads.rows, min(64, triton.next_power_of_2(max_query_len * heads.group)))
    if rows < 64:
        return PrefillShape(rows=rows, tile=32, num_warps=8, num_stages=5, boxes=False)
    tile = 64 if shared_bytes >= MUCH_SHARED_BYTES else 32
    return PrefillShape(rows=rows, tile=tile, num_warps=8, num_stages=3, boxes=False)


def _boxes(cache_NKBD: Tensor, tile: int) -> TensorDescriptor:
    """The cache as rows of D, from the view's first to its last, of which `tile` are fetched at a time."""
    num_blocks, K, block_size, D = cache_NKBD.shape
    num_rows = (num_blocks - 1) * (cache_NKBD.stride(0) // D) + K * block_size
    return TensorDescriptor(cache_NKBD, [num_rows, D], [D, 1], [tile, D])


def prefill_attention(
    q_TND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    tables: Tensor,
    items: Tensor,
    joins: Tensor,
    work: PrefillWork,
    score_scale: float,
    value_scale: float,
    shape: PrefillShape,
    form: AttentionForm,
    out_TND: Tensor,
) -> Tensor:
    """Write the rows of the items, and return `out`. `attention` has checked the arguments; `score_scale` is the
    form's, with log2(e) and what the keys are stored with in it. Items and joins are those of `work`, which was made
    for this shape and the form's window, `tables` what they point into."""
    (_, N, D), (_, K, block_size, _) = q_TND.shape, key_cache_NKBD.shape
    heads = head_tiles(N, K, D, value_cache_NKBD.shape[3], q_TND.dtype)
    num_pieces = work.num_pieces
    sums = stats = out_TND.new_empty(0, dtype=torch.float32)
    if num_pieces:
        num_rows = num_pieces * heads.count * shape.rows
        sums = out_TND.new_empty((num_rows, heads.dim), dtype=torch.float32)
        stats = out_TND.new_empty((num_rows, 2), dtype=torch.float32)
    common = {
        "HEADS": heads.count,
        "GROUP": heads.group,
        "DIM": heads.dim,
        "DIM_PADDED": heads.dim_padded,
    }
    _prefill_kernel[(work.num_items, heads.count)](
        q_TND,
        key_cache_NKBD,
        value_cache_NKBD,
        _boxes(key_cache_NKBD, shape.tile) if shape.boxes else None,
        _boxes(value_cache_NKBD, shape.tile) if shape.boxes else None,
        tables,
        items,
        form.sinks_N,
        out_TND,
        sums,
        stats,
        q_TND.stride(0),
        key_cache_NKBD.stride(0),
        key_cache_NKBD.stride(0) // D,
        score_scale,
        value_scale,
        BOXES=shape.boxes,
        ROWS=shape.rows,
        TILE=shape.tile,
        KV_BLOCK=block_size,
        TAIL=heads.tail,
        TAIL_PADDED=heads.tail_padded,
        WINDOW=form.window or 0,
        SOFT_CAP=form.soft_cap or 0.0,
        **common,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if num_pieces:
        grid = (work.num_joins, heads.count, triton.cdiv(shape.rows, _JOINED_ROWS))
        _join_prefill_kernel[grid](
            joins,
            form.sinks_N,
            out_TND,
            sums,
            stats,
            value_scale,
            shape.rows,
            JOINED=_JOINED_ROWS,
            **common,
            num_warps=4,
        )
    return out_TND
