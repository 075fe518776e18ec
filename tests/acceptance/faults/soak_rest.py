"""What an idle cluster holds: the workers' audits, and the figures of /proc for its processes."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from disagg.client import AsyncClient
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.faults.faulty import FIRED
from tests.acceptance.faults.cluster import audit
from tests.support.process_figures import rss_bytes

REST_TIMEOUT_S = 30.0
"""Leases, and memories of ended attempts that fade, are over by then."""
GATEWAY = "gateway"
GRPC_POOL = "event_engine"
"""What gRPC names the threads of its pool."""
_NUMBER = re.compile(r":?\[?\d+\]?")
"""In what a descriptor links to."""


@dataclass(frozen=True)
class Footprint:
    """One process at rest."""

    rss_mib: float
    files: Counter[str]
    """Open files by what they are."""
    threads: Counter[str]
    """By name."""

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """What `/proc/PID` shows now."""
        process = Path(f"/proc/{pid}")
        files: Counter[str] = Counter()
        for link in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                files[_NUMBER.sub("", str(link.readlink()))] += 1
        threads = Counter((task / "comm").read_text().strip() for task in (process / "task").iterdir())
        return cls(rss_bytes(pid) / 2**20, files, threads)

    @property
    def num_files(self) -> int:
        """That are open."""
        return self.files.total()

    @property
    def num_threads(self) -> int:
        """That run or wait."""
        return self.threads.total()

    @property
    def num_own_threads(self) -> int:
        """Those that are not of gRPC's pool."""
        return self.threads.total() - self.threads[GRPC_POOL]

    @property
    def figures(self) -> dict[str, float]:
        """For a report."""
        return {"rss_mib": self.rss_mib, "num_files": self.num_files, "num_threads": self.num_threads}

    def more_than(self, earlier: Footprint) -> dict[str, int]:
        """Kinds of files and names of threads of which there are more now."""
        return dict((self.files - earlier.files) + (self.threads - earlier.threads))


def footprints(cluster: ProcessCluster) -> dict[str, Footprint]:
    """Of every worker and the gateway, by name."""
    names = [*(str(info.worker_id) for info in cluster.workers), GATEWAY]
    return {name: Footprint.of(cluster.pid(name)) for name in names}


async def at_rest(client: AsyncClient, cluster: ProcessCluster) -> list[str]:
    """Wait until nothing is held, for at most `REST_TIMEOUT_S`; what is held then, and what audits found wrong."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + REST_TIMEOUT_S
    while held := await _held(client, cluster):
        if loop.time() >= deadline:
            return held
        await asyncio.sleep(0.2)
    return []


async def _held(client: AsyncClient, cluster: ProcessCluster) -> list[str]:
    state = await client.cluster_state()
    held = [f"router: {state.queued_requests} queued, {state.running_requests} running"]
    if not (state.queued_requests or state.running_requests):
        held.clear()
    for info in cluster.workers:
        found = await audit(info.address, cluster.secret)
        held += [f"{info.worker_id}: {count} {name}" for name, count in found.counts.items() if count]
        held += [f"{info.worker_id}: {problem}" for problem in found.problems]
    return held


def fired(logs: Path) -> Counter[str]:
    """How often each failpoint fell, by the logs of the workers."""
    lines = (line for log in logs.glob("*.log") for line in log.read_text(errors="replace").splitlines())
    return Counter(line.rpartition(f"{FIRED} ")[2] for line in lines if f"faulty: {FIRED} " in line)
