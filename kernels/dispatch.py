"""The ops that the engine calls; each call goes to the fastest implementation there is for its tensors.

CPU tensors take the C++ kernels (`kernels/cpu`), compiled when the first of them comes; CUDA tensors take the Triton
kernels (`kernels/triton`). Where no compiler or no Triton is, or for tensors that they do not take, the torch
reference. The environment variables are read at first use: `DISAGG_KERNELS` (`kernels/settings/switches.py`) chooses
otherwise, or switches single Triton kernels off; `DISAGG_CPU_LEVEL` (`kernels/cpu/build.py`) and `DISAGG_TRITON_SHAPES`
(`kernels/settings/triton_shapes.py`) say how they are compiled.

The choices are logged once; `describe` names that for CPU tensors, and makes it if it was not made yet: call it at the
start of what computes on a CPU, so that no request waits for the compiler. Shapes and numerics of the ops:
`disagg.kernels.reference`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.capture import CaptureError, Capturer
from disagg.kernels.cpu import build, calls
from disagg.kernels.cpu.linear import NativeExpertWeight, NativeLinear, NativeWeight
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.cuda_graph import GraphCapturer
from disagg.kernels.experts import Experts, ExpertWeight, Router, Shared
from disagg.kernels.groups import Groups, find_codes, quantize_int4
from disagg.kernels.linear import PackedWeight, linear
from disagg.kernels.linear import pack_weight as pack_for_onednn
from disagg.kernels.lora import Lora
from disagg.kernels.mxfp4 import Mxfp4Weight
from disagg.kernels.ops import (
    AttentionForm,
    AttentionSpec,
    Filters,
    HeadSquares,
    LatentWrite,
    Ops,
    Pointwise,
    Prefills,
    RopeWrite,
)
from disagg.kernels.prefill_work import ChunkPlace, PrefillWork
from disagg.kernels.quantize import STORED, Quantization, pack_fp8, quantize_int8
from disagg.kernels.settings import triton_shapes
from disagg.kernels.settings.switches import switches

if TYPE_CHECKING:
    from disagg.kernels.triton.ops import TritonOps

__all__ = [
    "PackedWeight",
    "add",
    "add_rms_norm",
    "argmax_rows",
    "arithmetic",
    "capturer",
    "describe",
    "digest_sums",
    "draw_rows",
    "draw_unfiltered",
    "draws_on",
    "drop_packing_memory",
    "embed",
    "gather_kv",
    "gelu_tanh_mul",
    "head_squares",
    "latent_rope_write",
    "linear",
    "linear_add_rms_norm",
    "linear_by_head",
    "linear_gelu_tanh_mul",
    "linear_silu_mul",
    "lora_add",
    "moe_ffn",
    "new_output",
    "pack_experts",
    "pack_router",
    "pack_weight",
    "packed_parts",
    "packing_name",
    "paged_decode_attention",
    "paged_prefill_attention",
    "plan_prefills",
    "pointwise",
    "qkv_rope_write",
    "restored_experts",
    "restored_weight",
    "rms_norm",
    "scatter_kv",
    "silu_mul",
    "take_rows",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Choice:
    """The implementations that CPU tensors take."""

    description: str
    ops: Ops
    native: NativeOps | None = None
    linear: NativeLinear | None = None


@functools.cache
def _choice() -> _Choice:
    mode = switches(os.environ).mode
    if mode == "reference":
        choice = _Choice("torch reference (DISAGG_KERNELS=reference)", reference)
        logger.warning("CPU kernels: %s", choice.description)
        return choice
    if mode == "triton":
        return _Choice("triton (DISAGG_KERNELS=triton)", _triton() or reference)
    try:
        library = build.library(os.environ)
        linear = NativeLinear.load(library.path)
        description = f"cpu-c++ {library.simd}, bf16 GEMM by {linear.arithmetic(torch.bfloat16)}"
        native = NativeOps(library.path)
        choice = _Choice(description, native, native, linear)
    except (build.BuildError, OSError) as error:
        logger.warning("CPU kernels: torch reference, which is slower, because the C++ ones cannot be used: %s", error)
        return _Choice(f"torch reference ({error})", reference)
    if _num_threads is not None:
        native.set_num_threads(_num_threads)
    if linear.arithmetic(torch.bfloat16) == "multiply-add":
        logger.warning("CPU kernels: %s: plain vectors, as without AVX2; several times slower", choice.description)
    else:
        logger.info("CPU kernels: %s", choice.description)
    return choice


_num_threads: int | None = None
"""Number of threads that was set; the C++ kernels get it when they are loaded."""


def _made_choice() -> _Choice | None:
    """The choice for CPU tensors if it was made. Functions that concern only the C++ kernels use it, so as not to
    compile them."""
    return _choice() if _choice.cache_info().currsize else None


@functools.cache
def _triton() -> TritonOps | None:
    """The Triton kernels; imported only where they can run, since Triton is not installed everywhere."""
    chosen = switches(os.environ)
    if chosen.mode == "reference" or (chosen.mode == "auto" and not torch.cuda.is_available()):
        return None
    try:
        from disagg.kernels.triton.ops import TritonOps, without
    except ImportError as error:
        logger.warning("CUDA kernels: torch reference, which is slower, because Triton cannot be used: %s", error)
        return None
    if (changes := triton_shapes.changes(os.environ)) != triton_shapes.Changes():
        logger.warning("CUDA kernels: launch shapes are overridden by %s: %s", triton_shapes.VARIABLE, changes)
    if not chosen.without:
        logger.info("CUDA kernels: triton")
        return TritonOps()
    logger.warning("CUDA kernels: triton %s", chosen)
    return without(chosen.without)


@functools.cache
def _elsewhere() -> Ops:
    """The implementation for tensors that are not on the CPU."""
    return _triton() or reference


def _without() -> str:
    """Note on what is switched off, to be appended to a description; empty if nothing is."""
    return f", {text}" if (text := str(switches(os.environ))) else ""


def describe() -> str:
    """Description of the implementation for CPU tensors, such as `cpu-c++ avx512` or `torch reference (no C++ compiler
    ...)`, and of the Triton kernels that are switched off, if any are."""
    return _choice().description + _without()


def native_library() -> ctypes.CDLL | None:
    """The C++ kernels, where CPU tensors take them; its calls release the GIL."""
    native = _choice().native
    return None if native is None else native.library


def capturer(device: torch.device) -> Capturer:
    """What captures computations of tensors of a device: their kernels' calls on a CPU, a CUDA graph on a GPU.

    Raises:
        CaptureError: nothing captures there.
    """
    if device.type == "cpu":
        library = native_library()
        if library is None:
            raise CaptureError("the C++ kernels are not in use")
        return calls.ProgramCapturer(library)
    if device.type == "cuda":
        return GraphCapturer(device)
    raise CaptureError(f"nothing captures what runs on a {device.type} device")


def _ops(tensor: Tensor) -> Ops:
    """The implementation for tensors on the device of this one."""
    return _choice().ops if tensor.is_cpu else _elsewhere()


def _fallback(op: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call an op of the reference in place of a kernel that does not take the tensors. Raises CaptureError while calls
    of kernels are only recorded: the reference would read what they have not computed yet."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), tensors[0].dtype)
    if calls.is_deferred():
        raise CaptureError(f"{op.__name__}: the kernel does not take these tensors ({dtype})")
    kernel = "draw_rows" if op is reference.draw_unfiltered else op.__name__
    if kernel not in switches(os.environ).without:
        _warn_declined(op.__name__, dtype)
    return op(*args, **kwargs)


def _first(kernel: Callable[P, R | None], op: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What the kernel computes, or where it does not take the tensors the op of the reference."""
    out = kernel(*args, **kwargs)
    return _fallback(op, *args, **kwargs) if out is None else out


@functools.cache
def _warn_declined(op: str, dtype: torch.dtype) -> None:
    logger.warning("%s: the kernel does not take these tensors (%s); using the torch reference", op, dtype)


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that compute CPU tensors in this process: torch's ops and the C++ kernels.

    Raises:
        ValueError: for less than one.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: must be at least 1, not {num_threads}")
    global _num_threads
    _num_threads = num_threads
    torch.set_num_threads(num_threads)
    if (made := _made_choice()) is not None and made.native is not None:
        made.native.set_num_threads(num_threads)


def pack_weight(
    weight_OI: Tensor, quantization: Quantization = "none", groups: Groups | None = None
) -> Tensor | PackedWeight:
    """Lay a weight out for `linear`; the plain weight is returned where that is not possible or not faster.

    Packing copies: whoever drops the plain weight afterwards needs no more memory than before. A weight that is also
    read in another way (a tied embedding) must be kept as well. The C++ GEMM takes bf16, fp32 and int8; where there is
    none, oneDNN's is chosen. `int8` rounds the weight to 8 bits (`kernels/quantize.py`); without the C++ GEMM, or in
    fp32, the rounded weight is packed as a plain one: the same model, no faster.

    `stored` packs a weight that was dequantized as the codes that it came from, if its `groups` are given and there is
    a C++ GEMM: the same bits are computed from fewer bytes. `stored_sums` does so as well, and its products are sums
    of codes, in other bits. `int4` rounds the weight to such codes. `fp8` is for GPUs that multiply 8-bit floats.

    Raises:
        ValueError: `int8`, `int4` or `fp8` of a weight that is not finite, or `int4` of one that has no whole groups.
    """
    if quantization == "fp8":
        return pack_fp8(weight_OI)
    native = _choice().linear if weight_OI.is_cpu else None
    if quantization == "int8":
        quantized = quantize_int8(weight_OI)
        rounded = native.pack_int8(quantized) if native is not None and weight_OI.dtype == torch.bfloat16 else None
        if rounded is not None:
            return rounded
        _warn_not_int8()
        weight_OI = quantized.dequantized(weight_OI.dtype)
    coded = None
    if quantization == "int4":
        coded = quantize_int4(weight_OI)
        weight_OI = coded.dequantized().to(weight_OI.dtype)
    elif quantization in STORED and groups is not None:
        coded = find_codes(weight_OI, groups)
    if quantization in STORED and (coded is None or native is None):
        _warn_not_stored(tuple(weight_OI.shape))
    if coded is not None and native is not None and weight_OI.dtype == torch.bfloat16:
        codes = native.pack_codes(coded, by_sums=quantization == "stored_sums")
        assert codes is not None, "the weight is on the CPU"
        return codes
    packed = native.pack(weight_OI) if native is not None else None
    return pack_for_onednn(weight_OI) if packed is None else packed


def pack_experts(weight_EOI: Tensor | Mxfp4Weight, quantization: Quantization = "none") -> ExpertWeight:
    """Lay the weights of a layer's experts out for `moe_ffn`, or those of its heads for `linear_by_head`; the plain
    weights are returned where there is no C++ kernel for them. `int8` rounds them as `pack_weight` does, each expert by
    itself. Weights in MXFP4 are packed as they are, and compute the bits of their bf16 numbers.

    Raises:
        ValueError: `int8` of a weight that is not finite, or `fp8` or `int4`.
    """
    if quantization in ("fp8", "int4"):
        raise ValueError(f"{quantization} is not supported for experts")
    if isinstance(weight_EOI, Mxfp4Weight):
        if (native := _choice().linear) is not None:
            return native.pack_mxfp4(weight_EOI)
        weight_EOI = weight_EOI.dequantized()
    if quantization in STORED:
        _warn_not_stored(tuple(weight_EOI.shape))
    native = _choice().linear if weight_EOI.is_cpu else None
    if quantization == "int8" and (native is None or weight_EOI.dtype != torch.bfloat16):
        _warn_not_int8()
        dtype, quantization = weight_EOI.dtype, "none"
        weight_EOI = torch.stack([quantize_int8(weight_OI).dequantized(dtype) for weight_OI in weight_EOI])
    packed = native.pack_experts(weight_EOI, quantization) if native is not None else None
    return weight_EOI if packed is None else packed


def pack_router(weight_EH: Tensor, experts: ExpertWeight) -> Tensor | PackedWeight:
    """Lay the weight of a router (fp32) out for `moe_ffn` with these experts; the plain weight is returned where they
    are plain."""
    if isinstance(experts, Tensor):
        return weight_EH
    native = _choice().linear
    assert native is not None, "it packed the experts"
    packed = native.pack(weight_EH)
    assert packed is not None, "the router's weight is a matrix in fp32"
    return packed


def packing_name(dtype: torch.dtype) -> str | None:
    """Name of the form that all weights of `dtype` on the CPU are packed in, including the library that reads it: other
    processes with the same name can use their `packed_parts`. None where oneDNN packs, whose form is its own."""
    native = _choice().linear
    return None if native is None or dtype not in (torch.bfloat16, torch.float32) else native.packing


def arithmetic(dtype: torch.dtype, quantization: Quantization, device: torch.device) -> str:
    """Name of the arithmetic of a model with such weights on a device. Kernels with the same name compute the same
    bits; oneDNN (`torch`) and GPUs promise less: there a row may depend on the rows beside it."""
    if device.type == "cuda":
        return "cuda-{}.{}".format(*torch.cuda.get_device_capability(device)) + _without()
    native = _choice().linear
    if native is None or dtype not in (torch.bfloat16, torch.float32):
        return "torch"
    name = native.arithmetic(torch.uint8 if quantization == "int8" and dtype == torch.bfloat16 else dtype)
    return f"{name}, sums of codes" if quantization == "stored_sums" else name


def packed_parts(weight: PackedWeight | NativeExpertWeight) -> tuple[Tensor, Tensor | None]:
    """Parts of a packed weight, where there is a `packing_name`: panels, and scales of 8-bit ones."""
    if isinstance(weight, NativeExpertWeight):
        return weight.packed, weight.scale_EO
    assert isinstance(weight, NativeWeight), "oneDNN's weights have no parts"
    return weight.packed, weight.scale_O


def restored_weight(packed: Tensor, scale_O: Tensor | None, out_features: int, in_features: int) -> PackedWeight:
    """The reverse of `packed_parts`, without a copy.

    Raises:
        ValueError: the parts are not those of a weight of this size.
    """
    native = _choice().linear
    assert native is not None, "there is a packing_name"
    return native.restored(packed, scale_O, out_features, in_features)


def restored_experts(
    packed: Tensor, scale_EO: Tensor | None, num_experts: int, out_features: int, in_features: int
) -> NativeExpertWeight:
    """The reverse of `packed_parts` of experts, without a copy.

    Raises:
        ValueError: the parts are not those of weights of this size.
    """
    native = _choice().linear
    assert native is not None, "there is a packing_name"
    return native.restored_experts(packed, scale_EO, num_experts, out_features, in_features)


def drop_packing_memory() -> None:
    """Let memory go back to the system together with the weights that were packed so far."""
    if (made := _made_choice()) is not None and made.linear is not None:
        made.linear.drop_rest()


@functools.cache
def _warn_not_int8() -> None:
    logger.warning("int8 weights: there is no C++ GEMM for them here; computing with their values in full size")


@functools.cache
def _warn_not_stored(shape: tuple[int, ...]) -> None:
    logger.warning("stored weights: one of shape %s is computed from its numbers in full size", list(shape))


def new_output(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate a tensor for ops to write into, contiguous, of the dtype and on the device of `like`; its contents are
    undefined."""
    return calls.new_output(shape, like.dtype) if like.is_cpu else like.new_empty(shape)


def draws_on(device: torch.device) -> bool:
    """Whether `draw_rows` takes logits on this device."""
    triton = _triton()
    return triton is not None and triton.runs_on(device) and switches(os.environ).has_kernel("draw_rows")


def draw_rows(logits_RV: Tensor, vocab_size: int, filters: Filters) -> Tensor:
    """A token for each row, int64 [R], drawn where the logits are; -1 where nothing can be chosen."""
    triton = _triton()
    assert triton is not None, "nothing draws on this device"
    return triton.draw_rows(logits_RV, vocab_size, filters)


def embed(token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
    """The rows of the embedding, [T, H]."""
    return _first(_ops(token_ids_T).embed, reference.embed, token_ids_T, embedding_VH)


def take_rows(x_TH: Tensor, rows_R: Tensor) -> Tensor:
    """Rows of a matrix by their indices, int64, which must be within; [R, H]."""
    return _first(_ops(x_TH).take_rows, reference.take_rows, x_TH, rows_R)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Root mean square norm over the last dim, times the weight, or one more than it; [T, H] or [T, heads, D]."""
    return _first(_ops(x_TH).rms_norm, reference.rms_norm, x_TH, weight_H, eps, plus_one)


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    return _first(_ops(x_TH).add_rms_norm, reference.add_rms_norm, x_TH, residual_TH, weight_H, eps, plus_one)


def add(x_TH: Tensor, y_TH: Tensor) -> Tensor:
    """x + y, [T, H]."""
    return _first(_ops(x_TH).add, reference.add, x_TH, y_TH)


def lora_add(x_TI: Tensor, y_TO: Tensor, lora: Lora, slots_T: Tensor) -> Tensor:
    """Add to each row of `y` what the adapter in its slot (int32; -1 for none) makes of the row of `x`, in place: sums
    in fp32, rounded once with `y`; [T, O], which is `y`. The bits of a row do not depend on the other rows."""
    return _first(_ops(x_TI).lora_add, reference.lora_add, x_TI, y_TO, lora, slots_T)


def pointwise(x_TH: Tensor, function: Pointwise, number: float) -> Tensor:
    """A function of each value and a number, [T, H]: in fp32, rounded once."""
    return _first(_ops(x_TH).pointwise, reference.pointwise, x_TH, function, number)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, [T, F]; gate is the first half."""
    return _first(_ops(gate_up_T2F).silu_mul, reference.silu_mul, gate_up_T2F)


def gelu_tanh_mul(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) * up with the approximation by tanh, [T, F]; gate is the first half."""
    return _first(_ops(gate_up_T2F).gelu_tanh_mul, reference.gelu_tanh_mul, gate_up_T2F)


def moe_ffn(x_TH: Tensor, router: Router, experts: Experts, shared: Shared | None) -> Tensor:
    """The sum of what each row's experts give, times their weights, and of what is shared, [T, H]. Weights are plain,
    or from `pack_experts` and `pack_router`."""
    return _first(_ops(x_TH).moe_ffn, reference.moe_ffn, x_TH, router, experts, shared)


def argmax_rows(logits_TV: Tensor, vocab_size: int) -> Tensor:
    """The first index of each row's largest logit, -1 where nothing can be chosen; int64 [T]."""
    return _first(_ops(logits_TV).argmax_rows, reference.argmax_rows, logits_TV, vocab_size)


def draw_unfiltered(logits_RV: Tensor, vocab_size: int, temperatures_R: Tensor, uniform_R: Tensor) -> Tensor:
    """A token for each row without filters, int64 [R], at its uniform number (fp64) of the distribution at its
    temperature (fp32); -1 where nothing can be chosen. The same token from every implementation."""
    args = (logits_RV, vocab_size, temperatures_R, uniform_R)
    return _first(_ops(logits_RV).draw_unfiltered, reference.draw_unfiltered, *args)


def qkv_rope_write(
    qkv_TQ: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    layer: RopeWrite,
    squares: HeadSquares | None = None,
) -> Tensor:
    """Norm (where given) and rotate the heads of q and k, write K and V at the tokens' slots; q, [T, N, D]."""
    args = (qkv_TQ, positions_T, slot_mapping_T, layer, squares)
    return _first(_ops(qkv_TQ).qkv_rope_write, reference.qkv_rope_write, *args)


def linear_by_head(x_TNI: Tensor, weight_NOI: ExpertWeight) -> Tensor:
    """The row of each head times the head's own weight, contiguous [T, N, O]: sums in fp32, rounded once. The weight is
    plain, or from `pack_experts`."""
    return _first(_ops(x_TNI).linear_by_head, reference.linear_by_head, x_TNI, weight_NOI)


def latent_rope_write(
    latent_TL: Tensor,
    k_TR: Tensor,
    absorbed_TNL: Tensor,
    q_TNR: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    layer: LatentWrite,
) -> Tensor:
    """Rotate the rope parts of q and k, write the latents (normed) and k at the tokens' slots; the absorbed q with its
    rotated part, [T, N, L + R]."""
    args = (latent_TL, k_TR, absorbed_TNL, q_TNR, positions_T, slot_mapping_T, layer)
    return _first(_ops(latent_TL).latent_rope_write, reference.latent_rope_write, *args)


def head_squares(qkv_TQ: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Sums of squares of all heads of q, and of all heads of k, fp32 [T, 2]."""
    return _first(_ops(qkv_TQ).head_squares, reference.head_squares, qkv_TQ, num_kv_heads, head_dim)


def paged_decode_attention(
    q_SND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    block_tables_SM: Tensor,
    context_lens_S: Tensor,
    form: AttentionForm,
    out_SND: Tensor | None = None,
) -> Tensor:
    """Attention of one query row per sequence over its cached context; [S, N, D], in `out` (contiguous) if given."""
    args = (q_SND, key_cache_NKBD, value_cache_NKBD, block_tables_SM, context_lens_S, form, out_SND)
    return _first(_ops(q_SND).paged_decode_attention, reference.paged_decode_attention, *args)


def plan_prefills(chunks: Sequence[ChunkPlace], spec: AttentionSpec) -> Mapping[int | None, PrefillWork]:
    """Work lists by window where the prompts of a step are computed at once, which is on a GPU; none where each chunk
    is computed alone. At least one chunk."""
    triton = _triton()
    has_kernel = switches(os.environ).has_kernel("paged_prefill_attention")
    if triton is None or not triton.runs_on(torch.device(spec.device)) or not has_kernel:
        return {}
    return triton.plan_prefills(chunks, spec)


def paged_prefill_attention(
    q_TND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    prefills: Prefills,
    form: AttentionForm,
    out_TND: Tensor,
) -> Tensor:
    """Causal attention of the prompts of a step over their cached contexts. Their rows of `out` (contiguous, [T, N, D])
    are written, and no others; `out`."""
    args = (q_TND, key_cache_NKBD, value_cache_NKBD, prefills, form, out_TND)
    return _first(_ops(q_TND).paged_prefill_attention, reference.paged_prefill_attention, *args)


def gather_kv(cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, out: Tensor) -> None:
    """Copy the KV of tokens [start, end) of a sequence into a flat uint8 tensor."""
    if _ops(cache_NL2KBD).gather_kv(cache_NL2KBD, block_ids, start, end, out) is None:
        _fallback(reference.gather_kv, cache_NL2KBD, block_ids, start, end, out)


def scatter_kv(cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, data: Tensor) -> None:
    """Copy what `gather_kv` wrote into tokens [start, end) of a sequence."""
    if _ops(cache_NL2KBD).scatter_kv(cache_NL2KBD, block_ids, start, end, data) is None:
        _fallback(reference.scatter_kv, cache_NL2KBD, block_ids, start, end, data)


def digest_sums(payload: Tensor, seed: int) -> Tensor:
    """Two keyed sums of a flat uint8 tensor, int64 [2], where it is; `seed` has 64 bits, unsigned. The last word is
    filled up with zeros."""
    num_bytes = payload.numel()
    if num_bytes % 8 or payload.storage_offset() % 8 or payload.data_ptr() % 8:
        padded = payload.new_zeros(-(-num_bytes // 8) * 8)
        padded[:num_bytes] = payload
        payload = padded
    words, seed = payload.view(torch.int64), seed - (1 << 64) if seed >> 63 else seed
    return _first(_ops(words).digest_sums, reference.digest_sums, words, seed)


def linear_silu_mul(x_TI: Tensor, weight_OI: Tensor | PackedWeight, bias_O: Tensor | None) -> Tensor:
    """`silu_mul` of `linear`, [T, O / 2]."""
    if isinstance(weight_OI, NativeWeight):
        return weight_OI.gemm_silu_mul(x_TI, bias_O)
    return silu_mul(linear(x_TI, weight_OI, bias_O))


def linear_gelu_tanh_mul(x_TI: Tensor, weight_OI: Tensor | PackedWeight, bias_O: Tensor | None) -> Tensor:
    """`gelu_tanh_mul` of `linear`, [T, O / 2]."""
    if isinstance(weight_OI, NativeWeight):
        return weight_OI.gemm_gelu_tanh_mul(x_TI, bias_O)
    return gelu_tanh_mul(linear(x_TI, weight_OI, bias_O))


def linear_add_rms_norm(
    x_TI: Tensor,
    weight_OI: Tensor | PackedWeight,
    bias_O: Tensor | None,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Project x with `weight_OI`, add the result to `residual_TO` and normalize; (normalized [T, O], sum [T, O]), as
    `add_rms_norm`. A `NativeWeight` does it in one call."""
    if isinstance(weight_OI, NativeWeight):
        return weight_OI.gemm_add_rms_norm(x_TI, bias_O, residual_TO, norm_O, eps, plus_one)
    return add_rms_norm(linear(x_TI, weight_OI, bias_O), residual_TO, norm_O, eps, plus_one)
