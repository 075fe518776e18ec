"""All that is between the QKV GEMM and attention, in one launch: QK-norm, rotary embedding, and the write of K and V
into the paged cache.

A program has a few heads of one kind (q, k or v) of one token: it reads them once, as two halves that are each other's
partners in the rotation. All roundings are those of the reference, which rounds to the model's dtype after the norm and
after each product of the rotation; so the compiler must not fuse a product with the sum behind it (`enable_fp_fusion`),
as it does in 16 bits, too. A cache in fp8 (e4m3) stores value / scale, divided as in IEEE 754 and clamped to the
largest finite number.

Shapes: T tokens, N query heads, K KV heads, D head dim, P positions of the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.ops import RopeWrite
from disagg.kernels.triton.jit import jit

_HEADS = 8
"""Largest number of heads of a program."""

FP8_MAX = 448.0
"""The largest finite value of e4m3."""

_LIMIT: tl.constexpr = tl.constexpr(FP8_MAX)


@jit
def _norm_halves(
    low: tl.tensor,
    high: tl.tensor,
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    eps: tl.tensor,
    half: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * half)
    factor = tl.rsqrt(mean + eps)[:, None]
    low_weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    high_weight = tl.load(weight_ptr + half + columns, mask=mask, other=0.0).to(tl.float32)
    low = ((low * factor).to(dtype).to(tl.float32) * low_weight[None, :]).to(dtype)
    high = ((high * factor).to(dtype).to(tl.float32) * high_weight[None, :]).to(dtype)
    return low.to(tl.float32), high.to(tl.float32)


@jit
def _turn(
    low: tl.tensor,
    high: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    position_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    half: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Norm the heads, if they have one, then rotate them."""
    dtype: tl.constexpr = cos_ptr.dtype.element_ty
    if NORM:
        low, high = _norm_halves(low, high, norm_ptr, columns, mask, eps, half, dtype)
    start = tl.load(position_ptr).to(tl.int64) * (2 * half)
    cos = tl.load(cos_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    turned_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    turned_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return turned_low.to(dtype).to(tl.float32), turned_high.to(dtype).to(tl.float32)


@jit
def _store_heads(
    ptr: tl.tensor,
    head_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    heads: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    scale: tl.tensor,
    half: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    if FP8:
        scales = scale + tl.zeros_like(low)
        low = tl.clamp(tl.div_rn(low, scales), -_LIMIT, _LIMIT)
        high = tl.clamp(tl.div_rn(high, scales), -_LIMIT, _LIMIT)
    at = ptr + heads[:, None] * head_stride + columns[None, :]
    tl.store(at, low.to(ptr.dtype.element_ty), mask=mask)
    tl.store(at + half, high.to(ptr.dtype.element_ty), mask=mask)


@jit
def _kernel(
    qkv_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
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
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    q_tiles: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    column_mask = columns < HALF
    is_q = tile < q_tiles
    is_v = tile >= q_tiles + kv_tiles
    first_tile = tl.where(is_q, 0, tl.where(is_v, q_tiles + kv_tiles, q_tiles))
    num_heads = tl.where(is_q, NUM_Q, NUM_KV)
    first_head = tl.where(is_q, 0, tl.where(is_v, NUM_Q + NUM_KV, NUM_Q))
    heads = (tile - first_tile) * HEADS + tl.arange(0, HEADS)
    mask = (heads < num_heads)[:, None] & column_mask[None, :]
    source = qkv_ptr + token * row_stride + (first_head + heads)[:, None] * (2 * HALF) + columns[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    tables = (positions_ptr + token, cos_ptr, sin_ptr, columns, column_mask)
    if is_q:
        low, high = _turn(low, high, q_norm_ptr, eps, *tables, HALF, NORM_Q)
        q_ptr = q_out_ptr + token * (NUM_Q * 2 * HALF)
        _store_heads(q_ptr, 2 * HALF, low, high, heads, columns, mask, 1.0, HALF, False)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, (slot % BLOCK_SIZE) * (2 * HALF)
            if is_v:
                cache_ptr = value_ptr + block * value_block_stride + offset
                _store_heads(cache_ptr, BLOCK_SIZE * 2 * HALF, low, high, heads, columns, mask, value_scale, HALF, FP8)
            else:
                low, high = _turn(low, high, k_norm_ptr, eps, *tables, HALF, NORM_K)
                cache_ptr = key_ptr + block * key_block_stride + offset
                _store_heads(cache_ptr, BLOCK_SIZE * 2 * HALF, low, high, heads, columns, mask, key_scale, HALF, FP8)


def qkv_rope_write(
    qkv_TQ: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    layer: RopeWrite,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """The op `reference.qkv_rope_write`; the cache may also be fp8, with one scale per tensor. Returns the rotated q,
    [T, N, D]."""
    T, q_norm_D, k_norm_D = qkv_TQ.shape[0], layer.q_norm_D, layer.k_norm_D
    key_cache_NKBD, value_cache_NKBD = layer.key_cache_NKBD, layer.value_cache_NKBD
    _, K, block_size, D = key_cache_NKBD.shape
    N = qkv_TQ.shape[1] // D - 2 * K
    q_TND = torch.empty((T, N, D), dtype=qkv_TQ.dtype, device=qkv_TQ.device)
    if T == 0:
        return q_TND
    heads = min(_HEADS, triton.next_power_of_2(K))
    columns = triton.next_power_of_2(D // 2)
    tiles = triton.cdiv(N, heads) + 2 * triton.cdiv(K, heads)
    _kernel[(T, tiles)](
        qkv_TQ,
        qkv_TQ if q_norm_D is None else q_norm_D,
        qkv_TQ if k_norm_D is None else k_norm_D,
        positions_T,
        layer.cos_PD,
        layer.sin_PD,
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
        NUM_Q=N,
        NUM_KV=K,
        BLOCK_SIZE=block_size,
        HALF=D // 2,
        COLUMNS=columns,
        HEADS=heads,
        NORM_Q=q_norm_D is not None,
        NORM_K=k_norm_D is not None,
        FP8=key_cache_NKBD.dtype == torch.float8_e4m3fn,
        num_warps=max(1, min(4, heads * columns // 128)),
        enable_fp_fusion=False,
    )
    return q_TND
