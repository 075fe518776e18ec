"""Products of codes in groups as sums of codes, in the order of `cpu/sums.cpp`: the reference of that kernel.

Shapes: T rows, O features out, I features in, G groups of 32 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.kernels.groups import GROUP, CodedWeight


def linear_by_sums(x_TI: Tensor, weight: CodedWeight, *, is_fused: bool) -> Tensor:
    """x @ weight.T in fp32, [T, O], of rows in bf16; `is_fused` where multiply-adds are rounded once.

    Sums and products are made in fp64 and rounded to fp32, which is the fused result but for a tie that fp64 cannot
    tell."""
    x_TGK = torch.unflatten(x_TI.double(), 1, (-1, GROUP))
    code_OGK = torch.unflatten(weight.code_OI.double(), 1, (-1, GROUP))
    scale_OG, offset_OG = weight.groups.scale_OG.float(), weight.groups.offset_OG
    if offset_OG is not None:
        offset_OG = -(offset_OG.float() * scale_OG) if weight.groups.offset == "zero" else offset_OG.float()
    sums_TG = _group_sums(x_TGK.float())

    def add(total_TO: Tensor, a: Tensor, b: Tensor) -> Tensor:
        product = a.double() * b.double()
        return ((product if is_fused else product.float().double()) + total_TO.double()).float()

    total_TO = x_TI.new_zeros((len(x_TI), len(code_OGK)), dtype=torch.float32)
    for group in range(scale_OG.shape[1]):
        of_codes_TO = torch.zeros_like(total_TO)
        for i in range(GROUP):
            of_codes_TO = add(of_codes_TO, x_TGK[:, group, i, None], code_OGK[None, :, group, i])
        if offset_OG is not None:
            total_TO = add(total_TO, sums_TG[:, group, None], offset_OG[None, :, group])
        total_TO = add(total_TO, of_codes_TO, scale_OG[None, :, group])
    return total_TO


def _group_sums(x_TGK: Tensor) -> Tensor:
    """Sums of groups, by halves."""
    while x_TGK.shape[-1] > 1:
        half = x_TGK.shape[-1] // 2
        x_TGK = x_TGK[..., :half] + x_TGK[..., half:]
    return x_TGK[..., 0]
