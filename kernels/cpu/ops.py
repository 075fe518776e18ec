"""The compiled kernels as functions of tensors.

A method returns None when its kernel does not take the tensors: another dtype than float32 and bfloat16, or a layout
that it does not read.

The short ops keep the GIL: they take microseconds, and giving it away costs more. Attention releases it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from disagg.kernels import kv_rows, reference
from disagg.kernels.cpu.calls import Kernel, new_output
from disagg.kernels.cpu.experts import MoeFfn
from disagg.kernels.cpu.linear import KINDS, PRODUCT, NativeExpertWeight
from disagg.kernels.experts import Experts, ExpertWeight, Router, Shared
from disagg.kernels.lora import MAX_PARTS, Lora
from disagg.kernels.lora_ranks import RANK_ALIGNMENT
from disagg.kernels.ops import (
    AttentionForm,
    HeadSquares,
    LatentWrite,
    Ops,
    Pointwise,
    PrefillChunk,
    Prefills,
    RopeWrite,
    can_hold,
)
from disagg.kernels.weights import MAX_TOKENS

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_POINTWISE: Final[Mapping[Pointwise, int]] = {"multiply": 0, "divide": 1, "soft_cap": 2}
"""Numbers of the functions in the library's calls."""
MAX_HEAD_DIM = 576
_ALL_TOKENS = 1 << 62
"""Window that no context fills."""


def _are_caches(key_cache_NKBD: Tensor, value_cache_NKBD: Tensor) -> bool:
    """Whether both have the same shape but for columns that values may lack, and strides, the inner [K, B, D] of the
    keys contiguous."""
    num_blocks, K, B, D = key_cache_NKBD.shape
    strides, value_shape = key_cache_NKBD.stride(), value_cache_NKBD.shape
    if strides[1:] != (B * D, D, 1) or value_cache_NKBD.stride() != strides:
        return False
    return value_shape[:3] == (num_blocks, K, B) and 0 < value_shape[3] <= D


def _is_int8(dtype: torch.dtype, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor) -> bool | None:
    """Whether the cache has rows of 8 bits; None where the kernels do not read it beside rows of `dtype`."""
    keys, values = key_cache_NKBD.dtype, value_cache_NKBD.dtype
    if keys == values == dtype:
        return False
    is_whole = key_cache_NKBD.shape[3] == value_cache_NKBD.shape[3] > kv_rows.SCALE_BYTES
    return True if keys == values == torch.int8 and is_whole else None


def _are_tables(cos_PR: Tensor, sin_PR: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether both, of which the first has this shape, are tables as the kernels read them: rows of R numbers, one
    behind the other."""
    R = shape[1]
    if not cos_PR.dtype == sin_PR.dtype == dtype or sin_PR.shape != shape:
        return False
    return R == 0 or cos_PR.stride() == sin_PR.stride() == (R, 1)


def _are_rows(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the tensor has this shape and dtype, the numbers of its last dim side by side."""
    return tensor.dtype == dtype and tensor.shape == shape and tensor.stride(-1) == 1


def _are_indices(indices_T: Tensor, T: int) -> bool:
    return indices_T.dtype == torch.int64 and indices_T.shape == (T,) and indices_T.is_contiguous()


def _is_vector(vector: Tensor | None, size: int, dtype: torch.dtype) -> bool:
    return vector is None or (vector.dtype == dtype and vector.shape == (size,) and vector.stride() == (1,))


def _are_squares(squares: HeadSquares | None, T: int) -> bool:
    if squares is None:
        return True
    sums_T2 = squares.sums_T2
    return sums_T2.dtype == torch.float32 and sums_T2.shape == (T, 2) and sums_T2.is_contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _takes(form: AttentionForm, N: int) -> bool:
    """Whether the sinks are as the kernels read them."""
    sinks_N = form.sinks_N
    return sinks_N is None or (sinks_N.dtype == torch.float32 and sinks_N.shape == (N,) and sinks_N.stride() == (1,))


def _form(form: AttentionForm) -> tuple[float, float, int, int]:
    """Scale, soft cap, window and sinks, as the kernels' structs hold them."""
    sinks = 0 if form.sinks_N is None else form.sinks_N.data_ptr()
    return form.scale, form.soft_cap or 0.0, form.window or _ALL_TOKENS, sinks


def _is_within(chunk: PrefillChunk, num_rows: int, block_size: int) -> bool:
    """Whether the chunk's rows are in the batch, and its table covers its last token."""
    table_M, rows = chunk.block_table_M, chunk.rows
    if table_M.dtype != torch.int32 or table_M.stride(0) != 1 or not 0 <= rows.start <= rows.stop <= num_rows:
        return False
    return bool(0 <= chunk.start <= table_M.shape[0] * block_size - (rows.stop - rows.start))


class NativeOps(Ops):
    """The library's functions, as `ops.Ops`. Stateless; any thread."""

    gather_kv = staticmethod(reference.gather_kv)
    scatter_kv = staticmethod(reference.scatter_kv)
    digest_sums = staticmethod(reference.digest_sums)
    """Computed by torch: there is no C++ kernel for it."""

    def __init__(self, path: Path) -> None:
        short, long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.library = long
        self.set_num_threads = short["disagg_set_num_threads"]
        """Set the number of threads that the kernels use from now on, in this process; at least 1."""
        self.set_num_threads.restype, self.set_num_threads.argtypes = None, [ctypes.c_int64]
        self._embed = Kernel(short, "disagg_embed", "PqPqqqP", "token {}: its id is not in the vocabulary")
        self._rms_norm = Kernel(short, "disagg_rms_norm", "iPqqPPqqqfi")
        self._add_rms_norm = Kernel(short, "disagg_add_rms_norm", "iPqPqPPPqqfi")
        self._silu_mul = Kernel(short, "disagg_silu_mul", "iPqPqq")
        self._gelu_tanh_mul = Kernel(short, "disagg_gelu_tanh_mul", "iPqPqq")
        self._add = Kernel(short, "disagg_add", "iPqPqPqq")
        self._lora_add = Kernel(
            short, "disagg_lora_add", "iPqPqqPPPPqqqqqqqqPP", "row {}: its slot is not one of the adapters'"
        )
        self._pointwise = Kernel(short, "disagg_pointwise", "iPqPqqif")
        self._head_squares = Kernel(short, "disagg_head_squares", "iPqqqqP")
        self._moe_ffn = MoeFfn(long)
        self._argmax = Kernel(short, "disagg_argmax", "iPqqqP")
        self._draw = Kernel(long, "disagg_draw", "iPqqqPPP")
        self._qkv_rope_write = Kernel(
            short,
            "disagg_qkv_rope_write",
            "iiPqqqqqqPPfiiPPPPqPPPqqqqqPP",
            "token {}: its slot or its position is outside the cache",
        )
        self._linear_by_head = Kernel(long, "disagg_linear_by_head", f"{PRODUCT}qq")
        self._latent_rope_write = Kernel(
            short,
            "disagg_latent_rope_write",
            "iPqPqPqqPqqqqqqPPPqPqqqPP",
            "token {}: its slot or its position is outside the cache",
        )
        self._decode_attention = Kernel(
            long,
            "disagg_decode_attention",
            "iiPqqPPqqqqPqqPqqqqffqPP",
            "sequence {}: its length or a block of its table is outside the cache",
        )
        self._prefill_attention = Kernel(
            long, "disagg_prefill_attention", "iiiiPqqPPqqqqPqqqffqPP", "the block at place {} is outside the cache"
        )

    @override
    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor | None:
        """IndexError for an id outside the vocabulary."""
        dtype, (stride, inner) = embedding_VH.dtype, embedding_VH.stride()
        T, (V, H), size = token_ids_T.numel(), embedding_VH.shape, embedding_VH.element_size()
        if dtype not in _IS_BF16 or inner != 1 or not _are_indices(token_ids_T, T):
            return None
        out = new_output((T, H), dtype)
        self._embed(token_ids_T.data_ptr(), T, embedding_VH.data_ptr(), V, stride * size, H * size, out.data_ptr())
        return out

    @override
    def take_rows(self, x_TH: Tensor, rows_R: Tensor) -> Tensor | None:
        """IndexError for an index outside."""
        return self.embed(rows_R, x_TH)

    @override
    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False) -> Tensor | None:
        dtype, shape, stride = x_TH.dtype, x_TH.shape, x_TH.stride()
        is_bf16 = _IS_BF16.get(dtype)
        if is_bf16 is None or weight_H.dtype != dtype or not 2 <= len(shape) <= 3 or stride[-1] != 1:
            return None
        if weight_H.shape != shape[-1:] or weight_H.stride(0) != 1:
            return None
        heads, head_stride = (shape[1], stride[1]) if len(shape) == 3 else (1, 0)
        out = new_output(shape, dtype)
        self._rms_norm(
            is_bf16, x_TH.data_ptr(), stride[0], head_stride, weight_H.data_ptr(), out.data_ptr(), shape[0], heads,
            shape[-1], eps, plus_one,
        )  # fmt: skip
        return out

    @override
    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        dtype, shape, x_stride, r_stride = x_TH.dtype, x_TH.shape, x_TH.stride(), residual_TH.stride()
        is_bf16 = _IS_BF16.get(dtype)
        if is_bf16 is None or residual_TH.dtype != dtype or weight_H.dtype != dtype or residual_TH.shape != shape:
            return None
        if len(shape) != 2 or x_stride[1] != 1 or r_stride[1] != 1:
            return None
        if weight_H.shape != shape[1:] or weight_H.stride(0) != 1:
            return None
        out, total = new_output(shape, dtype), new_output(shape, dtype)
        self._add_rms_norm(
            is_bf16, x_TH.data_ptr(), x_stride[0], residual_TH.data_ptr(), r_stride[0], weight_H.data_ptr(),
            out.data_ptr(), total.data_ptr(), shape[0], shape[1], eps, plus_one,
        )  # fmt: skip
        return out, total

    @override
    def add(self, x_TH: Tensor, y_TH: Tensor) -> Tensor | None:
        is_bf16, shape = _IS_BF16.get(x_TH.dtype), x_TH.shape
        if is_bf16 is None or y_TH.dtype != x_TH.dtype or len(shape) != 2 or y_TH.shape != shape:
            return None
        x_stride, y_stride = x_TH.stride(), y_TH.stride()
        if x_stride[1] != 1 or y_stride[1] != 1:
            return None
        out = new_output(shape, x_TH.dtype)
        self._add(is_bf16, x_TH.data_ptr(), x_stride[0], y_TH.data_ptr(), y_stride[0], out.data_ptr(), *shape)
        return out

    @override
    def lora_add(self, x_TI: Tensor, y_TO: Tensor, lora: Lora, slots_T: Tensor) -> Tensor | None:
        """IndexError for a slot outside, and nothing added."""
        (T, I), dtype, a, b = x_TI.shape, x_TI.dtype, lora.a_SPRI, lora.b_SRO  # noqa: E741
        S, P, R, _ = a.shape
        O = sum(lora.columns)  # noqa: E741
        if dtype not in _IS_BF16 or not _are_rows(x_TI, (T, I), dtype) or not _are_rows(y_TO, (T, O), dtype):
            return None
        if slots_T.dtype != torch.int32 or slots_T.shape != (T,) or not slots_T.is_contiguous():
            return None
        if a.dtype != dtype or b.dtype != dtype or a.shape[3] != I or b.shape != (S, R, O) or R % RANK_ALIGNMENT:
            return None
        ends = [*itertools.accumulate(lora.columns)]
        hidden = new_output((T, P, R), torch.float32)
        self._lora_add(
            _IS_BF16[dtype], x_TI.data_ptr(), x_TI.stride(0), y_TO.data_ptr(), y_TO.stride(0), T, a.data_ptr(),
            b.data_ptr(), lora.ranks_SP.data_ptr(), lora.scales_SP.data_ptr(), S, P, R, I, O,
            *(ends + [O] * (MAX_PARTS - P)), slots_T.data_ptr(), hidden.data_ptr(),
        )  # fmt: skip
        return y_TO

    @override
    def pointwise(self, x_TH: Tensor, function: Pointwise, number: float) -> Tensor | None:
        is_bf16, shape, stride = _IS_BF16.get(x_TH.dtype), x_TH.shape, x_TH.stride()
        if is_bf16 is None or len(shape) != 2 or stride[1] != 1:
            return None
        out = new_output(shape, x_TH.dtype)
        self._pointwise(is_bf16, x_TH.data_ptr(), stride[0], out.data_ptr(), *shape, _POINTWISE[function], number)
        return out

    @override
    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor | None:
        return self._activated(self._silu_mul, gate_up_T2F)

    @override
    def gelu_tanh_mul(self, gate_up_T2F: Tensor) -> Tensor | None:
        return self._activated(self._gelu_tanh_mul, gate_up_T2F)

    def _activated(self, kernel: Kernel, gate_up_T2F: Tensor) -> Tensor | None:
        is_bf16 = _IS_BF16.get(gate_up_T2F.dtype)
        stride = gate_up_T2F.stride()
        if is_bf16 is None or len(stride) != 2 or stride[1] != 1 or gate_up_T2F.shape[1] % 2:
            return None
        T, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out = new_output((T, size), gate_up_T2F.dtype)
        kernel(is_bf16, gate_up_T2F.data_ptr(), stride[0], out.data_ptr(), T, size)
        return out

    @override
    def moe_ffn(self, x_TH: Tensor, router: Router, experts: Experts, shared: Shared | None) -> Tensor | None:
        """Takes packed weights. ValueError for what does not fit them."""
        if not isinstance(experts.gate_up_L2IH, NativeExpertWeight):
            return None
        return self._moe_ffn(x_TH, router, experts, shared)

    @override
    def argmax_rows(self, logits_TV: Tensor, vocab_size: int) -> Tensor | None:
        is_bf16 = _IS_BF16.get(logits_TV.dtype)
        (T, V), (stride, inner) = logits_TV.shape, logits_TV.stride()
        if is_bf16 is None or inner != 1 or not 0 < vocab_size <= V:
            return None
        out = new_output((T,), torch.int64)
        self._argmax(is_bf16, logits_TV.data_ptr(), stride, T, vocab_size, out.data_ptr())
        return out

    @override
    def draw_unfiltered(
        self, logits_RV: Tensor, vocab_size: int, temperatures_R: Tensor, uniform_R: Tensor
    ) -> Tensor | None:
        is_bf16 = _IS_BF16.get(logits_RV.dtype)
        (R, V), (stride, inner) = logits_RV.shape, logits_RV.stride()
        if is_bf16 is None or inner != 1 or not 0 < vocab_size <= min(V, MAX_TOKENS):
            return None
        if temperatures_R.dtype != torch.float32 or uniform_R.dtype != torch.float64:
            return None
        if not (temperatures_R.is_contiguous() and uniform_R.is_contiguous()):
            return None
        out = new_output((R,), torch.int64)
        self._draw(
            is_bf16, logits_RV.data_ptr(), stride, R, vocab_size, temperatures_R.data_ptr(), uniform_R.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    @override
    def qkv_rope_write(
        self,
        qkv_TQ: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        layer: RopeWrite,
        squares: HeadSquares | None = None,
    ) -> Tensor | None:
        """IndexError, and nothing written, for a slot or a position outside."""
        cos_PR, sin_PR, is_whole = layer.cos_PR, layer.sin_PR, layer.is_whole
        key_cache_NKBD, value_cache_NKBD = layer.key_cache_NKBD, layer.value_cache_NKBD
        dtype = qkv_TQ.dtype
        is_bf16 = _IS_BF16.get(dtype)
        (T, Q), (stride, inner) = qkv_TQ.shape, qkv_TQ.stride()
        cache_shape, cache_strides, table_shape = key_cache_NKBD.shape, key_cache_NKBD.stride(), cos_PR.shape
        num_blocks, K, B, row_size = cache_shape
        is_int8 = _is_int8(dtype, key_cache_NKBD, value_cache_NKBD)
        if is_int8 is None:
            return None
        D = kv_rows.width(key_cache_NKBD)
        N, rest = divmod(Q - 2 * K * D, D)
        P, R = table_shape
        if is_bf16 is None or inner != 1 or rest or N < 1 or R % 2 or R > D or D > MAX_HEAD_DIM:
            return None
        if cache_strides[1:] != (B * row_size, row_size, 1):
            return None
        if value_cache_NKBD.shape != cache_shape or value_cache_NKBD.stride() != cache_strides:
            return None
        if not _are_tables(cos_PR, sin_PR, table_shape, dtype):
            return None
        if not (_are_indices(positions_T, T) and _are_indices(slot_mapping_T, T) and _are_squares(squares, T)):
            return None
        q_heads, k_heads = (N, K) if is_whole else (1, 1)
        if not (_is_vector(layer.q_norm_D, q_heads * D, dtype) and _is_vector(layer.k_norm_D, k_heads * D, dtype)):
            return None
        if (is_whole and (layer.q_norm_D is None or layer.k_norm_D is None)) or not _is_vector(
            layer.query_scale_P, P, dtype
        ):
            return None
        out = new_output((T, N, D), dtype)
        self._qkv_rope_write(
            is_bf16, is_int8, qkv_TQ.data_ptr(), stride, T, N, K, D, R, _address(layer.q_norm_D),
            _address(layer.k_norm_D), layer.eps, layer.plus_one, is_whole,
            0 if squares is None else squares.sums_T2.data_ptr(),
            positions_T.data_ptr(), cos_PR.data_ptr(), sin_PR.data_ptr(), P, _address(layer.query_scale_P),
            key_cache_NKBD.data_ptr(), value_cache_NKBD.data_ptr(), cache_strides[0], num_blocks, B,
            N * D if squares is None else squares.q_size, K * D if squares is None else squares.k_size,
            slot_mapping_T.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    @override
    def linear_by_head(self, x_TNI: Tensor, weight_NOI: ExpertWeight) -> Tensor | None:
        """Takes packed weights in bf16 and fp32."""
        if not isinstance(weight_NOI, NativeExpertWeight) or weight_NOI.scale_EO is not None:
            return None
        packed, O, I = weight_NOI.packed, weight_NOI.out_features, weight_NOI.in_features  # noqa: E741
        (T, N, _), dtype = x_TNI.shape, weight_NOI.dtype
        if packed.shape[0] != N or not _are_rows(x_TNI, (T, N, I), dtype):
            return None
        out = new_output((T, N, O), dtype)
        self._linear_by_head(
            KINDS[packed.dtype], x_TNI.data_ptr(), x_TNI.stride(0), T, packed.data_ptr(), 0, O, I, 0, out.data_ptr(),
            N * O, N, x_TNI.stride(1),
        )  # fmt: skip
        return out

    @override
    def latent_rope_write(
        self,
        latent_TL: Tensor,
        k_TR: Tensor,
        absorbed_TNL: Tensor,
        q_TNR: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        layer: LatentWrite,
    ) -> Tensor | None:
        """IndexError, and nothing written, for a slot or a position outside."""
        cos_PR, sin_PR, cache_N1BD = layer.cos_PR, layer.sin_PR, layer.cache_N1BD
        dtype, (T, N, L), (P, R) = latent_TL.dtype, absorbed_TNL.shape, cos_PR.shape
        is_bf16, (num_blocks, K, B, D) = _IS_BF16.get(dtype), cache_N1BD.shape
        if is_bf16 is None or K != 1 or D != L + R or R % 2 or not _are_caches(cache_N1BD, cache_N1BD):
            return None
        if cache_N1BD.dtype != dtype or not (_are_rows(latent_TL, (T, L), dtype) and _are_rows(k_TR, (T, R), dtype)):
            return None
        if not (_are_rows(absorbed_TNL, (T, N, L), dtype) and _are_rows(q_TNR, (T, N, R), dtype)):
            return None
        if not _are_tables(cos_PR, sin_PR, cos_PR.shape, dtype):
            return None
        if not (_are_indices(positions_T, T) and _are_indices(slot_mapping_T, T)):
            return None
        out = new_output((T, N, D), dtype)
        self._latent_rope_write(
            is_bf16, latent_TL.data_ptr(), latent_TL.stride(0), k_TR.data_ptr(), k_TR.stride(0),
            absorbed_TNL.data_ptr(), absorbed_TNL.stride(0), absorbed_TNL.stride(1), q_TNR.data_ptr(), q_TNR.stride(0),
            q_TNR.stride(1), T, N, L, R, positions_T.data_ptr(), cos_PR.data_ptr(), sin_PR.data_ptr(), P,
            cache_N1BD.data_ptr(), cache_N1BD.stride(0), num_blocks, B, slot_mapping_T.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    @override
    def head_squares(self, qkv_TQ: Tensor, num_kv_heads: int, head_dim: int) -> Tensor | None:
        is_bf16, (T, Q), (stride, inner) = _IS_BF16.get(qkv_TQ.dtype), qkv_TQ.shape, qkv_TQ.stride()
        k_size = num_kv_heads * head_dim
        if is_bf16 is None or inner != 1 or 2 * k_size >= Q:
            return None
        out = new_output((T, 2), torch.float32)
        self._head_squares(is_bf16, qkv_TQ.data_ptr(), stride, T, Q - 2 * k_size, k_size, out.data_ptr())
        return out

    @override
    def paged_decode_attention(
        self,
        q_SND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        block_tables_SM: Tensor,
        context_lens_S: Tensor,
        form: AttentionForm,
        out_SND: Tensor | None = None,
    ) -> Tensor | None:
        """IndexError for a length or a block outside the cache."""
        dtype = q_SND.dtype
        is_bf16 = _IS_BF16.get(dtype)
        is_int8 = _is_int8(dtype, key_cache_NKBD, value_cache_NKBD)
        if is_bf16 is None or is_int8 is None:
            return None
        q_stride, table_stride = q_SND.stride(), block_tables_SM.stride()
        if q_stride[2] != 1 or table_stride[1] != 1 or not _are_caches(key_cache_NKBD, value_cache_NKBD):
            return None
        if block_tables_SM.dtype != torch.int32 or context_lens_S.dtype != torch.int32 or context_lens_S.stride(0) != 1:
            return None
        S, N, D = q_SND.shape
        num_blocks, K, B, _ = key_cache_NKBD.shape
        cache_dim, value_dim = kv_rows.width(key_cache_NKBD), kv_rows.width(value_cache_NKBD)
        if D > MAX_HEAD_DIM or cache_dim != D or N % K or not S == block_tables_SM.shape[0] == context_lens_S.shape[0]:
            return None
        if not _takes(form, N) or not can_hold(out_SND, (S, N, value_dim), dtype):
            return None
        out = new_output((S, N, value_dim), dtype) if out_SND is None else out_SND
        self._decode_attention(
            is_bf16, is_int8, q_SND.data_ptr(), q_stride[0], q_stride[1], key_cache_NKBD.data_ptr(),
            value_cache_NKBD.data_ptr(), key_cache_NKBD.stride(0), num_blocks, K, B, block_tables_SM.data_ptr(),
            table_stride[0], block_tables_SM.shape[1], context_lens_S.data_ptr(), S, N, D, value_dim, *_form(form),
            out.data_ptr(),
        )  # fmt: skip
        return out

    @override
    def paged_prefill_attention(
        self,
        q_TND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        prefills: Prefills,
        form: AttentionForm,
        out_TND: Tensor,
    ) -> Tensor | None:
        """Calls the kernel for each chunk. IndexError for a block outside the cache."""
        dtype = q_TND.dtype
        is_bf16 = _IS_BF16.get(dtype)
        is_int8 = _is_int8(dtype, key_cache_NKBD, value_cache_NKBD)
        if is_bf16 is None or is_int8 is None:
            return None
        q_stride = q_TND.stride()
        cache_dim, value_dim = kv_rows.width(key_cache_NKBD), kv_rows.width(value_cache_NKBD)
        if q_stride[2] != 1 or not _are_caches(key_cache_NKBD, value_cache_NKBD):
            return None
        T, N, D = q_TND.shape
        num_blocks, K, B, _ = key_cache_NKBD.shape
        if D > MAX_HEAD_DIM or cache_dim != D or N % K or not _takes(form, N):
            return None
        if not can_hold(out_TND, (T, N, value_dim), dtype):
            return None
        if not all(_is_within(chunk, T, B) for chunk in prefills.chunks):
            return None
        itemsize = dtype.itemsize
        for chunk in prefills.chunks:
            first, num_rows = chunk.rows.start, chunk.rows.stop - chunk.rows.start
            self._prefill_attention(
                is_bf16, is_int8, D, value_dim, q_TND.data_ptr() + first * q_stride[0] * itemsize, q_stride[0],
                q_stride[1], key_cache_NKBD.data_ptr(), value_cache_NKBD.data_ptr(), key_cache_NKBD.stride(0),
                num_blocks, K, B, chunk.block_table_M.data_ptr(), chunk.start, num_rows, N, *_form(form),
                out_TND.data_ptr() + first * N * value_dim * itemsize,
            )  # fmt: skip
        return out_TND
