"""What the gateway costs: CPU time per token of both protocols, detokenizing included, and its share of a core with a
thousand live streams.

    python -m benchmarks.gateway [--json FILE]          cost per token, then 1,000 streams
    python -m benchmarks.gateway --slow [--json FILE]   clients that never read and connections that never speak

A real gateway process with its router talks to a worker without a model that sends a token per stream and step
(tests/support/gateway_rig); the text is detokenized with the default model's tokenizer. Clients
(tests/support/raw_clients.py) and worker share another process. CPU time is user and system time of the gateway's
process, all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateway.cost import (
    LIVE_STEP_S,
    LIVE_STREAMS,
    STEP_S,
    Cost,
    measure_costs,
    medians,
    summary,
)
from benchmarks.gateway.slow import measure_slow, show_slow, slow_summary
from disagg.cluster.system.process_tools import allow_open_files
from disagg.proto.errors import ConfigError
from tests.support.gateway_rig.rig import Rig
from tests.support.reports import print_table, report, write_json

TARGET_RATIO = 1.5


async def measure(options: argparse.Namespace) -> tuple[list[Cost], list[Cost]]:
    """Cost per token, and the windows with many live streams."""
    async with Rig(profile=options.profile) as rig:
        steps = {number: STEP_S.get(number, LIVE_STEP_S) for number in options.streams}
        costs = await measure_costs(rig, steps, options.window, options.repeats)
        live = []
        if options.live:
            live = await measure_costs(rig, {options.live: LIVE_STEP_S}, 2 * options.window, options.live_repeats)
    return costs, live


def show(costs: Sequence[Cost]) -> None:
    """Print the medians."""
    lines = []
    for (protocol, num_streams), cost in medians(costs).items():
        figures = (
            f"{cost.num_tokens / cost.seconds:.0f}",
            f"{cost.us_per_token:.1f}",
            f"{cost.core_share:.3f}",
            f"{cost.num_tokens / max(1, cost.num_messages):.2f}",
            f"{cost.rss_bytes / 2**20:.0f}",
        )
        lines.append((f"{num_streams} streams, {protocol}", *figures))
    print_table(
        f"CPU of the gateway's process, median of windows (HTTP at most {TARGET_RATIO:g}x gRPC)",
        ("", "tokens/s", "us/token", "cores", "tokens/message", "RSS MiB"),
        lines,
    )


def rows(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Every window."""
    return [
        {**cost._asdict(), "us_per_token": round(cost.us_per_token, 3), "core_share": round(cost.core_share, 4)}
        for cost in costs
    ]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", action="store_true", help="slow readers and silent connections instead")
    parser.add_argument("--streams", type=int, nargs="*", default=list(STEP_S), help="numbers of streams")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of one measurement")
    parser.add_argument("--repeats", type=int, default=5, help="windows of each protocol and number of streams")
    parser.add_argument("--live", type=int, default=LIVE_STREAMS, help="many live streams; 0 leaves them out")
    parser.add_argument("--live-repeats", type=int, default=3, help="windows of each protocol with many live streams")
    parser.add_argument("--profile", action="store_true", help="print a profile of the gateway; figures are then wrong")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    allow_open_files()
    try:
        if options.slow:
            slow = asyncio.run(measure_slow(options.window))
            show_slow(slow)
            content = report([row._asdict() for row in slow], slow_summary(slow))
        else:
            costs, live = asyncio.run(measure(options))
            show([*costs, *live])
            content = report(rows([*costs, *live]), summary(costs, live))
    except ConfigError as error:
        sys.exit(str(error))
    print("\n".join(f"{name}: {value:g}" for name, value in content.summary.items() if value is not None))
    if options.json:
        write_json(options.json, content)
        print(f"report: {options.json}")
