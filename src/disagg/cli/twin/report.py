"""`disagg explain --shape`: where answers decode, since when, what was compared, and what would change it.

GetShapeResponse ──report──> facts, the latest comparison with its figures, earlier ones as lines
"""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.address import reaching
from disagg.cli.operations.operate import open_client
from disagg.client import Shape, ShapeComparison
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import table
from disagg.router.config import num_split
from disagg.simulator.twin.twin import LEAST

SILENT_S = 300.0
"""Seconds without a look after which there is no twin: one look takes at most some minutes."""


def run_explain_shape(address: str, console: Console, *, as_json: bool) -> None:
    """Print the report. Raises `LaunchError` if there is no gateway."""
    with open_client(address) as client, reaching(address):
        shape = client.shape()
    if as_json:
        console.print_json(data=to_dict(shape))
    else:
        console.print(report(shape, time.time()))


def to_dict(shape: Shape) -> dict[str, Any]:
    """All fields under their names in the proto."""
    found: dict[str, Any] = MessageToDict(
        shape, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def report(shape: Shape, now: float) -> Group:
    """Report for people; `now` in seconds since the epoch."""
    if not shape.decodes:
        return Group(Text(f"policy {shape.policy}: it has no setting of where answers decode"))
    parts: list[RenderableType] = [_facts(shape, now)]
    if not shape.comparisons:
        parts += [Text(), Text(_why_nothing(shape, now), style="dim")]
        return Group(*parts)
    latest, *earlier = shape.comparisons
    parts += [Text(), Text("Compared last", style="bold"), _figures(latest), *_verdict(latest, now)]
    if earlier:
        parts += [Text(), Text("Before", style="bold"), _lines(earlier, now)]
    return Group(*parts)


def _facts(shape: Shape, now: float) -> Table:
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    by = f"by {shape.changed_by}" if shape.changed_by else "as configured"
    made.add_row("answers decode", Text(_meaning(shape.decodes)))
    made.add_row("since", Text(f"{_ago(now - shape.since)}, {by}"))
    made.add_row("policy", Text(shape.policy))
    made.add_row("twin", Text(f"read the load {_ago(now - shape.load_read)}" if shape.load_read else "none has run"))
    return made


def _why_nothing(shape: Shape, now: float) -> str:
    if not shape.load_read or now - shape.load_read > SILENT_S:
        return f"Nothing was compared yet, and no twin runs; start one with: {command('twin')}"
    number = shape.targeted_requests
    return (
        f"Nothing was compared yet: {number} of the latest requests have targets, and comparisons begin with {LEAST} "
        "requests that have some and two workers; targets come with requests (x-slo-ttft-ms, x-slo-tpot-ms) or from "
        "the section slo"
    )


def _meaning(decodes: str) -> str:
    if number := num_split(decodes):
        workers = "1 worker that takes" if number == 1 else f"{number} workers that take"
        return f"on {workers} no prompts, and on others where steps would be late there ({decodes})"
    return {
        "spread": "on all workers (spread)",
        "gather": "on as few workers as the TPOT targets allow (gather)",
    }.get(decodes, decodes)


def _figures(comparison: ShapeComparison) -> Table:
    rates = [each.rate_factor for each in comparison.options[0].predictions] if comparison.options else []
    made = table("", "setting", *(f"at {rate:.2f} of the rate>" for rate in rates))
    for option in comparison.options:
        is_chosen = option.decodes == comparison.chosen
        made.add_row(
            ">" if is_chosen else "",
            Text(option.decodes),
            *(f"{each.attainment:.1%}" for each in option.predictions),
            style="bold" if is_chosen else "",
        )
    return made


def _verdict(comparison: ShapeComparison, now: float) -> list[RenderableType]:
    difference, needed = comparison.difference, comparison.needed
    lines = [
        f"share of {comparison.requests} requests that meet their targets, predicted {_ago(now - comparison.at)}; "
        f"cause: {comparison.cause}; > was chosen",
        comparison.reason,
    ]
    if comparison.HasField("measured"):
        lines.insert(
            1,
            f"measured: {comparison.measured:.1%} of the {comparison.measured_requests} of them that came and ended "
            f"under {comparison.present}",
        )
    if comparison.chosen == comparison.present:
        lines.append(
            f"difference {difference:+.1%} of the requests; {comparison.present} is changed when that exceeds "
            f"{needed:.1%} (error {comparison.error:.1%} + {needed - comparison.error:.0%})"
        )
    else:
        lines.append(
            f"changed from {comparison.present}, which meets the targets of {difference:.1%} fewer requests; needed "
            f"were {needed:.1%} (error {comparison.error:.1%} + {needed - comparison.error:.0%})"
        )
    return [Text(line, style="dim") for line in lines]


def _lines(comparisons: list[ShapeComparison], now: float) -> Table:
    made = table("when", "requests>", "difference>", "needed>", "", "cause")
    for each in comparisons:
        change = f"{each.present} -> {each.chosen}" if each.chosen != each.present else each.chosen
        made.add_row(
            _ago(now - each.at),
            str(each.requests),
            f"{each.difference:+.1%}",
            f"{each.needed:.1%}",
            Text(change),
            Text(each.cause),
        )
    return made


def _ago(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
