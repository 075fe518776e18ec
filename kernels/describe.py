"""What this machine offers to the engine, as one JSON object on standard output: `python -m disagg.kernels.describe`.

A program of its own, so that a torch that cannot be loaded does not end the caller. It compiles the C++ kernels if that
was not done yet.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import torch

from disagg.kernels import dispatch
from disagg.kernels.attention import PROVIDERS
from disagg.kernels.attention_choice import probe
from disagg.kernels.cpu_dtype import find_cpu_dtype
from disagg.kernels.ops import AttentionSpec

LDCONFIG = "/sbin/ldconfig"
"""Program by which Triton finds the driver."""


def triton_lacks() -> list[str]:
    """What Triton needs to launch kernels and this machine lacks: it compiles its launcher at the first use."""
    compiler = os.environ.get("CC", "gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    found = {
        "triton": bool(importlib.util.find_spec("triton")),
        f"a C compiler ({compiler})": bool(shutil.which(compiler) or shutil.which("clang")),
        f"Python's headers ({header})": header.exists(),
        LDCONFIG: "TRITON_LIBCUDA_PATH" in os.environ or Path(LDCONFIG).exists(),
    }
    return [name for name, is_there in found.items() if not is_there]


USUAL = AttentionSpec(
    device="cuda:0",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=64,
    scale=128**-0.5,
)
"""Attention of Llama 3 8B in the form that GPU pools use."""


def attention_refusals(has_gpu: bool) -> dict[str, str | None]:
    """Reasons why providers of attention cannot be used on the first GPU, by name; None for one that gives right
    results. Without a GPU none is tried."""
    return {kind.name: kind.takes(USUAL) or (probe(kind.name, USUAL) if has_gpu else None) for kind in PROVIDERS}


ROWS, OUTPUTS, INPUTS = 256, 16384, 4096
"""Sizes of the measured products: the weight is larger than usual caches."""


def speed(dtype: torch.dtype, num_threads: int) -> dict[str, float]:
    """Speed at which the engine's products read weights, with one row, and multiply, with many; the best of several."""
    dispatch.set_num_threads(num_threads)
    weight = dispatch.pack_weight(torch.full((OUTPUTS, INPUTS), 0.5, dtype=dtype))

    def least_s(num_rows: int, repeats: int) -> float:
        rows = torch.full((num_rows, INPUTS), 0.5, dtype=dtype)
        times = []
        for _ in range(repeats + 1):
            began_s = time.perf_counter()
            dispatch.linear(rows, weight, None)
            times.append(time.perf_counter() - began_s)
        return min(times[1:])

    return {
        "threads": num_threads,
        "read_gb_s": OUTPUTS * INPUTS * dtype.itemsize / least_s(1, 5) / 1e9,
        "gflop_s": 2 * ROWS * OUTPUTS * INPUTS / least_s(ROWS, 2) / 1e9,
    }


def main() -> None:
    """Print versions, devices and kernels of this process as JSON."""
    cpu_dtype, num_cores = find_cpu_dtype(os.environ), len(os.sched_getaffinity(0))
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "num_cuda_devices": torch.cuda.device_count(),
        "triton_lacks": triton_lacks(),
        "attention": attention_refusals(torch.cuda.is_available()),
        "cpu_kernels": dispatch.describe(),
        "cpu_dtype": cpu_dtype.dtype,
        "speed": [speed(getattr(torch, cpu_dtype.dtype), threads) for threads in sorted({1, num_cores})],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
