"""What a cluster of hundreds of workers costs its controller and its gateway, with workers that have no engine.

    python -m benchmarks.router.many_workers [--workers 400] [--rest-s 10] [--json FILE]

A real controller (in this process), a real gateway process, and two processes of idle workers, half P, half D
(tests/support/worker_fleet.py). The cluster starts with one P and one D, so that the gateway is there while all the
others register, and is then scaled. One row has the cost of that and the time until one more worker is used; one row a
size has the rate at which the router core places requests among so many workers.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.router.placements import measure_placements
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.controller_thread import ControllerThread
from disagg.cluster.control.plan import plan_cluster
from disagg.cluster.core.gateways import GATEWAY
from disagg.cluster.system.process_tools import allow_open_files
from disagg.connections.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.proto.control import ControlState, ScaleRequest
from tests.support.process_figures import cpu_seconds
from tests.support.reports import print_table, report, write_json
from tests.support.worker_fleet import CONFIG, Counts, FleetLauncher, FleetProcess

WAIT_S = 180.0
PLACEMENT_BLOCKS, PLACEMENT_REQUESTS, PLACEMENT_REPEATS = 100_000, 5_000, 3


class Cluster:
    """The controller, the gateway and the fleets. Made by `run`, which ends them."""

    def __init__(self, controller: ControllerThread, launcher: FleetLauncher, fleets: Sequence[FleetProcess]) -> None:
        self._controller = controller
        self._launcher = launcher
        self._fleets = fleets
        self.scaled_at = 0.0

    def scale(self, prefill: int, decode: int) -> None:
        """Returns when all are ready and the gateway would place requests on each of them."""
        self.scaled_at = time.monotonic()
        self._controller.control(ScaleRequest(sizes={"prefill": prefill, "decode": decode}))
        self.wait(lambda state: state.is_settled and len(state.workers) == prefill + decode)
        names = [record.worker_id for record in self._controller.state().workers]
        self.wait(lambda _: all(self.seen(name, "placeable") is not None for name in names))

    def wait(self, condition: Callable[[ControlState], bool]) -> None:
        """Until the cluster is like that."""
        deadline = time.monotonic() + WAIT_S
        while not condition(self._controller.state()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster did not get there in {WAIT_S:g} s")
            time.sleep(0.05)

    def seen(self, worker_id: str, what: str) -> float | None:
        """When a worker was first seen to do that."""
        found = (fleet.seen.get((worker_id, what)) for fleet in self._fleets)
        return next((at for at in found if at is not None), None)

    def latest(self, what: str) -> float:
        """When the last worker was first seen to do that."""
        return max(at for fleet in self._fleets for (_, did), at in list(fleet.seen.items()) if did == what)

    def counts(self) -> Counts:
        """Numbers of workers of all fleets."""
        each = [fleet.counts() for fleet in self._fleets]
        return Counts(sum(c.connects for c in each), sum(c.frames for c in each), sum(c.nbytes for c in each))

    def cpu_s(self) -> dict[str, float]:
        """CPU time that each part has used up to now."""
        return {
            "controller": time.process_time(),
            "gateway": cpu_seconds(self._launcher.pid(GATEWAY)),
            "fleets": sum(cpu_seconds(fleet.pid) for fleet in self._fleets),
        }


def measure_joins(cluster: Cluster, num_workers: int, rest_s: float) -> dict[str, Any]:
    """Scale to that many workers, rest, and have one more worker join."""
    side = num_workers // 2
    before, cpu_before = cluster.counts(), cluster.cpu_s()
    cluster.scale(side, side)
    all_s, register_s = (cluster.latest(what) - cluster.scaled_at for what in ("placeable", "registers"))
    cpu_joined, joined = cluster.cpu_s(), cluster.counts()
    time.sleep(rest_s)
    cpu_rested = cluster.cpu_s()
    cluster.scale(side, side + 1)
    one = cluster.counts()
    name = f"decode-{side}"
    placeable_at, registers_at = cluster.seen(name, "placeable"), cluster.seen(name, "registers")
    assert placeable_at is not None
    assert registers_at is not None
    return {
        "part": "joins",
        "workers": 2 * side,
        "registered_s": round(register_s, 2),
        "placeable_s": round(all_s, 2),
        "one_more_ms": round(1000 * (placeable_at - registers_at), 1),
        "membership_frames": joined.frames - before.frames,
        "membership_bytes": joined.nbytes - before.nbytes,
        "one_more_bytes": one.nbytes - joined.nbytes,
        "pairs_formed": joined.connects - before.connects,
        "one_more_pairs": one.connects - joined.connects,
        **{f"join_cpu_s_{part}": round(cpu_joined[part] - cpu_before[part], 2) for part in cpu_joined},
        **{f"rest_cpu_share_{part}": round((cpu_rested[part] - cpu_joined[part]) / rest_s, 4) for part in cpu_joined},
    }


def run(num_workers: int, rest_s: float) -> dict[str, Any]:
    """One row; nothing is left running."""
    allow_open_files()
    secret = ClusterSecret(os.urandom(NUM_BYTES))
    with (
        tempfile.TemporaryDirectory(prefix="disagg-many-") as folder,
        FleetProcess(secret) as first,
        FleetProcess(secret) as second,
    ):
        fleets = (first, second)
        launcher = FleetLauncher(Path(folder), secret, fleets)
        controller = ControllerThread(plan_cluster(parse_config(CONFIG)), launcher, secret)
        address = controller.start()
        try:
            cluster = Cluster(controller, launcher, fleets)
            cluster.wait(lambda state: state.is_settled)
            first.follow(address)
            cluster.wait(lambda state: len(state.gateways) == 2)
            return measure_joins(cluster, num_workers, rest_s)
        finally:
            controller.stop()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=400, help="half P, half D (default 400)")
    parser.add_argument("--rest-s", type=float, default=10.0, help="how long the cluster rests (default 10)")
    parser.add_argument("--json", type=Path, help="write the report there")
    arguments = parser.parse_args()
    if not 4 <= arguments.workers <= 2000:
        parser.error(f"--workers: expected 4 to 2000, got {arguments.workers}")
    if arguments.rest_s <= 0:
        parser.error(f"--rest-s: expected more than 0, got {arguments.rest_s:g}")
    joins = run(arguments.workers, arguments.rest_s)
    print_table("Workers that join", ["", "value"], [[name, str(value)] for name, value in joins.items()])
    placements = [
        measure_placements(size, PLACEMENT_BLOCKS, PLACEMENT_REQUESTS, PLACEMENT_REPEATS, "joint", "cpu")
        for size in (4, arguments.workers)
    ]
    columns = ["workers", "placements_per_s", "submit_p50_us", "submit_p99_us", "placed_alone"]
    print_table("Placements", columns, [[str(row[name]) for name in columns] for row in placements])
    if arguments.json is not None:
        summary = {"one_more_ms": joins["one_more_ms"], "membership_bytes": joins["membership_bytes"]}
        write_json(arguments.json, report([joins, *placements], summary))


if __name__ == "__main__":
    main()
