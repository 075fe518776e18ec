"""`disagg usage`: the use of keys by day and model, with the sum of each key."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.cli.address import reaching
from disagg.cli.operations.operate import open_client
from disagg.client import UsageByDay
from disagg.cluster.system.terminal import table

_COUNTS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")
NO_KEY = "(no key)"
"""Name for the callers of a gateway without keys."""


def run_usage(address: str, days: int, key: str, console: Console, *, as_json: bool) -> None:
    """Print the use of keys.

    Raises:
        LaunchError: if there is no gateway.
        PermissionDeniedError: for another key's use without the key of an admin.
        UnavailableError: where the gateway keeps no record of use.
    """
    with open_client(address) as client, reaching(address):
        found = client.usage(days, key)
    if as_json:
        console.print_json(data=usage_json(found))
        return
    period = found.first_date if found.first_date == found.last_date else f"{found.first_date} to {found.last_date}"
    if not found.entries:
        console.print(f"nothing was used, {period} (UTC)", highlight=False)
        return
    console.print(by_day(found))
    if len(found.entries) > 1:
        console.print()
        console.print(by_key(found))
    if found.has_more:
        console.print("there are more entries; ask for fewer days or for one key", style="dim", highlight=False)


def by_day(found: UsageByDay) -> Table:
    """Table with one line for each day, key and model."""
    made = table("day (UTC)", "key", "model", "requests>", "failed>", "prompt>", "cached>", "output>")
    for entry in found.entries:
        counts = (f"{getattr(entry, name):,}" for name in _COUNTS)
        made.add_row(entry.date, entry.key or NO_KEY, entry.model, *counts)
    return made


def by_key(found: UsageByDay) -> Table:
    """Table with the sums of each key over days and models, the most output tokens first."""
    sums: dict[str, list[int]] = {}
    for entry in found.entries:
        counts = sums.setdefault(entry.key, [0] * len(_COUNTS))
        for i, name in enumerate(_COUNTS):
            counts[i] += getattr(entry, name)
    made = table("all days", "requests>", "failed>", "prompt>", "cached>", "output>")
    for key, counts in sorted(sums.items(), key=lambda item: (-item[1][-1], item[0])):
        made.add_row(key or NO_KEY, *(f"{count:,}" for count in counts))
    return made


def usage_json(found: UsageByDay) -> dict[str, Any]:
    """All fields of every entry, as JSON."""
    names = ("date", "key", "model", *_COUNTS)
    return {
        "first_date": found.first_date,
        "last_date": found.last_date,
        "has_more": found.has_more,
        "entries": [{name: getattr(entry, name) for name in names} for entry in found.entries],
    }
