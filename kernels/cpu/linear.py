"""bf16 weights packed for `linear.cpp`: one form serves any number of rows, from one decode to a prefill chunk.

Weights [N, K] become [N / 32, K / 2, 32, 2], zeros where N or K does not divide. Products are deterministic, and a
row's result is the same to the bit whatever rows are computed beside it. Threads take panels of columns. What follows a
product in the decoder (silu(gate) * up; residual and norm) can be done in the same call.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.kernels.linear import PackedWeight

COLUMNS = 32
_LINEAR: list[Any] = [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p]


class NativeLinear:
    """The library's products, and the packing of their weights. Stateless; any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.linear = _bind(library, "disagg_linear", [c_void_p])
        self.linear_silu_mul = _bind(library, "disagg_linear_silu_mul", [c_void_p, c_void_p])
        self.linear_add_rms_norm = _bind(
            library, "disagg_linear_add_rms_norm", [c_void_p, c_int64, c_void_p, c_float, c_void_p, c_void_p]
        )

    @classmethod
    def load(cls, path: Path) -> NativeLinear | None:
        """None where the library was compiled for a processor that `linear.cpp` is not for."""
        library = ctypes.CDLL(str(path))
        return cls(library) if hasattr(library, "disagg_linear") else None

    def pack(self, weight_OI: Tensor) -> NativeWeight | None:
        """None for a weight that is not a bf16 matrix on the CPU."""
        if not weight_OI.is_cpu or weight_OI.dim() != 2 or weight_OI.dtype != torch.bfloat16:
            return None
        O, I = weight_OI.shape  # noqa: E741 - the shape letters of the name
        padded = F.pad(weight_OI.detach(), (0, I % 2, 0, -O % COLUMNS))
        panels = padded.view(padded.shape[0] // COLUMNS, COLUMNS, padded.shape[1] // 2, 2).transpose(1, 2)
        return NativeWeight(self, panels.contiguous(), O, I)


def _bind(library: ctypes.CDLL, name: str, more: list[Any]) -> Any:
    function = library[name]
    function.restype, function.argtypes = None, [*_LINEAR, *more]
    return function


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight(PackedWeight):
    """A packed weight with the functions that read it.

    All tensors are bf16, products are summed in fp32 along I in order. ValueError for what does not fit the weight.
    """

    functions: NativeLinear
    packed: Tensor
    out_features: int
    in_features: int

    def product(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x @ weight.T + bias, rounded once; [T, O]."""
        operands = self._operands(x_TI, bias_O)
        out_TO = torch.empty((x_TI.shape[0], self.out_features), dtype=torch.bfloat16)
        self.functions.linear(*operands, out_TO.data_ptr())
        return out_TO

    def product_silu_mul(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """silu(gate) * up, [T, O / 2], of the product; gate is its first half."""
        if self.out_features % 2:
            raise ValueError(f"{self.out_features} columns are not gate and up")
        operands = self._operands(x_TI, bias_O)
        product_TO = torch.empty((x_TI.shape[0], self.out_features), dtype=torch.bfloat16)
        out_TF = torch.empty((x_TI.shape[0], self.out_features // 2), dtype=torch.bfloat16)
        self.functions.linear_silu_mul(*operands, product_TO.data_ptr(), out_TF.data_ptr())
        return out_TF

    def product_add_rms_norm(
        self, x_TI: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_O: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(product + residual), product + residual), rounded where the separate ops round."""
        operands = self._operands(x_TI, bias_O)
        shape = (x_TI.shape[0], self.out_features)
        if residual_TO.dtype != torch.bfloat16 or residual_TO.shape != shape or residual_TO.stride(1) != 1:
            raise ValueError(f"residual is {residual_TO.dtype} {list(residual_TO.shape)}, not bf16 rows {list(shape)}")
        self._check_vector("norm", norm_O)
        out_TO, total_TO = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16)
        self.functions.linear_add_rms_norm(
            *operands, residual_TO.data_ptr(), residual_TO.stride(0), norm_O.data_ptr(), eps, total_TO.data_ptr(),
            out_TO.data_ptr(),
        )  # fmt: skip
        return out_TO, total_TO

    def _operands(self, x_TI: Tensor, bias_O: Tensor | None) -> tuple[int | None, ...]:
        """The arguments that all functions begin with; they point into x, which the caller keeps."""
        shape, stride = x_TI.shape, x_TI.stride()
        if x_TI.dtype != torch.bfloat16 or len(shape) != 2 or shape[1] != self.in_features or stride[1] != 1:
            raise ValueError(f"x is {x_TI.dtype} {list(shape)}; the weight takes bf16 rows of {self.in_features}")
        if bias_O is not None:
            self._check_vector("bias", bias_O)
        return (
            x_TI.data_ptr(), stride[0], shape[0], self.packed.data_ptr(), self.out_features, self.in_features,
            None if bias_O is None else bias_O.data_ptr(),
        )  # fmt: skip

    def _check_vector(self, name: str, vector_O: Tensor) -> None:
        if vector_O.dtype != torch.bfloat16 or vector_O.shape != (self.out_features,) or vector_O.stride(0) != 1:
            raise ValueError(f"{name} is {vector_O.dtype} {list(vector_O.shape)}, not {self.out_features} bf16 numbers")
