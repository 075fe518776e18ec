"""KV between the paged cache and a flat buffer: all layers, K and V, all heads and tokens of a range in one launch. And
the digest of such a buffer.

A program moves some tokens of one head of one plane (a layer's K or V). Both sides are seen as the widest integers that
their alignment allows; in the usual case rows are multiples of 16 bytes, and a thread moves 16 bytes at a time. The ids
of the blocks travel to the device once, before the launch.

The order of the flat buffer is that of `reference.gather_kv`: [plane][head][token][dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.triton.jit import jit
from disagg.kernels.triton.sampling import GOLDEN, mix

_PROGRAM_BYTES = 16384
"""Bytes that a program moves: 128 for each thread of four warps."""

_DIGEST_WORDS = 1024
"""Words that a program adds up at a time: 64 bytes for each thread of four warps."""
_MAX_PROGRAMS = 1024

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@partial(jit, do_not_specialize=["start", "num_tokens"])
def _copy_kernel(
    cache_ptr: tl.tensor,
    flat_ptr: tl.tensor,
    block_ids_ptr: tl.tensor,
    start: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    block_stride: tl.tensor,
    plane_stride: tl.tensor,
    head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    known = tokens < num_tokens
    mask = known[:, None] & (columns < ROW)[None, :]
    positions = start + tokens
    blocks = tl.load(block_ids_ptr + positions // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    base = (head // num_heads) * plane_stride + (head % num_heads) * head_stride
    rows = base + blocks * block_stride + (positions % BLOCK_SIZE) * ROW
    cache = cache_ptr + rows[:, None] + columns[None, :]
    flat = flat_ptr + (head * num_tokens + tokens)[:, None] * ROW + columns[None, :]
    if GATHER:
        tl.store(flat, tl.load(cache, mask=mask), mask=mask)
    else:
        tl.store(cache, tl.load(flat, mask=mask), mask=mask)


def gather_kv(cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, out: Tensor) -> None:
    """The op `reference.gather_kv`. A buffer elsewhere (pinned memory) is filled by one copy from a buffer on the
    device.

    Raises:
        ValueError: the range or the size of `out` does not fit.
    """
    staged = out if out.device == cache_NL2KBD.device else torch.empty_like(out, device=cache_NL2KBD.device)
    _copy(cache_NL2KBD, block_ids, start, end, staged, gather=True)
    if staged is not out:
        out.copy_(staged)


def scatter_kv(cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, data: Tensor) -> None:
    """The op `reference.scatter_kv`, in one launch.

    Raises:
        ValueError: the range or the size of `data` does not fit.
    """
    _copy(cache_NL2KBD, block_ids, start, end, data.to(cache_NL2KBD.device), gather=False)


def takes(cache_NL2KBD: Tensor) -> bool:
    """Whether each head of a block is contiguous and the planes of a block lie at one distance, as in a whole cache and
    in a view of some of its heads."""
    _, layer_stride, side_stride, _, row_stride, last_stride = cache_NL2KBD.stride()
    _, layers, sides, _, block_size, D = cache_NL2KBD.shape
    return (
        last_stride == 1
        and (row_stride == D or block_size == 1)
        and (layer_stride == sides * side_stride or layers == 1)
    )


def _copy(cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, flat: Tensor, *, gather: bool) -> None:
    _, layers, sides, heads, block_size, D = cache_NL2KBD.shape
    row_bytes = D * cache_NL2KBD.element_size()
    _check(layers * sides * heads * row_bytes, block_size, len(block_ids), start, end, flat)
    num_tokens = end - start
    if not num_tokens or not heads:
        return
    cache = cache_NL2KBD.view(torch.uint8)
    word = next(word for word in _WORDS if _fits(cache, flat, row_bytes, word.itemsize))
    cache, flat = cache.view(word), flat.view(word)
    row = row_bytes // word.itemsize
    columns = triton.next_power_of_2(row)
    tokens = max(1, _PROGRAM_BYTES // (columns * word.itemsize))  # whatever the range: one kernel to compile
    _copy_kernel[(triton.cdiv(num_tokens, tokens), layers * sides * heads)](
        cache,
        flat,
        torch.tensor(block_ids, dtype=torch.int32).to(cache.device, non_blocking=True),
        start,
        num_tokens,
        heads,
        cache.stride(0),
        cache.stride(2),
        cache.stride(3),
        BLOCK_SIZE=block_size,
        ROW=row,
        COLUMNS=columns,
        TOKENS=tokens,
        GATHER=gather,
        num_warps=4,
    )


def _check(token_bytes: int, block_size: int, num_blocks: int, start: int, end: int, flat: Tensor) -> None:
    if not 0 <= start <= end <= num_blocks * block_size:
        raise ValueError(f"tokens [{start}, {end}) are not within {num_blocks} blocks of {block_size}")
    nbytes = (end - start) * token_bytes
    if flat.dtype != torch.uint8 or flat.dim() != 1 or flat.numel() != nbytes or not flat.is_contiguous():
        raise ValueError(
            f"tokens [{start}, {end}) take {nbytes} bytes; the buffer is {flat.dtype} of shape {list(flat.shape)}"
        )


def _fits(cache: Tensor, flat: Tensor, row_bytes: int, size: int) -> bool:
    """Whether both sides can be read in words of `size` bytes."""
    starts = (cache.data_ptr(), flat.data_ptr(), cache.storage_offset(), flat.storage_offset())
    steps = (row_bytes, *cache.stride()[:4])
    return all(number % size == 0 for number in (*starts, *steps))


# ---------------------------------------------------------------- digests


@jit
def _products(words: tl.tensor, keys: tl.tensor) -> tl.tensor:
    low = words.to(tl.uint32) + keys.to(tl.uint32)
    high = (words >> 32).to(tl.uint32) + (keys >> 32).to(tl.uint32)
    return (low.to(tl.uint64) * high.to(tl.uint64)).to(tl.int64, bitcast=True)


@partial(jit, do_not_specialize=["num_words", "seed"])
def _digest_kernel(
    words_ptr: tl.tensor, sums_ptr: tl.tensor, num_words: tl.tensor, seed: tl.tensor, BLOCK: tl.constexpr
) -> None:
    program = tl.program_id(0).to(tl.int64)
    state = (tl.zeros([BLOCK], dtype=tl.int64) + seed).to(tl.uint64, bitcast=True)
    first = tl.zeros([BLOCK], dtype=tl.int64)
    second = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(program * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < num_words
        words = tl.load(words_ptr + at, mask=mask, other=0).to(tl.uint64, bitcast=True)
        index = at.to(tl.int64).to(tl.uint64, bitcast=True)
        first += tl.where(mask, _products(words, mix(state + (index + 1) * GOLDEN)), 0)
        second += tl.where(mask, _products(words, mix(state + (index + 2) * GOLDEN)), 0)
    tl.store(sums_ptr + program * 2, tl.sum(first, axis=0))
    tl.store(sums_ptr + program * 2 + 1, tl.sum(second, axis=0))


def digest_sums(words: Tensor, seed: int) -> Tensor:
    """The op `reference.digest_sums`: each program adds up the words of its blocks, torch the programs. All is modulo
    2^64, so the order does not matter."""
    num_programs = max(1, min(triton.cdiv(len(words), _DIGEST_WORDS), _MAX_PROGRAMS))
    sums = torch.empty((num_programs, 2), dtype=torch.int64, device=words.device)
    _digest_kernel[(num_programs,)](words, sums, len(words), seed, BLOCK=_DIGEST_WORDS, num_warps=4)
    return sums.sum(0)
