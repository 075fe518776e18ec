"""What TLS between the processes of a cluster costs: the same clients, a plain and an encrypted cluster, in turns.

    python -m benchmarks.serving.encryption [--clients 16] [--tokens 256] [--repeats 5] --json FILE

Both clusters are up at once, with the model without weights: workers answer as fast as they can, so nearly all time is
messages, and the ratio is the worst that a real model can meet. Measured: tokens per second in the client, and CPU
seconds of the cluster's processes (user and system) per token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import load
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from tests.support import inference_stub
from tests.support.process_figures import cpu_seconds
from tests.support.reports import print_table, report, write_json

KINDS = ("off", "on")


def config(encryption: str) -> dict[str, Any]:
    """1P1D without weights; a step takes as long as Python takes."""
    return {
        "model": {"path": "fake"},
        "gateway": {"port": 0},
        "placement": {"local_prefill": "never"},
        "transfer": {"transport": "shm"},
        "network": {"encryption": encryption},
    }


def pids_of(cluster: ProcessCluster) -> list[int]:
    """The gateway and the workers."""
    state = cluster.state()
    return [gateway.pid for gateway in state.gateways] + [info.pid for info in cluster.workers]


async def measure(address: str, options: argparse.Namespace, repeat: int) -> tuple[float, int]:
    """Closed loop with prompts of the repeat's own: seconds and output tokens."""
    async with inference_stub.channel(address) as connection:
        stub = inference_stub.service(connection)
        model = await inference_stub.only_model(stub)
        shape = load.RequestSizes(input_tokens=64, output_tokens=options.tokens)
        count = options.clients * options.rounds
        elapsed_s, timings = await load.closed_loop(
            stub, load.requests(model, shape, repeat * count, count), options.clients
        )
        return elapsed_s, sum(timing.output_tokens for timing in timings)


def main() -> None:
    """Print the table; write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        clusters = {kind: stack.enter_context(ProcessCluster(parse_config(config(kind)))) for kind in KINDS}
        for kind in KINDS:
            asyncio.run(measure(clusters[kind].address, options, 1000))
        for repeat in range(options.repeats):
            for kind in KINDS if repeat % 2 == 0 else KINDS[::-1]:
                pids = pids_of(clusters[kind])
                before = sum(map(cpu_seconds, pids))
                elapsed_s, tokens = asyncio.run(measure(clusters[kind].address, options, repeat))
                cpu_us = (sum(map(cpu_seconds, pids)) - before) / tokens * 1e6
                rows.append(
                    {"encryption": kind, "repeat": repeat, "tok_s": tokens / elapsed_s, "cpu_us_per_token": cpu_us}
                )
    figures = {
        (kind, name): [row[name] for row in rows if row["encryption"] == kind]
        for kind in KINDS
        for name in ("tok_s", "cpu_us_per_token")
    }
    pairs = zip(figures["on", "tok_s"], figures["off", "tok_s"], strict=True)
    cpu_pairs = zip(figures["on", "cpu_us_per_token"], figures["off", "cpu_us_per_token"], strict=True)
    summary = {
        "tok_s_off": statistics.median(figures["off", "tok_s"]),
        "tok_s_on": statistics.median(figures["on", "tok_s"]),
        "tok_s_on_over_off": statistics.median(on / off for on, off in pairs),
        "cpu_us_per_token_off": statistics.median(figures["off", "cpu_us_per_token"]),
        "cpu_us_per_token_on": statistics.median(figures["on", "cpu_us_per_token"]),
        "cpu_on_over_off": statistics.median(on / off for on, off in cpu_pairs),
    }
    columns = ("encryption", "repeat", "tok_s", "cpu_us_per_token")
    cells = [[row["encryption"], *(f"{row[name]:.0f}" for name in columns[1:])] for row in rows]
    print_table("TLS between the processes of a cluster", columns, cells)
    print({name: round(value, 3) for name, value in summary.items()})
    if options.json:
        write_json(options.json, report(rows, summary))


if __name__ == "__main__":
    main()
