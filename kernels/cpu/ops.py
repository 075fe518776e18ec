"""The compiled kernels as functions of tensors.

Each method has the signature of its reference, and returns None when it does not take these tensors (another dtype than
float32 and bfloat16, a layout that the kernel does not read): the caller then uses the reference.

The short ops keep the GIL: they take microseconds, and giving it away costs more. Attention releases it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 512

P, I, F = c_void_p, c_int64, c_float  # noqa: E741 - pointer, integer, float: one letter per argument of the C functions
_SHORT: dict[str, tuple[Any, list[Any]]] = {
    "disagg_rms_norm": (None, [c_int32, P, I, I, P, P, I, I, I, F]),
    "disagg_add_rms_norm": (None, [c_int32, P, I, P, I, P, P, P, I, I, F]),
    "disagg_rope": (None, [c_int32, P, I, I, I, P, P, I, I, I, P, P, I, P, I, I, I]),
    "disagg_silu_mul": (None, [c_int32, P, I, P, I, I]),
    "disagg_set_num_threads": (None, [I]),
    "disagg_kv_write": (I, [P, P, I, I, I, I, P, P, I, I, I, I, P, I, I]),
}
_LONG: dict[str, tuple[Any, list[Any]]] = {
    "disagg_decode_attention": (I, [c_int32, P, I, I, P, P, I, I, I, I, P, I, I, P, I, I, I, F, P]),
    "disagg_prefill_attention": (I, [c_int32, P, I, I, P, P, I, I, I, I, P, I, I, I, I, F, P]),
}


def _bind(library: ctypes.CDLL, table: dict[str, tuple[Any, list[Any]]]) -> dict[str, Any]:
    functions = {}
    for name, (result, arguments) in table.items():
        function = library[name]
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


def _are_caches(key_cache_NKBD: Tensor, value_cache_NKBD: Tensor) -> bool:
    """Whether both have the same shape and strides, the inner [K, B, D] contiguous."""
    _, _, B, D = shape = key_cache_NKBD.shape
    strides = key_cache_NKBD.stride()
    return strides[1:] == (B * D, D, 1) and value_cache_NKBD.stride() == strides and value_cache_NKBD.shape == shape


class NativeOps:
    """The library's functions. Stateless; any thread."""

    def __init__(self, path: Path) -> None:
        short, long = _bind(ctypes.PyDLL(str(path)), _SHORT), _bind(ctypes.CDLL(str(path)), _LONG)
        self.set_num_threads = short["disagg_set_num_threads"]
        """How many threads the linear layers and attention use from now on, in this process; at least 1."""
        self._rms_norm = short["disagg_rms_norm"]
        self._add_rms_norm = short["disagg_add_rms_norm"]
        self._rope = short["disagg_rope"]
        self._silu_mul = short["disagg_silu_mul"]
        self._kv_write = short["disagg_kv_write"]
        self._decode_attention = long["disagg_decode_attention"]
        self._prefill_attention = long["disagg_prefill_attention"]

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
        """See `reference.rms_norm`."""
        dtype, shape, stride = x_TH.dtype, x_TH.shape, x_TH.stride()
        is_bf16 = _IS_BF16.get(dtype)
        if is_bf16 is None or weight_H.dtype != dtype or not 2 <= len(shape) <= 3 or stride[-1] != 1:
            return None
        if weight_H.shape != shape[-1:] or weight_H.stride(0) != 1:
            return None
        heads, head_stride = (shape[1], stride[1]) if len(shape) == 3 else (1, 0)
        out = torch.empty(shape, dtype=dtype)
        self._rms_norm(
            is_bf16, x_TH.data_ptr(), stride[0], head_stride, weight_H.data_ptr(), out.data_ptr(), shape[0], heads,
            shape[-1], eps,
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """See `reference.add_rms_norm`."""
        dtype, shape, x_stride, r_stride = x_TH.dtype, x_TH.shape, x_TH.stride(), residual_TH.stride()
        is_bf16 = _IS_BF16.get(dtype)
        if is_bf16 is None or residual_TH.dtype != dtype or weight_H.dtype != dtype or residual_TH.shape != shape:
            return None
        if len(shape) != 2 or x_stride[1] != 1 or r_stride[1] != 1:
            return None
        if weight_H.shape != shape[1:] or weight_H.stride(0) != 1:
            return None
        out, total = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        self._add_rms_norm(
            is_bf16, x_TH.data_ptr(), x_stride[0], residual_TH.data_ptr(), r_stride[0], weight_H.data_ptr(),
            out.data_ptr(), total.data_ptr(), shape[0], shape[1], eps,
        )  # fmt: skip
        return out, total

    def apply_rope(self, q_TND: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `reference.apply_rope`."""
        dtype = q_TND.dtype
        is_bf16 = _IS_BF16.get(dtype)
        if is_bf16 is None or k_TKD.dtype != dtype or cos_TD.dtype != dtype or sin_TD.dtype != dtype:
            return None
        q_stride, k_stride, cos_stride, sin_stride = q_TND.stride(), k_TKD.stride(), cos_TD.stride(), sin_TD.stride()
        if not q_stride[2] == k_stride[2] == cos_stride[1] == sin_stride[1] == 1:
            return None
        T, N, D = q_TND.shape
        if D % 2 or not cos_TD.shape == sin_TD.shape == (T, D) or (k_TKD.shape[0], k_TKD.shape[2]) != (T, D):
            return None
        q_out, k_out = torch.empty((T, N, D), dtype=dtype), torch.empty(k_TKD.shape, dtype=dtype)
        self._rope(
            is_bf16, q_TND.data_ptr(), q_stride[0], q_stride[1], N, q_out.data_ptr(),
            k_TKD.data_ptr(), k_stride[0], k_stride[1], k_TKD.shape[1], k_out.data_ptr(),
            cos_TD.data_ptr(), cos_stride[0], sin_TD.data_ptr(), sin_stride[0], T, D,
        )  # fmt: skip
        return q_out, k_out

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor | None:
        """See `reference.silu_mul`."""
        is_bf16 = _IS_BF16.get(gate_up_T2F.dtype)
        stride = gate_up_T2F.stride()
        if is_bf16 is None or len(stride) != 2 or stride[1] != 1 or gate_up_T2F.shape[1] % 2:
            return None
        T, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out = torch.empty((T, size), dtype=gate_up_T2F.dtype)
        self._silu_mul(is_bf16, gate_up_T2F.data_ptr(), stride[0], out.data_ptr(), T, size)
        return out

    def kv_write(
        self, k_TKD: Tensor, v_TKD: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, slot_mapping_T: Tensor
    ) -> bool | None:
        """See `reference.kv_write`; True when written. IndexError, and nothing written, for a slot outside."""
        dtype, shape = k_TKD.dtype, k_TKD.shape
        if not dtype == v_TKD.dtype == key_cache_NKBD.dtype == value_cache_NKBD.dtype or v_TKD.shape != shape:
            return None
        k_stride, v_stride = k_TKD.stride(), v_TKD.stride()
        if k_stride[2] != 1 or v_stride[2] != 1 or slot_mapping_T.dtype != torch.int64:
            return None
        if not _are_caches(key_cache_NKBD, value_cache_NKBD) or slot_mapping_T.stride(0) != 1:
            return None
        num_blocks, K, B, D = key_cache_NKBD.shape
        if shape != (slot_mapping_T.shape[0], K, D):
            return None
        size, block_stride = k_TKD.element_size(), key_cache_NKBD.stride(0)
        invalid = self._kv_write(
            k_TKD.data_ptr(), v_TKD.data_ptr(), k_stride[0] * size, v_stride[0] * size, k_stride[1] * size,
            v_stride[1] * size, key_cache_NKBD.data_ptr(), value_cache_NKBD.data_ptr(), block_stride * size, num_blocks,
            K, B, slot_mapping_T.data_ptr(), slot_mapping_T.shape[0], D * size,
        )  # fmt: skip
        if invalid >= 0:
            raise IndexError(f"slot {int(slot_mapping_T[invalid])} of token {invalid} is outside the cache")
        return True

    def paged_decode_attention(
        self,
        q_SND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        block_tables_SM: Tensor,
        context_lens_S: Tensor,
        scale: float,
    ) -> Tensor | None:
        """See `reference.paged_decode_attention`. IndexError for a length or a block outside the cache."""
        dtype = q_SND.dtype
        is_bf16 = _IS_BF16.get(dtype)
        if is_bf16 is None or key_cache_NKBD.dtype != dtype or value_cache_NKBD.dtype != dtype:
            return None
        q_stride, table_stride = q_SND.stride(), block_tables_SM.stride()
        if q_stride[2] != 1 or table_stride[1] != 1 or not _are_caches(key_cache_NKBD, value_cache_NKBD):
            return None
        if block_tables_SM.dtype != torch.int32 or context_lens_S.dtype != torch.int32 or context_lens_S.stride(0) != 1:
            return None
        S, N, D = q_SND.shape
        num_blocks, K, B, cache_dim = key_cache_NKBD.shape
        if D > MAX_HEAD_DIM or cache_dim != D or N % K or not S == block_tables_SM.shape[0] == context_lens_S.shape[0]:
            return None
        out = torch.empty((S, N, D), dtype=dtype)
        invalid = self._decode_attention(
            is_bf16, q_SND.data_ptr(), q_stride[0], q_stride[1], key_cache_NKBD.data_ptr(), value_cache_NKBD.data_ptr(),
            key_cache_NKBD.stride(0), num_blocks, K, B, block_tables_SM.data_ptr(), table_stride[0],
            block_tables_SM.shape[1], context_lens_S.data_ptr(), S, N, D, scale, out.data_ptr(),
        )  # fmt: skip
        if invalid >= 0:
            raise IndexError(f"sequence {invalid}: its length or a block of its table is outside the cache")
        return out

    def paged_prefill_attention(
        self,
        q_TND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        block_table_M: Tensor,
        start: int,
        scale: float,
    ) -> Tensor | None:
        """See `reference.paged_prefill_attention`. IndexError for a block outside the cache."""
        dtype = q_TND.dtype
        is_bf16 = _IS_BF16.get(dtype)
        if is_bf16 is None or key_cache_NKBD.dtype != dtype or value_cache_NKBD.dtype != dtype:
            return None
        q_stride = q_TND.stride()
        if q_stride[2] != 1 or not _are_caches(key_cache_NKBD, value_cache_NKBD):
            return None
        if block_table_M.dtype != torch.int32 or block_table_M.stride(0) != 1:
            return None
        T, N, D = q_TND.shape
        num_blocks, K, B, cache_dim = key_cache_NKBD.shape
        if D > MAX_HEAD_DIM or cache_dim != D or N % K or not 0 <= start <= block_table_M.shape[0] * B - T:
            return None
        out = torch.empty((T, N, D), dtype=dtype)
        invalid = self._prefill_attention(
            is_bf16, q_TND.data_ptr(), q_stride[0], q_stride[1], key_cache_NKBD.data_ptr(), value_cache_NKBD.data_ptr(),
            key_cache_NKBD.stride(0), num_blocks, K, B, block_table_M.data_ptr(), start, T, N, D, scale, out.data_ptr(),
        )  # fmt: skip
        if invalid >= 0:
            raise IndexError(f"block {int(block_table_M[invalid])} at place {invalid} is outside the cache")
        return out
