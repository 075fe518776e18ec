"""Reads measured kernel times from the parquet files that `aiconfigurator` publishes for a device (extra `plan`).

A folder has some of `gemm_perf`, `context_attention_perf`, `generation_attention_perf`, `custom_allreduce_perf` and
`nccl_perf` (`.parquet`); times in them are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.proto.errors import ConfigError
from disagg.simulator.durations.perf_tables import AllReduceTime, AttentionTime, GemmTime, PerfTables

_GEMM, _CONTEXT, _GENERATION = "gemm_perf", "context_attention_perf", "generation_attention_perf"
_CUSTOM, _NCCL = "custom_allreduce_perf", "nccl_perf"
_HEADS = ("batch_size", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "window_size", "latency")
COLUMNS: dict[str, tuple[str, ...]] = {
    _GEMM: ("gemm_dtype", "m", "n", "k", "latency"),
    _CONTEXT: (*_HEADS, "isl", "step"),
    _GENERATION: (*_HEADS, "isl", "step"),
    _CUSTOM: ("num_gpus", "message_size", "backend", "latency"),
    _NCCL: ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency"),
}
_MS = 1e-3
_EMPTY: dict[str, list[Any]] = {}


def read_perf_tables(folder: Path, *, kv_dtype: str = "bfloat16", flag: str = "--perf-tables") -> PerfTables:
    """The tables of one device's folder.

    Raises:
        ConfigError: pyarrow is not installed, there is no table, or a file lacks a column or cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{flag}: there is no folder {folder}")
    found = {name: _read(folder / f"{name}.parquet", columns, flag) for name, columns in COLUMNS.items()}
    tables = {name: table for name, table in found.items() if table is not None}
    if not tables:
        raise ConfigError(f"{flag}: {folder} has none of {', '.join(f'{name}.parquet' for name in COLUMNS)}")
    return PerfTables(
        source=folder.name,
        gemm=_gemms(tables.get(_GEMM, _EMPTY)),
        prefill_attention=_attention(tables.get(_CONTEXT, _EMPTY), kv_dtype),
        decode_attention=_attention(tables.get(_GENERATION, _EMPTY), kv_dtype),
        all_reduce=[*_custom(tables.get(_CUSTOM, _EMPTY)), *_nccl(tables.get(_NCCL, _EMPTY))],
    )


def _read(file: Path, columns: Sequence[str], flag: str) -> dict[str, list[Any]] | None:
    if not file.is_file():
        return None
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"{flag}: parquet files need pyarrow; run: pip install 'disagg[plan]'") from None
    try:
        present = parquet.read_schema(file).names
        if missing := [name for name in columns if name not in present]:
            raise ConfigError(f"{flag}: {file} lacks the column {', '.join(missing)}")
        read: dict[str, list[Any]] = parquet.read_table(file, columns=list(columns)).to_pydict()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{flag}: {file} cannot be read ({' '.join(str(error).split())[:200]})") from None
    return read


def _rows(table: dict[str, list[Any]], *columns: str) -> Any:
    return zip(*(table.get(name, []) for name in columns), strict=True)


def _gemms(table: dict[str, list[Any]]) -> dict[str, list[GemmTime]]:
    by_dtype: dict[str, list[GemmTime]] = {}
    for dtype, m, n, k, ms in _rows(table, *COLUMNS[_GEMM]):
        by_dtype.setdefault(dtype, []).append(GemmTime(m, n, k, ms * _MS))
    return by_dtype


def _attention(table: dict[str, list[Any]], kv_dtype: str) -> list[AttentionTime]:
    """Rows without a window. In a prompt all tokens are new (`step` 0); in a decode step `step` tokens came before."""
    return [
        AttentionTime(batch, isl + step, heads, kv_heads, head_dim, ms * _MS)
        for batch, heads, kv_heads, head_dim, dtype, window, ms, isl, step in _rows(table, *_HEADS, "isl", "step")
        if window == 0 and dtype == kv_dtype
    ]


def _custom(table: dict[str, list[Any]]) -> list[AllReduceTime]:
    """Rows of all-reduces inside a CUDA graph, as in a decode step."""
    rows = _rows(table, *COLUMNS[_CUSTOM])
    return [AllReduceTime(gpus, size, ms * _MS) for gpus, size, backend, ms in rows if backend.endswith("graph")]


def _nccl(table: dict[str, list[Any]]) -> list[AllReduceTime]:
    """Rows of NCCL all-reduces; message sizes are in bytes."""
    return [
        AllReduceTime(gpus, size, ms * _MS)
        for op, dtype, gpus, size, ms in _rows(table, *COLUMNS[_NCCL])
        if op == "all_reduce" and dtype == "half"
    ]
