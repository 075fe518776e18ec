"""What does speculation bring, and does it change tokens? Ratios are tokens/s with speculation over those without.

    python -m benchmarks.speculation --json FILE
    python -m benchmarks.speculation --quick                       small sizes, two minutes
    python -m benchmarks.speculation --only copying --batches 1 4  some of it
    python -m benchmarks.speculation --llamacpp build/peers/llama.cpp/bin --vllm    peers beside it
    DISAGG_CPU_LEVEL=x86-64-v3 python -m benchmarks.speculation    as on a processor that has AVX2 alone

copying_b<B>          copying work (copying.py), B sequences at a time
chat_min              drawn chat, the least of all batches
hostile               text that makes lookup always wrong (hostile.py), the least of all batches
differing_answers     answers whose tokens are not those of the same request without speculation, of
compared_answers      so many
of_best_fixed_k_min   lookup over the best number of drafts that stays the same, none among them; the least of all cells
itl_p99_<work>        p99 of the time between two steps that give a stream tokens, over that without speculation: the
                      largest of all batches
llamacpp_copying_b1   the peers' own ratios, on the same requests
vllm_copying_b<B>

The engine is in this process and decodes as a decode worker does: prompts are computed before, and their KV joins
(rig.py). Every method is a core of its own over the same runner. A turn runs all methods over the same requests, the
next one in the other order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speculation import cells, peers
from benchmarks.speculation.methods import FIXED, LOOKUP, OFF, make_cores
from benchmarks.speculation.requests import Request
from benchmarks.speculation.rig import Decoded, Rig
from benchmarks.speculation.works import Work, Works
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.cluster.system.cores import available_cores, pin_process
from disagg.cluster.system.process_tools import take_environment, thread_environment
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.shell.cpu_dtype import cpu_dtype_here
from tests.support.reports import positive, print_table, report, write_json

PARTS = (*cells.WORKS, "kinds")
SWEPT = ("copying", "chat")
"""Works that are measured with fixed numbers of drafts, too."""
BATCH_OF_KINDS = 8
NUM_HOSTILE = 16
"""Hostile requests; larger batches have some of them several times."""


def measure_work(
    rig: Rig, cores: Mapping[str, EngineCore], work: Work, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All turns of all methods over a work, at each batch size."""
    methods = [method for method in cores if method in (OFF, LOOKUP) or work.name in SWEPT]
    for batch in options.batches:
        count = max(options.requests, 2 * batch)
        for turn in range(options.turns):
            some = work.part(turn * count, count)
            found = {method: rig.run(cores[method], some, batch) for method in cells.in_order(methods, turn)}
            for method in methods:
                yield cells.row_of(work.name, batch, method, turn, found[method], found[OFF])
        say(f"{work.name}, {batch} at a time")


def measure_kind(rig: Rig, cores: Mapping[str, EngineCore], work: Work) -> Iterator[dict[str, Any]]:
    """One run of each method over a work; the tokens count, not the times."""
    found: dict[str, Decoded] = {
        method: rig.run(cores[method], work.prefilled, BATCH_OF_KINDS) for method in (OFF, LOOKUP)
    }
    for method, decoded in found.items():
        yield cells.row_of(f"kind: {work.name}", BATCH_OF_KINDS, method, 0, decoded, found[OFF])


def measure(rig: Rig, model_path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All parts that were asked for, as rows."""
    cores = make_cores(rig.runner, rig.config, rig.calibration, options.fixed)
    works = Works(rig, cores[OFF], model_path, options.max_tokens)
    most = max(options.requests * options.turns, 2 * max(options.batches))
    rows: list[dict[str, Any]] = []
    copying = works.copying(most) if {"copying", "kinds"} & {*options.only} else None
    if copying is not None:
        say(f"{len(copying.prefilled)} requests are copying work")
        rows += [{"work": "chosen", "request": one.request.name, "prompt": len(one.request.prompt), "copied": share}
                 for one, share in zip(copying.prefilled, copying.copied, strict=True)]  # fmt: skip
    if copying is not None and "copying" in options.only:
        rows += measure_work(rig, cores, copying, options)
    if "chat" in options.only:
        rows += measure_work(rig, cores, works.chat(most), options)
    if "hostile" in options.only:
        rows += measure_work(rig, cores, works.hostile(NUM_HOSTILE), options)
    if copying is not None and "kinds" in options.only:
        for work in works.kinds(copying, options.of_each_kind):
            rows += measure_kind(rig, cores, work)
    if copying is not None and (options.llamacpp or options.vllm):
        some = [one.request for one in copying.part(0, max(options.requests, 2 * max(peers.BATCHES)))]
        rows += measure_peers(some, {one.name: works.text_of(one) for one in some}, model_path, options)
    return rows


def measure_peers(
    requests: Sequence[Request], texts: Mapping[str, str], model_path: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The same requests by others, with speculation and without."""
    if options.llamacpp:
        llama = peers.LlamaLookup(options.llamacpp, texts, options.threads)
        yield from peers.measure(llama, requests[: options.requests], options.batches, options.turns)
        say(llama.name)
    if options.vllm:
        with peers.serving_both(model_path) as vllm:
            yield from peers.measure(vllm, requests, options.batches, options.turns)
        say(vllm.name)


def say(what: str) -> None:
    """Progress."""
    print(f"{what} ...", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the command line


def print_cells(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each cell and method."""
    lines = []
    for work, batch in cells.cells_of(rows):
        for method in cells.methods_of(rows, (work, batch)):
            cell = (work, batch)
            shown = [cells.median_of(rows, cell, method, name) for name in ("tok_s", "itl_p50_ms", "itl_p99_ms")]
            steps = sum(cells.values(rows, cell, method, "tokens")) / sum(cells.values(rows, cell, method, "steps"))
            over = cells.ratio(rows, cell, method, OFF)
            differing = sum(cells.values(rows, cell, method, "differing"))
            lines.append(
                (f"{work}, {batch}", method, f"{shown[0]:.1f}", f"{over:.3f}", f"{steps:.2f}", f"{shown[1]:.2f}",
                 f"{shown[2]:.2f}", f"{differing:.0f}")
            )  # fmt: skip
    columns = ("work, batch", "method", "tok/s", "over off", "tokens a step", "ITL p50 ms", "p99 ms", "differing")
    print_table("Decoding", columns, lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model of the cache, or a checkpoint folder")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--fixed", type=positive, nargs="*", default=[*FIXED], help="numbers of drafts of the sweep")
    parser.add_argument("--turns", type=positive, default=4)
    parser.add_argument("--requests", type=positive, default=8, help="of a turn, at least; twice the batch otherwise")
    parser.add_argument("--of-each-kind", type=positive, default=64, help="requests of each way to choose tokens")
    parser.add_argument("--max-tokens", type=positive, default=128, help="of an answer")
    parser.add_argument("--threads", type=positive, default=min(2, len(available_cores())))
    parser.add_argument("--llamacpp", type=Path, help="the folder of its programs; needs the default model")
    parser.add_argument("--vllm", action="store_true", help="its CPU build, installed at its first use")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(batches=[1, 4], fixed=[2], turns=1, requests=4, of_each_kind=4, max_tokens=48)
        options = parser.parse_args(argv)
    if options.llamacpp and options.model != DEFAULT_MODEL:
        parser.error("--llamacpp needs the default model: llama.cpp is given its GGUF file")
    return options


def main() -> None:
    """Measure, print, write the report."""
    options = parse_arguments()
    take_environment(thread_environment(options.threads))
    cores = available_cores()[: options.threads]
    pin_process(cores)
    model_path = resolve_model(options.model)
    config = WorkerConfig(
        worker_id="bench",
        roles=("prefill", "decode"),
        model_path=str(model_path),
        dtype=cpu_dtype_here().dtype,
        num_threads=options.threads,
        cores=cores,
        num_blocks=max(512, 96 * max(options.batches)),
    )
    rows = measure(Rig(config), model_path, options)
    measured = [row for row in rows if "tok_s" in row]
    beside = [row for row in rows if "peer" in row]
    summary = {**cells.summarize(measured), **peers.summarize(beside)}
    print_cells(measured)
    peers.show(beside)
    print_table("Summary", ["figure", "value"], [[n, "" if v is None else f"{v:.3f}"] for n, v in summary.items()])
    if options.json:
        write_json(options.json, report(rows, summary))
        print(f"report: {options.json}")
