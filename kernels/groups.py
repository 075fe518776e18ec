"""Weights of a few bits that stand for bf16 numbers: codes, and one scale for each group of 32 inputs.

    minimum    weight = bf16(scale * code + minimum)       4 bits, as Q4_1 of GGUF files
    zero       weight = bf16(scale * (code - zero))        4 bits, as GPTQ, AWQ and Q4_0
    none       weight = bf16(scale * code)                 8 bits, signed, as Q8_0

Scales, minimums and zeros are fp16; the sum is rounded to fp32, then to bf16. That is how checkpoints are dequantized,
so a weight in this form is the dequantized one in less memory, and products have the same bits. `find_codes` finds the
form of a dequantized weight, or finds that it has none; `quantize_int4` rounds any weight.

Shapes: O features out, I features in, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 32
"""Inputs of a group; groups of a checkpoint that are larger are several with the same scale."""

MOST_CODE = 15

Offset = Literal["none", "minimum", "zero"]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Scales of the groups of a weight, and what is added to the products."""

    scale_OG: Tensor
    """Scales in fp16."""
    offset_OG: Tensor | None
    """Minimums or zeros, in fp16; None for `none`."""
    offset: Offset

    @property
    def code_range(self) -> tuple[int, int]:
        """Least and largest code."""
        return (-128, 127) if self.offset == "none" else (0, MOST_CODE)

    def weight(self, code_OGK: Tensor) -> Tensor:
        """The weight [O, I] in bf16 of codes by group, in any dtype."""
        scale_OG1, code_OGK = self.scale_OG.float()[..., None], code_OGK.float()
        if self.offset_OG is None:
            values_OGK = code_OGK.mul_(scale_OG1)
        elif self.offset == "zero":
            values_OGK = code_OGK.sub_(self.offset_OG.float()[..., None]).mul_(scale_OG1)
        else:
            values_OGK = code_OGK.mul_(scale_OG1).add_(self.offset_OG.float()[..., None])
        return values_OGK.flatten(1).bfloat16()


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight [out_features, in_features] as codes in groups."""

    code_OI: Tensor
    """Codes, uint8 of 0 to 15, or int8 for `none`."""
    groups: Groups

    def dequantized(self) -> Tensor:
        """The weight that it stands for, in bf16."""
        return self.groups.weight(torch.unflatten(self.code_OI, 1, (-1, GROUP)))


def find_codes(weight_OI: Tensor, groups: Groups) -> CodedWeight | None:
    """The codes of a weight in bf16; None where not each of its numbers is that of a code."""
    if weight_OI.dtype != torch.bfloat16 or weight_OI.shape[1] != groups.scale_OG.shape[1] * GROUP:
        return None
    values_OGK = torch.unflatten(weight_OI.float(), 1, (-1, GROUP))
    scale_OG1 = groups.scale_OG.float()[..., None]
    if groups.offset_OG is not None and groups.offset == "minimum":
        values_OGK -= groups.offset_OG.float()[..., None]
    values_OGK /= torch.where(scale_OG1 == 0, torch.ones_like(scale_OG1), scale_OG1)
    if groups.offset_OG is not None and groups.offset == "zero":
        values_OGK += groups.offset_OG.float()[..., None]
    code_OGK = values_OGK.round_().clamp_(*groups.code_range)
    code_OGK = code_OGK.to(torch.int8 if groups.offset == "none" else torch.uint8)
    if not torch.equal(groups.weight(code_OGK), weight_OI):
        return None
    return CodedWeight(code_OGK.flatten(1), groups)


def quantize_int4(weight_OI: Tensor) -> CodedWeight:
    """The nearest weight of 4 bits whose minimums and largest numbers are those of its groups, but for fp16.

    Raises:
        ValueError: inputs are no whole groups, or a weight is not finite in fp16.
    """
    if weight_OI.shape[1] % GROUP:
        raise ValueError(f"int4 has groups of {GROUP} inputs; a weight has {weight_OI.shape[1]}")
    values_OGK = weight_OI.detach().float().view(len(weight_OI), -1, GROUP)
    offset_OG = values_OGK.amin(dim=2).half()
    scale_OG = ((values_OGK.amax(dim=2) - offset_OG.float()) / MOST_CODE).clamp_(min=0.0).half()
    is_finite_O = (offset_OG.isfinite() & scale_OG.isfinite()).all(dim=1)
    if not bool(is_finite_O.all()):
        raise ValueError(f"row {int((~is_finite_O).nonzero()[0])} of a weight is not finite in fp16")
    scale_OG1 = torch.where(scale_OG == 0, torch.ones_like(scale_OG), scale_OG).float()[..., None]
    code_OGK = ((values_OGK - offset_OG.float()[..., None]) / scale_OG1).round_().clamp_(0, MOST_CODE)
    return CodedWeight(code_OGK.to(torch.uint8).flatten(1), Groups(scale_OG, offset_OG, "minimum"))
