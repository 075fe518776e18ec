"""Turns of all methods over one work at one batch size, and what is made of them. No engine, no clock.

A cell is (work, batch). A turn runs every method over the same requests, the next turn in the other order; a ratio is
the median over the turns of one method's tokens/s over another's in the same turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speculation.methods import LOOKUP, OFF
from benchmarks.speculation.rig import Answer, Decoded
from tests.support.reports import percentile

WORKS = ("copying", "chat", "hostile")
"""Works whose times count."""


def in_order(methods: Sequence[str], turn: int) -> Sequence[str]:
    """The methods in the order of a turn."""
    return methods if turn % 2 == 0 else methods[::-1]


def num_differing(answers: Sequence[Answer], expected: Sequence[Answer]) -> int:
    """Number of answers whose tokens are not those expected."""
    return sum(one.token_ids != other.token_ids for one, other in zip(answers, expected, strict=True))


def row_of(work: str, batch: int, method: str, turn: int, decoded: Decoded, expected: Decoded) -> dict[str, Any]:
    """One run as a row; `expected` is a run without drafts."""
    gaps = [gap for answer in decoded.answers for gap in answer.gaps_ms]
    return {
        "work": work,
        "batch": batch,
        "method": method,
        "turn": turn,
        "tok_s": decoded.tok_s,
        "tokens": decoded.num_tokens,
        "steps": decoded.num_steps,
        "rows": decoded.num_rows,
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "answers": len(decoded.answers),
        "differing": num_differing(decoded.answers, expected.answers),
    }


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The cells of the rows, in the order in which they came."""
    return list(dict.fromkeys((row["work"], row["batch"]) for row in rows))


def methods_of(rows: Sequence[Mapping[str, Any]], cell: tuple[str, int]) -> list[str]:
    """Methods that a cell was measured with, in the order in which they came."""
    return list(dict.fromkeys(row["method"] for row in rows if (row["work"], row["batch"]) == cell))


def values(rows: Sequence[Mapping[str, Any]], cell: tuple[str, int], method: str, name: str = "tok_s") -> list[float]:
    """One figure of a method in a cell, turn by turn."""
    found = [row for row in rows if (row["work"], row["batch"], row["method"]) == (*cell, method)]
    return [row[name] for row in sorted(found, key=lambda row: int(row["turn"]))]


def ratio(
    rows: Sequence[Mapping[str, Any]], cell: tuple[str, int], method: str, other: str, name: str = "tok_s"
) -> float:
    """Median over the turns of a method's figure over another method's."""
    pairs = zip(values(rows, cell, method, name), values(rows, cell, other, name), strict=True)
    return statistics.median(above / below for above, below in pairs)


def median_of(rows: Sequence[Mapping[str, Any]], cell: tuple[str, int], method: str, name: str = "tok_s") -> float:
    """Median of a figure over the turns."""
    return statistics.median(values(rows, cell, method, name))


def best_fixed(rows: Sequence[Mapping[str, Any]], cell: tuple[str, int]) -> str | None:
    """The best of the methods with one number of drafts, none among them, by the median of their tokens/s. None where
    the cell has no sweep."""
    fixed = [method for method in methods_of(rows, cell) if method != LOOKUP]
    if fixed == [OFF]:
        return None
    return max(fixed, key=lambda method: median_of(rows, cell, method))


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The named figures; None for one that was not measured."""
    cells = [cell for cell in cells_of(rows) if LOOKUP in methods_of(rows, cell)]
    speedups = {cell: ratio(rows, cell, LOOKUP, OFF) for cell in cells}
    bests = {cell: best for cell in cells if (best := best_fixed(rows, cell)) is not None}
    summary: dict[str, float | None] = {f"copying_b{batch}": None for batch in (1, 4, 8)}
    summary |= {f"{work}_b{batch}": value for (work, batch), value in speedups.items() if work in WORKS}
    summary |= {
        "chat_min": _least([value for (work, _), value in speedups.items() if work == "chat"]),
        "hostile": _least([value for (work, _), value in speedups.items() if work == "hostile"]),
        "differing_answers": float(sum(row["differing"] for row in rows)),
        "compared_answers": float(sum(row["answers"] for row in rows if row["method"] != OFF)),
        "of_best_fixed_k_min": _least([ratio(rows, cell, LOOKUP, best) for cell, best in bests.items()]),
    }
    for work in dict.fromkeys(work for work, _ in cells if work in WORKS):
        ratios = [ratio(rows, cell, LOOKUP, OFF, "itl_p99_ms") for cell in cells if cell[0] == work]
        summary[f"itl_p99_{work}"] = max(ratios)
    return summary


def _least(found: Sequence[float]) -> float | None:
    return min(found, default=None)
