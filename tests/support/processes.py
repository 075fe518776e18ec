"""Which processes a test left on this machine, by their command line."""

from __future__ import annotations

import os
from pathlib import Path


def mentioning(text: str) -> list[int]:
    """The ids of processes, but for this one, with `text` in their command line."""
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and text.encode() in _read(pid, "cmdline")]


def children_mentioning(text: str) -> list[int]:
    """Those of them that are children of this process, zombies not counted."""
    stats = {pid: _read(pid, "stat").rpartition(b")")[2].split() for pid in mentioning(text)}
    return [pid for pid, stat in stats.items() if stat and int(stat[1]) == os.getpid()]


def children_of(pid: int) -> list[int]:
    """The children of a process, zombies not counted, in order of their ids."""
    pids = sorted(int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    stats = {child: _read(child, "stat").rpartition(b")")[2].split() for child in pids}
    return [child for child, stat in stats.items() if stat and stat[0] != b"Z" and int(stat[1]) == pid]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
