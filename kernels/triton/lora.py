"""What LoRA adapters add to the rows of a product: y[t] += scale * (x[t] A^T) B of the slot of row t.

One program for each row and part sums the inputs in fp32, then one for each row and some outputs sums the ranks. Rows
with slot -1 are left as they are, and programs do the same for a row whatever the others are, so that its bits do not
depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.lora import Lora
from disagg.kernels.triton.jit import jit

_INPUTS, _OUTPUTS = 128, 128
"""Numbers of a row that a program reads, or writes, at a time."""


@jit
def _shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    x_stride: tl.tensor,
    inputs: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    ranks = tl.arange(0, RANK)
    if slot >= 0:
        num_ranks = tl.load(ranks_ptr + slot * PARTS + part)
        weights_ptr = a_ptr + (slot * PARTS + part) * RANK * inputs
        total = tl.zeros((RANK,), dtype=tl.float32)
        for start in range(0, inputs, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + columns, mask=columns < inputs, other=0.0).to(tl.float32)
            mask = (ranks[:, None] < num_ranks) & (columns[None, :] < inputs)
            weights = tl.load(weights_ptr + ranks[:, None] * inputs + columns[None, :], mask=mask, other=0.0)
            total += tl.sum(weights.to(tl.float32) * x[None, :], axis=1)
        tl.store(hidden_ptr + (row * PARTS + part) * RANK + ranks, total)


@jit
def _expand_kernel(
    hidden_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_stride: tl.tensor,
    outputs: tl.tensor,
    first_end: tl.tensor,
    second_end: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    ranks, mask = tl.arange(0, RANK), columns < outputs
    if slot >= 0:
        part = (columns >= first_end).to(tl.int32) + (columns >= second_end).to(tl.int32)
        part = tl.minimum(part, PARTS - 1)
        num_ranks = tl.load(ranks_ptr + slot * PARTS + part)
        is_read = (ranks[:, None] < num_ranks[None, :]) & mask[None, :]
        hidden = tl.load(hidden_ptr + (row * PARTS + part[None, :]) * RANK + ranks[:, None], mask=is_read, other=0.0)
        weights_ptr = b_ptr + (slot * RANK + ranks[:, None]) * outputs + columns[None, :]
        weights = tl.load(weights_ptr, mask=is_read, other=0.0).to(tl.float32)
        total = tl.sum(hidden * weights, axis=0) * tl.load(scales_ptr + slot * PARTS + part)
        y = tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
        is_changed = mask & (num_ranks > 0)
        tl.store(y_ptr + row * y_stride + columns, (y + total).to(y_ptr.dtype.element_ty), mask=is_changed)


def lora_add(x_TI: Tensor, y_TO: Tensor, lora: Lora, slots_T: Tensor) -> Tensor:
    """The op `reference.lora_add` for rows of contiguous numbers, and a largest rank that is a power of two."""
    (T, inputs), outputs, (_, parts, rank, _) = x_TI.shape, y_TO.shape[1], lora.a_SPRI.shape
    if T == 0:
        return y_TO
    hidden_TPR = torch.empty((T, parts, rank), dtype=torch.float32, device=x_TI.device)
    _shrink_kernel[(T, parts)](
        x_TI, lora.a_SPRI, lora.ranks_SP, slots_T, hidden_TPR, x_TI.stride(0), inputs,
        PARTS=parts, RANK=rank, BLOCK=_INPUTS, num_warps=4,
    )  # fmt: skip
    first_end = lora.columns[0]
    second_end = first_end + lora.columns[1] if parts > 1 else first_end
    _expand_kernel[(T, triton.cdiv(outputs, _OUTPUTS))](
        hidden_TPR, lora.b_SRO, lora.ranks_SP, lora.scales_SP, slots_T, y_TO, y_TO.stride(0), outputs, first_end,
        second_end, PARTS=parts, RANK=rank, BLOCK=_OUTPUTS, num_warps=4,
    )  # fmt: skip
    return y_TO
