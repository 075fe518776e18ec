"""The ops that the engine calls; each call goes to the fastest implementation there is for its tensors.

CPU tensors take the C++ kernels (`kernels/cpu`), compiled at first use; where no compiler is, or for tensors that
they do not take, the torch reference. Tensors of other devices take the torch reference. The environment variable
`DISAGG_KERNELS` is read here, once, at first use: `auto` (or unset) is the above, `reference` forces the torch
reference everywhere.

Which path is in use is logged once; `describe` says it, and makes the choice if none was made yet: call it at start,
so that no request waits for the compiler. Shapes and numerics of the ops: `disagg.kernels.reference`.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels import linear as onednn
from disagg.kernels import reference
from disagg.kernels.cpu import build
from disagg.kernels.cpu.linear import NativeLinear, NativeWeight
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.linear import PackedWeight, linear
from disagg.kernels.reference import gather_kv, scatter_kv

__all__ = [
    "PackedWeight",
    "add_rms_norm",
    "apply_rope",
    "describe",
    "gather_kv",
    "kv_write",
    "linear",
    "linear_add_rms_norm",
    "linear_silu_mul",
    "pack_weight",
    "paged_decode_attention",
    "paged_prefill_attention",
    "rms_norm",
    "scatter_kv",
    "silu_mul",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    ops: NativeOps | None
    linear: NativeLinear | None
    description: str


@functools.cache
def _choice() -> _Choice:
    mode = os.environ.get("DISAGG_KERNELS", "auto")
    if mode not in ("auto", "reference"):
        raise ValueError(f"DISAGG_KERNELS: {mode!r} is not one of 'auto', 'reference'")
    if mode == "reference":
        choice = _Choice(None, None, "torch reference (DISAGG_KERNELS=reference)")
        logger.warning("CPU kernels: %s", choice.description)
        return choice
    try:
        library = build.build(build.sources(), build.cache_folder(), build.find_compiler())
        choice = _Choice(NativeOps(library.path), NativeLinear.load(library.path), f"cpu-c++ {library.simd}")
    except (build.BuildError, OSError) as error:
        logger.warning("CPU kernels: torch reference, which is slower, because the C++ ones cannot be used: %s", error)
        return _Choice(None, None, f"torch reference ({error})")
    logger.info("CPU kernels: %s", choice.description)
    return choice


def describe() -> str:
    """Which implementation CPU tensors take, such as `cpu-c++ avx512` or `torch reference (no C++ compiler ...)`."""
    return _choice().description


@functools.cache
def _warn_declined(op: str, dtype: torch.dtype) -> None:
    logger.warning("%s: the C++ kernel does not take these tensors (%s); using the torch reference", op, dtype)


def set_num_threads(num_threads: int) -> None:
    """How many threads CPU tensors are computed with in this process: torch's ops and the C++ kernels.

    Raises:
        ValueError: for less than one.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: must be at least 1, not {num_threads}")
    torch.set_num_threads(num_threads)
    if (ops := _choice().ops) is not None:
        ops.set_num_threads(num_threads)


def pack_weight(weight_OI: Tensor) -> Tensor | PackedWeight:
    """Lay a weight out for `linear`; the plain weight comes back where that is not possible or brings nothing.

    Packing copies: whoever drops the plain weight afterwards needs no more memory than before. A weight that is also
    read in another way (a tied embedding) must be kept as well. The C++ product is chosen for bf16 where the processor
    has the instructions; else oneDNN's.
    """
    native = _choice().linear if weight_OI.is_cpu else None
    packed = native.pack(weight_OI) if native is not None else None
    return onednn.pack_weight(weight_OI) if packed is None else packed


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dim, times the weight; [T, H] or [T, heads, D]."""
    if x_TH.is_cpu and (ops := _choice().ops) is not None:
        if (out := ops.rms_norm(x_TH, weight_H, eps)) is not None:
            return out
        _warn_declined("rms_norm", x_TH.dtype)
    return reference.rms_norm(x_TH, weight_H, eps)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    if x_TH.is_cpu and (ops := _choice().ops) is not None:
        if (out := ops.add_rms_norm(x_TH, residual_TH, weight_H, eps)) is not None:
            return out
        _warn_declined("add_rms_norm", x_TH.dtype)
    return reference.add_rms_norm(x_TH, residual_TH, weight_H, eps)


def apply_rope(q_TND: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q and k, Llama's half rotation."""
    if q_TND.is_cpu and (ops := _choice().ops) is not None:
        if (out := ops.apply_rope(q_TND, k_TKD, cos_TD, sin_TD)) is not None:
            return out
        _warn_declined("apply_rope", q_TND.dtype)
    return reference.apply_rope(q_TND, k_TKD, cos_TD, sin_TD)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, [T, F]; gate is the first half."""
    if gate_up_T2F.is_cpu and (ops := _choice().ops) is not None:
        if (out := ops.silu_mul(gate_up_T2F)) is not None:
            return out
        _warn_declined("silu_mul", gate_up_T2F.dtype)
    return reference.silu_mul(gate_up_T2F)


def linear_silu_mul(x_TI: Tensor, weight_OI: Tensor | PackedWeight, bias_O: Tensor | None) -> Tensor:
    """`silu_mul` of `linear`, [T, O / 2]."""
    if isinstance(weight_OI, NativeWeight):
        return weight_OI.product_silu_mul(x_TI, bias_O)
    return silu_mul(linear(x_TI, weight_OI, bias_O))


def linear_add_rms_norm(
    x_TI: Tensor,
    weight_OI: Tensor | PackedWeight,
    bias_O: Tensor | None,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `linear`."""
    if isinstance(weight_OI, NativeWeight):
        return weight_OI.product_add_rms_norm(x_TI, bias_O, residual_TO, norm_O, eps)
    return add_rms_norm(linear(x_TI, weight_OI, bias_O), residual_TO, norm_O, eps)


def kv_write(
    k_TKD: Tensor, v_TKD: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, slot_mapping_T: Tensor
) -> None:
    """Write each token's K and V at its slot, block * B + offset."""
    if k_TKD.is_cpu and (ops := _choice().ops) is not None:
        if ops.kv_write(k_TKD, v_TKD, key_cache_NKBD, value_cache_NKBD, slot_mapping_T):
            return
        _warn_declined("kv_write", k_TKD.dtype)
    reference.kv_write(k_TKD, v_TKD, key_cache_NKBD, value_cache_NKBD, slot_mapping_T)


def paged_decode_attention(
    q_SND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    block_tables_SM: Tensor,
    context_lens_S: Tensor,
    scale: float,
) -> Tensor:
    """Attention of one query row per sequence over its cached context; [S, N, D]."""
    args = (q_SND, key_cache_NKBD, value_cache_NKBD, block_tables_SM, context_lens_S, scale)
    if q_SND.is_cpu and (ops := _choice().ops) is not None:
        if (out := ops.paged_decode_attention(*args)) is not None:
            return out
        _warn_declined("paged_decode_attention", q_SND.dtype)
    return reference.paged_decode_attention(*args)


def paged_prefill_attention(
    q_TND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    block_table_M: Tensor,
    start: int,
    scale: float,
) -> Tensor:
    """Causal attention of tokens [start, start + T) of one sequence over its cached context; [T, N, D]."""
    args = (q_TND, key_cache_NKBD, value_cache_NKBD, block_table_M, start, scale)
    if q_TND.is_cpu and (ops := _choice().ops) is not None:
        if (out := ops.paged_prefill_attention(*args)) is not None:
            return out
        _warn_declined("paged_prefill_attention", q_TND.dtype)
    return reference.paged_prefill_attention(*args)
