"""A Ray cluster of several nodes on this machine, in a process of its own that ends with ours.

    with ray_nodes(folder, environment, [{"resources": ..., "labels": ...}, ...]) as nodes:
        nodes.address, nodes.raylets

The nodes share one address. `folder` is short, and becomes Ray's place for sockets and logs, also for those who are
started with `nodes.environment`. Run as a program, this file is that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True)
class RayNodes:
    """A cluster that runs."""

    address: str
    """host:port of its head."""
    raylets: tuple[int, ...]
    """The process id of each node's raylet, the parent of its workers; the head first."""
    environment: dict[str, str]
    """For programs that are to find it."""

    @property
    def host(self) -> str:
        """The address of all nodes."""
        return self.address.rpartition(":")[0]


@contextmanager
def ray_nodes(folder: Path, variables: Mapping[str, str], nodes: Sequence[dict[str, Any]]) -> Iterator[RayNodes]:
    """A head without room for workers, and these nodes."""
    (folder / "ray").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}
    environment = {**kept, **quiet, **variables, "RAY_TMPDIR": str(folder)}
    with (
        (folder / "nodes.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.ray.ray_nodes", json.dumps(list(nodes))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        answer = process.stdout.readline()
        assert answer, (folder / "nodes.log").read_text()[-2000:]
        try:
            yield RayNodes(environment=environment, **json.loads(answer))
        finally:
            process.stdin.close()
            process.wait(timeout=30)


def main(nodes: Sequence[dict[str, Any]]) -> None:
    """Start the nodes, print their addresses, keep them until standard input ends."""
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=common)
    started = [cluster.head_node, *(cluster.add_node(**common, **node) for node in nodes)]
    raylets = [node.all_processes["raylet"][0].process.pid for node in started]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
