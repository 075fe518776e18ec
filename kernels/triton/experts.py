"""A layer of experts, in launches whose number and grids depend on the number of rows alone, so that a CUDA graph can
hold them.

    torch      the router's product, in fp32
    _route     the experts of each row, ascending, and their weights; one program a row
    _place     each expert finds its rows' places among all rows sorted by expert; one program an expert
    _product   gate and up, then down: tiles of rows of one expert by columns; the grid has a program for each tile that
               there could be, and those beyond the last tile end at once
    _gate      the activation
    _combine   of each row, the sum of its experts' results by expert, then what is shared

Roundings are those of the reference. A row's bits may depend on the rows beside it only by the router's product, which
is the library's.

Shapes: T tokens, H hidden, I intermediate size, E experts, L experts of this rank, k experts of a row, R = T * k slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.experts import Experts, Router, Shared
from disagg.kernels.routing import SMALLEST_SUM
from disagg.kernels.triton.jit import jit

_SCORES = {"softmax": 0, "softmax_of_top": 1, "sigmoid": 2}
_GATES = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
_SLOTS = 1024
"""Slots that a program of `_place` looks at, at a time."""
_COLUMNS = 1024
"""Elements of a program of `_gate` and `_combine`."""
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a tile of `_product`: where experts have few rows on average, and many."""

_NONE: tl.constexpr = tl.constexpr(2**31 - 1)
_SMALLEST_SUM: tl.constexpr = tl.constexpr(SMALLEST_SUM)


@jit
def _largest(values: tl.tensor, is_open: tl.tensor, numbers: tl.tensor) -> tl.tensor:
    """The number of the largest open value, of equal ones the lowest."""
    best = tl.max(tl.max(tl.where(is_open, values, float("-inf")), axis=1), axis=0)
    return tl.min(tl.min(tl.where(is_open & (values == best), numbers, _NONE), axis=1), axis=0)


@jit
def _total(values: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(values, axis=1), axis=0)


@jit
def _open_groups(
    values: tl.tensor,
    is_real: tl.tensor,
    numbers: tl.tensor,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO_LARGEST: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Which groups a row may choose from, a column."""
    open_values = tl.where(is_real, values, float("-inf"))
    scores = tl.max(open_values, axis=1, keep_dims=True)
    if TWO_LARGEST:
        first = tl.min(tl.where(is_real & (values == scores), numbers, _NONE), axis=1, keep_dims=True)
        scores += tl.max(tl.where(numbers == first, float("-inf"), open_values), axis=1, keep_dims=True)
    groups = tl.arange(0, GROUPS_BLOCK)[:, None]
    is_open = groups < GROUPS
    is_kept = groups < 0
    for _ in range(TOP_GROUPS):
        best = _largest(scores, is_open, groups)
        is_kept |= groups == best
        is_open &= groups != best
    return is_kept


@jit
def _route_kernel(
    logits_ptr: tl.tensor,
    choice_bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scale: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO_LARGEST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    MEMBERS_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    members: tl.constexpr = EXPERTS // GROUPS
    groups, columns = tl.arange(0, GROUPS_BLOCK)[:, None], tl.arange(0, MEMBERS_BLOCK)[None, :]
    numbers = groups * members + columns
    is_real = (groups < GROUPS) & (columns < members)
    logits = tl.load(logits_ptr + row * EXPERTS + numbers, mask=is_real, other=0.0)
    is_bad = _total((logits != logits).to(tl.int32)) > 0
    scores = logits
    if SCORE == 0:
        powers = tl.where(is_real, tl.exp(logits - tl.max(tl.max(tl.where(is_real, logits, float("-inf")), 1), 0)), 0.0)
        scores = powers / _total(powers)
    if SCORE == 2:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    values = logits
    if HAS_BIAS:
        values = scores + tl.load(choice_bias_ptr + numbers, mask=is_real, other=0.0)
    elif SCORE == 2:
        values = scores
    values = tl.where(is_bad, 0.0, values)
    if GROUPS > 1:
        is_kept = _open_groups(values, is_real, numbers, GROUPS, TOP_GROUPS, TWO_LARGEST, GROUPS_BLOCK)
        values = tl.where(is_kept, values, float("-inf"))
    is_open = is_real
    for _ in range(TOP_K):
        is_open &= numbers != _largest(values, is_open, numbers)
    is_chosen = is_real & (is_open == 0)
    if SCORE == 1:
        top = tl.max(tl.max(tl.where(is_chosen, logits, float("-inf")), 1), 0)
        scores = tl.where(is_chosen, tl.exp(logits - top), 0.0)
        scores = scores / _total(scores)
    if RENORMALIZE:
        scores = scores / (_total(tl.where(is_chosen, scores, 0.0)) + _SMALLEST_SUM)
    weights = tl.where(is_bad, float("nan"), scores * scale)
    for i in range(TOP_K):
        expert = tl.min(tl.min(tl.where(is_chosen, numbers, _NONE), axis=1), axis=0)
        is_it = numbers == expert
        tl.store(ids_ptr + row * TOP_K + i, expert)
        tl.store(weights_ptr + row * TOP_K + i, _total(tl.where(is_it, weights, 0.0)))
        is_chosen &= numbers != expert


@jit
def _place_kernel(
    ids_ptr: tl.tensor,
    places_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_slots: tl.tensor,
    first_expert: tl.tensor,
    num_local: tl.tensor,
    HAS_COUNTS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    is_here = (expert >= first_expert) & (expert < first_expert + num_local)
    before, count = tl.to_tensor(0), tl.to_tensor(0)
    for start in range(0, num_slots, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=_NONE)
        before += tl.sum(((ids >= first_expert) & (ids < expert)).to(tl.int32), axis=0)
        count += tl.sum((ids == expert).to(tl.int32), axis=0)
    if HAS_COUNTS:
        tl.store(counts_ptr + expert, tl.load(counts_ptr + expert) + count)
    if is_here:
        tl.store(offsets_ptr + expert - first_expert, before)
        tl.store(offsets_ptr + expert - first_expert + 1, before + count, mask=expert == first_expert + num_local - 1)
    place = before
    for start in range(0, num_slots, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        is_its = tl.load(ids_ptr + slots, mask=slots < num_slots, other=_NONE) == expert
        places = place + tl.cumsum(is_its.to(tl.int32), axis=0) - 1
        tl.store(places_ptr + slots, tl.where(is_here, places, -1), mask=is_its)
        tl.store(sources_ptr + places, slots, mask=is_its & is_here)
        place += tl.sum(is_its.to(tl.int32), axis=0)


@jit
def _product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    num_local: tl.tensor,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """`EXPERTS` is a power of two, at least `num_local`."""
    experts = tl.arange(0, EXPERTS)
    is_real = experts < num_local
    starts = tl.load(offsets_ptr + experts, mask=is_real, other=0)
    ends = tl.load(offsets_ptr + experts + 1, mask=is_real, other=0)
    tiles = (ends - starts + ROWS - 1) // ROWS
    sums = tl.cumsum(tiles, axis=0)
    tile = tl.program_id(1)
    expert = tl.sum((is_real & (sums <= tile)).to(tl.int32), axis=0)
    if expert >= num_local:
        return
    is_it = experts == expert
    tile -= tl.sum(tl.where(is_it, sums - tiles, 0), axis=0)
    end = tl.sum(tl.where(is_it, ends, 0), axis=0)
    places = tl.sum(tl.where(is_it, starts, 0), axis=0) + tile * ROWS + tl.arange(0, ROWS)
    is_row = places < end
    rows = places
    if GATHER:
        rows = tl.load(sources_ptr + places, mask=is_row, other=0) // TOP_K
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    inputs = tl.arange(0, DEPTH)
    x_ptr += rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    weight_ptr += expert.to(tl.int64) * num_columns * depth + columns.to(tl.int64)[None, :] * depth + inputs[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        is_input = inputs < depth - start
        x = tl.load(x_ptr + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(weight_ptr + start, mask=is_input[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * num_columns + columns, mask=is_column, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptr += places.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@jit
def _gate_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_local: tl.tensor,
    features: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    if row >= tl.load(offsets_ptr + num_local):
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < features
    gate_ptr = gate_up_ptr + row.to(tl.int64) * 2 * features + columns
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + features, mask=mask, other=0.0).to(tl.float32)
    if GATE == 0:
        activated = gate / (1.0 + tl.exp(-gate))
    elif GATE == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        scaled = (gate * alpha).to(dtype).to(tl.float32)
        activated = gate * (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
    activated = activated.to(dtype).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * features + columns, (activated * up).to(dtype), mask=mask)


@jit
def _combine_kernel(
    results_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    shared_weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_SHARED_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + slot).to(tl.int64)
        weight = tl.load(weights_ptr + row * TOP_K + slot)
        result = tl.load(results_ptr + place * hidden + columns, mask=mask & (place >= 0), other=0.0).to(tl.float32)
        total += tl.where(place >= 0, result * weight, 0.0)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * hidden + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_SHARED_WEIGHTS:
            shared *= tl.load(shared_weights_ptr + row)
        total += shared
    tl.store(out_ptr + row * hidden + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def moe_ffn(x_TH: Tensor, router: Router, experts: Experts, shared: Shared | None) -> Tensor:
    """The op `reference.moe_ffn`, for rows with contiguous H and plain weights."""
    (T, H), device, dtype = x_TH.shape, x_TH.device, x_TH.dtype
    out_TH = torch.empty((T, H), dtype=dtype, device=device)
    gate_up, down = experts.gate_up_L2IH, experts.down_LHI
    assert isinstance(gate_up, Tensor), "the caller looks"
    assert isinstance(down, Tensor), "the caller looks"
    if T == 0:
        return out_TH
    ids_R, weights_R = _routed(x_TH, router)
    places_R, sources_R, offsets = _placed(ids_R, router, experts)
    num_slots, inner, activation = len(ids_R), down.shape[2], experts.activation
    gate_up_R2I = torch.empty((num_slots, 2 * inner), dtype=dtype, device=device)
    _multiply(x_TH, gate_up, experts.gate_up_bias_L2I, gate_up_R2I, sources_R, offsets, router.routing.top_k)
    gated_RI = torch.empty((num_slots, inner), dtype=dtype, device=device)
    _gate_kernel[(num_slots, triton.cdiv(inner, _COLUMNS))](
        gate_up_R2I, gated_RI, offsets, len(gate_up), inner, activation.alpha, activation.limit,
        GATE=_GATES[activation.kind], BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    results_RH = torch.empty((num_slots, H), dtype=dtype, device=device)
    _multiply(gated_RI, down, experts.down_bias_LH, results_RH, None, offsets, 1)
    gate_H = None if shared is None else shared.gate_H
    shared_weights_T = None if gate_H is None else (x_TH.float() @ gate_H.float()).sigmoid()
    _combine_kernel[(T, triton.cdiv(H, _COLUMNS))](
        results_RH, places_R, weights_R, results_RH if shared is None else shared.result_TH,
        weights_R if shared_weights_T is None else shared_weights_T, out_TH, H, TOP_K=router.routing.top_k,
        HAS_SHARED=shared is not None, HAS_SHARED_WEIGHTS=shared_weights_T is not None, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out_TH


def _routed(x_TH: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """The experts of all slots (int32) and their weights (fp32)."""
    routing, T, device = router.routing, x_TH.shape[0], x_TH.device
    assert isinstance(router.weight_EH, Tensor), "the caller looks"
    logits_TE = F.linear(x_TH.float(), router.weight_EH, router.bias_E)
    ids_R = torch.empty(T * routing.top_k, dtype=torch.int32, device=device)
    weights_R = torch.empty(T * routing.top_k, dtype=torch.float32, device=device)
    bias_E = router.choice_bias_E
    _route_kernel[(T,)](
        logits_TE, logits_TE if bias_E is None else bias_E, ids_R, weights_R, routing.scale,
        EXPERTS=routing.num_experts, TOP_K=routing.top_k, SCORE=_SCORES[routing.score], GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups, TWO_LARGEST=routing.group_score == "two_largest",
        RENORMALIZE=routing.renormalize, HAS_BIAS=bias_E is not None,
        GROUPS_BLOCK=triton.next_power_of_2(routing.groups),
        MEMBERS_BLOCK=triton.next_power_of_2(routing.group_size), num_warps=4,
    )  # fmt: skip
    return ids_R, weights_R


def _placed(ids_R: Tensor, router: Router, experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """The place of each slot (-1 where its expert is elsewhere), the slot of each place, and each expert's first
    place."""
    local, counts_E = len(experts.gate_up_L2IH), router.counts_E  # type: ignore[arg-type]
    places_R, sources_R = torch.empty_like(ids_R), torch.empty_like(ids_R)
    offsets = torch.empty(local + 1, dtype=torch.int32, device=ids_R.device)
    _place_kernel[(router.routing.num_experts,)](
        ids_R, places_R, sources_R, offsets, ids_R if counts_E is None else counts_E, len(ids_R), experts.first, local,
        HAS_COUNTS=counts_E is not None, SLOTS=_SLOTS, num_warps=4,
    )  # fmt: skip
    return places_R, sources_R, offsets


def _multiply(
    x: Tensor,
    weight_LNK: Tensor,
    bias_LN: Tensor | None,
    out_RN: Tensor,
    sources_R: Tensor | None,
    offsets: Tensor,
    top_k: int,
) -> None:
    """The product of the row of each place, or with `sources` of its slot's row, with its expert's weight."""
    (local, N, K), num_slots = weight_LNK.shape, len(out_RN)
    rows = _FEW_ROWS if num_slots < local * _MANY_ROWS else _MANY_ROWS
    num_tiles = min(num_slots, num_slots // rows + local)
    columns = 64
    _product_kernel[(triton.cdiv(N, columns), num_tiles)](
        x, weight_LNK, out_RN if bias_LN is None else bias_LN, out_RN, offsets if sources_R is None else sources_R,
        offsets, x.stride(0), N, K, local, TOP_K=top_k, GATHER=sources_R is not None, HAS_BIAS=bias_LN is not None,
        EXPERTS=triton.next_power_of_2(local), ROWS=rows, COLUMNS=columns, DEPTH=64, num_warps=4,
    )  # fmt: skip
