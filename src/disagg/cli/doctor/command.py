"""`disagg doctor`: checks this machine and, if one runs, a cluster; prints each fault and what to do about it.

Exit status 0 when nothing failed, else 1; warnings do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from disagg.cli.address import DEFAULT_ADDRESS, check_address
from disagg.cli.doctor.finding import Finding
from disagg.cli.doctor.gateway import gateway_findings, is_open
from disagg.cli.doctor.local import local_findings
from disagg.cluster.system.program import command

_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


def run_doctor(address: str | None, console: Console) -> int:
    """Check everything, and return the exit status.

    Args:
        address: the gateway to check. None checks the default one, and it is no fault if none runs there.

    Raises:
        ConfigError: if the address is invalid.
    """
    where = check_address(address or DEFAULT_ADDRESS)
    console.print(Text("This machine", style="bold"))
    failed = show(local_findings(), console)
    console.print(Text(f"\nCluster at {where}", style="bold"))
    if address is None and not is_open(where):
        show([Finding("ok", "gateway", "none runs there", command("up"))], console)
    else:
        failed += show(gateway_findings(where), console)
    console.print(Text(f"\n{verdict(failed)}", style="bold red" if failed else "green"))
    return 1 if failed else 0


def show(findings: Iterable[Finding], console: Console) -> int:
    """Print each finding as it comes, and return how many failed."""
    num_failed = 0
    for finding in findings:
        num_failed += finding.level == "FAIL"
        line = Table.grid(padding=(0, 2))
        line.add_column(width=4)
        line.add_column(width=10)
        line.add_column(overflow="fold")
        line.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.name), Text(finding.text))
        if finding.next_step:
            line.add_row("", "", Text(f"next: {finding.next_step}", style="dim"))
        console.print(Padding(line, (0, 0, 0, 2)))
    return num_failed


def verdict(num_failed: int) -> str:
    """Last line of the output, by the number of failures."""
    return "everything works" if not num_failed else f"{num_failed} of these failed"
