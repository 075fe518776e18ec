"""Is a cluster used as before once its workers are as fast as before? In virtual time: figures repeat exactly.

    python -m benchmarks.slow_times [--cells 0] [--json FILE]

Every shape, with local prefill and without it, with targets and without them, at three loads; all workers slow, or one,
or the links, for 1 s to 10 min, 2 to 100 times; and workers whose calibration was wrong by as much. `cells.py` has what
is compared. `--cells N` runs N cells that are spread over the grid, 0 all.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.slow_times.cells import Cell, Outcome, Who, compare, pool_of
from tests.support.reports import print_table, report, write_json

Row = dict[str, Any]
LOADS = {
    "1p1d": (1.0, 2.0, 3.0),
    "2p2d": (2.0, 4.0, 6.0),
    "2x1-elastic": (1.0, 2.0, 3.0),
    "2x1-chunked:512": (1.0, 2.0, 3.0),
}
"""Shape -> requests per second."""
FACTORS = (2.0, 5.0, 20.0, 100.0)
CALIBRATIONS = (*FACTORS, 0.5, 0.2, 0.05, 0.01)
SLOW_S = (1.0, 10.0, 60.0, 600.0)
SHARE_WITHIN = 0.03
"""By how much fewer requests may be in time than without the slow time."""
PROMPTS_WITHIN = 0.2
"""By how much the share of its pool's prompts that one worker computes may differ."""
LEAST_SHARE = 0.25
"""Of all prompts, for a pool whose workers are compared: of fewer the shares are chance."""


def cells() -> list[Cell]:
    """The grid."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for shape, loads in LOADS.items():
        is_split = shape in ("1p1d", "2p2d")
        for load, has_targets, local in product(loads, (True, False), ("auto", "never") if is_split else ("auto",)):
            for factor in CALIBRATIONS:
                yield Cell(shape, "calibration", factor, 0.0, load, has_targets, local)
            whose: tuple[Who, ...] = ("all", "one", "link") if is_split else ("all", "one")
            for who, factor, slow_s in product(whose, FACTORS, SLOW_S):
                yield Cell(shape, who, factor, slow_s, load, has_targets, local)


def spread(found: Sequence[Cell], number: int) -> list[Cell]:
    """So many of them from all over the grid; all where `number` is 0."""
    if not number:
        return list(found)
    return [found[index * len(found) // number] for index in range(min(number, len(found)))]


def row(cell: Cell) -> Row:
    """One cell: with its slow time, and without it."""
    after, without = compare(cell)
    return {
        **cell._asdict(),
        "from_s": round(after.from_s, 1),
        "share": round(after.share, 3),
        "share_without": round(without.share, 3),
        "refused": round(after.refused, 3),
        "prompts_differ": round(prompts_differ(after, without), 3),
        "recovered": has_recovered(after, without),
    }


def prompts_differ(after: Outcome, without: Outcome) -> float:
    """The largest difference between the shares of the prompts that equal workers compute. Which pool computes a prompt
    is a tie at low load, so pools that compute few with the slow time, or without it, do not count."""
    counted = {pool for pool, share in after.pools.items() if min(share, without.pools.get(pool, 0.0)) >= LEAST_SHARE}
    workers = [each for each in {*after.prompts, *without.prompts} if pool_of(each) in counted]
    return max((abs(after.prompts.get(each, 0.0) - without.prompts.get(each, 0.0)) for each in workers), default=0.0)


def has_recovered(after: Outcome, without: Outcome) -> bool:
    """Whether as many requests are in time, and the workers are used as before. With a queue that never ends
    it has not recovered."""
    if math.isinf(after.from_s):
        return False
    return after.share >= without.share - SHARE_WITHIN and prompts_differ(after, without) <= PROMPTS_WITHIN


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Flat figures."""
    lost = [each["share_without"] - each["share"] for each in rows]
    return {
        "cells": float(len(rows)),
        "recovered": sum(each["recovered"] for each in rows) / len(rows),
        "share_lost_max": max(lost),
        "share_lost_mean": sum(lost) / len(lost),
        "prompts_differ_max": max(each["prompts_differ"] for each in rows),
    }


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=0, help="how many of the grid (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows: list[Row] = []
    for cell in spread(cells(), options.cells):
        rows.append(row(cell))
        if not rows[-1]["recovered"]:
            print(f"not as before: {cell}: {rows[-1]}", flush=True)
    found = summary(rows)
    print_table("after slow times", ["", "value"], [[name, f"{value:.3f}"] for name, value in found.items()])
    if options.json is not None:
        write_json(options.json, report(rows, found))
