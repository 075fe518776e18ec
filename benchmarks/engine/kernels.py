"""Every op that the engine calls, in the shapes of the default model: time, rate, share of the machine's ceiling, and
the torch reference beside it.

python -m benchmarks.engine.kernels --json FILE
python -m benchmarks.engine.kernels --threads 2 --only paged_decode_attention

What is read from memory in a step is read from memory here (`kernel_cases.py`). The share is the longer one of reading
at the measured read rate and computing at the measured bf16 rate, over the time. Ops whose operands stay in the caches
have no limit of that kind, and no share. Ours and the reference take turns, in both orders.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.ceilings import Ceilings, measure, print_ceilings
from benchmarks.engine.kernel_cases import Call, Case, makers
from benchmarks.engine.step_limit import Work
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.cluster.system.cores import available_cores, pin_process
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.kernels.cpu import build
from disagg.kernels.dispatch import describe
from tests.support.reports import positive, print_table, report, write_json

REFERENCE_S = 0.3
"""The reference is called until this time is over, or all copies had their turn."""


def time_us(call: Call, copies: int, most_s: float) -> float:
    """Microseconds of one call, on the average over the copies, or over those for which there is time."""
    started = time.perf_counter()
    for i in range(copies):
        call(i)
        elapsed_s = time.perf_counter() - started
        if elapsed_s > most_s:
            return elapsed_s / (i + 1) * 1e6
    return (time.perf_counter() - started) / copies * 1e6


def measure_case(case: Case, ceilings: Ceilings, repeats: int) -> dict[str, Any]:
    """One row."""
    times: dict[str, list[float]] = {"ours": [], "reference": []}
    calls = {"ours": case.ours, "reference": case.reference}
    for call in calls.values():
        call(0)
    for repeat in range(repeats):
        for name in calls if repeat % 2 == 0 else reversed(calls):
            limit_s = float("inf") if name == "ours" else REFERENCE_S
            times[name].append(time_us(calls[name], case.copies, limit_s))
    return row(case, ceilings, statistics.median(times["ours"]), statistics.median(times["reference"]))


def row(case: Case, ceilings: Ceilings, ours_us: float, reference_us: float) -> dict[str, Any]:
    """What is reported of a case; rates and share only where they mean something."""
    found: dict[str, Any] = {
        "op": case.op,
        "shape": case.shape,
        "us": round(ours_us, 2),
        "reference_us": round(reference_us, 2),
        "speedup": round(reference_us / ours_us, 2),
    }
    if case.nbytes:
        found["gb_s"] = round(case.nbytes / ours_us / 1e3, 2)
    if case.flop:
        found["gflop_s"] = round(case.flop / ours_us / 1e3, 1)
        limit_s = Work(name=case.op, nbytes=case.nbytes, flop=case.flop).least_s(ceilings)
        found["share"] = round(limit_s * 1e6 / ours_us, 3)
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The least share and the least speed-up of each op, over its shapes: `<op>_share_min`, `<op>_speedup_min`."""
    flat: dict[str, float] = {}
    for each in rows:
        for figure in ("share", "speedup"):
            if figure in each:
                name = f"{each['op']}_{figure}_min"
                flat[name] = min(flat.get(name, float("inf")), each[figure])
    return flat


def print_rows(rows: Sequence[dict[str, Any]], num_threads: int) -> None:
    """One table."""
    columns = ("op", "shape", "us", "GB/s", "GFLOP/s", "share", "reference us", "times as fast")
    lines = [
        (
            each["op"],
            each["shape"],
            f"{each['us']:.1f}",
            *(f"{each[name]:.{places}f}" if name in each else "" for name, places in (("gb_s", 1), ("gflop_s", 0))),
            f"{each['share']:.2f}" if "share" in each else "",
            f"{each['reference_us']:.1f}",
            f"{each['speedup']:.1f}",
        )
        for each in rows
    ]
    print_table(f"ops of the engine: {describe()}, threads: {num_threads}", columns, lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model of the cache, or a checkpoint folder")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--only", nargs="+", metavar="OP", help="these ops alone")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    pin_process(available_cores()[: options.threads])
    ceilings = measure(options.threads)
    print_ceilings([(options.threads, ceilings, os.environ.get(build.LEVEL, ""))])
    model = read_model_config(resolve_model(options.model))
    rows = []
    with torch.inference_mode():
        for make in makers(model):
            case = make()
            if not options.only or case.op in options.only:
                rows.append(measure_case(case, ceilings, options.repeats))
    print_rows(rows, options.threads)
    if options.json:
        head = {"threads": options.threads, "read_gb_s": ceilings.read_gb_s, "gemm_gflop_s": ceilings.gemm_gflop_s}
        write_json(options.json, report([head, *rows], summary(rows)))
        print(f"report: {options.json}")


if __name__ == "__main__":
    main()
