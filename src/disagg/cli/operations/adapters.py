"""`disagg adapter add | remove | list`: LoRA adapters of a running cluster, through its gateway."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from disagg.cli.address import reaching
from disagg.cli.operations.operate import open_client
from disagg.cluster.system.terminal import format_bytes, table

_SHOWN_DIGITS = 12
"""Digits of a fingerprint that the table shows."""


def run_add(address: str, name: str, path: str, base: str, console: Console) -> None:
    """Serve an adapter. Raises `DisaggError` if it is refused, and `LaunchError` if there is no gateway."""
    with open_client(address) as client, reaching(address):
        adapter, notes = client.add_adapter(name, path, base)
    size, content = format_bytes(adapter.bytes), adapter.fingerprint[:_SHOWN_DIGITS]
    console.print(
        f"{escape(name)} is served: {size} on {escape(adapter.base)}, content {content}",
        highlight=False,
        soft_wrap=True,
    )
    _show_notes(notes, console)


def run_remove(address: str, name: str, console: Console) -> None:
    """Serve an adapter no more. Raises as `run_add`."""
    with open_client(address) as client, reaching(address):
        notes = client.remove_adapter(name)
    console.print(
        f"{escape(name)} is not served any more; answers that run end with it", highlight=False, soft_wrap=True
    )
    _show_notes(notes, console)


def run_list(address: str, console: Console) -> None:
    """Print all adapters. Raises as `run_add`."""
    with open_client(address) as client, reaching(address):
        adapters = client.adapters()
    if not adapters:
        console.print("there is no adapter")
        return
    found = table("adapter", "base", "phase", "path", "content", "size", "from")
    for each in adapters:
        found.add_row(
            escape(each.name),
            escape(each.base),
            each.phase,
            escape(each.path),
            each.fingerprint[:_SHOWN_DIGITS],
            format_bytes(each.bytes) if each.fingerprint else "",
            "file" if each.in_file else "operator",
        )
    console.print(found)
    for each in adapters:
        if each.detail:
            console.print(f"{escape(each.name)}: {escape(each.detail)}", highlight=False, soft_wrap=True)


def _show_notes(notes: Iterable[str], console: Console) -> None:
    for note in notes:
        console.print(f"[yellow]note[/yellow] {escape(note)}", highlight=False, soft_wrap=True)
