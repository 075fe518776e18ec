"""All that is between the products and latent attention, in one launch: the rotation of q's and k's rope parts, the
write of a token's row into the paged cache, and the queries.

A row of the cache is a latent, which is copied, and k behind it, which is rotated; so is each head's query, from the
absorbed one and its rope part. A program has one row of the cache, or a few heads of one token. Roundings are those of
the reference, as in `rope_write`.

Shapes: T tokens, N query heads, L dim of a latent, R dim of what is rotated, P positions of the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.ops import LatentWrite
from disagg.kernels.triton.jit import jit
from disagg.kernels.triton.rope_write import store, turned

_ELEMENTS = 2048
"""Numbers of the latents' part that a program copies, or those of one head."""


@jit
def _put_rows(
    whole_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    out_ptr: tl.tensor,
    held: tl.tensor,
    position_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    LATENT: tl.constexpr,
    LATENT_COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Put rows together; the first three pointers are to the beginning of each."""
    latents, columns = tl.arange(0, LATENT_COLUMNS)[None, :], tl.arange(0, COLUMNS)
    mask = held[:, None] & (latents < LATENT)
    whole = tl.load(whole_ptr[:, None] + latents, mask=mask, other=0.0).to(tl.float32)
    store(out_ptr[:, None] + latents, whole, mask, 1.0, FP8)
    mask = held[:, None] & (columns < HALF)[None, :]
    low = tl.load(turned_ptr[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(turned_ptr[:, None] + HALF + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    low, high = turned(low, high, position_ptr, cos_ptr, sin_ptr, columns, HALF)
    store(out_ptr[:, None] + LATENT + columns[None, :], low, mask, 1.0, FP8)
    store(out_ptr[:, None] + LATENT + HALF + columns[None, :], high, mask, 1.0, FP8)


@jit
def _latent_write_kernel(
    latent_ptr: tl.tensor,
    k_ptr: tl.tensor,
    absorbed_ptr: tl.tensor,
    q_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    latent_stride: tl.tensor,
    k_stride: tl.tensor,
    absorbed_stride: tl.tensor,
    absorbed_head_stride: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_stride: tl.tensor,
    NUM_Q: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    dim: tl.constexpr = LATENT + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position_ptr = positions_ptr + token
    if tile == 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            one = tl.arange(0, 1)
            row_ptr = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * dim + one
            whole_ptr, turned_ptr = latent_ptr + token * latent_stride + one, k_ptr + token * k_stride + one
            _put_rows(
                whole_ptr, turned_ptr, row_ptr, one < 1, position_ptr, cos_ptr, sin_ptr,
                LATENT, LATENT_COLUMNS, HALF, COLUMNS, FP8,
            )  # fmt: skip
    else:
        heads = (tile - 1) * HEADS + tl.arange(0, HEADS)
        whole_ptr = absorbed_ptr + token * absorbed_stride + heads.to(tl.int64) * absorbed_head_stride
        turned_ptr = q_ptr + token * q_stride + heads.to(tl.int64) * q_head_stride
        row_ptr = out_ptr + (token * NUM_Q + heads) * dim
        _put_rows(
            whole_ptr, turned_ptr, row_ptr, heads < NUM_Q, position_ptr, cos_ptr, sin_ptr,
            LATENT, LATENT_COLUMNS, HALF, COLUMNS, False,
        )  # fmt: skip


def latent_rope_write(
    latent_TL: Tensor,
    k_TR: Tensor,
    absorbed_TNL: Tensor,
    q_TNR: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    layer: LatentWrite,
) -> Tensor:
    """The op `reference.latent_rope_write`, for rows and heads of any stride; the cache may also be fp8, which stores
    values as they are."""
    (T, N, L), R, cache_N1BD = absorbed_TNL.shape, k_TR.shape[1], layer.cache_N1BD
    out_TND = torch.empty((T, N, L + R), dtype=absorbed_TNL.dtype, device=absorbed_TNL.device)
    if T == 0:
        return out_TND
    latent_columns = triton.next_power_of_2(L)
    heads = min(triton.next_power_of_2(N), max(1, _ELEMENTS // latent_columns))
    _latent_write_kernel[(T, 1 + triton.cdiv(N, heads))](
        latent_TL,
        k_TR,
        absorbed_TNL,
        q_TNR,
        positions_T,
        layer.cos_PR,
        layer.sin_PR,
        slot_mapping_T,
        out_TND,
        cache_N1BD,
        latent_TL.stride(0),
        k_TR.stride(0),
        absorbed_TNL.stride(0),
        absorbed_TNL.stride(1),
        q_TNR.stride(0),
        q_TNR.stride(1),
        cache_N1BD.stride(0),
        NUM_Q=N,
        BLOCK_SIZE=cache_N1BD.shape[2],
        LATENT=L,
        LATENT_COLUMNS=latent_columns,
        HALF=R // 2,
        COLUMNS=triton.next_power_of_2(R // 2),
        HEADS=heads,
        FP8=cache_N1BD.dtype == torch.float8_e4m3fn,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TND
