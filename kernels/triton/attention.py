"""Paged attention on the GPU: which kernel serves a call, and which tensors are taken at all.

Signatures are those of `disagg.kernels.reference`, with the scales of an fp8 cache behind them. A call returns None
when it does not take the tensors: another dtype than those below, a layout that the kernels do not read.

The cache has the dtype of q (fp32, fp16, bf16), or is fp8 (e4m3) with one scale per tensor: the stored value times
`key_scale` or `value_scale` is the value. It becomes the dtype of q in registers; scales are applied to the scores and
to the result.

No call reads anything from the device, so all of them can be captured in a CUDA graph. The decode kernel's grid depends
on the device alone.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from disagg.kernels.ops import AttentionForm, AttentionSpec, PlannedPrefills, can_hold
from disagg.kernels.prefill_work import ITEM_FIELDS, ChunkPlace, PrefillWork, prefill_work
from disagg.kernels.settings.triton_shapes import changes
from disagg.kernels.triton.decode_attention import decode_attention, decode_shape
from disagg.kernels.triton.prefill_attention import PrefillShape, prefill_attention, prefill_shape

MIN_HEAD_DIM, MAX_HEAD_DIM = 9, 256
"""Range of the head dim. Tensor cores take products over at least 16 numbers, and heads are padded to a power of two.
"""
MAX_GROUP = 64
"""Largest number of query heads per KV head."""
MAX_SEQUENCES = 4096
"""Largest number of sequences of one decode call: every program holds all lengths."""

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of activations that the kernels take."""
_INTERPRETER_MULTIPROCESSORS = 4


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def reads(q_TND: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, tables: Tensor, form: AttentionForm) -> bool:
    """Whether dtypes and layouts are those that the kernels read."""
    _, N, D = q_TND.shape
    _, K, block_size, _ = shape = key_cache_NKBD.shape
    strides = key_cache_NKBD.stride()
    return (
        q_TND.dtype in FLOAT_DTYPES
        and key_cache_NKBD.dtype in (q_TND.dtype, torch.float8_e4m3fn)
        and value_cache_NKBD.dtype == key_cache_NKBD.dtype
        and value_cache_NKBD.shape == shape
        and value_cache_NKBD.stride() == strides
        and strides[1:] == (block_size * D, D, 1)
        and q_TND.stride()[1:] == (D, 1)
        and tables.dtype == torch.int32
        and tables.stride(-1) == 1
        and MIN_HEAD_DIM <= D == shape[3] <= MAX_HEAD_DIM
        and N % K == 0
        and N // K <= MAX_GROUP
        and form.scale > 0.0
        and _takes_sinks(form.sinks_N, N)
    )


def _takes_sinks(sinks_N: Tensor | None, N: int) -> bool:
    return sinks_N is None or (sinks_N.dtype == torch.float32 and sinks_N.shape == (N,) and sinks_N.is_contiguous())


def _are_int32(*vectors: Tensor) -> bool:
    return all(vector.dtype == torch.int32 and vector.is_contiguous() for vector in vectors)


def _score_scale(scale: float, key_scale: float) -> float:
    """Factor of a product of q and stored key, for an exponential to base two."""
    return scale * key_scale * math.log2(math.e)


def _prefill_shape(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, heads: Sequence[int], num_heads: int, longest: int
) -> PrefillShape:
    """`heads` is (KV heads, tokens of a block, head dim)."""
    K, block_size, D = heads
    change = changes(os.environ).prefill
    return prefill_shape(q_dtype, kv_dtype, D, block_size, num_heads // K, longest, change)


def paged_decode_attention(
    q_SND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    block_tables_SM: Tensor,
    context_lens_S: Tensor,
    form: AttentionForm,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    *,
    out_SND: Tensor | None = None,
) -> Tensor | None:
    """Attention of one query row per sequence over its cached context; [S, N, D], zeros for a context of 0; in `out`
    if given.

    Table entries behind a context are not read. At most `MAX_SEQUENCES` sequences.
    """
    S, _, D = q_SND.shape
    if not (
        reads(q_SND, key_cache_NKBD, value_cache_NKBD, block_tables_SM, form)
        and _are_int32(context_lens_S)
        and 0 < S <= MAX_SEQUENCES
        and can_hold(out_SND, q_SND.shape, q_SND.dtype)
    ):
        return None
    num_multiprocessors, change = _num_multiprocessors(q_SND.device), changes(os.environ).decode
    shape = decode_shape(key_cache_NKBD.dtype, triton.next_power_of_2(D), num_multiprocessors, change)
    score_scale = _score_scale(form.scale, key_scale)
    return decode_attention(
        q_SND,
        key_cache_NKBD,
        value_cache_NKBD,
        block_tables_SM,
        context_lens_S,
        score_scale,
        value_scale,
        shape,
        form,
        out_SND,
    )


def plan_prefills(chunks: Sequence[ChunkPlace], spec: AttentionSpec, window: int | None = None) -> PrefillWork:
    """Make the work list of a step with at least one chunk, for layers with this window."""
    shape = _prefill_shape(
        getattr(torch, spec.dtype),
        getattr(torch, spec.kv_dtype),
        (spec.num_kv_heads, spec.block_size, spec.head_dim),
        spec.num_heads,
        max(chunk.num_tokens for chunk in chunks),
    )
    num_programs = shape.programs_at_once * _num_multiprocessors(torch.device(spec.device))
    tokens = shape.rows // (spec.num_heads // spec.num_kv_heads)
    return prefill_work(chunks, tokens, shape.tile, spec.num_kv_heads, num_programs, window)


def paged_prefill_attention(
    q_TND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    planned: PlannedPrefills,
    form: AttentionForm,
    out_TND: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor | None:
    """Causal attention of the prompts of a step, whose KV is already written. Writes their rows of `out`, and returns
    it. The work was planned for the form's window."""
    tables, work = planned.block_tables, planned.work
    if not reads(q_TND, key_cache_NKBD, value_cache_NKBD, tables, form):
        return None
    if not can_hold(out_TND, q_TND.shape, q_TND.dtype):
        return None
    end = work.num_items * ITEM_FIELDS
    shape = _prefill_shape(q_TND.dtype, key_cache_NKBD.dtype, key_cache_NKBD.shape[1:], q_TND.shape[1], work.longest)
    return prefill_attention(
        q_TND,
        key_cache_NKBD,
        value_cache_NKBD,
        tables,
        planned.numbers[:end],
        planned.numbers[end:],
        work,
        _score_scale(form.scale, key_scale),
        value_scale,
        shape,
        form,
        out_TND,
    )
