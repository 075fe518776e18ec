"""The kernels on Arm, compiled by a cross compiler and run by an emulator, without Python.

`kernels.cpp` compares results with sums in double. What is computed by fp32 multiply-adds has the bits of x86 with
AVX2.
Needs `aarch64-linux-gnu-g++` and `qemu-aarch64` (Debian: g++-aarch64-linux-gnu, qemu-user).
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from disagg.kernels.cpu import build

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROGRAM = Path(__file__).with_name("kernels.cpp")
ARM = build.LEVELS["aarch64"]
AVX2 = next(level for level in build.LEVELS["x86_64"] if level.name == "x86-64-v3")
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@functools.cache
def results(folder: Path, compiler: str, level: build.Level, *emulator: str) -> dict[str, str]:
    """What the program prints, by name."""
    program = folder / level.name
    flags = [flag for flag in build.FLAGS if flag != "-shared"]
    sources = [str(file) for file in (PROGRAM, *build.sources()) if file.suffix == ".cpp"]
    command = [compiler, *flags, *level.flags, "-static", "-pthread", *sources, "-o", str(program)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = (line.rpartition(" ") for line in done.stdout.splitlines())
    return {name: digest for name, _, digest in lines}


def on_arm(folder: Path, level: build.Level) -> dict[str, str]:
    return results(folder, CROSS_COMPILER, level, EMULATOR, "-cpu", "max")


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_results_are_right(folder: Path, level: build.Level) -> None:
    found = on_arm(folder, level)
    kinds = [found[f"arithmetic {kind}"] for kind in range(3)]
    assert kinds == ["bfmmla" if "bf16" in level.features else "fma", "fma", "fma"]
    assert len(found) > 50


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_multiply_adds_have_the_bits_of_x86(folder: Path, level: build.Level) -> None:
    if AVX2 not in build.levels_here():
        pytest.skip("this processor has no AVX2")
    found, expected = on_arm(folder, level), results(folder, build.find_compiler(), AVX2)
    others = {name for name in expected if found[name] != expected[name]}
    own = {name for name in expected if name == "arithmetic 0" or name.startswith("bf16 product")}
    assert others <= (own if "bf16" in level.features else set())
