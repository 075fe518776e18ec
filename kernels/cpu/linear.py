"""Weights packed for `linear.cpp`, in bf16, int8, fp32, codes or MXFP4: one form serves any number of rows, from one
decode to a prefill chunk.

Weights [N, K] become [N / 32, K / 2, 64], zeros where N or K does not divide; the order of a panel is that of
`panels.h`, of codes that of `groups.h`, of MXFP4 that of `floats4.h`. Products are deterministic, and a row's result is
the same to the bit whatever rows are computed beside it, on all processors of one arithmetic. Threads take panels of
columns. What follows a GEMM in the decoder (silu(gate) * up; residual and norm) can be done in the same call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.kernels.cpu.calls import Kernel, new_output
from disagg.kernels.cpu.memory import HugePages, copy_pairs
from disagg.kernels.groups import GROUP, CodedWeight, Offset
from disagg.kernels.linear import PackedWeight
from disagg.kernels.mxfp4 import GROUP_BYTES, Mxfp4Weight
from disagg.kernels.quantize import Int8Weight, Quantization, quantize_int8

COLUMNS = 32
PRODUCT: Final = "iPqqPPqqPPq"
"""Fields of the struct that a product begins with."""
_PACKING = 3
"""Version of the order within packed weights, to be increased when it changes."""
KINDS: Final[Mapping[torch.dtype, int]] = {torch.bfloat16: 0, torch.uint8: 1, torch.float32: 2}
"""Dtype of packed weights -> its number in the library's calls; int8 weights are bytes."""
_CODE_KINDS: Final[Mapping[tuple[torch.dtype, int], int]] = {
    (torch.uint8, 640): 3,
    (torch.int8, 640): 4,
    (torch.uint8, 1088): 5,
    (torch.int16, 640): 6,
    (torch.int32, 640): 7,
    (torch.int16, 1088): 8,
    (torch.uint8, COLUMNS * (GROUP_BYTES + 1)): 9,
}
"""Kinds of packed codes, by dtype and bytes of a group of a panel: with minimums, with zeros, of 8 bits; then the same
for products that are sums of codes; MXFP4."""
_CODE_DTYPES: Final[Mapping[tuple[Offset, bool], torch.dtype]] = {
    ("minimum", False): torch.uint8,
    ("zero", False): torch.int8,
    ("none", False): torch.uint8,
    ("minimum", True): torch.int16,
    ("zero", True): torch.int32,
    ("none", True): torch.int16,
}
"""Dtype that packed codes are held as, so that it tells their kind; whether products are sums of codes."""
_GROUP = 4
"""Columns of a vector whose int8 pairs stand together; see `panels.h`."""


class NativeLinear:
    """The library's GEMMs, and the packing of their weights. Any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.linear = Kernel(library, "disagg_linear", PRODUCT)
        self.linear_silu_mul = Kernel(library, "disagg_linear_silu_mul", f"{PRODUCT}P")
        self.linear_gelu_tanh_mul = Kernel(library, "disagg_linear_gelu_tanh_mul", f"{PRODUCT}P")
        self.linear_add_rms_norm = Kernel(library, "disagg_linear_add_rms_norm", f"{PRODUCT}PqPfiP")
        int8_pairs, arithmetic = library["disagg_int8_pairs"], library["disagg_arithmetic"]
        int8_pairs.restype, int8_pairs.argtypes = ctypes.c_int64, []
        arithmetic.restype, arithmetic.argtypes = ctypes.c_char_p, [ctypes.c_int64]
        self._int8_pairs, self._arithmetic = bool(int8_pairs()), arithmetic
        code_pairs = library["disagg_code_pairs"]
        code_pairs.restype, code_pairs.argtypes = ctypes.c_int64, []
        self._code_pairs = bool(code_pairs())
        self._memory = HugePages()
        self.packing = f"{_PACKING}-{Path(library._name).stem}"
        """Name of the packing and of the library that reads it: packed weights with equal names can be exchanged."""

    @classmethod
    def load(cls, path: Path) -> NativeLinear:
        """Load the GEMMs of a library."""
        return cls(ctypes.CDLL(str(path)))

    def arithmetic(self, weights: torch.dtype) -> str:
        """Name of the arithmetic of models whose weights are packed as bfloat16, uint8 (int8 weights) or float32:
        results of the same arithmetic have the same bits."""
        name: bytes = self._arithmetic(KINDS[weights])
        return name.decode()

    def pack(self, weight_OI: Tensor) -> NativeWeight | None:
        """Pack a weight; None for one that is not a matrix on the CPU, of bf16 or fp32."""
        if not weight_OI.is_cpu or weight_OI.dim() != 2 or weight_OI.dtype not in (torch.bfloat16, torch.float32):
            return None
        O, I = weight_OI.shape  # noqa: E741 - the shape letters of the name
        return NativeWeight(self, self._kept(_ordered(weight_OI.detach())), None, O, I)

    def pack_int8(self, weight: Int8Weight) -> NativeWeight | None:
        """Pack an int8 weight for GEMMs with bf16 rows; None for one that is not on the CPU."""
        if not weight.quantized_OI.is_cpu:
            return None
        O, I = weight.quantized_OI.shape  # noqa: E741
        packed = self._kept(self._ordered_int8(weight.quantized_OI))
        return NativeWeight(self, packed, weight.scale_O.contiguous(), O, I)

    def pack_codes(self, weight: CodedWeight, *, by_sums: bool = False) -> NativeWeight | None:
        """Pack a weight of codes, whose products have the bits of those of the bf16 weight that it stands for, or,
        `by_sums`, are sums of codes (`sums.cpp`); None for one that is not on the CPU."""
        if not weight.code_OI.is_cpu:
            return None
        groups, (O, I) = weight.groups, weight.code_OI.shape  # noqa: E741
        numbers = [groups.scale_OG] if groups.offset_OG is None else [groups.scale_OG, groups.offset_OG]
        headers = [_columns(each).transpose(1, 2).contiguous().view(torch.uint8) for each in numbers]
        panels = torch.cat([*headers, self._ordered_codes(weight.code_OI, by_sums)], dim=2)
        dtype = _CODE_DTYPES[groups.offset, by_sums]
        packed = self._memory.new((*panels.shape[:2], panels.shape[2] // dtype.itemsize), dtype)
        packed.view(torch.uint8).copy_(panels)
        return NativeWeight(self, packed, None, O, I)

    def pack_experts(self, weight_EOI: Tensor, quantization: Quantization = "none") -> NativeExpertWeight | None:
        """Pack the weights of all experts one behind the other, with `int8` in 8 bits where they are bf16; None for
        what is not on the CPU, of bf16 or fp32.

        Raises:
            ValueError: `int8` of a weight that is not finite.
        """
        if not weight_EOI.is_cpu or weight_EOI.dim() != 3 or weight_EOI.dtype not in (torch.bfloat16, torch.float32):
            return None
        E, O, I = weight_EOI.shape  # noqa: E741
        is_int8 = quantization == "int8" and weight_EOI.dtype == torch.bfloat16
        shape = (E, -(-O // COLUMNS), -(-I // 2), 2 * COLUMNS)
        packed = self._memory.new(shape, torch.uint8 if is_int8 else weight_EOI.dtype)
        scale_EO = torch.empty((E, O), dtype=torch.float32) if is_int8 else None
        for expert, weight_OI in enumerate(weight_EOI.detach()):
            if scale_EO is None:
                panels = _ordered(weight_OI)
            else:
                quantized = quantize_int8(weight_OI)
                scale_EO[expert] = quantized.scale_O
                panels = self._ordered_int8(quantized.quantized_OI)
            copy_pairs(packed[expert].view(panels.shape), panels)
        return NativeExpertWeight(packed, scale_EO, O, I)

    def pack_mxfp4(self, weight: Mxfp4Weight) -> NativeExpertWeight:
        """Pack the weights of all experts, which are on the CPU, as the codes that they are."""
        L, O, I = weight.shape  # noqa: E741
        shape = (L, -(-O // COLUMNS), I // GROUP, COLUMNS * (GROUP_BYTES + 1))
        packed = self._memory.new(shape, torch.uint8)
        for panels, code_OB, exponent_OG in zip(packed, weight.code_LOB, weight.exponent_LOG, strict=True):
            panels[..., :COLUMNS] = _columns(exponent_OG).transpose(1, 2)
            panels[..., COLUMNS:] = self._ordered_mxfp4(code_OB)
        return NativeExpertWeight(packed, None, O, I)

    def _ordered_int8(self, quantized_OI: Tensor) -> Tensor:
        """The numbers of an int8 weight as bytes, in the order in which they are packed."""
        if not self._int8_pairs:
            return _panels(quantized_OI.view(torch.uint8)).permute(0, 2, 3, 1)
        sign_OI = quantized_OI.view(torch.uint8) & 0x80
        panels = _panels(quantized_OI.abs().view(torch.uint8) | sign_OI)
        split = panels.view(panels.shape[0], 2, COLUMNS // 2 // _GROUP, _GROUP, panels.shape[2], 2)
        return split.permute(0, 4, 2, 1, 3, 5).reshape(panels.shape[0], panels.shape[2], COLUMNS, 2)

    def _ordered_codes(self, code_OI: Tensor, by_sums: bool) -> Tensor:
        """Codes as bytes in the order in which they are packed, [N / 32, K / 32, bytes]."""
        panels = _columns(code_OI).view(torch.uint8)
        P, _, I = panels.shape  # noqa: E741
        is_byte, G = code_OI.dtype == torch.int8, I // GROUP
        if self._code_pairs:
            if is_byte:
                return panels.view(P, 4, 8, G, 16, 2).permute(0, 3, 4, 1, 2, 5).reshape(P, G, -1)
            if by_sums:
                words = panels.view(P, COLUMNS, G, 4, 4, 2).permute(0, 2, 3, 1, 5, 4)
            else:
                words = panels.view(P, 4, 8, G, 2, 8, 2).permute(0, 3, 4, 1, 2, 6, 5)
        elif is_byte:
            return panels.transpose(1, 2).reshape(P, G, -1)
        else:
            words = panels.view(P, COLUMNS, G, 8, 4).permute(0, 2, 4, 1, 3)
        return (words[..., ::2] | words[..., 1::2] << 4).reshape(P, G, -1)

    def _ordered_mxfp4(self, code_OB: Tensor) -> Tensor:
        """Codes of two inputs a byte, in the order in which they are packed, [O / 32, I / 32, bytes]."""
        panels = _columns(code_OB)
        P, G = panels.shape[0], panels.shape[2] // GROUP_BYTES
        order: tuple[int, ...]
        if self._code_pairs:
            first, second = panels.view(P, COLUMNS, G, 2, 4, 2).unbind(5)
            order = (0, 2, 3, 1, 5, 4)
        else:
            first, second = panels.view(P, COLUMNS // 4, 4, G, 4, 2, 2).unbind(5)
            order = (0, 3, 4, 1, 5, 2, 6)
        bytes_of_input = torch.stack((first & 15 | second << 4, first >> 4 | second & 0xF0), dim=-1)
        return bytes_of_input.permute(order).reshape(P, G, -1)

    def restored(self, packed: Tensor, scale_O: Tensor | None, out_features: int, in_features: int) -> NativeWeight:
        """Make a weight from the tensors of a packed weight with the same `packing`; they are kept, not copied.

        Raises:
            ValueError: they are not those of a weight of this size.
        """
        _check_packed(packed, scale_O, (), out_features, in_features)
        return NativeWeight(self, packed, scale_O, out_features, in_features)

    def restored_experts(
        self, packed: Tensor, scale_EO: Tensor | None, num_experts: int, out_features: int, in_features: int
    ) -> NativeExpertWeight:
        """The same for the weights of a layer's experts. Raises as `restored` does."""
        _check_packed(packed, scale_EO, (num_experts,), out_features, in_features)
        return NativeExpertWeight(packed, scale_EO, out_features, in_features)

    def drop_rest(self) -> None:
        """Let the rest of the newest chunk go back to the system together with the weights that were packed so far."""
        self._memory.drop_rest()

    def _kept(self, panels: Tensor) -> Tensor:
        packed = self._memory.new((*panels.shape[:2], 2 * COLUMNS), panels.dtype)
        copy_pairs(packed.view(panels.shape), panels)
        return packed


def _check_packed(
    packed: Tensor, scale: Tensor | None, experts: tuple[int, ...], out_features: int, in_features: int
) -> None:
    """That these are the parts of a packed weight of this size, or of the weights of so many experts. Raises
    `ValueError`."""
    if packed.dim() == len(experts) + 3 and _code_kind(packed) is not None:
        coded_shape = (*experts, -(-out_features // COLUMNS), in_features // GROUP, packed.shape[-1])
        if packed.shape != coded_shape or in_features % GROUP or scale is not None or not packed.is_contiguous():
            raise ValueError(f"packed codes are {list(packed.shape)}, not {list(coded_shape)}")
        return
    shape = (*experts, -(-out_features // COLUMNS), -(-in_features // 2), 2 * COLUMNS)
    dtypes = (torch.bfloat16, torch.float32) if scale is None else (torch.uint8,)
    if packed.dtype not in dtypes or packed.shape != shape or not packed.is_contiguous():
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"packed weight is {packed.dtype} {list(packed.shape)}, not {wanted} {list(shape)}")
    if scale is not None and (scale.dtype, scale.shape) != (torch.float32, (*experts, out_features)):
        raise ValueError(f"scales are {scale.dtype} {list(scale.shape)}, not {out_features} float32")


def _code_kind(packed: Tensor) -> int | None:
    """The kind of packed codes; None for other weights."""
    return _CODE_KINDS.get((packed.dtype, packed.shape[-1] * packed.itemsize))


def _kind(packed: Tensor) -> int:
    """The kind of a packed weight."""
    code_kind = _code_kind(packed)
    return KINDS[packed.dtype] if code_kind is None else code_kind


def _columns(numbers_ON: Tensor) -> Tensor:
    """[O / 32, 32, N], padded with zeros."""
    padded = F.pad(numbers_ON, (0, 0, 0, -numbers_ON.shape[0] % COLUMNS))
    return padded.view(-1, COLUMNS, padded.shape[1])


def _ordered(weight_OI: Tensor) -> Tensor:
    """The numbers of a bf16 or fp32 weight in the order in which they are packed."""
    panels = _panels(weight_OI)
    return panels.transpose(1, 2) if weight_OI.dtype == torch.bfloat16 else panels.permute(0, 2, 3, 1)


def _panels(weight_OI: Tensor) -> Tensor:
    """[N / 32, 32, K / 2, 2], padded with zeros."""
    padded = F.pad(weight_OI, (0, weight_OI.shape[1] % 2, 0, -weight_OI.shape[0] % COLUMNS))
    return padded.view(padded.shape[0] // COLUMNS, COLUMNS, padded.shape[1] // 2, 2)


@dataclass(frozen=True, slots=True, eq=False)
class NativeExpertWeight:
    """Packed weights of all experts of a layer, which `kernels/cpu/experts.py` reads, or of all heads."""

    packed: Tensor
    """Panels of each expert, [E, N / 32, K / 2, 64], or of MXFP4 [E, N / 32, K / 32, 544]."""
    scale_EO: Tensor | None
    """Scales of int8 weights, float32; None for others."""
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of rows, biases and results."""
        return torch.float32 if self.packed.dtype == torch.float32 else torch.bfloat16

    @property
    def kind(self) -> int:
        """Number of its kind in the library's calls."""
        return _kind(self.packed)


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight(PackedWeight):
    """A packed weight with the functions that read it.

    All other tensors are fp32 with a weight in fp32, else bf16; sums of products are fp32. ValueError for what does
    not fit the weight.
    """

    functions: NativeLinear
    packed: Tensor
    scale_O: Tensor | None
    """Scales of an int8 weight, float32; None for other weights."""
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of rows, biases and results."""
        return torch.float32 if self.packed.dtype == torch.float32 else torch.bfloat16

    @property
    def kind(self) -> int:
        """Number of its kind in the library's calls."""
        return _kind(self.packed)

    @property
    def are_codes(self) -> bool:
        """Whether it is of codes in groups."""
        return _code_kind(self.packed) is not None

    def gemm(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x @ weight.T + bias, rounded once; [T, O]."""
        self._check(x_TI, bias_O)
        out_TO = new_output((x_TI.shape[0], self.out_features), self.dtype)
        self.functions.linear(*self._operands(x_TI, bias_O, out_TO))
        return out_TO

    def gemm_silu_mul(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """silu(gate) * up, [T, O / 2], of the GEMM; gate is its first half."""
        return self._gemm_activation(self.functions.linear_silu_mul, x_TI, bias_O)

    def gemm_gelu_tanh_mul(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """gelu(gate) * up with the approximation by tanh, [T, O / 2], of the GEMM; gate is its first half."""
        return self._gemm_activation(self.functions.linear_gelu_tanh_mul, x_TI, bias_O)

    def _gemm_activation(self, function: Kernel, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.out_features % 2:
            raise ValueError(f"{self.out_features} columns are not gate and up")
        self._check(x_TI, bias_O)
        product_TO = new_output((x_TI.shape[0], self.out_features), self.dtype)
        out_TF = new_output((x_TI.shape[0], self.out_features // 2), self.dtype)
        function(*self._operands(x_TI, bias_O, product_TO), out_TF.data_ptr())
        return out_TF

    def gemm_add_rms_norm(
        self,
        x_TI: Tensor,
        bias_O: Tensor | None,
        residual_TO: Tensor,
        norm_O: Tensor,
        eps: float,
        plus_one: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute (rms_norm(y + residual), y + residual) for the y of the GEMM, rounded where the separate ops
        round."""
        self._check(x_TI, bias_O)
        shape = (x_TI.shape[0], self.out_features)
        if residual_TO.dtype != self.dtype or residual_TO.shape != shape or residual_TO.stride(1) != 1:
            wanted = f"{_short(self.dtype)} rows {list(shape)}"
            raise ValueError(f"residual is {residual_TO.dtype} {list(residual_TO.shape)}, not {wanted}")
        self._check_vector("norm", norm_O)
        out_TO, total_TO = new_output(shape, self.dtype), new_output(shape, self.dtype)
        self.functions.linear_add_rms_norm(
            *self._operands(x_TI, bias_O, total_TO), residual_TO.data_ptr(), residual_TO.stride(0), norm_O.data_ptr(),
            eps, plus_one, out_TO.data_ptr(),
        )  # fmt: skip
        return out_TO, total_TO

    def _operands(self, x_TI: Tensor, bias_O: Tensor | None, out_TO: Tensor) -> tuple[int, ...]:
        """The arguments that all functions begin with. They point into the tensors, which the caller keeps."""
        return (
            self.kind, x_TI.data_ptr(), x_TI.stride(0), x_TI.shape[0], self.packed.data_ptr(),
            0 if self.scale_O is None else self.scale_O.data_ptr(), self.out_features, self.in_features,
            0 if bias_O is None else bias_O.data_ptr(), out_TO.data_ptr(), self.out_features,
        )  # fmt: skip

    def _check(self, x_TI: Tensor, bias_O: Tensor | None) -> None:
        shape = x_TI.shape
        if x_TI.dtype != self.dtype or len(shape) != 2 or shape[1] != self.in_features or x_TI.stride(1) != 1:
            wanted = f"{_short(self.dtype)} rows of {self.in_features}"
            raise ValueError(f"x is {x_TI.dtype} {list(shape)}; the weight takes {wanted}")
        if bias_O is not None:
            self._check_vector("bias", bias_O)

    def _check_vector(self, name: str, vector_O: Tensor) -> None:
        if vector_O.dtype != self.dtype or vector_O.shape != (self.out_features,) or vector_O.stride(0) != 1:
            wanted = f"{self.out_features} {_short(self.dtype)} numbers"
            raise ValueError(f"{name} is {vector_O.dtype} {list(vector_O.shape)}, not {wanted}")


def _short(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else "bf16"
