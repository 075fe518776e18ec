"""What a contact with a GPU found, as rows: one line of JSON each while it is measured, JSON and a page of all of them.

Whatever measures writes its rows through a `RowFile`, which is flushed row by row: a section that crashes or runs out
of time loses only what it had not measured yet. Pure but for files; needs nothing besides Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "miss", "failed", "open", "info"]
"""ok: as wanted; miss: below the target; failed: wrong or broken; open: could not be tried here; info: no target."""

BAD: tuple[Status, ...] = ("miss", "failed")
OUT_OF_TIME = "time"
"""Name of the row of a section that was ended at its limit: open where nothing had failed until then."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One finding."""

    section: str
    name: str
    status: Status
    value: float | None = None
    unit: str = ""
    share: float | None = None
    """Of the limit or peer that `detail` names; larger is better."""
    target: float | None = None
    """Least share that is wanted."""
    detail: str = ""
    without: str = ""
    """Ops whose kernels were switched off meanwhile."""

    @property
    def is_test(self) -> bool:
        """Whether it is the end of one test."""
        return "::" in self.name


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """One run of the whole check."""

    machine: Mapping[str, Any]
    commit: str
    command: str
    rows: list[Row] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, float]:
        """Share of each finding that has one, by `section/name`."""
        return {f"{row.section}/{row.name}": row.share for row in self.rows if row.share is not None}


class RowFile:
    """Where a section writes its rows. `with_targets=False` (tiny sizes on a CPU) makes every figure an info."""

    def __init__(self, path: Path, section: str, *, with_targets: bool) -> None:
        self._path = path
        self._section = section
        self._with_targets = with_targets

    def add(
        self,
        name: str,
        value: float | None,
        unit: str,
        *,
        share: float | None = None,
        target: float | None = None,
        detail: str = "",
    ) -> Row:
        """Write one measurement; its status follows from share and target."""
        status: Status = "info"
        target = target if self._with_targets else None
        if share is not None and target is not None:
            status = "ok" if share >= target else "miss"
        return self.write(
            Row(
                section=self._section,
                name=name,
                status=status,
                value=value,
                unit=unit,
                share=share,
                target=target,
                detail=detail,
            )
        )

    def failed(self, name: str, error: BaseException) -> Row:
        """Write that a measurement could not be made, and go on with the next one."""
        return self.write(failure(self._section, name, f"{type(error).__name__}: {error}"))

    def write(self, row: Row) -> Row:
        """Append one row."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        return row


def failure(section: str, name: str, detail: str) -> Row:
    """A row that says what went wrong, on one line of reasonable length."""
    return Row(section=section, name=name, status="failed", detail=" ".join(detail.split())[:400])


def read_rows(path: Path) -> list[Row]:
    """The rows in a file; a last line that was cut off is left out."""
    return parse_rows(path.read_text(encoding="utf-8")) if path.exists() else []


def parse_rows(text: str) -> list[Row]:
    """The rows of lines of JSON, up to one that was cut off."""
    rows: list[Row] = []
    for line in text.splitlines():
        try:
            rows.append(Row(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return rows


# ---------------------------------------------------------------- output


COLUMNS = ("section", "what", "value", "share", "target", "status", "detail")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    value = "" if row.value is None else f"{row.value:,.4g} {row.unit}".strip()
    share = "" if row.share is None else f"{row.share:.3f}"
    target = "" if row.target is None else f"{row.target:.2f}"
    without = f"without: {row.without}" if row.without else ""
    return (row.section, row.name, value, share, target, row.status, "; ".join(filter(None, (row.detail, without))))


def as_markdown(report: CheckReport) -> str:
    """The page for docs/benchmarks/."""
    counts = {status: sum(row.status == status for row in report.rows) for status in ("ok", "miss", "failed", "open")}
    lines = ["# First contact with a GPU", "", f"`{report.command}`, commit `{report.commit}`.", ""]
    lines += [f"- {name}: {value}" for name, value in report.machine.items()]
    lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items()) + ".", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(text.replace("|", "/") for text in cells(row)) + " |" for row in report.rows]
    return "\n".join(lines) + "\n"


def as_json(report: CheckReport) -> str:
    """The common form of this project's benchmark reports."""
    content = {
        "machine": dict(report.machine),
        "commit": report.commit,
        "command": report.command,
        "rows": [asdict(row) for row in report.rows],
        "summary": report.summary,
    }
    return json.dumps(content, indent=2) + "\n"
