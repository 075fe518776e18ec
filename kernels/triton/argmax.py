"""The largest logit of each row, in two launches: the best of each chunk of columns, and the best of the chunks.

One program per row would read a vocabulary of 128k with one multiprocessor.

Shapes: T rows, V columns, C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.triton.jit import jit

_CHUNK = 4096

_NO_ID: tl.constexpr = tl.constexpr(2**31 - 1)


@jit
def _chunk_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = columns < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
    # NaN becomes +inf, which nothing is above and which gives no token: one value marks both kinds of bad rows.
    logits = tl.where(logits == logits, logits, float("inf"))
    best = tl.max(logits, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + at, best)
    tl.store(ids_ptr + at, tl.min(tl.where(logits == best, columns, _NO_ID), axis=0))


@jit
def _row_kernel(
    best_ptr: tl.tensor, ids_ptr: tl.tensor, out_ptr: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    mask = chunks < num_chunks
    bests = tl.load(best_ptr + row * num_chunks + chunks, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_chunks + chunks, mask=mask, other=_NO_ID)
    best = tl.max(bests, axis=0)
    token = tl.min(tl.where(bests == best, ids, _NO_ID), axis=0)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite, token, -1).to(tl.int64))


def argmax_rows(logits_TV: Tensor, vocab_size: int) -> Tensor:
    """The op `reference.argmax_rows`, for rows with any stride whose columns are contiguous."""
    T, device = logits_TV.shape[0], logits_TV.device
    out_T = torch.empty(T, dtype=torch.int64, device=device)
    if T == 0:
        return out_T
    chunks = triton.cdiv(vocab_size, _CHUNK)
    best_TC = torch.empty((T, chunks), dtype=torch.float32, device=device)
    ids_TC = torch.empty((T, chunks), dtype=torch.int32, device=device)
    _chunk_kernel[(T, chunks)](logits_TV, best_TC, ids_TC, vocab_size, logits_TV.stride(0), CHUNK=_CHUNK, num_warps=8)
    _row_kernel[(T,)](best_TC, ids_TC, out_T, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return out_T
