"""Measured kernel times from files: columns, units, what is left out, and clear errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg.cli.planning import perf_tables
from disagg.cli.planning.perf_tables import read_perf_tables
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.perf_tables import AllReduceTime, AttentionTime, GemmTime

ATTENTION: dict[str, list[Any]] = {
    "batch_size": [2, 2, 2],
    "num_heads": [8, 8, 8],
    "num_key_value_heads": [4, 4, 4],
    "head_dim": [64, 64, 64],
    "kv_cache_dtype": ["bfloat16", "fp8", "bfloat16"],
    "window_size": [0, 0, 128],
    "latency": [0.5, 0.25, 0.1],
    "isl": [1, 1, 1],
    "step": [127, 127, 127],
}
TABLES: dict[str, dict[str, list[Any]]] = {
    "gemm_perf": {
        "gemm_dtype": ["bfloat16", "fp8"],
        "m": [1, 1],
        "n": [64, 64],
        "k": [32, 32],
        "latency": [2.0, 1.0],
    },
    "generation_attention_perf": ATTENTION,
    "context_attention_perf": ATTENTION | {"isl": [128] * 3, "step": [0] * 3},
    "custom_allreduce_perf": {
        "num_gpus": [2, 2],
        "message_size": [1024, 1024],
        "backend": ["vllm_eager", "vllm_graph"],
        "latency": [9.0, 4.0],
    },
    "nccl_perf": {
        "op_name": ["all_reduce", "all_gather", "all_reduce"],
        "nccl_dtype": ["half", "half", "int8"],
        "num_gpus": [2, 2, 2],
        "message_size": [1024, 1024, 1024],
        "latency": [6.0, 5.0, 5.0],
    },
}


def write(folder: Path, tables: dict[str, dict[str, list[Any]]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, columns in tables.items():
        parquet.write_table(
            pyarrow.table(columns | {"framework": ["x"] * len(columns["latency"])}), folder / f"{name}.parquet"
        )


def check(folder: Path) -> None:
    read = read_perf_tables(folder)
    assert read.source == folder.name
    assert read.gemm == {"bfloat16": [GemmTime(1, 64, 32, 2e-3)], "fp8": [GemmTime(1, 64, 32, 1e-3)]}
    assert read.decode_attention == [AttentionTime(2, 128, 8, 4, 64, 5e-4)]
    assert read.prefill_attention == [AttentionTime(2, 128, 8, 4, 64, 5e-4)]
    assert read.all_reduce == [AllReduceTime(2, 1024, 4e-3), AllReduceTime(2, 1024, 6e-3)]


def test_rows_become_seconds_and_what_is_not_comparable_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perf_tables, "_read", lambda file, columns, flag: TABLES[file.stem])
    check(tmp_path)


def test_parquet_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, TABLES)
    check(tmp_path)


def test_tables_that_are_missing_are_empty(tmp_path: Path) -> None:
    write(tmp_path, {"gemm_perf": TABLES["gemm_perf"]})
    read = read_perf_tables(tmp_path)
    assert (len(read.gemm), read.prefill_attention, read.decode_attention, read.all_reduce) == (2, [], [], [])


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"gemm_perf": {"m": [1], "n": [1], "latency": [1.0]}})
    with pytest.raises(ConfigError, match=r"^--perf-tables: \S+gemm_perf.parquet lacks the column gemm_dtype, k$"):
        read_perf_tables(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "gemm_perf.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match=r"^--perf-tables: \S+gemm_perf.parquet cannot be read"):
        read_perf_tables(tmp_path)


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--perf-tables: \S+ has none of gemm_perf.parquet, context"):
        read_perf_tables(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"--perf-tables: there is no folder {tmp_path / 'no'}")):
        read_perf_tables(tmp_path / "no")


def test_without_pyarrow_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gemm_perf.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"^--perf-tables: parquet files need pyarrow; run: pip install 'disagg\[plan\]'$"
    ):
        read_perf_tables(tmp_path)
