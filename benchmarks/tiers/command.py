"""What do KV in tiers, and KV fetched from other workers, save?

    python -m benchmarks.tiers --json FILE
    python -m benchmarks.tiers --quick                          small sizes, for a first look
    python -m benchmarks.tiers --only choice --modes none disk  some of it

Parts, all with the default model on 2 prefill and 2 decode workers by processes:

long      conversations whose histories are 8 times what the device caches of the prefill workers hold, each mode in
          turn, the next repeat in the other order; then, without tiers and with a disk, a restart of all workers and
          one turn more
agents    conversations that add much at each turn, whose histories the decode workers still have
local     the same where decode workers may compute prompts, as by default
source    streams of a worker from which another one fetches
choice    prefixes of 128 to 4,096 tokens, where loading from a slow disk (choice.py; in simulated time disks.py), or
          fetching over a slow link (in simulated time links.py), and computing cross at about 1,024

computed_none_over_all      prompt tokens that are computed, without tiers over with all
turn2_ttft_over_none        median TTFT of later turns of agents, with fetches over without
restart_computed_over_cold  prompt tokens that the turn after the restart computes, with a disk over without
choice_worst                TTFT as chosen over the better of computed and loaded, less 5 ms, at the worst length; with
                            the disk or the link, at once or after a pause, whichever is worst
*_answer_p50_over_none      median time to the last token of later turns
source_itl_p99_over_rest    p99 of the time between tokens of a source's streams, with fetches over without
wrong                       answers whose tokens are not those of the cluster without tiers
failed                      requests that failed
reuse_trace                 share of the prompt tokens of a recorded trace that are reused (--trace FILE)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.simulator.tiers import reuse_trace
from benchmarks.tiers import disks, figures, links
from benchmarks.tiers.choice import LENGTHS, Choice
from benchmarks.tiers.clusters import ALL, DISK, MODES, NONE, PEER, config, counters_of, restart_workers
from benchmarks.tiers.conversations import Client, Workload
from benchmarks.tiers.figures import AGENTS, CHOICE, CONVERSATIONS, LOCAL, LONG
from benchmarks.tiers.sources import Sources
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.engine.config import WorkerConfig
from disagg.engine.shell.cpu_dtype import cpu_dtype_here
from disagg.v1.inference_pb2_grpc import AdminServiceStub
from tests.support import inference_stub
from tests.support.launch import LAUNCHERS, launched
from tests.support.reports import positive, print_table, report, write_json

SOURCE = "source"
PARTS = (*CONVERSATIONS, SOURCE, CHOICE)
OF_AGENTS = (NONE, PEER, ALL)
"""Modes of the parts with agents."""
RESTARTED = (NONE, DISK)
"""Modes whose workers are restarted after the last turn."""
QUIET_S = 2.0
"""Seconds without requests after the last turn, in which workers write what they have not written yet."""


def workloads(*, is_quick: bool) -> dict[str, Workload]:
    """The conversations of all parts."""
    long = Workload(
        name=LONG,
        num_conversations=21,
        num_turns=4 if is_quick else 8,
        opening_tokens=512 + (4 * 96 if is_quick else 0),
        turn_tokens=64,
        output_tokens=32,
        prefill_blocks=96,
        decode_blocks=96,
    )
    agents = Workload(
        name=AGENTS,
        num_conversations=6 if is_quick else 8,
        num_turns=5,
        opening_tokens=1024,
        turn_tokens=128,
        output_tokens=48,
        prefill_blocks=224,
        decode_blocks=1024,
        local_prefill="never",
        seed=2,
    )
    return {LONG: long, AGENTS: agents, LOCAL: replace(agents, name=LOCAL, local_prefill="auto")}


async def converse(address: str, workload: Workload, mode: str, repeat: int) -> list[dict[str, Any]]:
    """One run of one mode on a fresh cluster."""
    async with inference_stub.channel(address) as channel:
        stub = inference_stub.service(channel)
        client = Client(stub, await inference_stub.only_model(stub), workload)
        async with client.others():
            rounds = [await client.round() for _ in range(workload.num_turns)]
        rows = [figures.row_of(workload.name, mode, repeat, turns) for turns in rounds]
        rows.append(
            {
                "part": f"{workload.name} others",
                "mode": mode,
                "repeat": repeat,
                "tpot_ms": [round(value * 1e3, 3) for value in client.other_tpots_s],
                "gap_ms": [round(value * 1e3, 3) for value in client.other_gaps_s],
                "errors": client.other_errors,
            }
        )
        admin = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        await asyncio.sleep(QUIET_S)
        rows.append({"part": f"{workload.name} counters", "mode": mode, "repeat": repeat, **await counters_of(admin)})
        if workload.name == LONG and mode in RESTARTED and repeat == 0:
            await restart_workers(admin)
            rows.append(figures.row_of(workload.name, mode, repeat, await client.round(), restarted=True))
    return rows


def measure_clusters(options: argparse.Namespace, workload: Workload) -> Iterator[dict[str, Any]]:
    """All modes in turn, forth and back again, each time on a new cluster."""
    for repeat in range(options.repeats):
        modes = [mode for mode in options.modes if workload.name == LONG or mode in OF_AGENTS]
        for mode in modes if repeat % 2 == 0 else modes[::-1]:
            say(f"{workload.name}, {mode}, run {repeat + 1}")
            with tempfile.TemporaryDirectory(prefix="disagg-bench-kv-", dir=options.folder) as folder:
                described = config(options.model, mode, workload, Path(folder))
                with launched("disaggregated", described, options.launcher) as address:
                    yield from asyncio.run(converse(address, workload, mode, repeat))


def worker_config(model: str) -> WorkerConfig:
    """A worker of the model, for parts without a cluster."""
    path = str(resolve_model(model))
    return WorkerConfig(worker_id="bench", roles=("prefill",), model_path=path, dtype=cpu_dtype_here().dtype)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All parts that were asked for, as rows."""
    rows: list[dict[str, Any]] = []
    for name, workload in workloads(is_quick=options.quick).items():
        if name in options.only:
            rows.append({"part": f"{name} workload", **asdict(workload), "over_caches": round(workload.over_caches, 2)})
            rows += measure_clusters(options, workload)
    if SOURCE in options.only:
        say(SOURCE)
        rows += Sources(worker_config(options.model), options.repeats + 1).rows()
    if CHOICE in options.only:
        say(CHOICE)
        rows += Choice(worker_config(options.model), options.lengths, options.repeats + 1).rows()
        lengths = [length for length in options.lengths if length <= links.LONGEST]
        for pause_s in (0.0, links.PAUSE_S):
            rows += [*links.rows(lengths, pause_s), *disks.rows(lengths, pause_s)]
    return rows


def say(what: str) -> None:
    """Progress."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name of an imported model")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--launcher", choices=LAUNCHERS, default="processes")
    parser.add_argument("--repeats", type=positive, default=1, help="runs of each mode")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[*LENGTHS], help="prefixes of the choice")
    parser.add_argument("--folder", type=Path, help="where the folders of disk tiers are made; else the system's")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format, for ten minutes of a core")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(lengths=[128, 512, 2048])
        options = parser.parse_args(argv)
    return options


def main() -> None:
    """Measure, print, write the report."""
    options = parse_arguments()
    rows = measure(options)
    summary = figures.summarize(rows, reuse_trace(options.trace) if options.trace else None)
    for table in figures.tables(rows):
        print_table(*table)
    print_table("Summary", ["figure", "value"], [[n, "" if v is None else f"{v:.3f}"] for n, v in summary.items()])
    if options.json:
        write_json(options.json, report(rows, summary))
        print(f"report: {options.json}")
