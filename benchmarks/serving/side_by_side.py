"""What `benchmarks.serving --shapes`, `--engine` and `--peer` run: our clusters, their bare engines and another server,
in turns.

    parties -> every concurrency and repeat, the order turned round from one repeat to the next -> ratios of each repeat

`served_over_engine_c<N>`: the cluster by gRPC over its own engines, both on the same cores; the difference is what
gateway, scheduling between processes and the client cost, which share the cores with the engines.
`served_over_<peer>_c<N>`: the cluster by HTTP over the other server by HTTP. Of several shapes, the summary has the
best one, and each shape's own as `<shape>_served_over_...`. With shapes alone, the first is compared with each of the
others, both by gRPC: `<first>_served_over_<other>_c<N>`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import load, load_http
from benchmarks.serving.parties import WARM_UP_SEED, HttpParty, Party, our_parties
from benchmarks.serving.vllm import serving_vllm
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.models.catalog import resolve_model
from disagg.engine.checkpoint.checkpoint import read_model_config
from tests.support.reports import print_table

PEER_VLLM = "vllm"


def measure(options: argparse.Namespace, base: dict[str, Any]) -> list[load.Run]:
    """All runs of all parties."""
    model = parse_config(base).model
    model_path = resolve_model(model.path or model.served_name)
    with ExitStack() as stack:
        parties: list[Party] = []
        for name in options.shapes:
            print(f"{name}: starting ...", file=sys.stderr, flush=True)
            parties += stack.enter_context(
                our_parties(name, base, options.launcher, model_path, with_engine=options.engine)
            )
        if options.peer:
            print(f"{options.peer}: starting ...", file=sys.stderr, flush=True)
            parties.append(stack.enter_context(_peer(options.peer, model_path)))
        return run_all(parties, options)


def run_all(parties: Sequence[Party], options: argparse.Namespace) -> list[load.Run]:
    """A warm-up of each, then everything in turns."""
    shape = load.RequestSizes(input_tokens=options.input_tokens, output_tokens=options.output_tokens)
    for party in parties:
        party.run(shape, 2, 0, WARM_UP_SEED, 2)
    runs = []
    seed = options.seed
    for repeat in range(options.repeats):
        for concurrency in options.concurrency:
            count = num_requests(concurrency, options.requests)
            for party in parties if repeat % 2 == 0 else reversed(parties):
                print(f"repeat {repeat + 1}: {party.name}, {concurrency} at a time ...", file=sys.stderr, flush=True)
                runs.append(party.run(shape, concurrency, repeat, seed, count))
                seed += count  # prompts that are in no cache
    return runs


def num_requests(concurrency: int, asked: int | None) -> int:
    """Requests of one run: enough that every client sends two or more, and at least eight."""
    return max(8, 2 * concurrency) if asked is None else asked


@contextmanager
def _peer(peer: str, model_path: Path) -> Iterator[Party]:
    """vLLM, started here, or a server that runs already."""
    vocab_size = read_model_config(model_path).vocab_size
    if peer == PEER_VLLM:
        with serving_vllm(model_path) as address:
            yield HttpParty(PEER_VLLM, address, vocab_size)
    else:
        yield HttpParty("peer", load_http.address_of(peer), vocab_size)


# ---------------------------------------------------------------- what is reported


def ratios(runs: Sequence[load.Run], ours: str, theirs: str) -> dict[int, float]:
    """By concurrency: the median, over the repeats, of our tokens/s over theirs. Empty where one was not measured."""
    tok_s = {(run.mode, run.concurrency, run.repeat): run.tok_s for run in runs}
    found: dict[int, list[float]] = {}
    for (mode, concurrency, repeat), rate in tok_s.items():
        other = tok_s.get((theirs, concurrency, repeat))
        if mode == ours and other is not None:
            found.setdefault(concurrency, []).append(rate / other)
    return {concurrency: round(statistics.median(values), 4) for concurrency, values in found.items()}


def comparison_rows(runs: Sequence[load.Run]) -> list[dict[str, Any]]:
    """One for each shape, pair and concurrency."""
    modes = {run.mode for run in runs}
    peer = next((name for name in (PEER_VLLM, "peer") if name in modes), None)
    shapes = list(dict.fromkeys(run.mode.split()[0] for run in runs if run.mode.endswith((" gRPC", " HTTP"))))
    has_others = peer is not None or any(mode.endswith(" engine") for mode in modes)
    rows = []
    for name in shapes:
        pairs = [(f"{name} gRPC", f"{name} engine", "engine"), (f"{name} HTTP", f"{name} engine", "engine_http")]
        if not has_others and name == shapes[0]:
            pairs = [(f"{name} gRPC", f"{other} gRPC", other) for other in shapes[1:]]
        if peer is not None:
            pairs += [(f"{name} HTTP", peer, peer), (f"{name} gRPC", peer, f"{peer}_grpc")]
        for ours, theirs, figure in pairs:
            rows += [
                {"what": "ratio", "shape": name, "over": figure, "concurrency": concurrency, "ratio": ratio}
                for concurrency, ratio in ratios(runs, ours, theirs).items()
            ]
    return rows


def summary(runs: Sequence[load.Run]) -> dict[str, float]:
    """`served_over_<what>_c<N>` of the best shape, those of every shape, and the tokens/s of everyone."""
    flat: dict[str, float] = {}
    for row in comparison_rows(runs):
        name = f"served_over_{row['over']}_c{row['concurrency']}"
        flat[f"{row['shape']}_{name}"] = row["ratio"]
        flat[name] = max(flat.get(name, 0.0), row["ratio"])
    for (mode, concurrency), cell in load.by_cell(runs).items():
        flat[f"{mode.replace(' ', '_')}_tok_s_c{concurrency}"] = round(load.figures(cell).tok_s, 2)
    return flat


def print_tables(runs: Sequence[load.Run], title: str) -> None:
    """Everyone's figures, then the ratios."""
    print_table(title, *load.table(runs))
    rows = comparison_rows(runs)
    if rows:
        lines = [(r["shape"], r["over"], str(r["concurrency"]), f"{r['ratio']:.2f}") for r in rows]
        print_table("output tok/s over", ("shape", "over", "concurrency", "ratio"), lines)
