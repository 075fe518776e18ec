"""The options of `disagg usage`, which usage.py implements."""

from __future__ import annotations

from typing import Annotated

import typer

from disagg.cli.address import DEFAULT_ADDRESS
from disagg.cluster.system.terminal import AddressOption, console, examples


def register(app: typer.Typer, panel: str) -> None:
    """Add the command to `app`, in this panel of its help."""
    app.command(
        "usage", rich_help_panel=panel, epilog=examples("disagg usage", "disagg usage --days 30 --key team-a --json")
    )(_usage)


def _usage(
    address: AddressOption = DEFAULT_ADDRESS,
    days: Annotated[int, typer.Option("--days", help="Days in UTC, today included.", min=1, max=3660)] = 7,
    key: Annotated[str, typer.Option("--key", help="Of one key, by its tenant's name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show what keys used by day and model: an admin sees all keys, another key itself. Needs gateway.usage."""
    from disagg.cli.operations.usage import run_usage

    run_usage(address, days, key, console(), as_json=as_json)
