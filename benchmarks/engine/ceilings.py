"""What this machine can do at most: how fast it reads memory, and how fast it multiplies.

    python -m benchmarks.engine.ceilings [--threads 1 2]

Two loops of our own, a part on each core. One adds up a buffer far larger than the caches. The other one multiplies in
registers alone, by the instructions for products of bf16 weights that the processor has, or the level that
`DISAGG_CPU_LEVEL` names: matrix tiles, pairs of bf16, or fp32 multiply-adds. Each rate is the best of a few bursts:
what slows a burst down are others. The median burst of reading is kept, too: it is what reading gets while others take
their part. Benchmarks measure both beside the thing itself, so that its share is of the same minute.
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

from disagg.cluster.system.cores import available_cores
from disagg.kernels import dispatch
from disagg.kernels.cpu import build
from tests.support.reports import print_table

READ_BYTES = 512 << 20
"""Bytes that all cores read together; more than any cache holds."""
READ_BURSTS = 6
PRODUCT_ROUNDS = 200_000
"""Rounds of products of each core, 12 vectors a round: some milliseconds."""
PRODUCT_BURSTS = 6
PAUSE_S = 0.02
"""Before what follows: threads of OpenMP look for work for some milliseconds."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings of the cores that measured them."""

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
    dispatch.set_num_threads(num_threads)
    measured = cores[:num_threads]
    read = [READ_BYTES / read_s(measured) / 1e9 for _ in range(READ_BURSTS)]
    products = [_product_rate(measured) for _ in range(PRODUCT_BURSTS)]
    time.sleep(PAUSE_S)
    return Ceilings(
        read_gb_s=round(max(read), 2),
        gemm_gflop_s=round(max(products), 1),
        median_read_gb_s=round(statistics.median(read), 2),
    )


def _seconds(cores: Sequence[int], part: Callable[[int], object]) -> float:
    """How long `part(index)` takes on all these cores at once, from when all are ready to the last one's end."""
    ready = threading.Barrier(len(cores) + 1)

    def run(index: int) -> None:
        os.sched_setaffinity(0, [cores[index]])  # of this thread
        ready.wait()
        part(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(cores))]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


# ---------------------------------------------------------------- reading


def read_s(cores: Sequence[int]) -> float:
    """How long these cores take to read `READ_BYTES` once, in seconds."""
    parts = np.array_split(_buffer(), len(cores))
    return _seconds(cores, lambda index: _read_loop()(parts[index].ctypes.data, parts[index].size))


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


def _product_rate(cores: Sequence[int]) -> float:
    """GFLOP/s."""
    made = [0] * len(cores)

    def multiply(index: int) -> None:
        made[index] = _product_loop()(PRODUCT_ROUNDS)

    taken_s = _seconds(cores, multiply)
    return sum(made) / taken_s / 1e9


@functools.cache
def _product_loop() -> Callable[[int], int]:
    """The compiled loop, for the level that is chosen; `BuildError` where there is no compiler."""
    source = Path(__file__).resolve().with_name("product_rate.cpp")
    headers = [file for file in build.sources() if file.suffix == ".h"]
    level = build.level_of(os.environ)
    library = build.build([source, *headers], build.cache_folder(), build.find_compiler(), level)
    function = ctypes.CDLL(str(library.path)).disagg_multiply
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64]
    return function


# ---------------------------------------------------------------- program


def print_ceilings(measured: Sequence[tuple[int, Ceilings, str]]) -> None:
    """The table that benchmarks begin with: by threads, and the level if it is not this processor's own."""
    columns = ("threads", "read GB/s", "median", "GFLOP/s")
    lines = [
        (
            ", ".join(filter(None, (str(num_threads), level))),
            f"{each.read_gb_s:.1f}",
            f"{each.median_read_gb_s:.1f}",
            f"{each.gemm_gflop_s:.0f}",
        )
        for num_threads, each, level in measured
    ]
    print_table("this machine", columns, lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=list(range(1, len(available_cores()) + 1)))
    options = parser.parse_args()
    level = os.environ.get(build.LEVEL, "")
    print_ceilings([(count, measure(count), level) for count in options.threads])


if __name__ == "__main__":
    main()
