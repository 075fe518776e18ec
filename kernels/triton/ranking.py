"""The most probable tokens of each row of logits, in order, without leaving the device.

Tokens are ranked by (probability descending, id ascending), which is the order of `engine.sampler`. The logit over the
temperature and the id make one 64-bit key, and no two tokens have the same one, so the order is exact and the same in
every launch:

1. Each group of columns gives its largest key.
2. The `num`-th largest of those bounds the `num`-th largest key of the row from below. At most `num` groups reach it,
   and with random logits only a few more than `num` keys do.
3. The keys above the bound are collected, in any order, and the row's weights exp((logit - largest) / T) are summed,
   as floats and as integers (`kernels/weights.py`).
4. The rank of a collected key is the number of larger ones among them; which is the key's place.

All is exact but the sum of floats: fp32 weights of the device's exponential, added up in fp64, in an order that depends
on the size of the vocabulary alone. So the mass is the same number in every run on a device, and within about 1e-6 of
another device's.

Shapes: R rows, V vocabulary, G groups of columns, C ranked tokens, E chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels import weights
from disagg.kernels.triton.jit import jit

GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)
"""Temperature below which the most probable token is taken, as in `engine.sampler`; the logits stay undivided."""

LOWEST: tl.constexpr = tl.constexpr(-(2**63))
"""A key below that of every token."""

_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(coefficient) for coefficient in weights.COEFFICIENTS)
_STEPS, _MOST_STEPS = tl.constexpr(weights.STEPS), tl.constexpr(weights.MOST_STEPS)

CHUNK = 4096
"""Columns that a program sums the weights of."""
_GROUP = 64
"""Columns in a group."""
_TILE = 64
"""Keys that are compared at once with as many others."""
_RANK_PROGRAMS = 8
"""Programs that rank the collected keys of one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The most probable tokens of each row, ranked."""

    ids_RC: Tensor
    """Ids of the ranked tokens, int64."""
    values_RC: Tensor
    """Logits over temperature, fp32, descending."""
    masses_RE: Tensor
    """Sums of exp(value - largest value) over the chunks of the row, fp64. NaN where a row cannot be sampled from."""
    weights_RE: Tensor
    """Sums of the integer weights of each `CHUNK` columns, int64."""
    vocab_size: int


@jit
def scaled(logits: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits over the temperature in fp32, rounded as in IEEE 754: equal on every device."""
    temperature = tl.where(temperature < GREEDY_BELOW, 1.0, temperature)
    return tl.div_rn(logits.to(tl.float32), temperature + tl.zeros_like(logits).to(tl.float32))


@jit
def key_of(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """int64: greater for a greater value, then for a smaller id. -0 equals 0; NaN is above all or below all."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@jit
def id_of(keys: tl.tensor) -> tl.tensor:
    """int64 token id of a key."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@jit
def value_of(keys: tl.tensor) -> tl.tensor:
    """fp32 value of a key."""
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@jit
def weights_of(values: tl.tensor, top: tl.tensor) -> tl.tensor:
    """`weights.weights` of scaled logits, int64."""
    steps = tl.minimum((top - values) * _STEPS, _MOST_STEPS).to(tl.int32)
    fractions = (steps & 0xFFFFF).to(tl.int64)
    power = _C4 - ((_C5 * fractions) >> 20)
    power = _C3 - ((power * fractions) >> 20)
    power = _C2 - ((power * fractions) >> 20)
    power = _C1 - ((power * fractions) >> 20)
    power = _C0 - ((power * fractions) >> 20)
    return (power << 12) >> (steps >> 20).to(tl.int64)


@jit
def _groups_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """The largest key of each group; sets the row's bound and count to what the next kernels start from."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=mask, other=0.0)
    keys = key_of(scaled(logits, tl.load(temperatures_ptr + row)), columns)
    largest = tl.max(tl.where(mask, keys, LOWEST), axis=1)
    tl.store(groups_ptr + row * tl.num_programs(1) * GROUPS + groups, largest)
    if chunk == 0:
        tl.store(bounds_ptr + row * 2, LOWEST)
        tl.store(counts_ptr + row, 0)


@jit
def _bounds_kernel(
    groups_ptr: tl.tensor, bounds_ptr: tl.tensor, num_groups: tl.tensor, num: tl.tensor, TILE: tl.constexpr
) -> None:
    """(the `num`-th largest key, the largest one) of the row's groups."""
    row = tl.program_id(0).to(tl.int64)
    groups_ptr += row * num_groups
    lanes = tl.arange(0, TILE)
    keys = tl.load(groups_ptr + tl.program_id(1) * TILE + lanes)
    ranks = tl.zeros([TILE], tl.int32)
    for first in range(0, num_groups, TILE):
        others = tl.load(groups_ptr + first + lanes)
        ranks += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), axis=1)
    bounds = bounds_ptr + row * 2 + tl.zeros([TILE], tl.int32)
    tl.store(bounds, keys, mask=ranks == num - 1)
    tl.store(bounds + 1, keys, mask=ranks == 0)


@jit
def _collect_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    collected_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    capacity: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = columns < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=mask, other=0.0)
    values = scaled(logits, tl.load(temperatures_ptr + row))
    top = value_of(tl.load(bounds_ptr + row * 2 + 1))
    masses = tl.where(mask, tl.exp(values - top), 0.0)
    tl.store(masses_ptr + row * tl.num_programs(1) + chunk, tl.sum(masses.to(tl.float64), axis=0))
    whole = tl.where(mask, weights_of(values, top), 0)
    tl.store(weights_ptr + row * tl.num_programs(1) + chunk, tl.sum(whole, axis=0))
    keys = key_of(values, columns)
    above = mask & (keys >= tl.load(bounds_ptr + row * 2))
    place = tl.atomic_add(counts_ptr + row + tl.zeros([CHUNK], tl.int64), 1, mask=above)
    tl.store(collected_ptr + row * capacity + place, keys, mask=above)


@jit
def _rank_kernel(
    collected_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    capacity: tl.tensor,
    num: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    collected_ptr += row * capacity
    count = tl.load(counts_ptr + row)
    lanes = tl.arange(0, TILE)
    for tile in range(tl.program_id(1) * TILE, count, tl.num_programs(1) * TILE):
        keys = tl.load(collected_ptr + tile + lanes, mask=tile + lanes < count, other=LOWEST)
        ranks = tl.zeros([TILE], tl.int32)
        for first in range(0, count, TILE):
            others = tl.load(collected_ptr + first + lanes, mask=first + lanes < count, other=LOWEST)
            ranks += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), axis=1)
        keep = (tile + lanes < count) & (ranks < num)
        tl.store(ids_ptr + row * num + ranks, id_of(keys), mask=keep)
        tl.store(values_ptr + row * num + ranks, value_of(keys), mask=keep)


def rank_top(logits_RV: Tensor, num: int, temperatures_R: Tensor, vocab_size: int) -> Ranking:
    """The first `num` tokens of each row, or all where there are fewer.

    Logits of any float dtype, columns contiguous; those from `vocab_size` on are padding. Temperatures are fp32. Rows
    with NaN or +inf get any order.
    """
    R, device = logits_RV.shape[0], logits_RV.device
    num = min(num, vocab_size)
    chunks = triton.cdiv(vocab_size, CHUNK)
    num_groups = chunks * (CHUNK // _GROUP)
    capacity = min(num * _GROUP, vocab_size)
    ids_RC = torch.empty((R, num), dtype=torch.int64, device=device)
    values_RC = torch.empty((R, num), dtype=torch.float32, device=device)
    masses_RE = torch.empty((R, chunks), dtype=torch.float64, device=device)
    weights_RE = torch.empty((R, chunks), dtype=torch.int64, device=device)
    if R:
        groups_RG = torch.empty((R, num_groups), dtype=torch.int64, device=device)
        bounds_R2 = torch.empty((R, 2), dtype=torch.int64, device=device)
        counts_R = torch.empty(R, dtype=torch.int32, device=device)
        collected = torch.empty((R, capacity), dtype=torch.int64, device=device)
        rows = (logits_RV, temperatures_R)
        stride = logits_RV.stride(0)
        _groups_kernel[(R, chunks)](
            *rows,
            groups_RG,
            bounds_R2,
            counts_R,
            vocab_size,
            stride,
            GROUPS=CHUNK // _GROUP,
            GROUP=_GROUP,
            num_warps=8,
        )
        _bounds_kernel[(R, num_groups // _TILE)](groups_RG, bounds_R2, num_groups, num, TILE=_TILE, num_warps=4)
        sums = (masses_RE, weights_RE)
        _collect_kernel[(R, chunks)](
            *rows, bounds_R2, counts_R, collected, *sums, vocab_size, stride, capacity, CHUNK=CHUNK, num_warps=8
        )
        _rank_kernel[(R, _RANK_PROGRAMS)](
            collected, counts_R, ids_RC, values_RC, capacity, num, TILE=_TILE, num_warps=4
        )
    return Ranking(
        ids_RC=ids_RC, values_RC=values_RC, masses_RE=masses_RE, weights_RE=weights_RE, vocab_size=vocab_size
    )
