"""Compiles the kernels that tests and benchmarks of a GPU launch, without one, into one archive for `gpu_cubins.py`.

    build/gpu-image/bin/python -m tests.gpu_stub.cubins .gpu/cubins.txz      with the versions of the machine

Shapes of the tests in tests/gpu, of the benchmarks `model`, `attention` and `sweep`, of the probe, and of `launches`.
Each part is a process of its own on the driver that computes nothing; what one of them cannot launch is compiled on the
machine. The tests run with `python -O`, so that no `assert` ends them: they compare what nobody computed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu_cubins import pack
from tests.gpu_stub import driver

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = REPOSITORY / "build/gpu-cubins"
TESTS = tuple(f"tests/gpu/test_{name}.py" for name in ("ops", "attention", "fp8", "engine", "graphs"))
PARTS = {
    "models": ["-m", "tests.gpu_stub.launches", str(WORK), "Llama-3-8B", "Qwen3-8B"],
    "benchmarks": ["-m", "tests.gpu_stub.benchmarks", str(WORK)],
    "tests": [
        "-O",
        "-m",
        "pytest",
        "-q",
        "--assert=plain",
        "-p",
        "tests.gpu_stub.plugin",
        "-c",
        "tests/gpu/pytest.ini",
        *TESTS,
    ],
}


def main(archive: str) -> None:
    """Compile, then pack."""
    (WORK / "cache").mkdir(parents=True, exist_ok=True)
    driver.build(WORK)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(WORK / "cache"),
        "TRITON_LIBCUDA_PATH": str(WORK),
        "DISAGG_KERNELS": "triton",
        "DISAGG_GPU_CHECK_DEVICE": "cpu",
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY))),
    }
    for name, arguments in PARTS.items():
        began = time.monotonic()
        with (WORK / f"{name}.log").open("w") as log:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=REPOSITORY, env=environment, stdout=log, stderr=log, check=False
            )
        status = "" if name == "tests" else f", status {done.returncode}"
        print(f"{name}: {time.monotonic() - began:.0f} s{status} ({WORK / name}.log)", flush=True)
        if done.returncode and name != "tests":
            sys.exit(f"{name} failed: {log.name}")
    num_kernels = pack(WORK / "cache", Path(archive))
    print(f"{archive}: {num_kernels} kernels, {Path(archive).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
