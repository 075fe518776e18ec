"""What a second gateway brings, and what the death of one costs.

    python -m benchmarks.gateways [--json FILE]

Real clusters of processes with the model without weights, whose steps are slowed down to a fixed pace:

    capacity   tokens per CPU second of each gateway process under the same streams; two gateways together over one
    death      kill -9 of one of two gateways with many streams: are all whole and identical, and how long is a gap
    prefix     share of prompt tokens that was found cached, with two gateways and with one
    burst      requests sent through both at once: how far the workers' counts are apart

Clients, workers and gateways share the machine. So capacity is not a rate by the clock: a gateway uses one core at
most, and what it can carry on a core of its own is its tokens over its CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from disagg.client import AsyncClient, Delta
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.process_tools import allow_open_files
from disagg.engine.fake_runner import fake_generate
from disagg.proto.control import GatewayRecord
from disagg.proto.errors import ConfigError, UnavailableError
from tests.support.process_figures import cpu_seconds
from tests.support.reports import print_table, report, write_json

STEP_MS = 25
"""Pause before each step of a worker."""
MODEL_LEN = 8192
PREFIX_TOKENS = 512
TARGET_RATIO, TARGET_GAP_S, TARGET_REUSE, TARGET_SPREAD = 1.8, 3.0, 0.97, 3
_OUTPUT = re.compile(r"^disagg_output_tokens_total (\S+)$", re.MULTILINE)
Row = dict[str, Any]


@contextmanager
def running(replicas: int, **pools: int) -> Iterator[ProcessCluster]:
    """A cluster of paced workers; `pools`: their sizes."""
    pool = {"num_blocks": 1 << 16, "max_num_seqs": 512, "cores": "none"}
    config = {
        "model": {"path": "fake", "max_model_len": MODEL_LEN},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "replicas": replicas},
        "placement": {"local_prefill": "never"},
        "pools": {name: {"size": size, **pool} for name, size in pools.items()},
        "recovery": {"failpoints": True},
    }
    with (
        patch.dict(os.environ, {"DISAGG_FAILPOINTS": f"engine.step=hang(ms={STEP_MS})"}),
        ProcessCluster(parse_config(config)) as cluster,
    ):
        yield cluster


def prompt_of(index: int) -> range:
    """Forty tokens, others for each index."""
    return range(index % 500, index % 500 + 40)


async def read(
    client: AsyncClient, index: int, num_tokens: int, seen: Callable[[Delta], None] = lambda delta: None
) -> list[int]:
    """The tokens of one stream."""
    found: list[int] = []
    async for delta in client.stream(prompt_of(index), max_tokens=num_tokens, temperature=0.0, ignore_eos=True):
        seen(delta)
        found.extend(delta.token_ids)
    return found


def addresses(cluster: ProcessCluster) -> list[str]:
    """Addresses at which each gateway is reached alone."""
    return [gateway.own_address or gateway.address for gateway in cluster.state().gateways]


# ---------------------------------------------------------------- capacity


async def tokens_through(gateway: GatewayRecord) -> float:
    """Output tokens that it has passed on so far."""
    async with httpx.AsyncClient() as http:
        shown = (await http.get(f"http://{gateway.own_http_address or gateway.http_address}/metrics")).text
    return float(_OUTPUT.findall(shown)[0])


async def measure_capacity(num_streams: int, window_s: float, repeats: int) -> list[Row]:
    """Windows of one gateway and of two, with as many streams in all."""
    rows: list[Row] = []
    for replicas in (1, 2):
        with running(replicas, prefill=1, decode=2) as cluster:
            async with AsyncExitStack() as stack:
                tasks = []
                for number, address in enumerate(addresses(cluster)):
                    share = num_streams // replicas
                    clients = [await stack.enter_async_context(AsyncClient(address)) for _ in range(4)]
                    first = number * share
                    tasks += [
                        asyncio.create_task(read(clients[i % 4], first + i, MODEL_LEN - 48)) for i in range(share)
                    ]
                try:
                    await until(lambda: running_requests(cluster, num_streams))
                    for _ in range(repeats):
                        rows += await measure_window(cluster, window_s)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
    return rows


async def running_requests(cluster: ProcessCluster, expected: int) -> bool:
    """Whether all of them decode."""
    async with AsyncClient(cluster.address) as client:
        state = await client.cluster_state()
    return sum(worker.sequences for worker in state.workers if "decode" in worker.roles) >= expected


async def measure_window(cluster: ProcessCluster, window_s: float) -> list[Row]:
    """CPU time and tokens of each gateway in one window."""
    gateways = cluster.state().gateways
    before = [(await tokens_through(gateway), cpu_seconds(gateway.pid)) for gateway in gateways]
    began = time.monotonic()
    await asyncio.sleep(window_s)
    after = [(await tokens_through(gateway), cpu_seconds(gateway.pid)) for gateway in gateways]
    seconds = time.monotonic() - began
    return [
        {
            "what": "capacity",
            "replicas": len(gateways),
            "gateway": gateway.name,
            "seconds": round(seconds, 3),
            "tokens": end[0] - start[0],
            "cpu_s": round(end[1] - start[1], 3),
            "tokens_per_cpu_s": round((end[0] - start[0]) / max(end[1] - start[1], 1e-9), 1),
        }
        for gateway, start, end in zip(gateways, before, after, strict=True)
    ]


def capacities(rows: Sequence[Row]) -> dict[int, float]:
    """Number of gateways -> tokens/s that they could carry with a core each; medians of the windows, added up."""
    found: dict[int, float] = {}
    for replicas in (1, 2):
        each: dict[str, list[float]] = {}
        for row in rows:
            if row["what"] == "capacity" and row["replicas"] == replicas:
                each.setdefault(row["gateway"], []).append(row["tokens_per_cpu_s"])
        if each:
            found[replicas] = sum(map(statistics.median, each.values()))
    return found


# ---------------------------------------------------------------- death


async def measure_death(num_streams: int, num_clients: int, num_tokens: int) -> Row:
    """Kill a gateway in the middle of all streams."""
    with running(2, prefill=1, decode=2) as cluster:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(cluster.address)) for _ in range(num_clients)]
            last = [0.0] * num_streams
            gaps = [0.0] * num_streams
            counts = [0] * num_streams

            def note(index: int, delta: Delta) -> None:
                now = time.monotonic()
                if counts[index]:
                    gaps[index] = max(gaps[index], now - last[index])
                last[index] = now
                counts[index] += len(delta.token_ids)

            tasks = [
                asyncio.create_task(read(clients[i % num_clients], i, num_tokens, lambda delta, i=i: note(i, delta)))  # type: ignore[misc]
                for i in range(num_streams)
            ]
            await until(lambda: done(all(count >= num_tokens // 8 for count in counts)))
            before, gaps[:] = max(gaps), [0.0] * num_streams
            served = {gateway.name: await tokens_through(gateway) for gateway in cluster.state().gateways}
            (doomed,) = [gateway for gateway in cluster.state().gateways if gateway.name == "gateway-1"]
            os.kill(doomed.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            num_resets = 0
            while True:  # a connection that the kernel gave to the dying process is reset
                try:
                    async with AsyncClient(cluster.address) as client:
                        await client.models()
                    break
                except UnavailableError:
                    num_resets += 1
            new_connection_s = time.monotonic() - killed_at
            answers = await asyncio.gather(*tasks, return_exceptions=True)
    whole = sum(answer == fake_generate(prompt_of(i), num_tokens) for i, answer in enumerate(answers))
    return {
        "what": "death",
        "streams": num_streams,
        "whole": whole,
        "share_on_the_killed": round(served["gateway-1"] / max(1.0, sum(served.values())), 3),
        "longest_gap_before_s": round(before, 3),
        "longest_gap_s": round(max(gaps), 3),
        "new_connection_s": round(new_connection_s, 3),
        "resets": num_resets,
        "errors": sorted({repr(answer)[:120] for answer in answers if isinstance(answer, BaseException)}),
    }


# ---------------------------------------------------------------- prefixes


async def measure_prefix(replicas: int, groups: int, each: int) -> Row:
    """Requests of `groups` shared prefixes in turn, by clients of all gateways in turn."""
    with running(replicas, prefill=2, decode=2) as cluster:
        prompt_tokens = cached_tokens = 0
        async with AsyncExitStack() as stack:
            found = addresses(cluster)
            clients = [await stack.enter_async_context(AsyncClient(found[i % len(found)])) for i in range(4)]
            for turn in range(each):
                for first in range(0, groups, 4):
                    asked = [
                        clients[(turn + group) % 4].generate(
                            [*range(group, group + PREFIX_TOKENS), 1000 + turn, *range(30)],
                            max_tokens=4,
                            temperature=0.0,
                            ignore_eos=True,
                        )
                        for group in range(first, min(groups, first + 4))
                    ]
                    for answer in await asyncio.gather(*asked):
                        prompt_tokens += answer.usage.prompt_tokens
                        cached_tokens += answer.usage.cached_tokens
    return {
        "what": "prefix",
        "replicas": replicas,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "reuse": round(cached_tokens / prompt_tokens, 4),
    }


# ---------------------------------------------------------------- bursts


async def measure_bursts(num_requests: int, repeats: int, decode: int) -> list[Row]:
    """Bursts through both gateways, on workers that are idle before each."""
    rows: list[Row] = []
    with running(2, prefill=1, decode=decode) as cluster:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(address)) for address in addresses(cluster)]
            for number in range(repeats):
                asked = [
                    clients[i % 2].generate(
                        prompt_of(number * num_requests + i), max_tokens=60, temperature=0.0, ignore_eos=True
                    )
                    for i in range(num_requests)
                ]
                answers = await asyncio.gather(*asked)
                placed: Counter[str] = Counter({f"decode-{i}": 0 for i in range(decode)})
                for i, answer in enumerate(answers):
                    placed[(await clients[i % 2].explain(answer.request_id)).decode_worker] += 1
                counts = sorted(placed.values())
                rows.append({"what": "burst", "workers": decode, "counts": counts, "spread": counts[-1] - counts[0]})
                await asyncio.sleep(0.2)
    return rows


# ---------------------------------------------------------------- all


async def done(is_so: bool) -> bool:
    """For `until`."""
    return is_so


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> None:
    """Wait for it. Raises `TimeoutError`."""
    deadline = time.monotonic() + limit_s
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s")
        await asyncio.sleep(0.05)


async def measure(options: argparse.Namespace) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    if "capacity" in options.only:
        rows += await measure_capacity(options.streams, options.window, options.repeats)
    if "death" in options.only:
        rows.append(await measure_death(options.streams, options.clients, options.tokens))
    if "prefix" in options.only:
        rows += [await measure_prefix(replicas, options.groups, 8) for replicas in (1, 2)]
    if "burst" in options.only:
        for decode in (2, 4):
            rows += await measure_bursts(64, options.bursts, decode)
    return rows


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """The figures by name; None for what was not measured."""
    found = capacities(rows)
    deaths = [row for row in rows if row["what"] == "death"]
    reuse = {row["replicas"]: row["reuse"] for row in rows if row["what"] == "prefix"}
    spreads = [row["spread"] for row in rows if row["what"] == "burst"]
    return {
        "two_over_one": round(found[2] / found[1], 3) if len(found) == 2 else None,
        "tokens_per_cpu_s_of_one": round(found[1], 1) if 1 in found else None,
        "streams": sum(row["streams"] for row in deaths) if deaths else None,
        "streams_whole": sum(row["whole"] for row in deaths) if deaths else None,
        "longest_gap_s": max(row["longest_gap_s"] for row in deaths) if deaths else None,
        "prefix_reuse_two_over_one": round(reuse[2] / reuse[1], 4) if len(reuse) == 2 else None,
        "burst_spread_max": max(spreads) if spreads else None,
    }


def show(rows: Sequence[Row], figures: dict[str, float | None]) -> None:
    """Print both."""
    lines = [
        (row["what"], ", ".join(f"{name} {value}" for name, value in row.items() if name != "what")) for row in rows
    ]
    print_table("Several gateways", ("", "measured"), lines)
    targets = {
        "two_over_one": f"at least {TARGET_RATIO}",
        "streams_whole": "all",
        "longest_gap_s": f"at most {TARGET_GAP_S}",
        "prefix_reuse_two_over_one": f"at least {TARGET_REUSE}",
        "burst_spread_max": f"at most {TARGET_SPREAD}",
    }
    for name, value in figures.items():
        if value is not None:
            print(f"{name}: {value:g}" + (f" ({targets[name]})" if name in targets else ""))


PARTS = ("capacity", "death", "prefix", "burst")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateways", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts")
    parser.add_argument("--streams", type=int, default=200, help="of capacity and death")
    parser.add_argument("--clients", type=int, default=20, help="connections of the streams in the part death")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream in the part death")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of one measurement of capacity")
    parser.add_argument("--repeats", type=int, default=3, help="windows of capacity")
    parser.add_argument("--groups", type=int, default=16, help="shared prefixes")
    parser.add_argument("--bursts", type=int, default=5, help="bursts of 64 requests, for each number of workers")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, write the report."""
    options = parse_arguments()
    allow_open_files()
    try:
        rows = asyncio.run(measure(options))
    except ConfigError as error:
        sys.exit(str(error))
    content = report(rows, summary(rows))
    show(rows, content.summary)
    if options.json:
        write_json(options.json, content)
        print(f"report: {options.json}")
