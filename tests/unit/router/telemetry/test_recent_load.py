"""The recent load of a router, by its views."""

from __future__ import annotations

import msgspec

from disagg.proto.ids import BlockHash, Incarnation, RequestId, WorkerId
from disagg.proto.messages import Load as WorkerLoad
from disagg.proto.messages import StepCoefficients, TierCounts
from disagg.router.api import ClusterView, PlacementView, RequestTrace, WorkerView
from disagg.router.telemetry.recent_load import Arrival, TierCapacity, capacity_of, load_of
from tests.support.router import worker_info

STEPS = StepCoefficients(5.0, 0.4, 1e-4, 0.5, 1e-3)


def test_a_routers_views_are_a_load() -> None:
    info = msgspec.structs.replace(worker_info("w0", num_blocks=50), fetches=True)
    tiers = (
        TierCounts(name="host", extent_ms=0.5, capacity_bytes=1000),
        TierCounts(name="disk", extent_ms=4.0, capacity_bytes=2000, off_reason="full"),
    )
    workers = (
        WorkerView(info, WorkerLoad(), steps=STEPS, tiers=tiers),
        WorkerView(worker_info("w1"), WorkerLoad(), steps=None),
        WorkerView(worker_info("w2"), WorkerLoad(), is_draining=True, steps=STEPS),
        WorkerView(worker_info("w3"), WorkerLoad(), is_suspected=True, steps=STEPS),
    )
    view = ClusterView(workers, 0, 0, placement=PlacementView("elastic", "gather", False, 0.001, 1e-9))
    traces = [
        RequestTrace(request_id=RequestId("b"), arrival=5.0, num_prompt_tokens=40, num_output_tokens=3),
        RequestTrace(
            request_id=RequestId("a"),
            arrival=4.0,
            num_prompt_tokens=20,
            prefix_marks=(BlockHash(b"\1" + bytes(15)),),
            num_output_tokens=7,
            most_output_tokens=9,
            outcome="stop",
            ttft_slo_s=1.0,
            tpot_slo_s=0.02,
        ),
    ]
    found = load_of(view, traces, 6.0)
    assert [worker.worker_id for worker in found.workers] == ["w0"]
    assert found.workers[0] == capacity_of(workers[0])
    assert found.workers[0].tiers == (TierCapacity(name="host", num_bytes=1000, extent_ms=0.5),)
    assert found.workers[0].fetches
    slower = WorkerView(info, WorkerLoad(), steps=STEPS, tiers=(msgspec.structs.replace(tiers[0], extent_ms=2.0),))
    smaller = WorkerView(info, WorkerLoad(), steps=STEPS, tiers=(msgspec.structs.replace(tiers[0], capacity_bytes=9),))
    assert capacity_of(slower).size == found.workers[0].size != capacity_of(smaller).size
    assert (found.decodes, found.admission, found.link_latency_s, found.link_byte_s) == ("gather", False, 0.001, 1e-9)
    assert found.arrivals == (
        Arrival(
            at_s=4.0,
            prompt_tokens=20,
            output_tokens=7,
            most_output_tokens=9,
            ttft_s=1.0,
            tpot_s=0.02,
            is_met=False,
            marks=(1,),
        ),
        Arrival(at_s=5.0, prompt_tokens=40, output_tokens=3, is_complete=False, most_output_tokens=0),
    )
    assert (info.worker_id, info.incarnation) == (WorkerId("w0"), Incarnation("1"))
