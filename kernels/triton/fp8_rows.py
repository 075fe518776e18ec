"""Rows rounded to 8-bit floats, each with a scale of its own; see `disagg.kernels.quantize`.

One program has one row, which it keeps in registers between finding its largest value and rounding: each number is read
once and written once. Programs of four warps hold 4096 numbers; longer rows take more warps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.triton.jit import jit

_LARGEST = tl.constexpr(448.0)


@jit
def _quantize_rows_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_stride: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < features
    x = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=0) / _LARGEST
    scale = tl.where(scale == 0.0, 1.0, scale)
    rounded = tl.minimum(tl.maximum(x / scale, -_LARGEST), _LARGEST)
    tl.store(out_ptr + row * features + columns, rounded.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """The function `quantize_rows` of `kernels/quantize.py`, for rows [T, I] with contiguous I."""
    T, features = x_TI.shape
    out_TI = torch.empty((T, features), dtype=torch.float8_e4m3fn, device=x_TI.device)
    scale_T = torch.empty(T, dtype=torch.float32, device=x_TI.device)
    if T:
        block = triton.next_power_of_2(features)
        num_warps = min(16, max(4, block // 1024))
        _quantize_rows_kernel[(T,)](x_TI, out_TI, scale_T, x_TI.stride(0), features, BLOCK=block, num_warps=num_warps)
    return out_TI, scale_T
