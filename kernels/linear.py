"""Linear layers with weights laid out once, at load, in the layout that the CPU's GEMM reads.

Torch reorders a plain weight on every call (bf16) or takes a slower GEMM (fp32). Packed with oneDNN, through the
ops that torch's own inductor backend emits for frozen linear layers, the same GEMM runs up to 2.5 times as fast;
in bf16 the result is bit for bit that of `F.linear`. `kernels/cpu/linear.py` packs for a kernel of our own.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

_PACKABLE = (torch.float32, torch.bfloat16)


class PackedWeight(ABC):
    """A weight [out_features, in_features] that only its own `gemm` can read. It does not refer to the plain one."""

    __slots__ = ()

    @abstractmethod
    def gemm(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x @ weight.T + bias, as [T, O]; dtypes must agree."""


def pack_weight(weight_OI: Tensor) -> Tensor | PackedWeight:
    """Lay a weight out for oneDNN; the plain weight is returned where that is not possible or not faster."""
    if weight_OI.is_cpu and weight_OI.dim() == 2 and weight_OI.dtype in _PACKABLE and _packing_works(weight_OI.dtype):
        return _pack(weight_OI)
    return weight_OI


def linear(x_TI: Tensor, weight_OI: Tensor | PackedWeight, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias, as [T, O]; the weight plain or from `pack_weight`."""
    if isinstance(weight_OI, Tensor):
        return F.linear(x_TI, weight_OI, bias_O)
    return weight_OI.gemm(x_TI, bias_O)


@dataclass(frozen=True, slots=True, eq=False)
class _OneDnnWeight(PackedWeight):
    packed: Tensor
    out_features: int

    def gemm(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if x_TI.shape[0] == 0:
            return x_TI.new_empty((0, self.out_features))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.packed, bias_O, "none", [], "")
        return out


def _pack(weight_OI: Tensor) -> PackedWeight:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), None)
    return _OneDnnWeight(packed, weight_OI.shape[0])


@functools.cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Run the ops once on small numbers: they are torch's own, but not part of its public interface."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = torch.arange(-24, 24, dtype=dtype).view(8, 6) / 8
    x = torch.arange(18, dtype=dtype).view(3, 6) / 4
    try:
        found = _pack(weight).gemm(x, None)
    except (RuntimeError, AttributeError) as error:
        logger.warning("oneDNN packing is off for %s weights, using the plain GEMM (slower): %s", dtype, error)
        return False
    agree = torch.allclose(found, F.linear(x, weight), rtol=1e-2, atol=1e-2)
    if not agree:
        logger.warning("oneDNN packing is off for %s weights, using the plain GEMM (slower): its result differs", dtype)
    return agree
