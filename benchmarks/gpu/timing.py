"""Times of GPU work, and the limits of this GPU that they are compared with.

A kernel is timed inside a CUDA graph of several calls, so that the host's launches are not in the figure; what cannot
be captured is timed call by call. On a CPU the same functions time the same calls with the host's clock, to test the
programs that use them.

A measurement that fails costs itself only. After an error that a device gives for every later call, too, the process
replaces itself with one that leaves out what was tried (`--not`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import isolation
from benchmarks.gpu.report import RowFile

_cuda: Any = torch.cuda

GIB = 1 << 30
PINNED_BOTH = "both ways at once"


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The rates that this GPU reached in this run."""

    read_gb_s: float
    """Bytes read per second by the best of several reductions, or by a copy (both directions counted)."""
    gemm_tflop_s: float
    """bf16 matrix product of 8192 x 8192 x 8192, random numbers."""
    fp8_gemm_tflop_s: float = 0.0
    """0 where there is none."""
    to_host_gb_s: float = 0.0
    """Rate from the device to pinned memory of the host."""
    to_device_gb_s: float = 0.0
    """Rate from pinned memory of the host to the device."""


def parse(description: str | None) -> argparse.Namespace:
    """The arguments that every section has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=Path, required=True, help="file that gets a line of JSON for each finding")
    parser.add_argument("--ceilings", type=Path, required=True, help="file with the measured limits")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, no targets")
    parser.add_argument(
        isolation.OPTION,
        dest="left_out",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="measurements that are not made",
    )
    return parser.parse_args()


def row_file(arguments: argparse.Namespace, section: str) -> RowFile:
    """The file of this section's findings."""
    return RowFile(arguments.rows, section, with_targets=arguments.device == "cuda")


def read_ceilings(path: Path) -> Ceilings:
    """Of the section that ran first; without them the others have nothing to compare with.

    Raises:
        SystemExit: there are none.
    """
    if not path.exists():
        sys.exit("the limits of this machine were not measured")
    return Ceilings(**json.loads(path.read_text(encoding="utf-8")))


def write_ceilings(path: Path, ceilings: Ceilings) -> None:
    """Write the ceilings for the sections that follow."""
    path.write_text(json.dumps(asdict(ceilings)), encoding="utf-8")


def attempt(rows: RowFile, name: str, measure: Callable[[], object]) -> bool:
    """Make one measurement, unless it is left out; whether that went well. What it raises is a row, and its memory is
    given back, so that the next one can try. After an error that the device gives for ever this process is replaced by
    one that goes on."""
    if name in isolation.left_out():
        return True
    is_well = True
    try:
        measure()
    except Exception as error:
        rows.failed(name, error)
        isolation.go_on(name, error)
        is_well = False
    isolation.tried(name)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return is_well


# ---------------------------------------------------------------- clocks


def kernel_ms(run: Callable[[], object], device: torch.device, *, calls: int = 10, repeats: int = 15) -> float:
    """Median time of one call of `run`, which does not wait for the host. It is called several times in a row."""
    for _ in range(2):
        run()
    if device.type != "cuda":
        return _host_ms(run, repeats=3)
    torch.cuda.synchronize(device)
    graph, stream = _cuda.CUDAGraph(), _cuda.Stream(device)
    stream.wait_stream(_cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    _cuda.current_stream(device).wait_stream(stream)
    with _cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return _event_ms(graph.replay, device, repeats) / calls


def call_ms(run: Callable[[], object], device: torch.device, *, calls: int = 4, repeats: int = 15) -> float:
    """Median time of one call of `run`, as a stream sees several in a row: launches count where they are what the GPU
    waits for."""

    def run_all() -> None:
        for _ in range(calls):
            run()

    return _event_ms(run_all, device, repeats) / calls if device.type == "cuda" else _host_ms(run, repeats=3)


def in_turns(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A call of the next one each time, round and round."""
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def wall_ms(run: Callable[[], object], *, repeats: int) -> float:
    """Median time of one call of `run`, which returns when its result is on the host."""
    run()
    return _host_ms(run, repeats=repeats)


def _event_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _host_ms(run: Callable[[], object], *, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


# ---------------------------------------------------------------- limits


def measure_ceilings(device: torch.device) -> tuple[Ceilings, dict[str, float]]:
    """The limits, and each bandwidth by the op that was timed (GB/s)."""
    on_gpu = device.type == "cuda"
    rates = _bandwidths(device, 4 * GIB if on_gpu else 1 << 22)
    to_host, to_device, both = _pinned_rates(device, GIB if on_gpu else 1 << 20)
    size = 8192 if on_gpu else 256
    flop = 2.0 * size**3
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    gemm = flop / kernel_ms(lambda: a @ b.T, device) / 1e9
    ceilings = Ceilings(
        read_gb_s=max(rates.values()),
        to_host_gb_s=to_host,
        to_device_gb_s=to_device,
        gemm_tflop_s=gemm,
        fp8_gemm_tflop_s=_fp8_rate(a, b, flop, device) if on_gpu else 0.0,
    )
    return ceilings, {**rates, PINNED_BOTH: both}


def _pinned_rates(device: torch.device, nbytes: int) -> tuple[float, float, float]:
    """GB/s of copies of `nbytes` bytes: device to pinned memory, back, and both at the same time, added up."""
    on_gpu = device.type == "cuda"
    on_device = [torch.randint(256, (nbytes,), dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    other: Any = _cuda.Stream(device) if on_gpu else None

    def out() -> None:
        on_host[0].copy_(on_device[0], non_blocking=True)

    def back() -> None:
        on_device[1].copy_(on_host[1], non_blocking=True)

    def both() -> None:
        if not on_gpu:
            out()
            back()
            return
        current = _cuda.current_stream(device)
        other.wait_stream(current)
        with _cuda.stream(other):
            out()
        back()
        current.wait_stream(other)

    one_way = [nbytes / call_ms(each, device, repeats=5) / 1e6 for each in (out, back)]
    return one_way[0], one_way[1], 2 * nbytes / call_ms(both, device, repeats=5) / 1e6


def _bandwidths(device: torch.device, nbytes: int) -> dict[str, float]:
    """GB/s by op, of `nbytes` random bytes that no cache holds."""
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return {
        "copy": 2 * nbytes / call_ms(lambda: target.copy_(source), device) / 1e6,
        "sum": nbytes / call_ms(source.sum, device) / 1e6,
        "max": nbytes / call_ms(source.amax, device) / 1e6,
    }


def _fp8_rate(a: Tensor, b: Tensor, flop: float, device: torch.device) -> float:
    one = torch.ones((), device=device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    try:
        return flop / kernel_ms(lambda: torch._scaled_mm(a8, b8.T, one, one, out_dtype=torch.bfloat16), device) / 1e9
    except RuntimeError:
        return 0.0


def main() -> None:
    """The section `limits`: what the others are compared with."""
    arguments = parse(main.__doc__)
    rows, device = row_file(arguments, "limits"), torch.device(arguments.device)
    ceilings, rates = measure_ceilings(device)
    write_ceilings(arguments.ceilings, ceilings)
    for op, rate in rates.items():
        detail = {"copy": "read and written", PINNED_BOTH: "pinned memory, added up"}.get(op, "read")
        rows.add(f"bandwidth, {op}", rate, "GB/s", detail=detail)
    rows.add("bandwidth, device to host", ceilings.to_host_gb_s, "GB/s", detail="pinned memory")
    rows.add("bandwidth, host to device", ceilings.to_device_gb_s, "GB/s", detail="pinned memory")
    rows.add("bf16 matrix product", ceilings.gemm_tflop_s, "TFLOP/s", detail="8192 x 8192 x 8192")
    rows.add("fp8 matrix product", ceilings.fp8_gemm_tflop_s, "TFLOP/s", detail="8192 x 8192 x 8192; 0: not there")


if __name__ == "__main__":
    main()
