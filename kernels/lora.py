"""The operand of the op `lora_add`: the two small matrices of LoRA adapters (Hu et al., arXiv 2106.09685) beside one
product of the model, one slot for each adapter.

Shapes: S slots, P parts of the product, R the largest rank, I inputs, O outputs of all parts together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.lora_ranks import aligned_rank

MAX_PARTS = 3
"""Parts of a fused product: q, k, v; gate and up."""


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """What is added to the rows of a product, whose outputs may be those of several modules, one behind the other.

    Row t with slot s gets, in the columns of part p, `scales[s, p] * (x[t] A[s, p]^T) B[s]`, of which the first
    `ranks[s, p]` ranks are read. A rank of 0 adds nothing. Adapters are written into slots between steps.
    """

    a_SPRI: Tensor
    """In the dtype of the rows; contiguous, as all others."""
    b_SRO: Tensor
    """In the dtype of the rows."""
    ranks_SP: Tensor
    """Ranks, int32."""
    scales_SP: Tensor
    """Scales, fp32."""
    columns: tuple[int, ...]
    """Number of outputs of each part."""

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.b_SRO.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.a_SPRI, self.b_SRO, self.ranks_SP, self.scales_SP)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def allocate_lora(
    num_slots: int, max_rank: int, inputs: int, columns: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Lora:
    """Empty slots.

    Raises:
        ValueError: there are no parts, or more than `MAX_PARTS`.
    """
    if not 1 <= len(columns) <= MAX_PARTS:
        raise ValueError(f"{len(columns)} parts are not 1 to {MAX_PARTS}")
    rank, parts = aligned_rank(max_rank), len(columns)
    return Lora(
        torch.zeros((num_slots, parts, rank, inputs), dtype=dtype, device=device),
        torch.zeros((num_slots, rank, sum(columns)), dtype=dtype, device=device),
        torch.zeros((num_slots, parts), dtype=torch.int32, device=device),
        torch.zeros((num_slots, parts), dtype=torch.float32, device=device),
        columns,
    )
