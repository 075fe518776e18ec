"""Weights of experts in MXFP4 in place of the parameters that they would fill, from load until weights are packed."""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.kernels.groups import GROUP
from disagg.kernels.mxfp4 import Mxfp4Weight


class ExpertFloats:
    """Weights by the memory of their parameters [L, O, I], which nothing is written to; the tensor of a checkpoint has
    its dimensions in another order."""

    def __init__(self) -> None:
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_put: dict[int, int] = {}
        """Weights that were put, by the same memory."""

    @property
    def are_none(self) -> bool:
        """Whether there are none."""
        return not self._weights

    def put(self, part: Tensor, weight: Mxfp4Weight) -> None:
        """Keep the weights [1, O, I] of one expert. `part` is what they would fill of a contiguous parameter, [1, I, O]
        or with O divided in two."""
        memory = part.untyped_storage()
        kept = self._weights.get(memory.data_ptr())
        if kept is None:
            numbers = memory.nbytes() // part.element_size()
            kept = torch.empty(numbers // 2, dtype=torch.uint8), torch.empty(numbers // GROUP, dtype=torch.uint8)
            self._weights[memory.data_ptr()] = kept
        self._num_put[memory.data_ptr()] = self._num_put.get(memory.data_ptr(), 0) + part.numel()
        for whole, own, inputs in ((kept[0], weight.code_LOB, 2), (kept[1], weight.exponent_LOG, GROUP)):
            place = _place(whole, part, inputs)
            place.copy_(own.transpose(1, 2).reshape(place.shape))

    def take(self, parameter_LOI: Tensor) -> Mxfp4Weight | None:
        """The weights of a whole parameter, which are kept no longer; None where there are none."""
        at = parameter_LOI.untyped_storage().data_ptr()
        kept = self._weights.pop(at, None)
        if kept is None:
            return None
        assert self._num_put.pop(at) == parameter_LOI.numel(), "some experts of a parameter are not in MXFP4"
        L, O, _ = parameter_LOI.shape  # noqa: E741 - the shape letters of the name
        return Mxfp4Weight(kept[0].view(L, O, -1), kept[1].view(L, O, -1))


def _place(memory: Tensor, part: Tensor, inputs: int) -> Tensor:
    """Where `part` lies in memory that has a byte for so many inputs, which are its second dimension."""
    sizes, strides = list(part.shape), [stride // inputs for stride in part.stride()]
    sizes[1], strides[1] = sizes[1] // inputs, 1
    return memory.as_strided(sizes, strides, int(part.storage_offset()) // inputs)
