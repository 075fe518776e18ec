"""Whose batches another gateway may take over, and whether their owner has ended.

An owner is a process, named `<gateway>/<process id>/<life>/<start>`; its start tells it from a later process with the
same id. A lease that ran out says that it renewed nothing: it may have ended, hang, or have stood still with the whole
machine. Only the first is the end of a gateway, so the owner's process is looked up. One that cannot be seen from here,
in another container, is taken for one that has ended.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from disagg.proto.clock.still_time import StillTime

_STATE, _START = 0, 19
"""Places in `/proc/<pid>/stat` behind the name: see proc(5), fields 3 and 22."""
_DEAD: Final = ("Z", "X")


def owner_of(name: str, life: str) -> str:
    """This process as an owner.

    Args:
        name: of the gateway, the same in each of its lives.
        life: of this process; another one each time.
    """
    pid = os.getpid()
    return f"{name}/{pid}/{life}/{_start(pid) or ''}"


def is_alive(owner: str) -> bool:
    """Whether the owner's process is known to run. The owner name of an earlier version has no start time; then any
    other process with its id counts."""
    _, pid, _, start = [*owner.split("/"), "", "", ""][:4]
    if not pid.isdecimal():
        return False
    found = _start(int(pid))
    if start and found is not None:
        return found == start
    return int(pid) != os.getpid() and _exists(int(pid))


def _start(pid: int) -> str | None:
    """When a process started, in ticks since the boot; empty for one that has ended, None where it is unknown."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else None
    except ProcessLookupError:
        return ""
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return "" if fields[_STATE] in _DEAD else fields[_START]


def _exists(pid: int) -> bool:
    """Whether there is a process with this id. True where it cannot be known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class TakeOver:
    """Decides when expired leases may be taken over. If this process stood still, it waits for the length of a lease
    first: the whole machine may have stood still, and the other owners then have to renew their leases.

    Args:
        clock: of this process.
        lease_s: length of a lease.
    """

    def __init__(self, clock: StillTime, lease_s: float) -> None:
        self._clock, self._lease_s = clock, lease_s
        self._still_s = clock.seconds
        self._from = clock.now()

    def is_allowed(self) -> bool:
        """Whether expired leases may be taken over now. Compare the leases with a time that was read before this
        call."""
        now = self._clock.now()
        if self._clock.seconds != self._still_s:
            self._still_s, self._from = self._clock.seconds, now + self._lease_s
        return now >= self._from
