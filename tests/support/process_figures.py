"""A process's figures in /proc (proc(5)). Raises `OSError` for one that is not there, unless documented otherwise."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Resident memory. Raises `LookupError` for a process without any, such as a zombie."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"process {pid} has no resident memory")


def children(pid: int) -> list[int]:
    """The processes whose parent this is."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and int(_stat(int(folder.name))[1]) == pid:
                found.append(int(folder.name))
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """The fields behind the name, which may have blanks in it: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
