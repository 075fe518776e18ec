"""The attention kernels as cases for the compiler: `triton_compile.compile_kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton

from disagg.kernels.settings.triton_shapes import DecodeChange, PrefillChange
from disagg.kernels.triton.decode_attention import DecodeShape, decode_shape, latent_decode_shape
from disagg.kernels.triton.heads import HeadTiles, head_tiles
from disagg.kernels.triton.prefill_attention import PrefillShape, latent_prefill_shape, prefill_shape
from tests.support.triton_compile import Case

H100_SHARED_BYTES = 227 << 10
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}


def _types(q: str, kv: str) -> dict[str, str]:
    tensors = {"q_ptr": f"*{q}", "key_ptr": f"*{kv}", "value_ptr": f"*{kv}", "tables_ptr": "*i32", "lens_ptr": "*i32"}
    strides = {"q_stride": "i32:16", "block_stride": "i32:16", "table_stride": "i32:16"}
    return tensors | {"out_ptr": f"*{q}"} | strides | {"score_scale": "fp32", "value_scale": "fp32"}


def _constants(
    dim: int, group: int, block_size: int, tile: int, rows: int
) -> dict[str, int | float | bool | str | None]:
    padded = triton.next_power_of_2(dim)
    sizes = {"HEADS": 8, "GROUP": group, "ROWS": rows, "TILE": tile, "KV_BLOCK": block_size}
    sizes |= {"DIM": dim, "DIM_PADDED": padded, "TAIL": 0, "TAIL_PADDED": 0}
    return sizes | {"WINDOW": 0, "SOFT_CAP": 0.0, "sinks_ptr": None}


def decode_case(
    q: str, kv: str, dim: int, group: int, block_size: int, change: Mapping[str, Any] | None = None
) -> Case:
    """For up to 256 sequences, `change` as in
    `DISAGG_TRITON_SHAPES`."""
    shape = decode_shape(DTYPES[kv], triton.next_power_of_2(dim), 132, DecodeChange(**change or {}))
    rows = max(16, triton.next_power_of_2(group))
    return Case(
        module="disagg.kernels.triton.decode_attention",
        kernel="_decode_kernel",
        types=_types(q, kv) | {"sums_ptr": "*fp32", "stats_ptr": "*fp32", "num_sequences": "i32"},
        constants={**_constants(dim, group, block_size, shape.tile, rows), "SEQUENCES_PADDED": 256},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def formed(case: Case, *, window: int = 0, soft_cap: float = 0.0, sinks: bool = False) -> Case:
    """The kernel for another form of attention."""
    constants = {name: value for name, value in case.constants.items() if name != "sinks_ptr" or not sinks}
    changes: dict[str, int | float] = {"WINDOW": window, "SOFT_CAP": soft_cap}
    constants |= {name: value for name, value in changes.items() if name in constants}
    return replace(case, constants=constants, types=case.types | ({"sinks_ptr": "*fp32"} if sinks else {}))


def latent_decode_case(q: str, kv: str, num_heads: int, block_size: int) -> Case:
    """For latent attention of 512 and 64 numbers, on an H100."""
    heads = head_tiles(num_heads, 1, 576, 512, DTYPES[q])
    shape = latent_decode_shape(heads, DTYPES[q], DTYPES[kv], 132, H100_SHARED_BYTES)
    return _latent(decode_case(q, kv, 512, heads.group, block_size), heads, shape, heads.rows)


def latent_prefill_case(q: str, kv: str, num_heads: int, block_size: int, queries: int) -> Case:
    """Of a chunk of `queries` tokens."""
    heads = head_tiles(num_heads, 1, 576, 512, DTYPES[q])
    shape = latent_prefill_shape(heads, DTYPES[q], queries, H100_SHARED_BYTES)
    return _latent(prefill_case(q, kv, 512, heads.group, block_size, queries), heads, shape, shape.rows)


def _latent(case: Case, heads: HeadTiles, shape: DecodeShape | PrefillShape, rows: int) -> Case:
    sizes = {
        "HEADS": heads.count,
        "ROWS": rows,
        "TILE": shape.tile,
        "TAIL": heads.tail,
        "TAIL_PADDED": heads.tail_padded,
    }
    return replace(case, constants=case.constants | sizes, num_warps=shape.num_warps, num_stages=shape.num_stages)


def latent_joins() -> list[Case]:
    """Of decodes, and of the pieces of a split context."""
    sizes = {"GROUP": 64, "HEADS": 2, "DIM": 512, "DIM_PADDED": 512}
    decode, prefill = join_case(), join_prefill_case()
    return [
        replace(decode, constants=decode.constants | sizes | {"PIECES": 16}, num_warps=4),
        replace(prefill, constants=prefill.constants | sizes, num_warps=4),
    ]


def join_case() -> Case:
    """Of decodes."""
    types = {"lens_ptr": "*i32", "out_ptr": "*bf16", "sums_ptr": "*fp32", "stats_ptr": "*fp32"}
    sizes = _constants(128, 4, 16, 64, 16)
    return Case(
        module="disagg.kernels.triton.decode_attention",
        kernel="_join_kernel",
        types=types | {"num_sequences": "i32", "value_scale": "fp32"},
        constants={name: sizes[name] for name in ("HEADS", "GROUP", "TILE", "DIM", "DIM_PADDED", "WINDOW", "sinks_ptr")}
        | {"PROGRAMS": 264, "SEQUENCES_PADDED": 1, "PIECES": 64},
    )


def prefill_case(
    q: str, kv: str, dim: int, group: int, block_size: int, queries: int, change: Mapping[str, Any] | None = None
) -> Case:
    """Of a chunk of `queries` tokens."""
    shape = prefill_shape(DTYPES[q], DTYPES[kv], dim, block_size, group, queries, PrefillChange(**change or {}))
    types = _types(q, kv) | {"items_ptr": "*i32", "sums_ptr": "*fp32", "stats_ptr": "*fp32", "rows_per_block": "i32:16"}
    constants: dict[str, int | float | bool | str | None] = {"BOXES": shape.boxes}
    for boxes in ("key_boxes", "value_boxes"):
        if shape.boxes:
            types[boxes] = f"tensordesc<{kv}[{shape.tile}, {dim}]>"
        else:
            constants[boxes] = None
    return Case(
        module="disagg.kernels.triton.prefill_attention",
        kernel="_prefill_kernel",
        types=types,
        constants={**constants, **_constants(dim, group, block_size, shape.tile, shape.rows)},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def join_prefill_case() -> Case:
    """Of the pieces of a split context."""
    sizes = _constants(128, 4, 16, 64, 128)
    return Case(
        module="disagg.kernels.triton.prefill_attention",
        kernel="_join_prefill_kernel",
        types={"joins_ptr": "*i32", "out_ptr": "*bf16", "sums_ptr": "*fp32", "stats_ptr": "*fp32"}
        | {"value_scale": "fp32", "piece_rows": "i32:16"},
        constants={name: sizes[name] for name in ("HEADS", "GROUP", "DIM", "DIM_PADDED", "sinks_ptr")} | {"JOINED": 16},
    )
