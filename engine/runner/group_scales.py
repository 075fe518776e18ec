"""What a checkpoint has of weights in few bits, from load until weights are packed: scales of groups beside the weights
that they belong to, and experts in MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.engine.runner.expert_floats import ExpertFloats
from disagg.kernels.groups import GROUP, Groups, Offset


@dataclass(slots=True)
class _Matrix:
    """What is known of one weight [O, I], of which some rows or columns may be missing."""

    offset: Offset
    scale_OG: Tensor
    offset_OG: Tensor
    is_known_OG: Tensor


class GroupScales:
    """Scales of weights by the memory in which those lie: tensors of a checkpoint are parts of fused weights."""

    def __init__(self, *, keeps_experts: bool = False) -> None:
        """`keeps_experts`: experts in MXFP4 stay in it."""
        self._matrices: dict[int, _Matrix] = {}
        self.experts = ExpertFloats() if keeps_experts else None
        """Experts in MXFP4, which are not dequantized; None where they shall be."""

    def put(self, part: Tensor, groups: Groups) -> None:
        """Keep the scales of a part of a weight: rows and columns of a contiguous one, columns in whole groups."""
        memory, inputs = part.untyped_storage(), part.stride(0)
        rows, columns = divmod(int(part.storage_offset()), inputs)
        if part.stride(1) != 1 or inputs % GROUP or columns % GROUP or part.shape[1] % GROUP:
            return
        shape = (memory.nbytes() // part.element_size() // inputs, inputs // GROUP)
        matrix = self._matrices.get(memory.data_ptr())
        if matrix is None:
            scales, offsets = (torch.zeros(shape, dtype=torch.float16) for _ in range(2))
            matrix = _Matrix(groups.offset, scales, offsets, torch.zeros(shape, dtype=torch.bool))
            self._matrices[memory.data_ptr()] = matrix
        if matrix.offset != groups.offset:  # parts in several forms: none of the whole
            return
        first = columns // GROUP
        place = slice(rows, rows + part.shape[0]), slice(first, first + part.shape[1] // GROUP)
        matrix.scale_OG[place] = groups.scale_OG
        matrix.is_known_OG[place] = True
        if groups.offset_OG is not None:
            matrix.offset_OG[place] = groups.offset_OG

    @property
    def are_none(self) -> bool:
        """Whether no weight has any, and there are no experts in MXFP4."""
        return not self._matrices and (self.experts is None or self.experts.are_none)

    def of(self, weight: Tensor) -> Groups | None:
        """The scales of a whole weight; None where it has none, or not everywhere."""
        matrix = self._matrices.get(weight.untyped_storage().data_ptr())
        if matrix is None or weight.dim() != 2 or not bool(matrix.is_known_OG.all()):
            return None
        return Groups(matrix.scale_OG, None if matrix.offset == "none" else matrix.offset_OG, matrix.offset)
