"""Which workers leave with their node."""

from __future__ import annotations

import msgspec
import pytest

from disagg.cluster.core.state_diff import EMPTY_STATE
from disagg.cluster.on_ray import controller_client, detached
from disagg.cluster.on_ray.detached import latest_state, present, ready_on
from disagg.cluster.system.children import LaunchError
from disagg.proto.control import ControlReply, ControlRequest, ControlState, WorkerPhase, WorkerRecord
from disagg.proto.errors import UnavailableError
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


@pytest.mark.parametrize("is_there", [True, False])
def test_whoever_waits_bears_a_controller_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    answers: list[ControlState | None] = [None, EMPTY_STATE]

    def call_controller(request: ControlRequest) -> ControlReply:
        if (answer := answers.pop(0)) is None:
            raise UnavailableError("the controller does not answer: Deadline Exceeded", "controller_away")
        return answer

    monkeypatch.setattr(detached, "call_controller", call_controller)
    monkeypatch.setattr(controller_client, "find_controller", lambda: object() if is_there else None)
    before = ControlState(pools=(), gateways=(), workers=(record("d0", "starting", ""),))
    if not is_there:
        with pytest.raises(LaunchError, match=r"^the controller is gone for good; Ray does not start it again$"):
            latest_state(before)
        return
    assert latest_state(before) is before
    assert latest_state(before) == EMPTY_STATE
