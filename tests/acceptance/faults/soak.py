"""Many requests through a real cluster that fails on purpose: is every answer exact, and does everything go back?

python -m tests.acceptance.faults.soak --requests 10000 --json FILE

Two prefill and two decode workers as child processes, with the deterministic model. A fifth of the clients go away at
a random moment; failpoints fall on bytes, control messages and steps, at least five in a hundred requests. Prompts have
shared prefixes and mixed lengths. Every token that a client gets is compared with the reference.

Before and after that the same load runs without faults, slice by slice in turns, on this cluster and on a second one of
the same kind, which has no faults. The median of the ratios of neighbours afterwards, divided by that before, is the
share of the goodput that is left (tokens of exact, finished answers per second). Without the second cluster the
machine's own minutes would be compared; without the slices before, the luck of two clusters, which is up to 12 %.

What each process holds is taken at rest before and after: the workers' own audit, memory, open files and threads.
Threads of gRPC's own pool are shown and not counted: it takes one more when there is much to do, and gives it back when
it pleases.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE, PAUSE_VARIABLE
from disagg.proto.errors import DisaggError
from tests.acceptance.faults.soak_rest import Footprint, at_rest, fired, footprints
from tests.support.reports import print_table, report, write_json

FAILPOINTS = ";".join(
    [
        "transport.send=corrupt(p=0.0034)",
        "transport.receive=corrupt(p=0.0034)",
        "transport.send=fail(p=0.0005)",
        "transport.receive=fail(p=0.0005)",
        "transport.receive=delay(p=0.0034,ms=50)",
        "control.send=drop(p=0.0003)",
        "control.receive=drop(p=0.0003)",
        "control.send=duplicate(p=0.0003)",
        "control.send=reorder(p=0.0003)",
        "control.send=delay(p=0.0014,ms=20)",
        "control.send=stale(p=0.0003)",
        "control.send=resize(p=0.0007)",
        "engine.step=raise(p=0.00007)",
        "tokens.send=drop(p=0.00003)",
    ]
)
FEWEST_FAULTS = 0.05
"""Per request."""
NUM_SLICES = 20
"""Of the load without faults, on each cluster: on a shared machine one slice may be half as fast as the next. Slices
that ran next to each other are compared."""
CANCELLED_SHARE = 0.22
"""Of the clients, that mean to go; some of their answers end before."""
NUM_FAMILIES = 16
"""Shared prefixes."""
LARGEST_GROWTH_MIB = 64.0
"""What a process may have more at rest after the soak than before."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request of the plan."""

    prompt: tuple[int, ...]
    num_tokens: int
    leaves_after: int | None
    """The client goes after so many tokens; None stays to the end."""
    leaves_after_s: float | None
    """The client goes after this time, perhaps before the first token."""


@dataclass
class Outcome:
    """What became of the requests of one phase."""

    counts: Counter[str] = field(default_factory=Counter)
    """`finished`, `cancelled`, `wrong`, and `failed: <code>`."""
    num_tokens: int = 0
    """Of finished answers."""
    longest_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Tokens of finished answers per second."""
        return self.num_tokens / self.elapsed_s


def plan(seed: int, num_requests: int, cancelled_share: float) -> list[Work]:
    """Requests with prompts of 8 to 343 tokens, of which up to 256 are shared, and answers of 1 to 64 tokens."""
    dice = random.Random(seed)
    families = [[random.Random(number).randrange(32_000) for _ in range(256)] for number in range(NUM_FAMILIES)]
    work = []
    for _ in range(num_requests):
        shared = dice.choice(families)[: dice.choice((0, 0, 32, 64, 128, 256))]
        own = [dice.randrange(32_000) for _ in range(dice.randrange(8, 88))]
        num_tokens = dice.randrange(1, 65)
        leaves = dice.random() < cancelled_share
        by_time = num_tokens == 1 or dice.random() < 0.3
        work.append(
            Work(
                prompt=(*shared, *own),
                num_tokens=num_tokens,
                leaves_after=dice.randrange(1, num_tokens) if leaves and not by_time else None,
                leaves_after_s=dice.random() * 0.1 if leaves and by_time else None,
            )
        )
    return work


async def run(client: AsyncClient, work: Sequence[Work], concurrency: int) -> Outcome:
    """All of them, so many at a time."""
    outcome, turns = Outcome(), asyncio.Semaphore(concurrency)

    async def one(each: Work) -> None:
        async with turns:
            started = time.monotonic()
            what = await ask(client, each)
            outcome.longest_s = max(outcome.longest_s, time.monotonic() - started)
        outcome.counts[what] += 1
        outcome.num_tokens += each.num_tokens if what == "finished" else 0

    started = time.monotonic()
    await asyncio.gather(*(one(each) for each in work))
    outcome.elapsed_s = time.monotonic() - started
    return outcome


async def ask(client: AsyncClient, work: Work) -> str:
    """What became of one request; `wrong` if a token was not the reference's."""
    got: list[int] = []
    try:
        async with asyncio.timeout(work.leaves_after_s):
            finished = await follow(client, work, got)
    except TimeoutError:
        finished = False
    except DisaggError as error:
        return f"failed: {error.code}"
    expected = fake_generate(work.prompt, work.num_tokens)
    if got != (expected if finished else expected[: len(got)]):
        return "wrong"
    return "finished" if finished else "cancelled"


async def follow(client: AsyncClient, work: Work, got: list[int]) -> bool:
    """Collect the tokens of a stream in `got`; whether it came to its end."""
    stream = client.stream(list(work.prompt), max_tokens=work.num_tokens, temperature=0.0, ignore_eos=True)
    try:
        async for delta in stream:
            got += delta.token_ids
            if work.leaves_after is not None and len(got) >= work.leaves_after:
                return len(got) == work.num_tokens
    finally:
        await stream.aclose()
    return True


async def in_turns(
    client: AsyncClient, other: AsyncClient, seed: int, num_requests: int, concurrency: int
) -> Comparison:
    """The load without faults and cancels in slices, for each cluster in turn, in an order that turns round."""
    compared = Comparison([], [])
    both = [(client, compared.mine), (other, compared.other)]
    for part in range(NUM_SLICES):
        for each, outcomes in both if part % 2 == 0 else reversed(both):
            outcomes.append(await run(each, plan(seed + part, num_requests, 0.0), concurrency))
    return compared


@dataclass(frozen=True)
class Comparison:
    """Slices of this cluster and of the one in peace, neighbours at one index."""

    mine: list[Outcome]
    other: list[Outcome]

    @property
    def ratio(self) -> float:
        """Median goodput of this cluster over the other's."""
        return statistics.median(
            mine.goodput / other.goodput for mine, other in zip(self.mine, self.other, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """One soak."""

    soak: Outcome
    before: Comparison
    after: Comparison
    footprints: dict[str, tuple[Footprint, Footprint]]
    """By process, before and after."""
    left: list[str]
    """What was held at rest after the soak."""
    fired: Counter[str]
    restarts: int


async def soak(
    cluster: ProcessCluster, other: ProcessCluster, options: argparse.Namespace, logs: Path, pause: Path
) -> Result:
    """All phases on `cluster`, the first and the last one beside another cluster."""
    num_calm = max(100, options.requests // 50)
    incarnations = {info.worker_id: info.incarnation for info in cluster.workers}
    async with AsyncClient(cluster.address) as client, AsyncClient(other.address) as other_client:
        for each in (client, other_client):
            await warm_up(each, num_calm, options.concurrency)
        say("the load without faults, in turns with a cluster that is left in peace")
        before = await in_turns(client, other_client, 200, num_calm, options.concurrency)
        await at_rest(client, cluster)
        first = footprints(cluster)
        say(f"{options.requests} requests with faults")
        pause.unlink()
        outcome = await run(client, plan(options.seed + 1000, options.requests, CANCELLED_SHARE), options.concurrency)
        pause.touch()
        left = await at_rest(client, cluster)
        say("the load without faults again, in turns")
        after = await in_turns(client, other_client, 300, num_calm, options.concurrency)
        left += await at_rest(client, cluster)
    last = footprints(cluster)
    return Result(
        soak=outcome,
        before=before,
        after=after,
        footprints={name: (first[name], last[name]) for name in first if name in last},
        left=left,
        fired=fired(logs),
        restarts=sum(incarnations.get(info.worker_id) != info.incarnation for info in cluster.workers),
    )


async def warm_up(client: AsyncClient, num_calm: int, concurrency: int) -> None:
    """Fill caches, and let every thread and connection come that the load needs."""
    say("warming up")
    await run(client, plan(1, 2 * num_calm, CANCELLED_SHARE), concurrency)
    await run(client, plan(100, num_calm, 0.0), concurrency)


def say(what: str) -> None:
    """Progress."""
    print(f"{what} ...", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the verdict


def summary(result: Result) -> dict[str, float]:
    """The figures of a soak, and `met`: 1 if every promise is kept."""
    outcome, before, after = result.soak, result.before, result.after
    phases = [outcome, *before.mine, *before.other, *after.mine, *after.other]
    total = sum(outcome.counts.values())
    failed = sum(number for what, number in outcome.counts.items() if what.startswith("failed"))
    growth = {name: last.rss_mib - first.rss_mib for name, (first, last) in result.footprints.items()}
    files = {name: last.num_files - first.num_files for name, (first, last) in result.footprints.items()}
    threads = {name: last.num_own_threads - first.num_own_threads for name, (first, last) in result.footprints.items()}
    figures = {
        "requests": total,
        "finished": outcome.counts["finished"],
        "cancelled": outcome.counts["cancelled"],
        "failed": failed,
        "wrong": sum(phase.counts["wrong"] for phase in phases),
        "faults": sum(result.fired.values()),
        "faults_per_request": sum(result.fired.values()) / total,
        "left_over": len(result.left),
        "worker_restarts": result.restarts,
        "goodput_during": outcome.goodput,
        "goodput_before": statistics.median(each.goodput for each in before.mine),
        "goodput_after": statistics.median(each.goodput for each in after.mine),
        "over_other_before": before.ratio,
        "over_other_after": after.ratio,
        "goodput_ratio": after.ratio / before.ratio,
        "longest_request_s": outcome.longest_s,
        "memory_growth_mib": max(growth.values()),
        "open_files_growth": max(files.values()),
        "threads_growth": max(threads.values()),
        "elapsed_s": outcome.elapsed_s,
    }
    figures["met"] = float(
        not figures["wrong"]
        and not figures["failed"]
        and not figures["left_over"]
        and figures["faults_per_request"] >= FEWEST_FAULTS
        and figures["goodput_ratio"] >= 0.95
        and figures["memory_growth_mib"] <= LARGEST_GROWTH_MIB
        and figures["open_files_growth"] <= 0
        and figures["threads_growth"] <= 0
    )
    return figures


def rows(result: Result) -> list[dict[str, Any]]:
    """Outcomes, faults and footprints, one thing a row."""
    outcomes = [{"row": "outcome", "name": what, "count": n} for what, n in sorted(result.soak.counts.items())]
    faults = [{"row": "fault", "name": what, "count": n} for what, n in sorted(result.fired.items())]
    calm = [
        {"row": phase, "name": f"{whose} {number}", "tokens_per_s": each.goodput, "counts": dict(each.counts)}
        for phase, compared in (("before", result.before), ("after", result.after))
        for whose, slices in (("this", compared.mine), ("other", compared.other))
        for number, each in enumerate(slices)
    ]
    sizes = [
        {
            "row": "footprint",
            "name": name,
            "before": first.figures,
            "after": last.figures,
            "more": last.more_than(first),
        }
        for name, (first, last) in result.footprints.items()
    ]
    left = [{"row": "left over", "name": what} for what in result.left]
    return [*outcomes, *faults, *calm, *sizes, *left]


def cluster_config() -> ClusterConfig:
    """Chunks of two blocks, so that a prompt takes several; short leases, so that what is stuck ends soon."""
    return parse_config(
        {
            "model": {"path": "fake"},
            "gateway": {"port": 0},
            "placement": {"local_prefill": "never"},
            "recovery": {"failpoints": True},
            "transfer": {
                "chunk_bytes": 256,
                "staging_bytes": 2048,
                "heartbeat_s": 0.25,
                "lease_timeout_s": 2.0,
                "timeout_s": 2.0,
            },
            "pools": {
                "prefill": {"size": 2, "token_budget": 256, "num_blocks": 1024},
                "decode": {"size": 2, "num_blocks": 1024},
            },
        }
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Soak a cluster that fails on purpose.")
    parser.add_argument("--requests", type=int, default=10_000, help="with faults and cancels (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the faults")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(arguments)


def main() -> int:
    """Exit status 0 if every promise is kept."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="disagg-soak-") as folder:
        logs, pause = Path(folder) / "logs", Path(folder) / "pause"
        pause.touch()
        os.environ[FAILPOINTS_VARIABLE] = f"seed={options.seed};{FAILPOINTS}"
        os.environ[PAUSE_VARIABLE] = str(pause)
        with ProcessCluster(cluster_config(), log_dir=logs) as cluster:
            os.environ[PAUSE_VARIABLE] = folder  # The other one's failpoints pause for ever.
            with ProcessCluster(cluster_config(), log_dir=Path(folder) / "other") as other:
                os.environ[PAUSE_VARIABLE] = str(pause)  # for workers that are started again
                result = asyncio.run(soak(cluster, other, options, logs, pause))
    figures = summary(result)
    print_table("Soak", ["figure", "value"], [[name, f"{value:,.4g}"] for name, value in figures.items()])
    for what in result.left:
        print(f"left over: {what}")
    for name, (first, last) in result.footprints.items():
        for what, count in last.more_than(first).items():
            print(f"{name} has {count} more: {what}")
    if options.json:
        write_json(options.json, report(rows(result), figures))
    return 0 if figures["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
