"""Decode attention: one query token per sequence, the context of all sequences shared out evenly.

A context is cut into tiles. All tiles of all (sequence, KV head) pairs, the items, stand in one row, item after item,
and each of a fixed number of programs takes an equal run of that row (Sanovar et al. 2024, "Lean Attention"). So every
program reads the same number of bytes whatever the lengths are, and the grid depends on neither the lengths nor the
batch: a CUDA graph can be replayed with other ones. A program computes from the lengths where its run begins. An item
that lies in one run is written at once. The others are left in pieces, which a second kernel joins.

With a window an item has the tiles from the one on that holds the first token which the query sees. In latent attention
the items of a sequence are not KV heads but tiles of its query heads (`heads`), which all read the only KV head.

A program has at most two pieces: of the item that began before its run (piece 0), and of the one that begins in it and
goes on behind it (piece 1). They hold unnormalised fp32 sums, the sum of weights and the largest score.

Shapes: S sequences, G query heads of an item, M those padded to the 16 rows that a tensor core takes, C tokens of a
tile, D dim of the values, R further dim of the keys in latent attention, P programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.ops import AttentionForm
from disagg.kernels.settings.triton_shapes import DecodeChange
from disagg.kernels.triton.attend import LOG2_E, attend, first_seen, load_rows, nothing_yet, with_sinks, write_rows
from disagg.kernels.triton.heads import MUCH_SHARED_BYTES, HeadTiles, head_tiles
from disagg.kernels.triton.jit import jit

AS_BUILT_IN = DecodeChange()


@jit
def _num_tiles(length: tl.tensor, TILE: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Tiles of a context of this length."""
    if WINDOW:
        return (length + TILE - 1) // TILE - first_seen(length - 1, WINDOW) // TILE
    return (length + TILE - 1) // TILE


@jit
def _tiles(
    lens_ptr: tl.tensor, num_sequences: tl.tensor, TILE: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr
) -> tl.tensor:
    """Tiles of each sequence's context, for one KV head; 0 behind the last sequence."""
    sequences_S = tl.arange(0, PADDED)
    lens_S = tl.load(lens_ptr + sequences_S, mask=sequences_S < num_sequences, other=0)
    return _num_tiles(lens_S, TILE, WINDOW)


@jit
def _run(
    lens_ptr: tl.tensor,
    num_sequences: tl.tensor,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQUENCES_PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The tiles of the row that this program takes, and the sequence, head and first tile of the item that they begin
    in. No tiles (position >= end) for a program behind the last tile."""
    tiles_S = _tiles(lens_ptr, num_sequences, TILE, WINDOW, SEQUENCES_PADDED)
    ends_S = tl.cumsum(tiles_S, 0) * HEADS
    total = tl.sum(tiles_S, 0) * HEADS
    run = tl.cdiv(total, tl.num_programs(0))
    position = tl.program_id(0) * run
    end = tl.minimum(position + run, total)
    sequence = tl.sum((ends_S <= position).to(tl.int32), 0)
    item = tl.sum(tl.where(ends_S <= position, tiles_S, 0), 0) * HEADS
    num_tiles = _num_tiles(tl.load(lens_ptr + sequence, mask=position < end, other=1), TILE, WINDOW)
    head = (position - item) // num_tiles
    return position, end, sequence, head, item + head * num_tiles


@jit
def _keep_piece(
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    piece: tl.tensor,
    held_MD: tl.tensor,
    sums_MD: tl.tensor,
    mass_M: tl.tensor,
    top_M: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    """Store a piece for the joining kernel, in rows [piece, query head of the group]."""
    rows_M = piece * GROUP + tl.arange(0, ROWS)
    held_M = tl.arange(0, ROWS) < GROUP
    tl.store(sums_ptr + rows_M[:, None] * DIM + tl.arange(0, DIM_PADDED)[None, :], sums_MD, mask=held_MD)
    tl.store(stats_ptr + rows_M * 2, mass_M, mask=held_M)
    tl.store(stats_ptr + rows_M * 2 + 1, top_M, mask=held_M)


@partial(jit, do_not_specialize=["num_sequences", "table_stride"])
def _decode_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    num_sequences: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    SEQUENCES_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> None:
    position, end, sequence, head, item = _run(lens_ptr, num_sequences, HEADS, TILE, WINDOW, SEQUENCES_PADDED)
    rows_M = tl.arange(0, ROWS)
    dims_D = tl.arange(0, DIM_PADDED)
    held_M = rows_M < GROUP
    held_MD = held_M[:, None] & (dims_D < DIM)[None, :]
    while position < end:
        length = tl.load(lens_ptr + sequence)
        num_tiles = _num_tiles(length, TILE, WINDOW)
        first = position - item
        last = tl.minimum(end - item, num_tiles)
        if first < last:
            heads_M = head * GROUP + rows_M
            q_at = q_ptr + sequence.to(tl.int64) * q_stride
            q_MD = load_rows(q_at, heads_M * (DIM + TAIL), held_M, DIM, DIM_PADDED, True)
            q_tail_MR, at_head = None, head * KV_BLOCK * DIM
            if TAIL:
                q_tail_MR = load_rows(q_at + DIM, heads_M * (DIM + TAIL), held_M, TAIL, TAIL_PADDED, True)
                at_head *= 0
            limit_M = tl.zeros([ROWS], tl.int32) + length
            table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
            begin = first_seen(length - 1, WINDOW)
            cache = (begin, length, table_ptr, key_ptr + at_head, value_ptr + at_head, block_stride, score_scale)
            tiles = (first, last)
            if WINDOW:
                tiles = (first + begin // TILE, last + begin // TILE)
            state = nothing_yet(ROWS, DIM_PADDED, WINDOW)
            queries = (q_MD, q_tail_MR)
            state = attend(
                *queries, *state, limit_M, *tiles, *cache, TILE, KV_BLOCK, DIM, DIM_PADDED, TAIL, TAIL_PADDED, True,
                WINDOW, SOFT_CAP,
            )  # fmt: skip
            if (first == 0) & (last == num_tiles):
                at_MD = (sequence * HEADS * GROUP + heads_M)[:, None] * DIM + dims_D[None, :]
                sums_MD, mass_M = state[0], state[1]
                if sinks_ptr is not None:
                    sums_MD, mass_M = with_sinks(*state, sinks_ptr, heads_M, held_M)
                write_rows(out_ptr, at_MD, held_MD, sums_MD, mass_M, value_scale)
            else:
                piece = tl.program_id(0) * 2 + (first == 0).to(tl.int32)
                _keep_piece(sums_ptr, stats_ptr, piece, held_MD, *state, GROUP, ROWS, DIM, DIM_PADDED)
        item += num_tiles
        position = item
        head += 1
        if head == HEADS:
            head = 0
            sequence += 1


@partial(jit, do_not_specialize=["num_sequences"])
def _join_kernel(
    lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    num_sequences: tl.tensor,
    value_scale: tl.tensor,
    PROGRAMS: tl.constexpr,
    SEQUENCES_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """A program per (item, query head): join its pieces; zeros for no context; nothing if one program had it all."""
    sequence = tl.program_id(0) // HEADS
    tiles_S = _tiles(lens_ptr, num_sequences, TILE, WINDOW, SEQUENCES_PADDED)
    run = tl.maximum(tl.cdiv(tl.sum(tiles_S, 0) * HEADS, PROGRAMS), 1)
    before = tl.sum(tl.where(tl.arange(0, SEQUENCES_PADDED) < sequence, tiles_S, 0), 0) * HEADS
    num_tiles = _num_tiles(tl.load(lens_ptr + sequence), TILE, WINDOW)
    item = before + (tl.program_id(0) % HEADS) * num_tiles
    first_program = item // run
    num_pieces = tl.cdiv(item + num_tiles, run) - first_program
    if num_tiles == 0:
        num_pieces = 0
    if num_pieces == 1:
        return

    dims_D = tl.arange(0, DIM_PADDED)
    sums_D = tl.zeros([DIM_PADDED], tl.float32)
    mass = 0.0
    top = float("-inf")
    for first_piece in range(0, num_pieces, PIECES):
        pieces_W = first_piece + tl.arange(0, PIECES)
        held_W = pieces_W < num_pieces
        rows_W = ((first_program + pieces_W) * 2 + (pieces_W == 0).to(tl.int32)) * GROUP + tl.program_id(1)
        mass_W = tl.load(stats_ptr + rows_W * 2, mask=held_W, other=0.0)
        top_W = tl.load(stats_ptr + rows_W * 2 + 1, mask=held_W, other=float("-inf"))
        held_WD = held_W[:, None] & (dims_D < DIM)[None, :]
        sums_WD = tl.load(sums_ptr + rows_W[:, None] * DIM + dims_D[None, :], mask=held_WD, other=0.0)
        new_top = tl.maximum(top, tl.max(top_W, 0))
        weight_W = tl.exp2(top_W - new_top)
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(mass_W * weight_W, 0)
        sums_D = sums_D * shrink + tl.sum(sums_WD * weight_W[:, None], 0)
        top = new_top
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + (tl.program_id(0) % HEADS) * GROUP + tl.program_id(1)) * LOG2_E
        new_top = tl.maximum(top, sink)
        mass = mass * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        sums_D *= tl.exp2(top - new_top)
    share = value_scale / tl.where(mass > 0.0, mass, 1.0)
    out_row = tl.program_id(0) * GROUP + tl.program_id(1)
    tl.store(out_ptr + out_row * DIM + dims_D, (sums_D * share).to(out_ptr.dtype.element_ty), mask=dims_D < DIM)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """Launch parameters of the decode kernel."""

    tile: int
    """Tokens that a program reads at a time; a power of two."""
    num_programs: int
    """Number of programs that share the contexts: all of them run at once, so that none starts late."""
    num_warps: int
    num_stages: int
    """Stages of the compiler's pipeline. Block ids are loaded first, and K and V by them: about half of the stages are
    tiles."""


def _pieces_at_once(num_items: int, num_programs: int, dim_padded: int) -> int:
    """Pieces of an item that the joining kernel loads at a time: all of them, if the items are equally long and the
    registers suffice."""
    most = 64 if dim_padded <= 256 else 16
    return int(triton.next_power_of_2(min(most, num_programs // num_items + 2)))


def decode_shape(
    kv_dtype: torch.dtype, dim_padded: int, num_multiprocessors: int, change: DecodeChange = AS_BUILT_IN
) -> DecodeShape:
    """Launch two programs per multiprocessor, each with three tiles of K and V, 16 KiB each, in shared memory.

    So at least 64 KiB a multiprocessor are on their way while a tile is computed; 4.8 TB/s and 700 ns of latency ask
    for 25. More than two programs, or larger tiles, do not fit into shared memory or registers.
    """
    tile = max(16, min(128, 16384 // (dim_padded * kv_dtype.itemsize)))
    return DecodeShape(
        tile=change.tile or tile,
        num_programs=(change.programs or 2) * num_multiprocessors,
        num_warps=change.warps or 4,
        num_stages=change.stages or 7,
    )


def latent_decode_shape(
    heads: HeadTiles, q_dtype: torch.dtype, kv_dtype: torch.dtype, num_multiprocessors: int, shared_bytes: int
) -> DecodeShape:
    """Launch eight warps, among whose registers the sums are divided.

    Few heads wait for memory: of 16, two programs fit on a multiprocessor of an H100, or one whose tiles become 16 bits
    in registers. 64 wait for products, and take tiles of 64 tokens.
    """
    has_most = shared_bytes >= MUCH_SHARED_BYTES
    tile, programs, num_stages = 32, 1, 5
    if q_dtype == torch.float32:
        tile, num_stages = 16, 3
    elif heads.rows >= 64:
        tile, num_stages = 64 if has_most else 32, 3
    elif kv_dtype != q_dtype:
        num_stages = 9
    elif heads.rows == 16 and has_most:
        programs = 2
    return DecodeShape(tile=tile, num_programs=programs * num_multiprocessors, num_warps=8, num_stages=num_stages)


def _pieces(num_rows: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the pieces: sums, and (sum of weights, largest score)."""
    sums = torch.empty((num_rows, dim), dtype=torch.float32, device=device)
    return sums, torch.empty((num_rows, 2), dtype=torch.float32, device=device)


def decode_attention(
    q_SND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    block_tables_SM: Tensor,
    context_lens_S: Tensor,
    score_scale: float,
    value_scale: float,
    shape: DecodeShape,
    form: AttentionForm,
    out_SND: Tensor | None = None,
) -> Tensor:
    """Compute [S, N, dim of the values] from arguments that `attention` has checked; `score_scale` is the form's, with
    log2(e) and what the keys are stored with in it."""
    (S, N, D), (_, K, block_size, _) = q_SND.shape, key_cache_NKBD.shape
    heads = head_tiles(N, K, D, value_cache_NKBD.shape[3], q_SND.dtype)
    if out_SND is None:
        out_SND = torch.empty((S, N, heads.dim), dtype=q_SND.dtype, device=q_SND.device)
    sums, stats = _pieces(shape.num_programs * 2 * heads.group, heads.dim, q_SND.device)
    common = {
        "SEQUENCES_PADDED": triton.next_power_of_2(S),
        "HEADS": heads.count,
        "GROUP": heads.group,
        "TILE": shape.tile,
        "DIM": heads.dim,
        "DIM_PADDED": heads.dim_padded,
        "WINDOW": form.window or 0,
    }
    _decode_kernel[(shape.num_programs,)](
        q_SND,
        key_cache_NKBD,
        value_cache_NKBD,
        block_tables_SM,
        context_lens_S,
        form.sinks_N,
        out_SND,
        sums,
        stats,
        S,
        q_SND.stride(0),
        key_cache_NKBD.stride(0),
        block_tables_SM.stride(0),
        score_scale,
        value_scale,
        ROWS=heads.rows,
        KV_BLOCK=block_size,
        TAIL=heads.tail,
        TAIL_PADDED=heads.tail_padded,
        SOFT_CAP=form.soft_cap or 0.0,
        **common,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    # Of the padded number, so that there is no variant which only a number between two powers of two needs.
    pieces = _pieces_at_once(triton.next_power_of_2(S) * heads.count, shape.num_programs, heads.dim_padded)
    _join_kernel[(S * heads.count, heads.group)](
        context_lens_S,
        form.sinks_N,
        out_SND,
        sums,
        stats,
        S,
        value_scale,
        PROGRAMS=shape.num_programs,
        PIECES=pieces,
        **common,
        num_warps=1 if pieces <= 16 and heads.dim_padded <= 256 else 4,
    )
    return out_SND
