"""What this machine can do at most: how fast it reads memory, and how fast it multiplies bf16 matrices.

    python -m benchmarks.engine.ceilings [--threads 1 2]

The read rate is that of a loop of our own that adds up a buffer far larger than the caches, one part on each core. The
rate of products is the faster one of oneDNN's and our own at `GEMM_SHAPE`. Each is the best of a few bursts: what
slows a burst down are others. The median burst is kept, too: it is what reading gets while others take their part.
Benchmarks measure both beside the thing itself, so that its share is of the same minute.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.common import print_table
from disagg.cluster.system.cores import available_cores
from disagg.kernels import dispatch, linear
from disagg.kernels.cpu import build

READ_BYTES = 512 << 20
"""Of all cores together; more than any cache."""
READ_BURSTS = 6
GEMM_SHAPE = (1024, 2048, 2048)
"""Rows, inputs, outputs: 8.6 GFLOP, of which the weights (8 MiB) stay in the second-level cache or near it."""
GEMM_BURSTS = 6
PAUSE_S = 0.02
"""Between products and what follows: threads of OpenMP look for work for some milliseconds."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the cores that measured it."""

    read_gb_s: float
    gemm_gflop_s: float
    median_read_gb_s: float


def measure(num_threads: int) -> Ceilings:
    """The ceilings of `num_threads` cores, the first ones that this process may use. Takes about a second.

    Leaves the number of compute threads of this process at `num_threads`.

    Raises:
        ValueError: for more threads than cores.
    """
    cores = available_cores()
    if not 1 <= num_threads <= len(cores):
        raise ValueError(f"num_threads: must be in [1, {len(cores)}], not {num_threads}")
    rates = [READ_BYTES / _read_s(cores[:num_threads]) / 1e9 for _ in range(READ_BURSTS)]
    gemm_gflop_s = _gemm_gflop_s(num_threads)
    time.sleep(PAUSE_S)
    return Ceilings(
        read_gb_s=round(max(rates), 2),
        gemm_gflop_s=round(gemm_gflop_s, 1),
        median_read_gb_s=round(statistics.median(rates), 2),
    )


# ---------------------------------------------------------------- reading


def _read_s(cores: Sequence[int]) -> float:
    """How long the buffer takes, a part on each core, from when all are ready to the last one's end."""
    parts = np.array_split(_buffer(), len(cores))
    ready = threading.Barrier(len(cores) + 1)

    def read(core: int, part: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        os.sched_setaffinity(0, [core])  # of this thread
        ready.wait()
        _read_loop()(part.ctypes.data, part.size)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(cores, parts, strict=True)]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


@functools.cache
def _buffer() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.ones(READ_BYTES // 4, dtype=np.int32)


@functools.cache
def _read_loop() -> Callable[[int, int], int]:
    """The compiled loop; `BuildError` where there is no compiler."""
    source = Path(__file__).resolve().with_name("read_rate.cpp")
    library = build.build([source], build.cache_folder(), build.find_compiler())
    function = ctypes.CDLL(str(library.path)).disagg_read  # gives the GIL away while it reads
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
    return function


# ---------------------------------------------------------------- products


def _gemm_gflop_s(num_threads: int) -> float:
    dispatch.set_num_threads(num_threads)
    rows, inputs, outputs = GEMM_SHAPE
    x = torch.randn(rows, inputs).bfloat16()
    weight = torch.randn(outputs, inputs).bfloat16()
    products = (linear.pack_weight(weight), dispatch.pack_weight(weight))
    best_s = min(_product_s(x, packed) for _ in range(GEMM_BURSTS) for packed in products)
    return 2 * rows * inputs * outputs / best_s / 1e9


def _product_s(x: torch.Tensor, weight: torch.Tensor | linear.PackedWeight) -> float:
    started = time.perf_counter()
    dispatch.linear(x, weight, None)
    return time.perf_counter() - started


# ---------------------------------------------------------------- program


def line(num_threads: int, ceilings: Ceilings) -> tuple[str, str, str, str]:
    """A row of the table."""
    reads = (f"{ceilings.read_gb_s:.1f}", f"{ceilings.median_read_gb_s:.1f}")
    return (str(num_threads), *reads, f"{ceilings.gemm_gflop_s:.0f}")


def print_ceilings(by_threads: Sequence[tuple[int, Ceilings]]) -> None:
    """The table that benchmarks begin with."""
    columns = ("threads", "read GB/s", "median", "bf16 GFLOP/s")
    print_table("this machine", columns, [line(*each) for each in by_threads])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=list(range(1, len(available_cores()) + 1)))
    options = parser.parse_args()
    print_ceilings([(count, measure(count)) for count in options.threads])


if __name__ == "__main__":
    main()
