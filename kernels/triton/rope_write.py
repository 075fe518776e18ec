"""All that is between the QKV GEMM and attention, in one launch: QK-norm, rotary embedding, and the write of K and V
into the paged cache.

A program has a few heads of one kind (q, k or v) of one token: it reads them once, as two halves that are each other's
partners in the rotation, and the rest of the head behind them, which is not rotated. All roundings are those of the
reference, which rounds to the model's dtype after the norm and after each product of the rotation; so the compiler must
not fuse a product with the sum behind it (`enable_fp_fusion`), as it does in 16 bits, too. A cache in fp8 (e4m3) stores
value / scale, divided as in IEEE 754 and clamped to the largest finite number.

Shapes: T tokens, N query heads, K KV heads, D head dim, R dims of it that are rotated, P positions of the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.ops import HeadSquares, RopeWrite
from disagg.kernels.triton.jit import jit

_HEADS = 8
"""Largest number of heads of a program."""

FP8_MAX = 448.0
"""The largest finite value of e4m3."""

_LIMIT: tl.constexpr = tl.constexpr(FP8_MAX)


@jit
def _weighted(
    x: tl.tensor,
    factor: tl.tensor,
    weight_ptr: tl.tensor,
    mask: tl.tensor,
    dtype: tl.constexpr,
    PLUS_ONE: tl.constexpr,
) -> tl.tensor:
    """A part of each head times its factor and its weight, in fp32, its values rounded to `dtype`."""
    weight = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
    if PLUS_ONE:
        return (x * factor * (1.0 + weight)).to(dtype).to(tl.float32)
    return ((x * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@jit
def _norm_factor(
    low: tl.tensor,
    high: tl.tensor,
    rest: tl.tensor,
    squares_ptr: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """One over the root mean square of each head (`NORM` 1), or of all of them, by their sum of squares (2)."""
    if NORM == 2:
        means = tl.load(squares_ptr) / size + tl.zeros((low.shape[0],), dtype=tl.float32)
    else:
        means = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if REST:
            means += tl.sum(rest * rest, axis=1)
        means = means / (2 * HALF + REST)
    return tl.rsqrt(means + eps)[:, None]


@jit
def _norm_and_turn(
    low: tl.tensor,
    high: tl.tensor,
    rest: tl.tensor,
    norm_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    position_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    heads: tl.tensor,
    columns: tl.tensor,
    rest_columns: tl.tensor,
    mask: tl.tensor,
    rest_mask: tl.tensor,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    TURN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Norm the heads, if they have a norm, then rotate their halves."""
    dtype: tl.constexpr = cos_ptr.dtype.element_ty
    column_mask = columns < HALF
    if NORM:
        factor = _norm_factor(low, high, rest, squares_ptr, size, eps, HALF, REST, NORM)
        if NORM == 2:
            weight_ptr = norm_ptr + heads[:, None] * (2 * HALF + REST)
            low = _weighted(low, factor, weight_ptr + columns[None, :], mask, dtype, PLUS_ONE)
            high = _weighted(high, factor, weight_ptr + HALF + columns[None, :], mask, dtype, PLUS_ONE)
            if REST:
                rest_ptr = weight_ptr + 2 * HALF + rest_columns[None, :]
                rest = _weighted(rest, factor, rest_ptr, rest_mask, dtype, PLUS_ONE)
        else:
            weight_ptr = norm_ptr + columns[None, :]
            low = _weighted(low, factor, weight_ptr, column_mask[None, :], dtype, PLUS_ONE)
            high = _weighted(high, factor, weight_ptr + HALF, column_mask[None, :], dtype, PLUS_ONE)
            if REST:
                rest_ptr = norm_ptr + 2 * HALF + rest_columns[None, :]
                rest = _weighted(rest, factor, rest_ptr, (rest_columns < REST)[None, :], dtype, PLUS_ONE)
    if TURN:
        low, high = turned(low, high, position_ptr, cos_ptr, sin_ptr, columns, HALF)
    return low, high, rest


@jit
def turned(
    low: tl.tensor,
    high: tl.tensor,
    position_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    columns: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate the halves of heads by the row of the tables at a position, each step rounded to the tables' dtype."""
    dtype: tl.constexpr = cos_ptr.dtype.element_ty
    start = tl.load(position_ptr).to(tl.int64) * (2 * HALF)
    cos = tl.load(cos_ptr + start + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + start + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    turned_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    turned_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return turned_low.to(dtype).to(tl.float32), turned_high.to(dtype).to(tl.float32)


@jit
def _store_heads(
    ptr: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    rest: tl.tensor,
    columns: tl.tensor,
    rest_columns: tl.tensor,
    mask: tl.tensor,
    rest_mask: tl.tensor,
    scale: tl.tensor,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """`ptr` points to the beginning of each head."""
    store(ptr + columns[None, :], low, mask, scale, FP8)
    store(ptr + HALF + columns[None, :], high, mask, scale, FP8)
    if REST:
        store(ptr + 2 * HALF + rest_columns[None, :], rest, rest_mask, scale, FP8)


@jit
def store(ptr: tl.tensor, x: tl.tensor, mask: tl.tensor, scale: tl.tensor, FP8: tl.constexpr) -> None:
    """Store values in the dtype of `ptr`; in fp8 over a scale, and clamped."""
    if FP8:
        x = tl.clamp(tl.div_rn(x, scale + tl.zeros_like(x)), -_LIMIT, _LIMIT)
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@jit
def _kernel(
    qkv_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    query_scale_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    eps: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    row_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    q_size: tl.tensor,
    k_size: tl.tensor,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    TURN: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    dim: tl.constexpr = 2 * HALF + REST
    q_tiles: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns, rest_columns = tl.arange(0, COLUMNS), tl.arange(0, REST_COLUMNS)
    is_q = tile < q_tiles
    is_v = tile >= q_tiles + kv_tiles
    first_tile = tl.where(is_q, 0, tl.where(is_v, q_tiles + kv_tiles, q_tiles))
    num_heads = tl.where(is_q, NUM_Q, NUM_KV)
    first_head = tl.where(is_q, 0, tl.where(is_v, NUM_Q + NUM_KV, NUM_Q))
    heads = (tile - first_tile) * HEADS + tl.arange(0, HEADS)
    mask = (heads < num_heads)[:, None] & (columns < HALF)[None, :]
    rest_mask = (heads < num_heads)[:, None] & (rest_columns < REST)[None, :]
    source = qkv_ptr + token * row_stride + (first_head + heads)[:, None] * dim
    low = tl.load(source + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = low
    if REST:
        rest = tl.load(source + 2 * HALF + rest_columns[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    tables = (positions_ptr + token, cos_ptr, sin_ptr, heads, columns, rest_columns, mask, rest_mask)
    places = (columns, rest_columns, mask, rest_mask)
    if is_q:
        norm = (q_norm_ptr, squares_ptr + 2 * token, q_size, eps)
        low, high, rest = _norm_and_turn(low, high, rest, *norm, *tables, HALF, REST, NORM_Q, PLUS_ONE, TURN)
        if QUERY_SCALE:
            position = tl.load(positions_ptr + token).to(tl.int64)
            query_scale = tl.load(query_scale_ptr + position).to(tl.float32)
            low, high, rest = low * query_scale, high * query_scale, rest * query_scale
        q_ptr = q_out_ptr + token * (NUM_Q * dim) + heads[:, None] * dim
        _store_heads(q_ptr, low, high, rest, *places, 1.0, HALF, REST, False)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, (slot % BLOCK_SIZE) * dim + heads[:, None] * (BLOCK_SIZE * dim)
            if is_v:
                cache_ptr = value_ptr + block * value_block_stride + offset
                _store_heads(cache_ptr, low, high, rest, *places, value_scale, HALF, REST, FP8)
            else:
                norm = (k_norm_ptr, squares_ptr + 2 * token + 1, k_size, eps)
                low, high, rest = _norm_and_turn(low, high, rest, *norm, *tables, HALF, REST, NORM_K, PLUS_ONE, TURN)
                cache_ptr = key_ptr + block * key_block_stride + offset
                _store_heads(cache_ptr, low, high, rest, *places, key_scale, HALF, REST, FP8)


@jit
def _head_squares_kernel(
    qkv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    q_size: tl.tensor,
    k_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    is_k = tl.program_id(1)
    size = tl.where(is_k == 1, k_size, q_size)
    source = qkv_ptr + token * row_stride + is_k * q_size
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(source + start + columns, mask=start + columns < size, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(out_ptr + 2 * token + is_k, tl.sum(squares, axis=0))


def head_squares(qkv_TQ: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """The op `reference.head_squares`, for rows of any stride."""
    T, k_size = qkv_TQ.shape[0], num_kv_heads * head_dim
    out_T2 = torch.empty((T, 2), dtype=torch.float32, device=qkv_TQ.device)
    if T:
        q_size = qkv_TQ.shape[1] - 2 * k_size
        _head_squares_kernel[(T, 2)](qkv_TQ, out_T2, qkv_TQ.stride(0), q_size, k_size, BLOCK=1024, num_warps=4)
    return out_T2


def qkv_rope_write(
    qkv_TQ: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    layer: RopeWrite,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    squares: HeadSquares | None = None,
) -> Tensor:
    """The op `reference.qkv_rope_write`; the cache may also be fp8, with one scale per tensor. Returns the rotated q,
    [T, N, D]."""
    T, q_norm_D, k_norm_D = qkv_TQ.shape[0], layer.q_norm_D, layer.k_norm_D
    key_cache_NKBD, value_cache_NKBD = layer.key_cache_NKBD, layer.value_cache_NKBD
    _, K, block_size, D = key_cache_NKBD.shape
    N, R = qkv_TQ.shape[1] // D - 2 * K, layer.cos_PR.shape[1]
    q_TND = torch.empty((T, N, D), dtype=qkv_TQ.dtype, device=qkv_TQ.device)
    if T == 0:
        return q_TND
    if layer.is_whole and squares is None:
        squares = HeadSquares(head_squares(qkv_TQ, K, D), N * D, K * D)
    heads = min(_HEADS, triton.next_power_of_2(K))
    half, rest = (R // 2, D - R) if R else (D // 2, 0)  # what is not rotated at all is read in halves, too
    columns, rest_columns = triton.next_power_of_2(half), triton.next_power_of_2(max(1, rest))
    tiles = triton.cdiv(N, heads) + 2 * triton.cdiv(K, heads)
    norm = 2 if layer.is_whole else 1
    _kernel[(T, tiles)](
        qkv_TQ,
        qkv_TQ if q_norm_D is None else q_norm_D,
        qkv_TQ if k_norm_D is None else k_norm_D,
        qkv_TQ if squares is None else squares.sums_T2,
        qkv_TQ if layer.query_scale_P is None else layer.query_scale_P,
        positions_T,
        layer.cos_PR,
        layer.sin_PR,
        slot_mapping_T,
        q_TND,
        key_cache_NKBD,
        value_cache_NKBD,
        layer.eps,
        key_scale,
        value_scale,
        qkv_TQ.stride(0),
        key_cache_NKBD.stride(0),
        value_cache_NKBD.stride(0),
        1 if squares is None else squares.q_size,
        1 if squares is None else squares.k_size,
        NUM_Q=N,
        NUM_KV=K,
        BLOCK_SIZE=block_size,
        HALF=half,
        REST=rest,
        COLUMNS=columns,
        REST_COLUMNS=rest_columns,
        HEADS=heads,
        NORM_Q=0 if q_norm_D is None else norm,
        NORM_K=0 if k_norm_D is None else norm,
        PLUS_ONE=layer.plus_one,
        TURN=R > 0,
        QUERY_SCALE=layer.query_scale_P is not None,
        FP8=key_cache_NKBD.dtype == torch.float8_e4m3fn,
        num_warps=max(1, min(4, heads * columns // 128)),
        enable_fp_fusion=False,
    )
    return q_TND
