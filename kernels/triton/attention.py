"""Paged attention on the GPU: which kernel serves a call, and which tensors are taken at all.

Signatures are those of `disagg.kernels.reference`, with the scales of an fp8 cache behind them. A call returns None
when it does not take the tensors: another dtype than those below, a layout that the kernels do not read.

Latent attention is that over a cache of one KV head whose values are the first numbers of its keys: the value cache is
a view of the key cache.

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
from torch import Tensor

from disagg.kernels.ops import AttentionForm, AttentionSpec, PlannedPrefills, can_hold
from disagg.kernels.prefill_work import ITEM_FIELDS, ChunkPlace, PrefillWork, prefill_work
from disagg.kernels.settings.triton_shapes import changes
from disagg.kernels.triton.decode_attention import DecodeShape, decode_attention, decode_shape, latent_decode_shape
from disagg.kernels.triton.heads import LEAST_SHARED_BYTES, HeadTiles, head_tiles
from disagg.kernels.triton.prefill_attention import (
    PrefillShape,
    latent_prefill_shape,
    prefill_attention,
    prefill_shape,
)

MIN_HEAD_DIM, MAX_HEAD_DIM = 9, 256
"""Range of the head dim. Tensor cores take products over at least 16 numbers, and heads are padded to a power of two.
"""
MAX_GROUP = 64
"""Largest number of query heads per KV head, but in latent attention, which has no such limit."""
MIN_LATENT_DIM, MAX_LATENT_DIM, MAX_TAIL_DIM = 9, 512, 64
"""Range of the dim of latents, and largest dim of what keys have beside."""
MAX_SEQUENCES = 4096
"""Largest number of sequences of one decode call: every program holds all lengths."""

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of activations that the kernels take."""
_INTERPRETER_MULTIPROCESSORS = 4
_RESERVED_SHARED_BYTES = 1024
"""Shared memory of a multiprocessor that no program can have."""
_H100_SHARED_BYTES = 227 << 10


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have; in the interpreter that of an H100."""
    if device.type != "cuda":
        return _H100_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - _RESERVED_SHARED_BYTES


def reads(q_TND: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, tables: Tensor, form: AttentionForm) -> bool:
    """Whether dtypes and layouts are those that the kernels read."""
    _, N, D = q_TND.shape
    _, K, block_size, _ = shape = key_cache_NKBD.shape
    strides = key_cache_NKBD.stride()
    is_latent = value_cache_NKBD.shape != shape
    return (
        q_TND.dtype in FLOAT_DTYPES
        and key_cache_NKBD.dtype in (q_TND.dtype, torch.float8_e4m3fn)
        and value_cache_NKBD.dtype == key_cache_NKBD.dtype
        and value_cache_NKBD.stride() == strides
        and strides[1:] == (block_size * D, D, 1)
        and q_TND.stride()[1:] == (D, 1)
        and tables.dtype == torch.int32
        and tables.stride(-1) == 1
        and shape[3] == D
        and (_are_latents(key_cache_NKBD, value_cache_NKBD) if is_latent else MIN_HEAD_DIM <= D <= MAX_HEAD_DIM)
        and N % K == 0
        and (is_latent or N // K <= MAX_GROUP)
        and form.scale > 0.0
        and _takes_sinks(form.sinks_N, N)
    )


def _are_latents(key_cache_NKBD: Tensor, value_cache_NKBD: Tensor) -> bool:
    """Whether the values are the first numbers of the keys of one head."""
    (num_blocks, K, block_size, D), L = key_cache_NKBD.shape, value_cache_NKBD.shape[3]
    return (
        K == 1
        and value_cache_NKBD.shape[:3] == (num_blocks, K, block_size)
        and value_cache_NKBD.data_ptr() == key_cache_NKBD.data_ptr()
        and MIN_LATENT_DIM <= L <= MAX_LATENT_DIM
        and 1 <= D - L <= MAX_TAIL_DIM
    )


def _takes_sinks(sinks_N: Tensor | None, N: int) -> bool:
    return sinks_N is None or (sinks_N.dtype == torch.float32 and sinks_N.shape == (N,) and sinks_N.is_contiguous())


def _are_int32(*vectors: Tensor) -> bool:
    return all(vector.dtype == torch.int32 and vector.is_contiguous() for vector in vectors)


def _score_scale(scale: float, key_scale: float) -> float:
    """Factor of a product of q and stored key, for an exponential to base two."""
    return scale * key_scale * math.log2(math.e)


def _has_room(heads: HeadTiles, device: torch.device) -> bool:
    """Whether a program has the shared memory that it needs."""
    return not heads.tail or _shared_bytes(device) >= LEAST_SHARED_BYTES


def _decode_shape(heads: HeadTiles, q_dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> DecodeShape:
    num_multiprocessors = _num_multiprocessors(device)
    if heads.tail:
        return latent_decode_shape(heads, q_dtype, kv_dtype, num_multiprocessors, _shared_bytes(device))
    return decode_shape(kv_dtype, heads.dim_padded, num_multiprocessors, changes(os.environ).decode)


def _prefill_shape(
    heads: HeadTiles,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    longest: int,
    device: torch.device,
) -> PrefillShape:
    if heads.tail:
        return latent_prefill_shape(heads, q_dtype, longest, _shared_bytes(device))
    change = changes(os.environ).prefill
    return prefill_shape(q_dtype, kv_dtype, heads.dim, block_size, heads.group, longest, change)


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
    """Attention of one query row per sequence over its cached context; [S, N, dim of the values], zeros for a context
    of 0; in `out` if given.

    Table entries behind a context are not read. At most `MAX_SEQUENCES` sequences.
    """
    (S, N, D), value_dim = q_SND.shape, value_cache_NKBD.shape[3]
    if not (
        reads(q_SND, key_cache_NKBD, value_cache_NKBD, block_tables_SM, form)
        and _are_int32(context_lens_S)
        and 0 < S <= MAX_SEQUENCES
        and can_hold(out_SND, (S, N, value_dim), q_SND.dtype)
    ):
        return None
    heads = head_tiles(N, key_cache_NKBD.shape[1], D, value_dim, q_SND.dtype)
    if not _has_room(heads, q_SND.device):
        return None
    shape = _decode_shape(heads, q_SND.dtype, key_cache_NKBD.dtype, q_SND.device)
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
    device, longest = torch.device(spec.device), max(chunk.num_tokens for chunk in chunks)
    dtype, kv_dtype = getattr(torch, spec.dtype), getattr(torch, spec.kv_dtype)
    heads = head_tiles(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim or spec.head_dim, dtype)
    shape = _prefill_shape(heads, dtype, kv_dtype, spec.block_size, longest, device)
    num_programs = shape.programs_at_once * _num_multiprocessors(device)
    return prefill_work(chunks, shape.rows // heads.group, shape.tile, heads.count, num_programs, window)


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
    (T, N, D), (_, K, block_size, _), value_dim = q_TND.shape, key_cache_NKBD.shape, value_cache_NKBD.shape[3]
    if not can_hold(out_TND, (T, N, value_dim), q_TND.dtype):
        return None
    end = work.num_items * ITEM_FIELDS
    heads = head_tiles(N, K, D, value_dim, q_TND.dtype)
    if not _has_room(heads, q_TND.device):
        return None
    shape = _prefill_shape(heads, q_TND.dtype, key_cache_NKBD.dtype, block_size, work.longest, q_TND.device)
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
