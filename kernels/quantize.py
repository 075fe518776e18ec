"""Weights in 8 bits, symmetric, one scale for each output.

    int8       scale = largest |weight of the row| / 127        quantized = round(weight / scale), half to even
    fp8        e4m3, for GPUs that multiply it: half the bytes of bf16, twice the rate
               weight     largest |weight of the row| / 448      once, when it is packed
               input      largest |x of the row| / 448           at each GEMM, by one small kernel
               GEMM       cuBLAS' scaled GEMM, both scales and the bias at the end, rounded to bf16; its sums are
                          those of fast accumulation, on Hopper with some 14 bits instead of fp32's 24

int8 values are -127 to 127, exact in bf16, so the GEMM's sums are exact in them and are scaled once, at the end. An
e4m3 value has 3 bits of mantissa, so each is off by at most 1/16 of itself. On a CPU, for tests, the same rounded
values are multiplied in fp32.

Shapes: T rows, I features in, O features out.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from typing_extensions import override

from disagg.kernels.linear import PackedWeight
from disagg.kernels.settings.switches import switches

LARGEST_INT8 = 127

Quantization = Literal["none", "stored", "stored_sums", "int8", "int4", "fp8"]
"""Quantization of the weights of linear layers. `stored` and `stored_sums` round no weight: those that a checkpoint has
in 4 or 8 bits are computed from as few, as bf16 numbers or as sums of codes; see `kernels/groups.py`, which also has
the rounding of `int4`."""
STORED: Final[tuple[Quantization, ...]] = ("stored", "stored_sums")
"""Those for which a checkpoint has to have scales of groups."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A weight [out_features, in_features]: `quantized * scale`."""

    quantized_OI: Tensor
    """Quantized values of the weight, int8."""
    scale_O: Tensor
    """Scale of each output of the layer, float32."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The rounded weight as a tensor [O, I] of `dtype`."""
        return (self.quantized_OI * self.scale_O[:, None]).to(dtype)


def quantize_int8(weight_OI: Tensor) -> Int8Weight:
    """The nearest 8-bit weight.

    Raises:
        ValueError: a weight is not finite.
    """
    weight = weight_OI.detach().float()
    largest_O = weight.abs().amax(dim=1)
    if not bool(largest_O.isfinite().all()):
        raise ValueError(f"row {int((~largest_O.isfinite()).nonzero()[0])} of a weight is not finite")
    scale_O = largest_O / LARGEST_INT8
    scale_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O))  # a row of zeros, or of next to nothing
    quantized = (weight / scale_O[:, None]).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    return Int8Weight(quantized.to(torch.int8), scale_O)


logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
"""The largest finite value of e4m3."""
ALIGNMENT = 16
"""Both sizes of a weight must be multiples of this many numbers for the scaled GEMM."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(PackedWeight):
    """A weight [out_features, in_features]: `quantized * scale`."""

    quantized_OI: Tensor
    """Quantized values of the weight, float8_e4m3fn."""
    scale_O: Tensor
    """Scale of each output of the layer, float32."""

    @override
    def gemm(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Takes x in bf16 on a GPU."""
        if x_TI.shape[0] == 0:
            return x_TI.new_empty((0, self.quantized_OI.shape[0]))
        quantized_TI, scale_T = quantize_rows(x_TI)
        if not x_TI.is_cuda:
            return self._reference(quantized_TI, scale_T, bias_O, x_TI.dtype)
        out: Tensor = torch._scaled_mm(
            quantized_TI,
            self.quantized_OI.t(),
            scale_a=scale_T[:, None],
            scale_b=self.scale_O[None, :],
            bias=bias_O,
            out_dtype=x_TI.dtype,
            use_fast_accum=True,
        )
        return out

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The rounded weight as a tensor [O, I] of `dtype`."""
        return (self.quantized_OI.float() * self.scale_O[:, None]).to(dtype)

    def _reference(self, x_TI: Tensor, scale_T: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
        sums_TO = (x_TI.float() @ self.quantized_OI.float().t()) * scale_T[:, None] * self.scale_O[None, :]
        return (sums_TO if bias_O is None else sums_TO + bias_O.float()).to(dtype)


def pack_fp8(weight_OI: Tensor) -> Tensor | Fp8Weight:
    """Round a weight to 8 bits; the plain weight comes back, after a warning, where its sizes do not allow it.

    Raises:
        ValueError: a weight is not finite.
    """
    if any(size % ALIGNMENT for size in weight_OI.shape):
        logger.warning(
            "a weight of shape %s is not quantized: fp8 needs multiples of %d", list(weight_OI.shape), ALIGNMENT
        )
        return weight_OI
    quantized, scale_O = _quantize(weight_OI.detach())
    if not bool(scale_O.isfinite().all()):
        raise ValueError(f"row {int((~scale_O.isfinite()).nonzero()[0])} of a weight is not finite")
    return Fp8Weight(quantized, scale_O)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to (values [T, I] in e4m3, scales [T] in fp32); a row of zeros has scale one. Nothing waits for the
    device."""
    if x_TI.is_cuda and switches(os.environ).has_kernel("quantize_rows"):
        from disagg.kernels.triton.fp8_rows import quantize_rows as on_gpu  # triton is not everywhere

        return on_gpu(x_TI)
    return _quantize(x_TI)


def _quantize(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize row by row. The values are clamped, because a number past the largest would be NaN."""
    x = x_RI.float()
    scale_R = x.abs().amax(dim=1) / LARGEST_FP8
    scale_R = torch.where(scale_R == 0, torch.ones_like(scale_R), scale_R)
    return (x / scale_R[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scale_R
