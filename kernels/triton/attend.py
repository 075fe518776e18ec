"""The inner loop of both attention kernels: rows of one KV head attend to a range of tiles of a paged context.

The softmax is computed online (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; its use for
attention tiles: Dao et al. 2022, "FlashAttention"). Scores are kept in base 2, so that `exp2` needs no product.

Slots that no token was written to may hold NaN. They lie behind the context's end, or before the window of the first
token of a tile of rows, where K and V are loaded as zeros.

The parts of an `AttentionForm` but its scale are constants of the compiler: a plain kernel has nothing of them.

Keys of latent attention have a tail, further columns behind those that are their values. Queries have one as well, and
the products of both are added to a score. A tile is read once, as keys and as values.

Shapes: M rows (query heads of one KV head x tokens), C tokens of a tile, D dim of the values (and of the keys, without
their tail) padded to a power of two, R dim of the tail padded likewise.
"""

from __future__ import annotations

import math

import triton.language as tl

from disagg.kernels.triton.jit import jit

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1e30)
"""Score of a row that has seen nothing yet: below all scores, but a number."""


@jit
def first_seen(position: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The first token that the one at `position` sees; a WINDOW of 0 leaves all."""
    if WINDOW:
        return tl.maximum(position + 1 - WINDOW, 0)
    return position * 0


@jit
def _are_held(tokens_C: tl.tensor, begin: tl.tensor, length: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Which tokens there is something to read of."""
    if WINDOW:
        return (tokens_C >= begin) & (tokens_C < length)
    return tokens_C < length


@jit
def _tile_rows(
    table_ptr: tl.tensor,
    tokens_C: tl.tensor,
    first_token: tl.tensor,
    begin: tl.tensor,
    length: tl.tensor,
    block_stride: tl.tensor,
    TILE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Start of the tokens' rows in the cache of one head, in elements (int64: caches pass 2**31 elements)."""
    if KV_BLOCK % TILE == 0:
        block = tl.load(table_ptr + first_token // KV_BLOCK).to(tl.int64)
        return block * block_stride + (first_token % KV_BLOCK + tl.arange(0, TILE)) * ROW
    if MASKED:
        held_C = _are_held(tokens_C, begin, length, WINDOW)
        blocks_C = tl.load(table_ptr + tokens_C // KV_BLOCK, mask=held_C, other=0).to(tl.int64)
    else:
        blocks_C = tl.load(table_ptr + tokens_C // KV_BLOCK).to(tl.int64)
    return blocks_C * block_stride + (tokens_C % KV_BLOCK) * ROW


@jit
def load_rows(
    ptr: tl.tensor,
    starts_X: tl.tensor,
    held_X: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """The first `SIZE` columns of rows, padded with zeros; with MASKED zeros for rows that are not held."""
    columns = tl.arange(0, PADDED)
    at = starts_X[:, None] + columns[None, :]
    if MASKED:
        return tl.load(ptr + at, mask=held_X[:, None] & (columns < SIZE)[None, :], other=0.0)
    if PADDED != SIZE:
        return tl.load(ptr + at, mask=(columns < SIZE)[None, :], other=0.0)
    return tl.load(ptr + at)


@jit
def _add_tile(
    q_MD: tl.tensor,
    q_tail_MR: tl.tensor | None,
    k_CD: tl.tensor,
    k_tail_CR: tl.tensor | None,
    v_CD: tl.tensor,
    sums_MD: tl.tensor,
    mass_M: tl.tensor,
    top_M: tl.tensor,
    limit_M: tl.tensor,
    tokens_C: tl.tensor,
    score_scale: tl.tensor,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax; an fp8 tile becomes the dtype of q here."""
    scores_MC = tl.dot(q_MD, tl.trans(k_CD.to(q_MD.dtype)), input_precision="ieee")
    if q_tail_MR is not None and k_tail_CR is not None:
        scores_MC = tl.dot(q_tail_MR, tl.trans(k_tail_CR.to(q_MD.dtype)), scores_MC, input_precision="ieee")
    if SOFT_CAP > 0.0:
        # cap * log2(e) * tanh(x / cap), where `score_scale` has log2(e) in it: e^(2x / cap) is 2^(2 score / cap).
        power_MC = tl.exp2(scores_MC * (score_scale * (2.0 / SOFT_CAP)))
        scores_MC = (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (power_MC + 1.0))
    if MASKED:
        visible_MC = tokens_C[None, :] < limit_M[:, None]
        if WINDOW:
            visible_MC = visible_MC & (tokens_C[None, :] >= limit_M[:, None] - WINDOW)
        scores_MC = tl.where(visible_MC, scores_MC, float("-inf"))
    if SOFT_CAP > 0.0:
        new_top_M = tl.maximum(top_M, tl.max(scores_MC, 1))
        weights_MC = tl.exp2(scores_MC - new_top_M[:, None])
    else:
        new_top_M = tl.maximum(top_M, tl.max(scores_MC, 1) * score_scale)
        weights_MC = tl.exp2(scores_MC * score_scale - new_top_M[:, None])
    shrink_M = tl.exp2(top_M - new_top_M)
    mass_M = mass_M * shrink_M + tl.sum(weights_MC, 1)
    sums_MD *= shrink_M[:, None]
    sums_MD = tl.dot(weights_MC.to(q_MD.dtype), v_CD.to(q_MD.dtype), sums_MD, input_precision="ieee")
    return sums_MD, mass_M, new_top_M


@jit
def nothing_yet(
    ROWS: tl.constexpr, DIM_PADDED: tl.constexpr, WINDOW: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(sums, mass, top) of rows that have attended to nothing. With a WINDOW the top is a number, since a row may see
    nothing of the first tiles."""
    sums_MD = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    top = LOWEST if WINDOW else float("-inf")
    return sums_MD, tl.zeros([ROWS], tl.float32), tl.full([ROWS], top, tl.float32)


@jit
def with_sinks(
    sums_MD: tl.tensor, mass_M: tl.tensor, top_M: tl.tensor, sinks_ptr: tl.tensor, heads_M: tl.tensor, held_M: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """(sums, mass) with the sinks of the rows' heads, once all tiles were added."""
    sinks_M = tl.load(sinks_ptr + heads_M, mask=held_M, other=0.0) * LOG2_E
    new_top_M = tl.maximum(top_M, sinks_M)
    shrink_M = tl.exp2(top_M - new_top_M)
    return sums_MD * shrink_M[:, None], mass_M * shrink_M + tl.exp2(sinks_M - new_top_M)


@jit
def attend(
    q_MD: tl.tensor,
    q_tail_MR: tl.tensor | None,
    sums_MD: tl.tensor,
    mass_M: tl.tensor,
    top_M: tl.tensor,
    limit_M: tl.tensor,
    first_tile: tl.tensor,
    end_tile: tl.tensor,
    begin: tl.tensor,
    length: tl.tensor,
    table_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    block_stride: tl.tensor,
    score_scale: tl.tensor,
    TILE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add tiles [first_tile, end_tile) to the running (weighted sums of V, sum of weights, largest score).

    `score_scale` is positive and has log2(e) in it; `table_ptr` is at the sequence's table, the cache pointers at the
    head. With MASKED a row sees only tokens < its limit, with a WINDOW the last of these, and nothing is read at or
    behind `length`, nor before `begin` with a WINDOW; without MASKED all tiles must be full and visible to all rows.
    Without a WINDOW every row must see a token of the first tile it is ever given. With a TAIL `value_ptr` is not read.
    """
    for tile in range(first_tile, end_tile):
        tokens_C = tile * TILE + tl.arange(0, TILE)
        rows_C = _tile_rows(
            table_ptr, tokens_C, tile * TILE, begin, length, block_stride, TILE, KV_BLOCK, DIM + TAIL, MASKED, WINDOW
        )
        held_C = tokens_C
        if MASKED:
            held_C = _are_held(tokens_C, begin, length, WINDOW)
        k_CD = load_rows(key_ptr, rows_C, held_C, DIM, DIM_PADDED, MASKED)
        v_CD, k_tail_CR = k_CD, None
        if TAIL:
            k_tail_CR = load_rows(key_ptr + DIM, rows_C, held_C, TAIL, TAIL_PADDED, MASKED)
        else:
            v_CD = load_rows(value_ptr, rows_C, held_C, DIM, DIM_PADDED, MASKED)
        sums_MD, mass_M, top_M = _add_tile(
            q_MD,
            q_tail_MR,
            k_CD,
            k_tail_CR,
            v_CD,
            sums_MD,
            mass_M,
            top_M,
            limit_M,
            tokens_C,
            score_scale,
            MASKED,
            WINDOW,
            SOFT_CAP,
        )
    return sums_MD, mass_M, top_M


@jit
def attend_boxes(
    q_MD: tl.tensor,
    sums_MD: tl.tensor,
    mass_M: tl.tensor,
    top_M: tl.tensor,
    first_tile: tl.tensor,
    end_tile: tl.tensor,
    table_ptr: tl.tensor,
    key_boxes: tl.tensor,
    value_boxes: tl.tensor,
    head: tl.tensor,
    rows_per_block: tl.tensor,
    score_scale: tl.tensor,
    TILE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`attend` without MASKED, each tile fetched by the copy engine as one box of one block.

    The descriptors see the cache as rows of D from the view's start; a block is `rows_per_block` of them away from
    the next. The address arithmetic of `attend`, and the registers it needs, fall away.
    """
    for tile in range(first_tile, end_tile):
        token = tile * TILE
        row = tl.load(table_ptr + token // KV_BLOCK) * rows_per_block + head * KV_BLOCK + token % KV_BLOCK
        k_CD = key_boxes.load([row, 0])
        v_CD = value_boxes.load([row, 0])
        sums_MD, mass_M, top_M = _add_tile(
            q_MD, None, k_CD, None, v_CD, sums_MD, mass_M, top_M, top_M, token, score_scale, False, 0, SOFT_CAP
        )
    return sums_MD, mass_M, top_M


@jit
def write_rows(
    out_ptr: tl.tensor,
    at_MD: tl.tensor,
    held_MD: tl.tensor,
    sums_MD: tl.tensor,
    mass_M: tl.tensor,
    value_scale: tl.tensor,
) -> None:
    """The weighted means of V, in the dtype of `out_ptr`; zeros for rows that attended to nothing."""
    share_M = value_scale / tl.where(mass_M > 0.0, mass_M, 1.0)
    tl.store(out_ptr + at_MD, (sums_MD * share_M[:, None]).to(out_ptr.dtype.element_ty), mask=held_MD)
