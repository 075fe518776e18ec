"""Which launch shapes the sweep tries, in which order, what it calls the best, and what an error costs."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.report import RowFile, read_rows
from benchmarks.gpu.shapes import (
    BUILT_IN,
    LOADED,
    KernelShape,
    Usage,
    best,
    candidates,
    fits,
    programs_at_once,
    read_table,
    rounds,
    speed_up,
    variable,
)
from benchmarks.gpu.sweep import SECTION, Sizes, Sweep, name_of, times_of
from benchmarks.gpu.timing import attempt
from disagg.kernels.settings import triton_shapes as launch_shapes
from disagg.kernels.triton.decode_attention import decode_shape
from disagg.kernels.triton.prefill_attention import prefill_shape

DECODE, PREFILL = BUILT_IN["decode"], BUILT_IN["prefill"]


def decode(**changes: int) -> KernelShape:
    return KernelShape("decode", tuple((DECODE.values | changes).items()))


def prefill(**changes: int | bool) -> KernelShape:
    return KernelShape("prefill", tuple((PREFILL.values | changes).items()))


def test_the_built_in_shapes_are_those_of_the_kernels() -> None:
    made = decode_shape(torch.bfloat16, 128, 1)
    assert decode(tile=made.tile, programs=made.num_programs, warps=made.num_warps, stages=made.num_stages) == DECODE
    for block_size, expected in ((64, PREFILL), (16, LOADED)):
        long = prefill_shape(torch.bfloat16, torch.bfloat16, 128, block_size, 4, 2048)
        values = {"warps": long.num_warps, "stages": long.num_stages}
        assert prefill(rows=long.rows, tile=long.tile, **values, boxes=long.boxes) == expected


@pytest.mark.parametrize(
    ("usage", "num_warps", "expected"),
    [
        (Usage(166, 0, 104460), 4, 2),  # of shared memory: 2 x (104460 + 1024) of 233472 bytes
        (Usage(166, 0, 38916), 4, 3),  # of registers: 3 x 4 x 5376 of 65536
        (Usage(128, 0, 37896), 4, 4),
        (Usage(255, 168, 98324), 4, 2),
        (Usage(255, 0, 98324), 8, 1),
        (Usage(32, 0, 232449), 4, 0),  # more than a block can have
        (Usage(32, 0, 232448), 4, 1),
    ],
)
def test_programs_at_once_on_a_multiprocessor(usage: Usage, num_warps: int, expected: int) -> None:
    assert programs_at_once(usage, num_warps) == expected


def test_a_shape_fits_if_its_programs_are_at_once_and_it_spills_little() -> None:
    usage = Usage(166, 0, 71688)
    assert [fits(decode(stages=5, programs=count), usage) for count in (1, 2, 3, 4)] == [True, True, True, False]
    assert [fits(prefill(), Usage(255, spilled, 98324)) for spilled in (0, 256, 257)] == [True, True, False]


def test_the_table_has_all_shapes_and_the_built_in_ones_fit() -> None:
    table = read_table()
    assert {shape.code for shape in candidates()} == set(table)
    assert {DECODE, PREFILL} <= {shape for each in rounds(candidates(), table) for shape in each}


def test_boxes_lie_within_a_block() -> None:
    assert {shape.values["tile"] for shape in candidates(64) if shape.values.get("boxes")} == {32, 64}
    assert {shape.values["tile"] for shape in candidates(128) if shape.values.get("boxes")} == {32, 64, 128}
    assert {shape.values["tile"] for shape in candidates(32) if shape.values.get("boxes")} == {32}
    assert not [shape for shape in candidates(16) if shape.values.get("boxes")]


def test_what_tells_most_comes_first() -> None:
    shapes = [
        decode(tile=32, stages=3),
        prefill(tile=128, warps=8, boxes=False, stages=4),
        prefill(stages=4),
        LOADED,
        decode(programs=3),
        prefill(warps=8, stages=3),
        prefill(boxes=False),
        decode(stages=5),
        PREFILL,
        DECODE,
    ]
    spilled = {PREFILL.code: 168, prefill(stages=4).code: 40}
    table = {shape.code: Usage(100, spilled.get(shape.code, 0), 1000) for shape in shapes}
    assert rounds(shapes, table) == [
        [DECODE, PREFILL, LOADED],
        [
            decode(programs=3),
            prefill(tile=128, warps=8, boxes=False, stages=4),
            decode(stages=5),
            prefill(boxes=False),
            prefill(stages=4),
        ],
        [decode(tile=32, stages=3), prefill(warps=8, stages=3)],
    ]
    table[DECODE.code] = Usage(100, 0, 100000)  # also the code of three programs
    assert [shape for shape in rounds(shapes, table)[1] if shape.kind == "decode"] == [decode(stages=5)]


def test_the_best_is_the_fastest_in_the_mean_of_all_cells() -> None:
    half, mixed, cut = decode(stages=5), decode(stages=3), decode(tile=32)
    times = {
        DECODE: {(1, 8): 10.0, (2, 8): 40.0},
        half: {(1, 8): 8.0, (2, 8): 40.0},
        mixed: {(1, 8): 5.0, (2, 8): 50.0},
        cut: {(1, 8): 1.0},
        prefill(stages=4): {(64, 0): 1.0},
    }
    assert speed_up(half, times) == pytest.approx(math.sqrt(10 / 8))
    assert speed_up(mixed, times) == pytest.approx(math.sqrt(10 / 5 * 40 / 50))
    assert speed_up(cut, times) is None
    assert speed_up(prefill(stages=4), times) is None  # the built-in one was not measured
    assert best(times) == {"decode": (mixed, speed_up(mixed, times))}


def test_the_value_of_the_variable_is_taken_by_the_kernels() -> None:
    changes = launch_shapes.parse(variable([decode(stages=5), prefill(boxes=False)]))
    assert changes.decode == launch_shapes.DecodeChange(64, 2, 4, 5)
    assert changes.prefill == launch_shapes.PrefillChange(128, 64, 4, 2, False)


# ---------------------------------------------------------------- measured, on a CPU


SIZES = Sizes(
    shape=attention.TensorSizes(
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        block_size=16,
        dtype=torch.float16,
        decode_cells=((1, 20),),
        prefill_chunks=((4, 8),),
    ),
    calls={"decode": 1, "prefill": 1},
    repeats=1,
    num_shapes=1,
)


def test_each_shape_is_launched_and_an_error_costs_that_shape_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_TRITON_SHAPES", '{"decode": {"stages": 9}}')
    path = tmp_path / "rows"
    sweep = Sweep(SIZES, torch.device("cpu"), RowFile(path, SECTION, with_targets=False))
    launched: list[int] = []
    shape_of = launch_shapes.changes

    def seen(environ: dict[str, str]) -> launch_shapes.Changes:
        found = shape_of(environ)
        if found.decode.stages == 5:
            raise RuntimeError("out of resource")
        launched.append(found.decode.stages or 0)
        return found

    monkeypatch.setattr("disagg.kernels.triton.attention.changes", seen)
    for shape in (DECODE, decode(stages=5), decode(stages=3), PREFILL):
        attempt(sweep.rows, name_of(shape), functools.partial(sweep.measure, shape))
    sweep.report_best()
    assert list(dict.fromkeys(launched)) == [7, 3, 0]
    assert os.environ["DISAGG_TRITON_SHAPES"] == '{"decode": {"stages": 9}}', "as before"
    *rows, last = read_rows(path)
    assert [(row.name, row.status) for row in rows] == [
        ("decode: tile 64, programs 2, warps 4, stages 7", "info"),
        ("decode: tile 64, programs 2, warps 4, stages 5", "failed"),
        ("decode: tile 64, programs 2, warps 4, stages 3", "info"),
        ("prefill: rows 128, tile 64, warps 4, stages 2, boxes true", "info"),
    ]
    assert rows[1].detail == "RuntimeError: out of resource"
    assert (rows[0].value, last.name) == (1.0, "best of 3")
    value = last.detail.split("'")[1]
    assert set(json.loads(value)) == {"decode", "prefill"}
    assert list(times_of(read_rows(path), candidates())) == [DECODE, decode(stages=3), PREFILL]
    assert times_of(read_rows(path), candidates())[PREFILL] == pytest.approx(sweep.times[PREFILL], abs=0.06)


def test_a_wrong_result_is_no_shape_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    sweep = Sweep(SIZES, torch.device("cpu"), RowFile(path, SECTION, with_targets=False))
    sweep.measure(DECODE)
    monkeypatch.setattr(Sweep, "_decode", lambda *_: lambda: torch.full((1, 2, 16), torch.nan))
    attempt(sweep.rows, "nan", functools.partial(sweep.measure, decode(stages=3)))
    assert decode(stages=3) not in sweep.times
    failed = read_rows(path)[-1]
    assert failed.status == "failed"
    assert "(1, 20): the result differs from that of the built-in shape by nan of its norm" in failed.detail
