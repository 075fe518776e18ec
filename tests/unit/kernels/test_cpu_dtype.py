"""In which dtype a CPU computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.kernels.cpu_dtype import CpuDtype, choose, find_cpu_dtype

NO_COMPILER = "no C++ compiler on PATH (looked for c++, g++, clang++)"
NARROW = "it has no vectors of 256 bits or more, by which bf16 is widened"
AVX2, BF16, AMX = {"avx2", "fma"}, {"avx2", "avx512f", "avx512_bf16"}, {"avx512f", "amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("simd", "lacks", "features", "expected"),
    [
        ("avx512", "", BF16, CpuDtype("bfloat16", "C++ for avx512")),
        ("avx2 (x86-64-v3)", "", BF16, CpuDtype("bfloat16", "C++ for avx2 (x86-64-v3)")),
        ("neon", "", {"asimd"}, CpuDtype("bfloat16", "C++ for neon")),
        ("", NO_COMPILER, AVX2, CpuDtype("float32", "torch", NO_COMPILER)),
        ("", NO_COMPILER, {"asimd"}, CpuDtype("float32", "torch", NO_COMPILER)),
        ("", NO_COMPILER, BF16, CpuDtype("bfloat16", "torch", NO_COMPILER)),
        ("", NO_COMPILER, AMX, CpuDtype("bfloat16", "torch", NO_COMPILER)),
        ("", NO_COMPILER, set(), CpuDtype("float32", "torch", NO_COMPILER)),
        ("generic", "", set(), CpuDtype("float32", "C++ for generic", NARROW)),
        ("sse2 (x86-64)", "", BF16, CpuDtype("float32", "C++ for sse2 (x86-64)", NARROW)),
    ],
)
def test_bf16_only_where_its_products_are_fast(simd: str, lacks: str, features: set[str], expected: CpuDtype) -> None:
    assert choose(simd, lacks, frozenset(features)) == expected


def test_without_a_compiler_or_with_the_reference_asked_for_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_cpu_dtype({}).slow_because == NO_COMPILER
    assert find_cpu_dtype({"DISAGG_KERNELS": "reference"}).slow_because == "DISAGG_KERNELS=reference"
    assert find_cpu_dtype({"DISAGG_KERNELS": "auto,-embed"}).slow_because == NO_COMPILER
