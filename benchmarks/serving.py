"""Output tokens/s, TTFT and TPOT of a cluster at several concurrencies, closed loop.

python benchmarks/serving.py                                  starts a disaggregated cluster
python benchmarks/serving.py --launch both --json FILE        and then a colocated one with as many workers
python benchmarks/serving.py --address 127.0.0.1:8470         measures a cluster that runs already
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import load
from benchmarks.common import print_table, report, write_json
from benchmarks.launch import LAUNCHERS, launched
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub

WARMUP_SEED = 1 << 40
"""Prompts of the warm-up; measured ones count up from 0."""


def num_requests(concurrency: int, asked: int | None) -> int:
    """Requests of one run: enough that every client sends two or more, and at least eight."""
    return max(8, 2 * concurrency) if asked is None else asked


async def measure(address: str, mode: str, options: argparse.Namespace) -> list[load.Run]:
    """All concurrencies and repeats on one cluster, after a warm-up."""
    shape = load.Shape(input_tokens=options.input_tokens, output_tokens=options.output_tokens)
    runs: list[load.Run] = []
    next_seed = options.seed
    async with load.channel(address) as channel:
        stub = load.service(channel)
        model = await load.only_model(stub)
        await load.closed_loop(stub, load.requests(model, shape, WARMUP_SEED, 2), 2)
        for concurrency in options.concurrency:
            for repeat in range(options.repeats):
                count = num_requests(concurrency, options.requests)
                print(f"{mode}: {count} requests, {concurrency} at a time ...", file=sys.stderr, flush=True)
                runs.append(
                    await run_once(stub, load.requests(model, shape, next_seed, count), concurrency, repeat, mode)
                )
                next_seed += count
    return runs


async def run_once(
    stub: InferenceServiceStub, work: Iterator[pb.GenerateRequest], concurrency: int, repeat: int, mode: str
) -> load.Run:
    """One measured run."""
    elapsed_s, timings = await load.closed_loop(stub, work, concurrency)
    return load.Run(mode=mode, concurrency=concurrency, repeat=repeat, elapsed_s=elapsed_s, timings=timings)


def measure_all(options: argparse.Namespace) -> list[load.Run]:
    """The running cluster, or each mode that was asked for in a cluster of its own."""
    if options.address:
        return asyncio.run(measure(options.address, "running", options))
    modes = ["disaggregated", "colocated"] if options.launch == "both" else [options.launch]
    base: dict[str, Any] = yaml.safe_load(options.config.read_text(encoding="utf-8")) or {} if options.config else {}
    runs = []
    for mode in modes:
        print(f"{mode}: starting a cluster ...", file=sys.stderr, flush=True)
        with launched(mode, base, options.launcher) as address:
            runs += asyncio.run(measure(address, mode, options))
    return runs


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--address", help="host:port of a running cluster")
    where.add_argument("--launch", choices=["disaggregated", "colocated", "both"], default="disaggregated")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="ray", help="what starts the processes")
    parser.add_argument("--config", type=Path, help="cluster configuration for --launch")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=positive, help="requests of a run (default: max(8, 2 x concurrency))")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--input-tokens", type=positive, default=256)
    parser.add_argument("--output-tokens", type=positive, default=128)
    parser.add_argument("--seed", type=int, default=0, help="the first prompt's seed: another one gives new prompts")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    runs = measure_all(options)
    columns, lines = load.table(runs)
    print_table(f"{options.input_tokens} tokens in, {options.output_tokens} out, closed loop", columns, lines)
    if options.json:
        write_json(options.json, report([load.row(run) for run in runs], load.summary(runs)))
        print(f"report: {options.json}")


if __name__ == "__main__":
    main()
