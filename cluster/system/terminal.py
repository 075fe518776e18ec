"""Terminal output that the commands share: the console, plain tables, sizes in bytes, examples in the help, the option
that names a gateway.

Nothing here loads `rich` before something is printed, so that `disagg --help` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

AddressOption = Annotated[
    str, typer.Option("--address", "-a", envvar="DISAGG_ADDRESS", help="host:port of the gateway (gRPC).")
]


def examples(*lines: str) -> str:
    """Text at the end of a command's help: lines that can be typed as they stand."""
    return "\n\n".join(("Examples:", *lines))  # a single line break would join them


def console(*, stderr: bool = False) -> Console:
    """The console of standard output, or of standard error."""
    from rich.console import Console

    return Console(stderr=stderr)


def table(*columns: str) -> Table:
    """An empty table without lines. A column whose name ends in `>` is aligned to the right, for numbers."""
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for column in columns:
        made.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return made


def format_bytes(num_bytes: int) -> str:
    """Format a size, such as `0 B`, `48 KiB` or `2.2 MiB`."""
    if num_bytes < 1 << 10:
        return f"{num_bytes} B"
    if num_bytes < 1 << 20:
        return f"{num_bytes / (1 << 10):.0f} KiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
