"""One token per row, drawn on the device: the next step can read it there, and the host reads it a step later.

The draw is that of `engine.sampler`, with one uniform number per (seed, output index): without filters by the running
sum of integer weights in the order of ids; else an inverse CDF over tokens ranked by (probability descending, id
ascending), behind top-k, top-p and min-p, each over what the one before left. Three launches follow the four of
`ranking.rank_top`:

1. The uniform numbers: `engine.randomness`, SplitMix64 (`proto/splitmix.py`) in 64-bit integers.
2. The draw from the first `NUM_RANKED` tokens, which decides nearly every row with a filter.
3. Rows without filters: the sums of the chunks tell the chunk, and its weights the token. Rows with filters that the
   ranked tokens do not decide: a search over all keys of the row, by the sum of the weights above a key; slow (16
   passes over the row for each filter, and for the draw), and right for every filter. Other rows' programs return at
   once.

What is exact: the uniform number, bit for bit; rows without filters; the order of the tokens; greedy rows; top-k. What
is not: sums of weights of rows with filters, which differ from the host's by about 1e-6 (fp32 exponentials), so a draw
or a top-p cut that falls so close to the border between two tokens may take the neighbour. Each token that the filters
keep has one such border: of a few tokens about one draw in a million differs between sampler and kernel, of 50,000
flat ones up to one in ten. The same kernel on the same device repeats itself always.

Bias, masks, penalties and log-probabilities are not here: who needs them edits the logits before.

Shapes: R rows, V vocabulary, C ranked tokens, E chunks.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.ops import Filters
from disagg.kernels.triton.jit import jit
from disagg.kernels.triton.ranking import (
    CHUNK,
    GREEDY_BELOW,
    LOWEST,
    Ranking,
    id_of,
    key_of,
    rank_top,
    scaled,
    weights_of,
)

NUM_RANKED = 256

BAD_ROW: tl.constexpr = tl.constexpr(-1)
"""Result for a row that has NaN, +inf or nothing finite, in place of a token."""

_UNDECIDED: tl.constexpr = tl.constexpr(-2)
"""Mark of a row that the second launch leaves to the third."""

_CHUNK = 512
"""Columns that the search reads at a time; it keeps a sum for each of these columns and each key that it tries."""

_WAYS = 16

GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_UNIT: tl.constexpr = tl.constexpr(2.0**-53)


def sample(logits_RV: Tensor, vocab_size: int, filters: Filters, num_ranked: int = NUM_RANKED) -> Tensor:
    """Token ids, int64 [R]; -1 for a row that nothing can be drawn from.

    Columns are contiguous; those from `vocab_size` on are padding.
    """
    ranking = rank_top(logits_RV, num_ranked, filters.temperatures_R, vocab_size)
    return draw(logits_RV, ranking, filters, uniform(filters.seeds_R, filters.indices_R))


@jit
def mix(z: tl.tensor) -> tl.tensor:
    """SplitMix64's output function, of unsigned 64-bit numbers."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@partial(jit, do_not_specialize=["num"])
def _uniform_kernel(
    seeds_ptr: tl.tensor, indices_ptr: tl.tensor, out_ptr: tl.tensor, num: tl.tensor, BLOCK: tl.constexpr
) -> None:
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num
    seeds = tl.load(seeds_ptr + rows, mask=mask, other=0).to(tl.uint64, bitcast=True)
    indices = tl.load(indices_ptr + rows, mask=mask, other=0).to(tl.uint64, bitcast=True)
    bits = mix(mix(seeds + GOLDEN) + (indices + 1) * GOLDEN)
    # 53 bits fit into a signed number, whose conversion every device has; it and the product are exact.
    tl.store(out_ptr + rows, (bits >> 11).to(tl.int64, bitcast=True).to(tl.float64) * _UNIT, mask=mask)


def uniform(seeds_R: Tensor, indices_R: Tensor) -> Tensor:
    """`engine.randomness.uniform` of each row, fp64."""
    out_R = torch.empty(seeds_R.shape, dtype=torch.float64, device=seeds_R.device)
    if (num := seeds_R.numel()) != 0:
        _uniform_kernel[(triton.cdiv(num, 128),)](seeds_R, indices_R, out_R, num, BLOCK=128, num_warps=4)
    return out_R


@jit
def _is_unfiltered(top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Whether a row has no filter: the contrary of `engine.sampling_rules.is_filtered`."""
    return ((top_k <= 0) | (top_k >= vocab_size)) & (top_p >= 1.0) & (min_p <= 0.0)


@jit
def _pick(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    uniform: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """The token of a row without filters; see `weights`."""
    chunks = tl.arange(0, CHUNKS)
    sums = tl.cumsum(tl.load(weights_ptr + chunks, mask=chunks < num_chunks, other=0), axis=0)
    total = tl.max(sums, axis=0)
    goal = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.sum((sums <= goal).to(tl.int32), axis=0)
    goal -= tl.sum(tl.where(chunks == chunk - 1, sums, 0), axis=0)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < vocab_size
    values = scaled(tl.load(logits_ptr + columns, mask=mask, other=0.0), temperature)
    sums = tl.cumsum(tl.where(mask, weights_of(values, top), 0), axis=0)
    return (chunk * COLUMNS + tl.sum((sums <= goal).to(tl.int32), axis=0)).to(tl.int64)


@jit
def _draw_kernel(
    ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    out_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    KNOWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    IS_ALL: tl.constexpr,
) -> None:
    """Draw from the ranked tokens: a token, BAD_ROW or _UNDECIDED."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    known = columns < KNOWN
    values = tl.load(values_ptr + row * KNOWN + columns, mask=known, other=0.0).to(tl.float64)
    chunks = tl.arange(0, CHUNKS)
    mass = tl.sum(tl.load(masses_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0), axis=0)
    largest = tl.load(values_ptr + row * KNOWN).to(tl.float64)
    weights = tl.where(known, tl.exp(values - largest), 0.0)
    sums = tl.cumsum(weights, axis=0)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    limits_k = (top_k > 0) & (top_k < vocab_size)
    undecided = limits_k & (top_k > KNOWN)
    kept = tl.where(limits_k, tl.minimum(top_k, KNOWN), KNOWN)
    cut = limits_k | IS_ALL
    total = tl.where(limits_k, tl.sum(tl.where(columns == kept - 1, sums, 0.0), axis=0), mass)
    below = tl.sum(((columns < kept) & (sums < top_p * total)).to(tl.int32), axis=0)
    cuts_p = (top_p < 1.0) & (below < kept)
    kept = tl.where(cuts_p, below + 1, kept)
    likely = tl.sum(((columns < kept) & (weights >= min_p)).to(tl.int32), axis=0)
    cuts_min_p = (min_p > 0.0) & (likely < kept)
    kept = tl.where(cuts_min_p, tl.maximum(likely, 1), kept)
    cut = cut | cuts_p | cuts_min_p
    # Without filters the third launch draws.
    undecided = undecided | (cut == 0) | _is_unfiltered(top_k, top_p, min_p, vocab_size)
    total = tl.sum(tl.where(columns == kept - 1, sums, 0.0), axis=0)
    at = tl.sum((known & (sums <= tl.load(uniform_ptr + row) * total)).to(tl.int32), axis=0)
    is_greedy = tl.load(temperatures_ptr + row) < GREEDY_BELOW
    at = tl.where(is_greedy, 0, tl.minimum(at, kept - 1))
    undecided = undecided & (is_greedy == 0)
    token = tl.load(ids_ptr + row * KNOWN + at)
    token = tl.where(undecided, _UNDECIDED, token)
    is_finite = (mass == mass) & (mass < float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite, token, BAD_ROW))


@jit
def _above(
    logits_ptr: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    key: tl.tensor,
    min_p: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Sums over the tokens of the row whose keys are at least `key`: of their weights, of their number, and of those
    with a weight of at least `min_p`. fp64 and int32."""
    sums = tl.zeros([CHUNK], tl.float64)
    counts = tl.zeros([CHUNK], tl.int32)
    likely = tl.zeros([CHUNK], tl.int32)
    for first in range(0, vocab_size, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        mask = columns < vocab_size
        values = scaled(tl.load(logits_ptr + columns, mask=mask, other=0.0), temperature)
        chosen = mask & (key_of(values, columns) >= key)
        weights = tl.exp(values - top)
        sums += tl.where(chosen, weights, 0.0).to(tl.float64)
        counts += chosen.to(tl.int32)
        likely += (chosen & (weights >= min_p)).to(tl.int32)
    return tl.sum(sums, axis=0), tl.sum(counts, axis=0), tl.sum(likely, axis=0)


@jit
def _search(
    logits_ptr: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    goal: tl.tensor,
    BY_COUNT: tl.constexpr,
    STRICT: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The largest key in [low, high) with a sum (or number) above it that reaches the goal, or passes it; `low` if
    none does. It is the key of a token, or `low`.

    Each pass over the row tries `WAYS` keys between the two, and leaves up to `WAYS` - 1 behind the last one. The range
    may have more than 2^63 keys: it is unsigned.
    """
    ways = tl.arange(0, WAYS).to(tl.int64) + 1
    span = (high - low).to(tl.uint64, bitcast=True)
    while span > 1:
        step = tl.maximum(span // WAYS, 1).to(tl.int64, bitcast=True)
        tried = (ways * step).to(tl.uint64, bitcast=True) < span
        keys = low + ways * step
        sums = tl.zeros([CHUNK, WAYS], tl.float64)
        for first in range(0, vocab_size, CHUNK):
            columns = first + tl.arange(0, CHUNK)
            mask = columns < vocab_size
            values = scaled(tl.load(logits_ptr + columns, mask=mask, other=0.0), temperature)
            chosen = mask[:, None] & (key_of(values, columns)[:, None] >= keys[None, :])
            weights = tl.full([CHUNK], 1.0, tl.float64) if BY_COUNT else tl.exp(values - top).to(tl.float64)
            sums += tl.where(chosen, weights[:, None], 0.0)
        totals = tl.sum(sums, axis=0)
        reaches = tried & ((totals > goal) if STRICT else (totals >= goal))
        num = tl.sum(reaches.to(tl.int64), axis=0)
        low += num * step
        left = span - (num * step).to(tl.uint64, bitcast=True)
        # Where the last key that was tried reaches the goal, all that is left behind it can.
        span = tl.where(num < WAYS, tl.minimum(left, step.to(tl.uint64, bitcast=True)), left)
    return low


@jit
def _search_kernel(
    logits_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    out_ptr: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    num_chunks: tl.tensor,
    KNOWN: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Draw in the rows that are undecided: without filters from the weights, else find the keys at which each filter
    cuts, then draw from what they leave."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out_ptr + row) == _UNDECIDED:
        logits_ptr += row * row_stride
        temperature = tl.load(temperatures_ptr + row)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        top = tl.load(values_ptr + row * KNOWN)
        uniform = tl.load(uniform_ptr + row)
        if _is_unfiltered(top_k, top_p, min_p, vocab_size):
            weights_ptr += row * num_chunks
            args = (logits_ptr, weights_ptr, temperature, top, uniform, vocab_size, num_chunks)
            tl.store(out_ptr + row, _pick(*args, COLUMNS, CHUNKS))
        else:
            high = key_of(top, tl.load(ids_ptr + row * KNOWN)) + 1
            cut = _lowest(logits_ptr, temperature, vocab_size, CHUNK)
            scan = (logits_ptr, temperature, top, vocab_size)
            if (top_k > 0) & (top_k < vocab_size):
                cut = _search(*scan, cut, high, top_k, True, False, CHUNK, WAYS)
            total, count, likely = _above(logits_ptr, temperature, top, cut, min_p, vocab_size, CHUNK)
            if top_p < 1.0:
                cut = _search(*scan, cut, high, top_p * total, False, False, CHUNK, WAYS)
            if (min_p > 0.0) & (likely < count):
                at_least = tl.maximum(likely, 1)
                cut = _search(*scan, cut, high, at_least, True, False, CHUNK, WAYS)
            total, _, _ = _above(logits_ptr, temperature, top, cut, min_p, vocab_size, CHUNK)
            token = _search(*scan, cut, high, uniform * total, False, True, CHUNK, WAYS)
            tl.store(out_ptr + row, id_of(token))


@jit
def _lowest(logits_ptr: tl.tensor, temperature: tl.tensor, vocab_size: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """The smallest key of the row."""
    lowest = tl.full([CHUNK], -(LOWEST + 1), tl.int64)
    for first in range(0, vocab_size, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        mask = columns < vocab_size
        keys = key_of(scaled(tl.load(logits_ptr + columns, mask=mask, other=0.0), temperature), columns)
        lowest = tl.minimum(lowest, tl.where(mask, keys, -(LOWEST + 1)))
    return tl.min(lowest, axis=0)


def draw(logits_RV: Tensor, ranking: Ranking, filters: Filters, uniform_R: Tensor) -> Tensor:
    """The token at `uniform_R` (fp64, in [0, 1)) of each row's filtered distribution, int64; -1 for a bad row."""
    R, known = ranking.ids_RC.shape
    out_R = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    if R == 0:
        return out_R
    vocab_size, chunks = ranking.vocab_size, ranking.masses_RE.shape[1]
    rules = (filters.temperatures_R, filters.top_k_R, filters.top_p_R, filters.min_p_R, uniform_R, out_R, vocab_size)
    _draw_kernel[(R,)](
        ranking.ids_RC,
        ranking.values_RC,
        ranking.masses_RE,
        *rules,
        chunks,
        KNOWN=known,
        COLUMNS=triton.next_power_of_2(known),
        CHUNKS=triton.next_power_of_2(chunks),
        IS_ALL=known == vocab_size,
        num_warps=4,
    )
    _search_kernel[(R,)](
        logits_RV,
        ranking.values_RC,
        ranking.ids_RC,
        ranking.weights_RE,
        *rules,
        logits_RV.stride(0),
        chunks,
        KNOWN=known,
        CHUNK=_CHUNK,
        WAYS=_WAYS,
        COLUMNS=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=16,
    )
    return out_R
