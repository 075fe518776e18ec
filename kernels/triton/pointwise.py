"""Sums of two rows, and functions of each value and a number: x * number, x / number, number * tanh(x / number). All in
fp32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.ops import Pointwise
from disagg.kernels.triton.jit import jit

_BLOCK = 1024
"""Elements of a program."""

_FUNCTIONS: dict[Pointwise, int] = {"multiply": 0, "divide": 1, "soft_cap": 2}


@jit
def _pointwise_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    features: tl.tensor,
    number: tl.tensor,
    BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < features
    x = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    numbers = number + tl.zeros_like(x)
    if FUNCTION == 0:
        x = x * numbers
    elif FUNCTION == 1:
        x = tl.div_rn(x, numbers)
    else:
        shrunk = tl.exp(-2.0 * tl.abs(x) / numbers)
        size = numbers * ((1.0 - shrunk) / (1.0 + shrunk))
        x = tl.where(x < 0.0, -size, size)
    tl.store(out_ptr + row * features + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _add_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < features
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * features + columns, (x + y).to(out_ptr.dtype.element_ty), mask=mask)


def pointwise(x_TH: Tensor, function: Pointwise, number: float) -> Tensor:
    """The op `reference.pointwise`, for rows with contiguous H."""
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    T, features = x_TH.shape
    if out_TH.numel():
        grid = (T, triton.cdiv(features, _BLOCK))
        _pointwise_kernel[grid](
            x_TH, out_TH, x_TH.stride(0), features, number, BLOCK=_BLOCK, FUNCTION=_FUNCTIONS[function], num_warps=4
        )
    return out_TH


def add(x_TH: Tensor, y_TH: Tensor) -> Tensor:
    """The op `reference.add`, for rows with contiguous H."""
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    T, features = x_TH.shape
    if out_TH.numel():
        grid = (T, triton.cdiv(features, _BLOCK))
        _add_kernel[grid](x_TH, y_TH, out_TH, x_TH.stride(0), y_TH.stride(0), features, BLOCK=_BLOCK, num_warps=4)
    return out_TH
