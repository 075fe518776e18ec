"""Which workers leave with their node."""

from __future__ import annotations

import msgspec

from disagg.cluster.on_ray.detached import present, ready_on
from disagg.proto.control import ControlState, WorkerPhase, WorkerRecord
from disagg.proto.ids import Incarnation, WorkerId
from tests.support.router import worker_info


def record(name: str, phase: WorkerPhase, address: str) -> WorkerRecord:
    info = msgspec.structs.replace(
        worker_info(name), worker_id=WorkerId(name), incarnation=Incarnation(f"i-{name}"), address=address
    )
    return WorkerRecord(worker_id=WorkerId(name), pool="decode", phase=phase, info=info if address else None)


def test_ready_workers_of_a_host_leave_it() -> None:
    state = ControlState(
        pools=(),
        gateways=(),
        workers=(
            record("d0", "ready", "10.0.0.1:5000"),
            record("d1", "ready", "10.0.0.11:5000"),
            record("d2", "draining", "10.0.0.1:5001"),
            record("p0", "ready", "[fd00::1]:5000"),
            record("p1", "starting", ""),
        ),
    )
    assert ready_on(state, "10.0.0.1") == [("d0", "i-d0")]
    assert ready_on(state, "fd00::1") == [("p0", "i-p0")]
    assert ready_on(state, "127.0.0.1") == []
    assert {name for name, _ in present(state)} == {"d0", "d1", "d2", "p0"}
