"""What the compiler makes of the attention kernels for a Hopper GPU: next to no spilled registers, and programs fit
beside each other on a multiprocessor, as the launch shapes count on."""

from __future__ import annotations

import pytest
import torch
import triton

from disagg.kernels.triton.decode_attention import decode_shape
from disagg.kernels.triton.prefill_attention import prefill_shape
from tests.support.triton_compile import Case, compile_kernels

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for programs."""
REGISTERS = 65536
"""Of a multiprocessor."""
SPILLED_OF_FP8 = 8
"""Bytes a thread, of the decode kernel for fp8 and heads of 128: two registers with Triton 3.7, none with 3.6."""
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
    return sizes | {"DIM": dim, "DIM_PADDED": padded}


def decode_case(q: str, kv: str, dim: int, group: int, block_size: int) -> Case:
    shape = decode_shape(DTYPES[kv], triton.next_power_of_2(dim), 132)
    rows = max(16, triton.next_power_of_2(group))
    return Case(
        module="disagg.kernels.triton.decode_attention",
        kernel="_decode_kernel",
        types=_types(q, kv) | {"sums_ptr": "*fp32", "stats_ptr": "*fp32", "num_sequences": "i32"},
        constants={**_constants(dim, group, block_size, shape.tile, rows), "SEQUENCES_PADDED": 256},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def join_case() -> Case:
    types = {"lens_ptr": "*i32", "out_ptr": "*bf16", "sums_ptr": "*fp32", "stats_ptr": "*fp32"}
    sizes = _constants(128, 4, 16, 64, 16)
    return Case(
        module="disagg.kernels.triton.decode_attention",
        kernel="_join_kernel",
        types=types | {"num_sequences": "i32", "value_scale": "fp32"},
        constants={name: sizes[name] for name in ("HEADS", "GROUP", "TILE", "DIM", "DIM_PADDED")}
        | {"PROGRAMS": 264, "SEQUENCES_PADDED": 1, "PIECES": 64},
    )


def prefill_case(q: str, kv: str, dim: int, group: int, block_size: int, queries: int) -> Case:
    shape = prefill_shape(DTYPES[q], DTYPES[kv], dim, block_size, group, queries)
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
    sizes = _constants(128, 4, 16, 64, 128)
    return Case(
        module="disagg.kernels.triton.prefill_attention",
        kernel="_join_prefill_kernel",
        types={"joins_ptr": "*i32", "out_ptr": "*bf16", "sums_ptr": "*fp32", "stats_ptr": "*fp32"}
        | {"value_scale": "fp32", "piece_rows": "i32:16"},
        constants={name: sizes[name] for name in ("HEADS", "GROUP", "DIM", "DIM_PADDED")} | {"JOINED": 16},
    )


@pytest.mark.slow
def test_two_decode_programs_fit_on_a_multiprocessor() -> None:
    fp8 = decode_case("bf16", "fp8e4nv", 128, 4, 16)
    cases = [
        decode_case("bf16", "bf16", 128, 4, 16),
        decode_case("bf16", "bf16", 128, 8, 64),
        decode_case("bf16", "bf16", 64, 3, 16),
        decode_case("fp16", "fp16", 80, 1, 32),
        fp8,
        decode_case("bf16", "fp8e4nv", 64, 8, 64),
        join_case(),
        join_prefill_case(),
    ]
    for case, usage in zip(cases, compile_kernels(cases), strict=True):
        assert usage.spilled_bytes <= (SPILLED_OF_FP8 if case is fp8 else 0), case
        assert 2 * usage.shared_bytes <= SHARED_BYTES, case
        assert 2 * usage.registers * 32 * case.num_warps <= REGISTERS, case


@pytest.mark.slow
def test_prefill_programs_fit_on_a_multiprocessor_and_two_where_boxes_are_fetched() -> None:
    cases = [
        prefill_case("bf16", "bf16", 128, 4, 16, 4096),
        prefill_case("bf16", "bf16", 128, 8, 64, 4096),
        prefill_case("bf16", "bf16", 64, 4, 128, 4096),
        prefill_case("bf16", "bf16", 64, 3, 16, 4096),
        prefill_case("fp16", "fp16", 80, 1, 32, 64),
        prefill_case("bf16", "bf16", 128, 4, 16, 1),
        prefill_case("bf16", "fp8e4nv", 128, 4, 64, 4096),
        prefill_case("fp32", "fp32", 64, 3, 16, 4096),
    ]
    assert [case.constants["BOXES"] for case in cases] == [False, True, True, False, False, False, False, False]
    for case, usage in zip(cases, compile_kernels(cases), strict=True):
        programs = 2 if case.constants["BOXES"] else 1
        # Scalars that the loop over full tiles does not need may be parked: one register of all 255 is 4 bytes.
        assert usage.spilled_bytes <= 192, case
        assert programs * usage.shared_bytes <= SHARED_BYTES, case
        assert programs * usage.registers * 32 * case.num_warps <= REGISTERS, case
