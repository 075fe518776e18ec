"""Decode steps and prompts of this tree's engine beside another commit's, in turns.

python -m benchmarks.engine.commits REVISION --json FILE
python -m benchmarks.engine.commits REVISION --loops 8 --batches 8      and closed loops, whose prompts meet decodes

Both engines live at once, each a process on the same first cores, one of them at work at a time; what drives them is
this tree's. A turn measures each batch size and prompts on one engine and then on the other, the order turned round
from turn to turn. A ratio is the median, over the turns, of this tree's time over the other's, so that what the machine
does meanwhile meets both. The other engine has to understand the configuration and the commands of this tree's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.process import Engine, running_engine
from benchmarks.engine.rig import LoopShape
from benchmarks.engine.steps import PROMPTS, Kind, add_engine_arguments, kinds, prompts_name, worker_config
from disagg.cluster.models.catalog import resolve_model
from tests.support.reports import REPOSITORY, positive, print_table, report, write_json

LOOP_ROUNDS = 3
"""Requests of a loop for each place in it."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Milliseconds of one work in one turn, on both engines."""

    before: float
    after: float


def measure_kind(engines: tuple[Engine, Engine], options: argparse.Namespace) -> dict[str, list[Pair]]:
    """All turns of `(the other revision's engine, this tree's)`, by the name of the work."""
    works = _works(options)
    found: dict[str, list[Pair]] = {name: [] for name in works}
    for turn in range(options.turns):
        for name, time_ms in works.items():
            times = [0.0, 0.0]
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                times[side] = time_ms(engines[side])
            found[name].append(Pair(before=times[0], after=times[1]))
    return found


def _works(options: argparse.Namespace) -> dict[str, Callable[[Engine], float]]:
    """How each work is timed: the median step of each batch size, the prompts, and whole loops."""
    works: dict[str, Callable[[Engine], float]] = {}
    for batch in options.batches:
        works[f"decode {batch}"] = partial(_step_ms, batch=batch, options=options)
    for count in PROMPTS:
        size = options.input_tokens // count
        works[prompts_name(count, size)] = partial(_prompts_ms, num_tokens=size, num_prompts=count)
    first_seeds = itertools.count(step=1 << 16)  # an engine remembers prompts
    for concurrency in options.loops:
        works[f"loop of {concurrency}"] = partial(_loop_ms, concurrency=concurrency, first_seeds=first_seeds)
    return works


def _step_ms(engine: Engine, batch: int, options: argparse.Namespace) -> float:
    return statistics.median(engine.decode(batch, options.input_tokens, options.steps))


def _prompts_ms(engine: Engine, num_tokens: int, num_prompts: int) -> float:
    return engine.prefill(num_tokens, num_prompts)


def _loop_ms(engine: Engine, concurrency: int, first_seeds: Iterator[int]) -> float:
    shape = LoopShape(
        concurrency=concurrency,
        requests=LOOP_ROUNDS * concurrency,
        input_tokens=256,
        output_tokens=128,
        first_seed=next(first_seeds),
    )
    engine.begin_loop(shape)
    return engine.end_loop().elapsed_s * 1e3


def rows_of(kind: Kind, found: dict[str, list[Pair]]) -> list[dict[str, Any]]:
    """A row for each work."""
    rows = []
    for name, pairs in found.items():
        ratios = [pair.after / pair.before for pair in pairs]
        rows.append(
            {
                "engine": kind.name,
                "what": name,
                "before_ms": round(statistics.median(pair.before for pair in pairs), 3),
                "after_ms": round(statistics.median(pair.after for pair in pairs), 3),
                "ratio": round(statistics.median(ratios), 4),
                "least_ratio": round(min(ratios), 4),
                "most_ratio": round(max(ratios), 4),
            }
        )
    return rows


def check_out(revision: str, folder: Path) -> Path:
    """The files of a revision in an empty folder; its packages, to be found before this tree's.

    Raises:
        ValueError: there is no such revision.
    """
    archive = subprocess.run(["git", "archive", revision], cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode:
        raise ValueError(f"revision: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder / "src"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what to compare with: a commit, a branch, a tag")
    add_engine_arguments(parser)
    parser.add_argument("--steps", type=positive, default=48, help="decode steps of each batch size, each turn")
    parser.add_argument("--loops", type=positive, nargs="*", default=[], help="requests at a time (256 in, 128 out)")
    parser.add_argument("--turns", type=positive, default=6)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    model_path = resolve_model(options.model)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="disagg-commit-") as folder:
        other = check_out(options.revision, Path(folder))
        for kind in kinds(options):
            print(f"{kind.name} ...", file=sys.stderr, flush=True)
            config = worker_config(kind, model_path)
            engines = running_engine(config, other, kind.level), running_engine(config, level=kind.level)
            with engines[0] as before, engines[1] as after:
                rows += rows_of(kind, measure_kind((before, after), options))
    columns = ("engine", "work", f"{options.revision}, ms", "this tree, ms", "ratio", "least", "most")
    lines = [
        (row["engine"], row["what"], f"{row['before_ms']:.2f}", f"{row['after_ms']:.2f}", f"{row['ratio']:.3f}",
         f"{row['least_ratio']:.3f}", f"{row['most_ratio']:.3f}")
        for row in rows
    ]  # fmt: skip
    print_table(f"this tree beside {options.revision}", columns, lines)
    if options.json:
        summary = {f"{row['what']}, {row['engine']}".replace(" ", "_").replace(",", ""): row["ratio"] for row in rows}
        write_json(options.json, report(rows, summary))
        print(f"report: {options.json}")


if __name__ == "__main__":
    main()
