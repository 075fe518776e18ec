"""What a contact prints: failures first, figures last, one short line each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.report import BAD, OUT_OF_TIME, Row

MOST_CHARACTERS = 10_000
"""Of all that is printed. Whoever runs it elsewhere may see the end of the output alone."""
LINE = 170
"""Characters of a failure; a figure has fewer."""
FAILURES_SHARE = 0.5
"""Of the characters, where there are more lines than fit."""


def summary(rows: Sequence[Row], sections: Sequence[str], verdict: str, limit: int = MOST_CHARACTERS) -> str:
    """At most `limit` characters: failures and what was ended at its limit, a line for each of `sections`, figures, the
    verdict. What does not fit is counted."""
    sections_text = "\n".join(["sections:", *(f"  {line}" for line in sections)]) if sections else ""
    failures = [_failure(row) for row in rows if row.status == "failed" or row.name == OUT_OF_TIME]
    figures = [_figure(row) for row in rows if row.value is not None and not row.is_test and row.status != "failed"]
    room = limit - len(sections_text) - len(verdict) - 40
    for_failures = min(_length(failures), max(int(room * FAILURES_SHARE), room - _length(figures)))
    parts = [
        _fitting("failed:", failures, for_failures),
        sections_text,
        _fitting("figures:", figures, room - for_failures),
        verdict,
    ]
    return "\n".join(part for part in parts if part)[:limit]


def _failure(row: Row) -> str:
    without = f" [without {row.without}]" if row.without else ""
    return f"  {row.section}: {row.name}{without}: {row.detail}"[:LINE]


def _figure(row: Row) -> str:
    share = "" if row.share is None else f" ({row.share:.2f}{f' of {row.target:.2f}' if row.target else ''})"
    mark = " MISS" if row.status in BAD else ""
    without = f" without {row.without}" if row.without else ""
    return f"  {row.section}: {row.name[:60]}: {row.value:,.4g} {row.unit}{share}{mark}{without}"[:110]


def _length(lines: Sequence[str]) -> int:
    return sum(len(line) + 1 for line in lines) + 60 if lines else 0


def _fitting(title: str, lines: Sequence[str], room: int) -> str:
    """As many lines as fit behind the title, and how many do not."""
    if not lines:
        return ""
    kept, used = [], len(title) + 50
    for line in lines:
        used += len(line) + 1
        if used > room:
            break
        kept.append(line)
    left_out = len(lines) - len(kept)
    return "\n".join([title, *kept, *([f"  and {left_out} more in rows.jsonl"] if left_out else [])])
