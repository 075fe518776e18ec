"""Gaps between the tokens of running streams while long prompts arrive, in clusters of several shapes.

python -m benchmarks.serving.interference --json FILE

Some streams run; each second a long prompt with a short answer comes in. Measured is every gap between two tokens of
the streams, in the client. Each shape is compared with itself at rest: the same streams, of the same lengths, with
nothing else. Prompts always go through a prefill worker where there is one (`local_prefill: never`). On the two cores
that the default shapes need, the client shares the first one with the gateway and the first worker.

The streams of shape `elastic` (and of `slack`, its workers in mode colocated) have a TPOT target: `--target-over-idle`
times their median gap at rest. It is kept by a stream whose mean gap is at most that.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks import load
from disagg.cluster.system.cores import available_cores, pin_process
from disagg.gateway.requests.validate import TPOT_METADATA
from disagg.loadtests.generator.load_generator import GENERATOR_NICE
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support import inference_stub
from tests.support.launch import LAUNCHERS, launched
from tests.support.pace import on_time, steady
from tests.support.reports import percentile, positive, print_table, report, write_json

SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "disaggregated": ("disaggregated", {}),
    "chunked": ("colocated", {"scheduling": "decode_first"}),
    "prefill_first": ("colocated", {"scheduling": "prefill_first"}),
    "elastic": ("elastic", {}),
    "slack": ("colocated", {"scheduling": "slack"}),
}
"""Name -> mode and what is special about its colocated pool; each shape has two workers of one core."""
WITH_TARGET = ("elastic", "slack")
STREAM_SEED = 1 << 41
ARRIVAL_SEED = 1 << 42
REPORTED = (50, 90, 99)
PAUSE_S = 1.0
"""Seconds in which the cluster drops the cancelled requests."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One shape, at rest or with arrivals."""

    shape: str
    with_arrivals: bool
    repeat: int
    gaps_ms: tuple[float, ...]
    """Between the tokens of the streams, all streams together; tokens of one message have gaps of 0. Of a stream that
    was cut, also from its last token to the end."""
    num_cut: int
    """Streams that had not ended after `--max-seconds`."""
    num_arrivals: int
    """Long prompts that were answered while the streams ran."""
    arrival_ttft_ms: tuple[float, ...]
    mean_gaps_ms: tuple[float, ...] = ()
    """Mean gap of each stream, in milliseconds."""
    target_ms: float | None = None
    """The mean gap that streams should have, in milliseconds."""

    @property
    def num_kept(self) -> int:
        """Streams within their target."""
        return 0 if self.target_ms is None else sum(gap <= self.target_ms for gap in self.mean_gaps_ms)

    @property
    def name(self) -> str:
        """The name in tables and keys."""
        return f"{self.shape} {'with arrivals' if self.with_arrivals else 'at rest'}"


def base_config(options: argparse.Namespace, shape: str) -> dict[str, Any]:
    """The cluster's configuration, but for mode and port."""
    base: dict[str, Any] = yaml.safe_load(options.config.read_text(encoding="utf-8")) or {} if options.config else {}
    special = {"token_budget": options.token_budget, **SHAPES[shape][1]}
    pools = base.get("pools", {})
    return {
        **base,
        "placement": {**base.get("placement", {}), "local_prefill": "never", "admission": False},
        "pools": {
            **pools,
            "colocated": {"size": 2, **pools.get("colocated", {}), **special},
            "workers": {"size": 2, **pools.get("workers", {})},
        },
    }


def generate_request(model: pb.Model, seed: int, num_input: int, num_output: int) -> pb.GenerateRequest:
    """A greedy request with a prompt of its own."""
    return next(load.requests(model, load.RequestSizes(input_tokens=num_input, output_tokens=num_output), seed, 1))


async def read(
    stub: InferenceServiceStub, request: pb.GenerateRequest, times: list[float], tpot_ms: float | None = None
) -> None:
    """Note when each token of an answer comes in, on `time.perf_counter`."""
    metadata = () if tpot_ms is None else ((TPOT_METADATA, f"{tpot_ms:g}"),)
    async for response in stub.Generate(request, metadata=metadata):
        times += [time.perf_counter()] * len(response.delta.token_ids)


async def arrive(stub: InferenceServiceStub, prompts: Iterator[pb.GenerateRequest], ttfts_ms: list[float]) -> None:
    """Send a prompt each second, whatever became of the last one, until cancelled."""

    async def one(request: pb.GenerateRequest) -> None:
        sent = time.perf_counter()
        times: list[float] = []
        await read(stub, request, times)
        ttfts_ms.append((times[0] - sent) * 1e3)

    async with asyncio.TaskGroup() as group:
        async for _ in on_time(steady(1.0)):
            group.create_task(one(next(prompts)))


async def measure(
    address: str,
    shape: str,
    repeat: int,
    with_arrivals: bool,
    options: argparse.Namespace,
    target_ms: float | None = None,
) -> Measurement:
    """All streams from start to end, with or without arrivals, for `max_seconds` at most."""
    kind = 2 * repeat + with_arrivals
    async with inference_stub.channel(address) as channel:
        stub = inference_stub.service(channel)
        model = await inference_stub.only_model(stub)
        first_seed = STREAM_SEED + kind * options.streams
        streams = [
            generate_request(model, first_seed + index, options.stream_input_tokens, options.stream_output_tokens)
            for index in range(options.streams)
        ]
        long = load.RequestSizes(input_tokens=options.arrival_input_tokens, output_tokens=options.arrival_output_tokens)
        prompts = load.requests(model, long, ARRIVAL_SEED + (kind << 20), 1 << 20)
        ttfts_ms: list[float] = []
        times: list[list[float]] = [[] for _ in streams]
        running = [asyncio.create_task(read(stub, *pair, target_ms)) for pair in zip(streams, times, strict=True)]
        arrivals = [asyncio.create_task(arrive(stub, prompts, ttfts_ms))] if with_arrivals else []
        ended, cut = await asyncio.wait(running, timeout=options.max_seconds)
        now = time.perf_counter()
        for task in (*cut, *arrivals):
            task.cancel()
        await asyncio.gather(*cut, *arrivals, return_exceptions=True)
        await asyncio.gather(*ended)  # raises what a stream has raised
        await asyncio.sleep(PAUSE_S)
    gaps_ms = [
        [(after - before) * 1e3 for before, after in pairwise([*stream, now] if task in cut else stream)]
        for stream, task in zip(times, running, strict=True)
    ]
    return Measurement(
        shape=shape,
        with_arrivals=with_arrivals,
        repeat=repeat,
        gaps_ms=tuple(gap for stream in gaps_ms for gap in stream),
        num_cut=len(cut),
        num_arrivals=len(ttfts_ms),
        arrival_ttft_ms=tuple(ttfts_ms),
        mean_gaps_ms=tuple(sum(stream) / len(stream) for stream in gaps_ms if stream),
        target_ms=target_ms,
    )


def measure_all(options: argparse.Namespace) -> list[Measurement]:
    """Each shape in a cluster of its own, at rest and with arrivals in turn."""
    found = []
    for shape in options.shapes:
        print(f"{shape}: starting a cluster ...", file=sys.stderr, flush=True)
        with launched(SHAPES[shape][0], base_config(options, shape), options.launcher) as address, on_first_core():
            found += asyncio.run(measure_shape(address, shape, options))
    return found


async def measure_shape(address: str, shape: str, options: argparse.Namespace) -> list[Measurement]:
    """All measurements of one cluster, after a warm-up: rest, arrivals, arrivals, rest, ..."""
    await measure(address, shape, options.repeats, False, warm_up_options(options))
    found: list[Measurement] = []
    for repeat in range(options.repeats):
        for with_arrivals in (False, True) if repeat % 2 == 0 else (True, False):
            target_ms = None
            if shape in WITH_TARGET and found:
                target_ms = options.target_over_idle * percentile(gaps_of(found, shape, False), 50)
            measured = await measure(address, shape, repeat, with_arrivals, options, target_ms)
            p99 = percentile(measured.gaps_ms, 99)
            kept = "" if target_ms is None else f", {measured.num_kept} streams within {target_ms:.1f} ms"
            print(f"{measured.name}, repeat {repeat}: P99 {p99:.1f} ms{kept}", file=sys.stderr, flush=True)
            found.append(measured)
    return found


@contextmanager
def on_first_core() -> Iterator[None]:
    """Pin this process to the core that the gateway has, and let it run before others there, where that is allowed:
    a client that waits for the core would measure itself. Clusters are started with all cores, at the usual priority.
    """
    cores = available_cores()
    pin_process(cores[:1])
    set_niceness(GENERATOR_NICE)
    try:
        yield
    finally:
        set_niceness(0)
        pin_process(cores)


def set_niceness(niceness: int) -> None:
    """Of all threads of this process; nothing happens where it is not allowed."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def warm_up_options(options: argparse.Namespace) -> argparse.Namespace:
    """The same options with a short duration."""
    return argparse.Namespace(**{**vars(options), "stream_output_tokens": 16})


# ---------------------------------------------------------------- what is reported


def gaps_of(measurements: Sequence[Measurement], shape: str, with_arrivals: bool) -> list[float]:
    """The gaps of all repeats."""
    return [
        gap
        for measured in measurements
        if (measured.shape, measured.with_arrivals) == (shape, with_arrivals)
        for gap in measured.gaps_ms
    ]


def summary(measurements: Sequence[Measurement]) -> dict[str, float]:
    """`itl_p99_ms_<shape>`, `itl_p99_idle_ms_<shape>`, and their quotient `itl_p99_over_idle_<shape>`;
    `target_kept_<shape>`: the share of streams with arrivals within their target."""
    flat: dict[str, float] = {}
    for shape in dict.fromkeys(measured.shape for measured in measurements):
        busy = percentile(gaps_of(measurements, shape, True), 99)
        idle = percentile(gaps_of(measurements, shape, False), 99)
        flat[f"itl_p99_ms_{shape}"] = round(busy, 3)
        flat[f"itl_p99_idle_ms_{shape}"] = round(idle, 3)
        flat[f"itl_p99_over_idle_{shape}"] = round(busy / idle, 3)
        targeted = [each for each in measurements if each.shape == shape and each.with_arrivals and each.target_ms]
        if targeted:
            num_streams = sum(len(each.mean_gaps_ms) for each in targeted)
            flat[f"target_kept_{shape}"] = round(sum(each.num_kept for each in targeted) / num_streams, 3)
    return flat


def row(measured: Measurement) -> dict[str, Any]:
    """A measurement as one JSON row."""
    return {
        "shape": measured.shape,
        "with_arrivals": measured.with_arrivals,
        "repeat": measured.repeat,
        "gaps": len(measured.gaps_ms),
        "cut_streams": measured.num_cut,
        "arrivals": measured.num_arrivals,
        **{f"itl_p{percent}_ms": round(percentile(measured.gaps_ms, percent), 3) for percent in REPORTED},
        "itl_max_ms": round(max(measured.gaps_ms), 3),
        "target_ms": measured.target_ms,
        "streams_within_target": measured.num_kept,
        "mean_gaps_ms": [round(gap, 3) for gap in measured.mean_gaps_ms],
        "arrival_ttft_ms": [round(ttft, 1) for ttft in measured.arrival_ttft_ms],
    }


def table(measurements: Sequence[Measurement]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column titles and one line a shape, at rest and with arrivals."""
    columns = ("streams", "gaps", "ITL ms p50", "p90", "p99", "max", "p99 over rest", "arrivals", "their TTFT p50 ms")
    lines = []
    for shape in dict.fromkeys(measured.shape for measured in measurements):
        idle_p99 = percentile(gaps_of(measurements, shape, False), 99)
        for with_arrivals in (False, True):
            gaps = gaps_of(measurements, shape, with_arrivals)
            ttfts = [t for m in measurements if m.shape == shape for t in m.arrival_ttft_ms] if with_arrivals else []
            lines.append(
                (
                    f"{shape} {'with arrivals' if with_arrivals else 'at rest'}",
                    str(len(gaps)),
                    *(f"{percentile(gaps, percent):.1f}" for percent in REPORTED),
                    f"{max(gaps):.1f}",
                    f"{percentile(gaps, 99) / idle_p99:.2f}",
                    str(len(ttfts)),
                    f"{percentile(ttfts, 50):.0f}" if ttfts else "-",
                )
            )
    return columns, lines


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=["disaggregated", "chunked", "prefill_first"]
    )
    parser.add_argument("--launcher", choices=LAUNCHERS, default="processes", help="what starts the processes")
    parser.add_argument("--config", type=Path, help="cluster configuration that all shapes share")
    parser.add_argument("--token-budget", type=positive, default=512, help="tokens of a step of a colocated worker")
    parser.add_argument("--streams", type=positive, default=8)
    parser.add_argument("--stream-input-tokens", type=positive, default=128)
    parser.add_argument("--stream-output-tokens", type=positive, default=1536)
    parser.add_argument("--max-seconds", type=positive, default=60, help="streams that starve are cut then")
    parser.add_argument("--arrival-input-tokens", type=positive, default=2000)
    parser.add_argument("--arrival-output-tokens", type=positive, default=32)
    parser.add_argument("--target-over-idle", type=float, default=1.5, help="of streams that have a TPOT target")
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    measurements = measure_all(options)
    columns, lines = table(measurements)
    title = (
        f"gaps of {options.streams} streams while {options.arrival_input_tokens} tokens in, "
        f"{options.arrival_output_tokens} out arrive each second"
    )
    print_table(title, columns, lines)
    if options.json:
        write_json(options.json, report([row(measured) for measured in measurements], summary(measurements)))
        print(f"report: {options.json}")


if __name__ == "__main__":
    main()
