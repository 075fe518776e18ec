"""Weights in 8 bits: symmetric, one scale for each output.

    scale = largest |weight of the row| / 127        quantized = round(weight / scale), half to even

The values are -127 to 127, exact in bf16, so the product's sums are exact in them and are scaled once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LARGEST = 127

Quantization = Literal["none", "int8", "fp8"]
"""Of the weights of linear layers; `fp8` is in `kernels/fp8.py`."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A weight [out_features, in_features]: `quantized * scale`."""

    quantized_OI: Tensor
    """int8."""
    scale_O: Tensor
    """float32."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """As a plain weight, rounded to `dtype`."""
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
    scale_O = largest_O / LARGEST
    scale_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O))  # a row of zeros, or of next to nothing
    quantized = (weight / scale_O[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return Int8Weight(quantized.to(torch.int8), scale_O)
