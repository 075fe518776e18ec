"""silu(gate) * up or gelu(gate) * up over the output of the GEMM of the MLP's fused gate and up weights.

The activation is rounded to the dtype before the multiplication, as the reference rounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.triton.jit import jit

_BLOCK = 1024
"""Elements of a program: 16 bytes for each thread of four warps, in half precision."""


@jit
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < features
    gate_ptr = gate_up_ptr + row * row_stride + columns
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + features, mask=mask, other=0.0).to(tl.float32)
    slope = gate
    if GELU:  # 0.5 * x * (1 + tanh(u)) is x / (1 + exp(-2u))
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-slope))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * features + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up_T2F: Tensor, *, gelu: bool = False) -> Tensor:
    """The op `reference.silu_mul`, or `reference.gelu_tanh_mul`, for rows [T, 2F] with contiguous 2F."""
    T, features = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty((T, features), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if out_TF.numel():
        grid = (T, triton.cdiv(features, _BLOCK))
        _silu_mul_kernel[grid](
            gate_up_T2F, out_TF, gate_up_T2F.stride(0), features, BLOCK=_BLOCK, GELU=gelu, num_warps=4
        )
    return out_TF
