"""Weights of experts in MXFP4: floats of 4 bits (E2M1), and a power of two for each group of 32 inputs as their scale
(OCP Microscaling Formats 1.0).

    weight = E2M1(code) * 2^(exponent - 127)

Each weight is exact in bf16, so a kernel that makes it from its code computes the bits of the bf16 weight. Subnormal
numbers are exact as well; an exponent of 253 or 254 gives infinity where bf16 has no such number.

Shapes: L experts, O features out, I features in, B = I / 2 bytes, G = I / 32 groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from disagg.kernels.groups import GROUP

FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of E2M1, by their code."""
GROUP_BYTES: Final = GROUP // 2
"""Bytes of the codes of a group."""


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """Weights [L, O, I] of the experts of a layer."""

    code_LOB: Tensor
    """Codes in bytes, uint8: of two inputs the first in the lower 4 bits."""
    exponent_LOG: Tensor
    """Exponents, uint8, 0 to 254."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, features out and features in."""
        L, O, B = self.code_LOB.shape  # noqa: E741 - the shape letters of the name
        return L, O, 2 * B

    def dequantized(self) -> Tensor:
        """The weights as bf16 numbers, made expert by expert."""
        table, weight_LOI = torch.tensor(FP4_VALUES), torch.empty(self.shape, dtype=torch.bfloat16)
        for weight_OI, code_OB, exponent_OG in zip(weight_LOI, self.code_LOB, self.exponent_LOG, strict=True):
            code_OB2 = torch.stack((code_OB & 15, code_OB >> 4), dim=-1)
            values_OGK = table[code_OB2.int()].view(*exponent_OG.shape, GROUP)
            scale_OG = exponent_OG.contiguous().view(torch.float8_e8m0fnu).float()
            weight_OI.copy_(values_OGK.mul_(scale_OG[..., None]).flatten(1))
        return weight_LOI
