"""What tiers and fetches cost a placement: two routers in one process under the same stream of requests, one of which
has workers with tiers, with fetches, or with both, a few hundred requests of one after those of the other.

Other load on the machine is the same for both, so that the ratio of their rates is steadier than the rates.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

from benchmarks.router.placements import CLOCKS, Traffic
from disagg.cluster.system.process_tools import freeze_start
from disagg.router.config import PolicyName
from tests.support.reports import percentile

WAYS: dict[str, tuple[bool, bool]] = {
    "none": (False, False),
    "tiers": (True, False),
    "fetch": (False, True),
    "tiers+fetch": (True, True),
}
"""Whether prefill workers have tiers, and whether workers fetch; `none` shows how far two equal routers differ."""
TURN_REQUESTS = 400
"""Requests of one router before it is the other's turn."""


def compare_ways(
    ways: str, num_workers: int, num_blocks: int, pairs: int, policy: PolicyName, clock: str
) -> dict[str, Any]:
    """One row: placements per second with these ways over those without, median and quartiles of pairs of turns, and
    both's times of a placement in microseconds."""
    tiers, fetches = WAYS[ways]
    without = Traffic(num_workers, num_blocks, policy, CLOCKS[clock])
    with_ways = Traffic(num_workers, num_blocks, policy, CLOCKS[clock], tiers=tiers, fetches=fetches)
    freeze_start()
    for traffic in (without, with_ways):
        traffic.run(max(3000, 2 * num_workers))
    ratios: list[float] = []
    submit_us: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        took = [0.0, 0.0]
        for which in (0, 1) if pair % 2 else (1, 0):
            traffic = (without, with_ways)[which]
            traffic.times_ns.clear()
            traffic.run(TURN_REQUESTS)
            times = traffic.times_ns["submit"]
            took[which] = sum(times) / len(times)
            submit_us[which].extend(ns / 1e3 for ns in times)
        ratios.append(took[0] / took[1])
    gc.unfreeze()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "part": "ways",
        "ways": ways,
        "workers": num_workers,
        "indexed_blocks": with_ways.holdings.num_blocks,
        "clock": clock,
        "pairs": pairs,
        "over_none": round(middle, 3),
        "quartiles": f"{low:.2f} to {high:.2f}",
        "submit_p50_us": round(percentile(submit_us[1], 50), 1),
        "none_p50_us": round(percentile(submit_us[0], 50), 1),
        "submit_p99_us": round(percentile(submit_us[1], 99), 1),
        "none_p99_us": round(percentile(submit_us[0], 99), 1),
        "fetches": round(with_ways.num_fetches / max(1, with_ways.num_finished), 3),
    }
