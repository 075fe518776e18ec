"""What a tenant sees of another one that offers ten times its share, and what small requests see of a large one that
waits for room. The simulator's cluster (real router core, real engine cores) in virtual time: figures repeat exactly.

    python -m tests.acceptance.isolation.tenants [--seconds 60] [--json FILE]

Two tenants (flood, and a neighbour that asks for a quarter of what the cluster can do): the share of the neighbour's
requests that had their first token within 0.5 s, beside that without the other tenant. `one tenant` is the same load
under one name, which is what a router without turns does.

    many calls     single answers of the neighbour's kind, ten times the share
    n = 16         calls of 16 answers of up to 8,000 tokens
    long prompts   of 4,000 tokens; one that has begun is not interrupted (200 ms)
    refused        calls of 128 answers, which a limit of tokens a minute refuses

Large request: ten decode workers of which each has 55 % of its KV blocks in use by small requests; then one that needs
70 % of a worker arrives every ten seconds. The first `FILLING_S` do not count.

KV: a tenant that asks for more KV blocks than 1, 2 or 4 decode workers have, in answers of several sizes, and another
one that asks for 2 tokens twice a second. Each of these should have its first token within the time for which requests
pass one that waits for room, and a step.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg.router.api import TenantLimits
from disagg.router.config import RouterConfig
from tests.acceptance.isolation.tenants_cluster import STEP_MS, Seen, TenantsCluster, Wish
from tests.support.reports import percentile, print_table, report, write_json

TARGET_S = 0.5
REST_S = 10.0
"""For what was asked last."""
FILLING_S = 5.0
"""Until the decode workers are in use as they are later."""
LEAST_S = 10.0
"""Of virtual time: with less there are too few requests, and no large one."""
NUM_PREFILLS, NUM_DECODES, PLACES = 2, 4, 16
NUM_BLOCKS = 1 << 14
"""KV blocks of a decode worker that never lacks any: 16 answers of 8,000 tokens need half of them."""
SHARED = TenantLimits(is_sole=False)
NEIGHBOUR = Wish(
    label="neighbour",
    tenant="neighbour",
    limits=SHARED,
    prompt_tokens=200,
    output_tokens=60,
    max_tokens=200,
    ttft_slo_s=TARGET_S,
)
CAPACITY_PER_S = NUM_DECODES * PLACES / 1.2
"""Answers of that kind, of 60 steps of 20 ms."""

KV_FLOODS = {
    "prompts of 32": (20, 300, 32, 0.2),
    "n = 16": (100, 500, 16, 0.3),
    "small": (20, 20, 1, 20.0),
    "large": (1100, 100, 1, 1.0),
    "large and long": (700, 500, 1, 0.5),
}
"""Prompt and output tokens, answers of a call, calls per second and decode worker."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Flood:
    """What the other tenant sends."""

    wish: Wish
    num_answers: int
    calls_per_s: float


def _flood(prompt: int, output: int, most: int, num_answers: int, limits: TenantLimits = SHARED) -> Flood:
    """Ten times its share, in what it takes of places to decode or of prefill workers, whichever is more."""
    wish = Wish(
        label="flood", tenant="flood", limits=limits, prompt_tokens=prompt, output_tokens=output, max_tokens=most
    )
    of_decode, of_prefill = output / 60 / CAPACITY_PER_S, prompt * 0.05e-3 / NUM_PREFILLS
    return Flood(wish, num_answers, 10 * 0.5 / max(of_decode, of_prefill) / num_answers)


FLOODS = {
    "many calls": _flood(200, 60, 200, 1),
    "n = 16": _flood(200, 2000, 8000, 16),
    "long prompts": _flood(4000, 16, 64, 1),
    "refused": _flood(200, 60, 4000, 128, TenantLimits(is_sole=False, tokens_per_minute=100_000)),
}


def arrivals(rate_per_s: float, seconds: float, rng: random.Random) -> list[float]:
    """Times of a Poisson process."""
    times, now = [], rng.expovariate(rate_per_s)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate_per_s)
    return times


def _schedule(
    cluster: TenantsCluster, times: Sequence[float], wish: Wish, num_answers: int = 1, rng: random.Random | None = None
) -> None:
    """Ask for this at these times; with `rng` answers are half as long to half as long again."""
    for when in times:
        mean = wish.output_tokens
        num_tokens = mean if rng is None else rng.randint(mean // 2, mean * 3 // 2)
        asked = replace(wish, output_tokens=num_tokens)
        cluster.at(when, functools.partial(cluster.ask, asked, num_answers))


def neighbour_row(name: str, flood: Flood | None, seconds: float, *, one_tenant: bool = False) -> Row:
    """One load. The neighbour's arrivals are the same in all; its last requests are given time to be answered."""
    cluster = TenantsCluster(NUM_PREFILLS, NUM_DECODES, PLACES, NUM_BLOCKS)
    alone = TenantLimits()
    wish = replace(NEIGHBOUR, tenant="all", limits=alone) if one_tenant else NEIGHBOUR
    rng = random.Random(1)
    _schedule(cluster, arrivals(CAPACITY_PER_S / 4, seconds, rng), wish, rng=rng)
    if flood is not None:
        other = replace(flood.wish, tenant="all", limits=alone) if one_tenant else flood.wish
        rng = random.Random(2)
        _schedule(cluster, arrivals(flood.calls_per_s, seconds, rng), other, flood.num_answers, rng)
    cluster.run(seconds + REST_S)
    asked = [seen for seen in cluster.seen.values() if seen.wish.label == "neighbour"]
    met = [seen for seen in asked if seen.ttft_s is not None and seen.ttft_s <= TARGET_S]
    others = [seen for seen in cluster.seen.values() if seen.wish.label != "neighbour"]
    return {
        "part": "neighbour",
        "load": name,
        "one_tenant": one_tenant,
        "requests": len(asked),
        "attainment": round(len(met) / len(asked), 4),
        **_ttft(asked),
        "refused": sum(bool(seen.error) for seen in asked),
        "flood_answers": len(others),
        "flood_answered": sum(seen.ended is not None and not seen.error for seen in others),
    }


def _ttft(asked: Sequence[Seen]) -> dict[str, float]:
    times = [1000 * seen.ttft_s for seen in asked if seen.ttft_s is not None]
    return {f"ttft_p{each}_ms": round(percentile(times, each), 1) if times else -1.0 for each in (50, 99)}


def large_row(seconds: float, *, with_large: bool) -> Row:
    """Small requests of 4 to 9 blocks, about 6 on average, 90 at a time on ten workers of 100 blocks."""
    config = RouterConfig(local_prefill="never", decode_reserve_tokens=16)
    cluster = TenantsCluster(2, 10, 64, 100, config)
    small = Wish(label="small", tenant="", limits=TenantLimits(), prompt_tokens=60, output_tokens=60, max_tokens=60)
    rng = random.Random(3)
    _schedule(cluster, arrivals(90 / 1.2, seconds, rng), small, rng=rng)
    large = replace(small, label="large", prompt_tokens=1100, output_tokens=20, max_tokens=20)
    if with_large:
        _schedule(cluster, [FILLING_S + 10 * number for number in range(int(seconds / 10))], large)
    cluster.run(seconds + REST_S)
    asked = [seen for seen in cluster.seen.values() if seen.wish.label == "small" and seen.arrival >= FILLING_S]
    waits = [seen.ttft_s for seen in cluster.seen.values() if seen.wish.label == "large" and seen.ttft_s is not None]
    return {
        "part": "large",
        "load": "with a large one" if with_large else "small ones",
        "requests": len(asked),
        "attainment": round(sum(seen.ttft_s is not None for seen in asked) / len(asked), 4),
        **_ttft(asked),
        "refused": sum(bool(seen.error) for seen in asked),
        "large_answered": len(waits),
        "large_longest_ms": round(1000 * max(waits, default=0.0), 1),
    }


def kv_row(name: str, num_decodes: int, seconds: float) -> Row:
    """Decode workers of 100 blocks, and places for all."""
    config = RouterConfig(local_prefill="never")
    cluster = TenantsCluster(2, num_decodes, 256, 100, config)
    prompt, output, num_answers, calls_per_s = KV_FLOODS[name]
    flood = Wish(
        label="flood", tenant="flood", limits=SHARED, prompt_tokens=prompt, output_tokens=output, max_tokens=output
    )
    times = arrivals(calls_per_s * num_decodes, seconds, random.Random(4))
    _schedule(cluster, [0.0] * 3 + times, flood, num_answers)
    small = replace(flood, label="small", tenant="small", prompt_tokens=20, output_tokens=2, max_tokens=2)
    _schedule(cluster, [FILLING_S + number / 2 for number in range(int(2 * (seconds - FILLING_S)))], small)
    cluster.run(seconds + REST_S)
    asked = [seen for seen in cluster.seen.values() if seen.wish.label == "small"]
    waits = [math.inf if seen.ttft_s is None else seen.ttft_s for seen in asked]
    return {
        "part": "kv",
        "load": f"{name}, {num_decodes} D",
        "requests": len(asked),
        "attainment": round(sum(wait <= config.bypass_s + STEP_MS / 1e3 for wait in waits) / len(asked), 4),
        **_ttft(asked),
        "longest_ms": round(1000 * max(waits), 1),
        "refused": sum(bool(seen.error) for seen in asked),
        "flood_answers": len(cluster.seen) - len(asked),
        "flood_answered": sum(
            seen.ended is not None and not seen.error for seen in cluster.seen.values() if seen.wish is not small
        )
        - len([seen for seen in asked if seen.ended is not None and not seen.error]),
    }


def measure(seconds: float, progress: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """All rows."""
    rows = []
    make: Callable[[], Row]
    for make in (
        functools.partial(neighbour_row, "alone", None, seconds),
        *(functools.partial(neighbour_row, name, flood, seconds) for name, flood in FLOODS.items()),
        *(functools.partial(neighbour_row, name, flood, seconds, one_tenant=True) for name, flood in FLOODS.items()),
        functools.partial(large_row, seconds, with_large=False),
        functools.partial(large_row, seconds, with_large=True),
        *(functools.partial(kv_row, name, number, seconds) for name in KV_FLOODS for number in (1, 2, 4)),
    ):
        rows.append(make())
        progress(rows[-1])
    return rows


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The most that the neighbour loses, in points; and what small requests lose to a large one."""
    alone = next(row["attainment"] for row in rows if row["load"] == "alone")
    beside = [row["attainment"] for row in rows if row["part"] == "neighbour" and not row["one_tenant"]]
    without, with_large = (row["ttft_p99_ms"] for row in rows if row["part"] == "large")
    return {
        "neighbour_alone_percent": round(100 * alone, 2),
        "neighbour_most_lost_points": round(100 * (alone - min(beside)), 2),
        "small_ttft_p99_ratio": round(with_large / without, 3),
        "kv_small_longest_ms": max(row["longest_ms"] for row in rows if row["part"] == "kv"),
        "large_longest_wait_ms": max(row.get("large_longest_ms", 0.0) for row in rows),
    }


COLUMNS = (
    "load",
    "one_tenant",
    "requests",
    "attainment",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "refused",
    "flood_answers",
    "flood_answered",
    "large_answered",
    "large_longest_ms",
    "longest_ms",
)


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help=f"of virtual time, at least {LEAST_S:g}")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args()
    if options.seconds < LEAST_S:
        parser.error(f"--seconds: at least {LEAST_S:g}")
    rows = measure(options.seconds, lambda row: print(row["part"], row["load"], "done", file=sys.stderr))
    cells = [[str(row.get(column, "-")) for column in COLUMNS] for row in rows]
    print_table("Tenants, virtual time", [column.replace("_", " ") for column in COLUMNS], cells)
    print(summary(rows))
    if options.json is not None:
        write_json(options.json, report(rows, summary(rows)))


if __name__ == "__main__":
    main()
