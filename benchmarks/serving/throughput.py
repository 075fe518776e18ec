"""Output tokens/s, TTFT and TPOT of a cluster at several concurrencies, closed loop.

python -m benchmarks.serving                                  starts a disaggregated cluster
python -m benchmarks.serving --launch both --json FILE        and then a colocated one with as many workers
python -m benchmarks.serving --address 127.0.0.1:8470         measures a cluster that runs already
python -m benchmarks.serving --engine                         clusters in turns with their bare engines
python -m benchmarks.serving --peer vllm                      and with vLLM, or with the server at http://HOST:PORT
python -m benchmarks.serving --shapes elastic-2x1 1p1d        the first of our shapes over the others

The last three start every shape of `--shapes` and measure all in both orders (side_by_side.py).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import load
from benchmarks.serving import side_by_side
from benchmarks.serving.parties import SHAPES, WARM_UP_SEED
from benchmarks.serving.side_by_side import num_requests
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support import inference_stub
from tests.support.launch import LAUNCHERS, launched
from tests.support.reports import positive, print_table, report, write_json


async def measure(address: str, mode: str, options: argparse.Namespace) -> list[load.Run]:
    """All concurrencies and repeats on one cluster, after a warm-up."""
    shape = load.RequestSizes(input_tokens=options.input_tokens, output_tokens=options.output_tokens)
    runs: list[load.Run] = []
    next_seed = options.seed
    async with inference_stub.channel(address) as channel:
        stub = inference_stub.service(channel)
        model = await inference_stub.only_model(stub)
        await load.closed_loop(stub, load.requests(model, shape, WARM_UP_SEED, 2), 2)
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
    base = base_config(options)
    runs = []
    for mode in modes:
        print(f"{mode}: starting a cluster ...", file=sys.stderr, flush=True)
        with launched(mode, base, options.launcher) as address:
            runs += asyncio.run(measure(address, mode, options))
    return runs


def base_config(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration file as it is, or nothing."""
    return yaml.safe_load(options.config.read_text(encoding="utf-8")) or {} if options.config else {}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--address", help="host:port of a running cluster")
    where.add_argument("--launch", choices=["disaggregated", "colocated", "both"], default="disaggregated")
    parser.add_argument("--engine", action="store_true", help="beside the bare engines, on the same cores")
    parser.add_argument("--peer", metavar="vllm|URL", help="beside another server that speaks OpenAI's API")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", help="side by side; alone: the first over the others")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="ray", help="what starts the processes")
    parser.add_argument("--config", type=Path, help="cluster configuration for --launch")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=positive, help="requests of a run (default: max(8, 2 x concurrency))")
    parser.add_argument("--repeats", type=positive, help="default: 1; with --engine or --peer 5")
    parser.add_argument("--input-tokens", type=positive, default=256)
    parser.add_argument("--output-tokens", type=positive, default=128)
    parser.add_argument("--seed", type=int, default=0, help="the first prompt's seed: another one gives new prompts")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(argv)
    options.side_by_side = bool(options.engine or options.peer or options.shapes)
    if options.side_by_side and options.address:
        parser.error("--address: --shapes, --engine and --peer start clusters of their own")
    options.shapes = options.shapes or [name for name, shape in SHAPES.items() if shape.mode != "elastic"]
    options.repeats = options.repeats or (5 if options.side_by_side else 1)
    return options


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    title = f"{options.input_tokens} tokens in, {options.output_tokens} out, closed loop"
    if options.side_by_side:
        runs = side_by_side.measure(options, base_config(options))
        side_by_side.print_tables(runs, title)
        rows = side_by_side.comparison_rows(runs)
        summary = side_by_side.summary(runs)
    else:
        runs = measure_all(options)
        print_table(title, *load.table(runs))
        rows, summary = [], load.summary(runs)
    if options.json:
        write_json(options.json, report([*rows, *(load.row(run) for run in runs)], summary))
        print(f"report: {options.json}")
