"""One row of the faults benchmark: figures against one promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.acceptance.faults.load import Stream
from tests.support.reports import print_table


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was seen, and whether it is what was promised."""

    name: str
    promise: str
    met: bool
    streams: int = 0
    completed: int = 0
    failed: int = 0
    wrong: int = 0
    """Streams with a token that is not the reference's, is missing in between, or came twice."""
    longest_gap_s: float = 0.0
    longest_ttft_s: float = 0.0
    recovery_s: float = 0.0
    """From the fault until every process was as before."""
    left: int = 0
    """Blocks, leases and all else that was held after the load."""
    left_for_s: float = 0.0
    """From the end of the load until nothing was held."""
    figures: dict[str, float] = field(default_factory=dict)
    """What only this row has."""
    loop_longest_s: float = 0.0
    """The longest turn of the gateway's event loop since that gateway's start, by its own gauge; 0 below 5 ms."""
    errors: tuple[str, ...] = ()
    """The first few that clients got."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, rounded to milliseconds."""
        values = asdict(self)
        values["figures"] = {name: round(value, 3) for name, value in self.figures.items()}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def of_streams(streams: Sequence[Stream]) -> dict[str, Any]:
    """The figures that every row with streams has."""
    return {
        "streams": len(streams),
        "completed": sum(stream.is_whole for stream in streams),
        "failed": sum(bool(stream.error) for stream in streams),
        "wrong": sum(stream.is_wrong for stream in streams),
        "longest_gap_s": max((stream.longest_gap_s for stream in streams), default=0.0),
        "longest_ttft_s": max((stream.ttft_s for stream in streams), default=0.0),
        "errors": tuple(stream.error for stream in streams if stream.error)[:3],
    }


def all_right(seen: Mapping[str, Any]) -> bool:
    """Whether every stream was whole and equal to the reference."""
    return bool(seen["streams"]) and seen["completed"] == seen["streams"] and not seen["wrong"]


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    columns = (
        "",
        "met",
        "streams",
        "completed",
        "wrong",
        "gap s",
        "TTFT s",
        "recovery s",
        "left",
        "freed s",
        "figures",
    )
    lines = [
        (
            row.name,
            "yes" if row.met else "NO",
            str(row.streams),
            str(row.completed),
            str(row.wrong),
            f"{row.longest_gap_s:.2f}",
            f"{row.longest_ttft_s:.2f}",
            f"{row.recovery_s:.2f}",
            str(row.left),
            f"{row.left_for_s:.2f}",
            ", ".join(f"{name} {value:.3g}" for name, value in row.figures.items()),
        )
        for row in rows
    ]
    print_table("Faults", columns, lines)
    for row in rows:
        if not row.met:
            print(f"{row.name}: {row.promise}\n  {'; '.join(row.errors) or 'see the figures'}")
