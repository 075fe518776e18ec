"""Kernels that were compiled in one cache are found in another one, by another process: nothing is compiled again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_cubins import pack, unpack

LAUNCH = """
import sys, torch
from pathlib import Path
from tests.gpu_stub.driver import install
launches = install(Path(sys.argv[1]))
from disagg.kernels.triton.ops import TritonOps
TritonOps().silu_mul(torch.zeros(3, 512, dtype=torch.bfloat16))
assert sum(launches.counts().values()) == 1
"""


def launch(library: Path, cache: Path) -> None:
    """One op in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", LAUNCH, library],
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
    )


def contents(cache: Path) -> dict[str, int]:
    """Files with when they were written."""
    return {path.relative_to(cache).as_posix(): path.stat().st_mtime_ns for path in cache.glob("*/*")}


def test_what_was_compiled_elsewhere_is_not_compiled_again(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tests.gpu_stub import driver

    library = driver.build(tmp_path)
    launch(library, tmp_path / "here")
    assert pack(tmp_path / "here", tmp_path / "cubins.txz") == 1
    (tmp_path / "here").rename(tmp_path / "gone")
    assert unpack(tmp_path / "cubins.txz", tmp_path / "there") == 1
    before = contents(tmp_path / "there")
    launch(library, tmp_path / "there")
    assert contents(tmp_path / "there") == before
