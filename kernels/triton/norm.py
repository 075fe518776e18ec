"""RMS norm over the last dim, alone and behind the addition of the residual stream: one pass over memory each.

A program has a tile of whole rows in registers. Roundings are those of `reference.rms_norm`: fp32 inside, to the dtype
before the weight is multiplied (with `PLUS_ONE` behind the product), and the sum with the residual to the dtype before
it is normed.

Shapes: R rows, H features of a row.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.triton.jit import jit

MAX_ROW = 32768
"""Largest number of features that a program can hold: 64 registers a thread."""

_TILE = 1024
"""Elements of a program with short rows."""


@jit
def _norm(
    x: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    dtype: tl.constexpr,
    PLUS_ONE: tl.constexpr,
) -> tl.tensor:
    """The normed tile, from fp32, its values rounded to `dtype`."""
    mean = tl.sum(x * x, axis=1) / size
    normed = x * tl.rsqrt(mean + eps)[:, None]
    if PLUS_ONE:
        return (normed * (1.0 + weight)[None, :]).to(dtype)
    return (normed.to(dtype).to(tl.float32) * weight[None, :]).to(dtype)


@partial(jit, do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    starts = (rows // heads) * token_stride + (rows % heads) * head_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    normed = _norm(x, weight, eps, SIZE, out_ptr.dtype.element_ty, PLUS_ONE)
    tl.store(out_ptr + rows[:, None] * SIZE + columns[None, :], normed, mask=mask)


@partial(jit, do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    out = rows[:, None] * SIZE + columns[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask=mask, other=0.0)
    total = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + out, total, mask=mask)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    normed = _norm(total.to(tl.float32), weight, eps, SIZE, out_ptr.dtype.element_ty, PLUS_ONE)
    tl.store(out_ptr + out, normed, mask=mask)


def _tiles(num_rows: int, size: int) -> tuple[int, int, int, int]:
    """(programs, rows of a program, padded row, warps)."""
    block: int = triton.next_power_of_2(size)
    rows = max(1, min(_TILE // block, triton.next_power_of_2(num_rows)))
    warps = min(max(rows * block // 512, 1), 16)
    return triton.cdiv(num_rows, rows), rows, block, warps


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """The op `reference.rms_norm`, for [T, H] or [T, heads, H] with any strides and contiguous H."""
    out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    size = x_TH.shape[-1]
    if not out.numel():
        return out
    heads = x_TH.shape[1] if x_TH.dim() == 3 else 1
    num_rows = x_TH.shape[0] * heads
    programs, rows, block, warps = _tiles(num_rows, size)
    _rms_norm_kernel[(programs,)](
        x_TH,
        weight_H,
        out,
        num_rows,
        heads,
        x_TH.stride(0),
        x_TH.stride(1),
        eps,
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        PLUS_ONE=plus_one,
        num_warps=warps,
    )
    return out


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """The op `reference.add_rms_norm`, for [T, H] with contiguous H."""
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    sum_TH = torch.empty_like(out_TH)
    num_rows, size = x_TH.shape
    if not out_TH.numel():
        return out_TH, sum_TH
    programs, rows, block, warps = _tiles(num_rows, size)
    _add_rms_norm_kernel[(programs,)](
        x_TH,
        residual_TH,
        weight_H,
        out_TH,
        sum_TH,
        num_rows,
        x_TH.stride(0),
        residual_TH.stride(0),
        eps,
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        PLUS_ONE=plus_one,
        num_warps=warps,
    )
    return out_TH, sum_TH
