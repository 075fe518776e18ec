"""The recent load on its way from a gateway to a twin."""

from __future__ import annotations

import math

import msgspec
import pytest

from disagg.gateway.operators.admin_answers import placement_facts
from disagg.gateway.operators.load_codec import decode, encode_arrival
from disagg.proto.ids import BlockHash, RequestId
from disagg.proto.messages import KvLayout, StepCoefficients, TierCounts, WindowKv
from disagg.proto.messages import Load as WorkerLoad
from disagg.router.api import ClusterView, PlacementView, RequestTrace, WorkerView
from disagg.router.telemetry.recent_load import arrival_of, capacity_of, load_of
from disagg.v1 import inference_pb2 as pb
from tests.support.router import worker_info

STEPS = StepCoefficients(5.0, 0.4, 1e-4, 0.5, 1e-3)
VIEW = ClusterView(
    (
        WorkerView(worker_info("w0", num_blocks=50), WorkerLoad(), steps=STEPS),
        WorkerView(worker_info("w1"), WorkerLoad(), steps=None),
        WorkerView(worker_info("w2"), WorkerLoad(), is_draining=True, steps=STEPS),
    ),
    0,
    0,
    placement=PlacementView("elastic", "gather", False, 0.001, 1e-9),
)
TRACES = (
    RequestTrace(request_id=RequestId("b"), arrival=5.0, num_prompt_tokens=40, num_output_tokens=3, tpot_slo_s=0.02),
    RequestTrace(
        request_id=RequestId("a"),
        arrival=4.0,
        num_prompt_tokens=40,
        prefix_marks=(BlockHash(b"\1" + bytes(15)), BlockHash(b"\xff" * 16)),
        num_output_tokens=7,
        most_output_tokens=9,
        outcome="length",
        ttft_slo_s=1.0,
    ),
)
GOLDEN = bytes.fromhex(
    "0a1609000000000000144010281803397b14ae47e17a943f"  # the request b
    "0a2e090000000000001040102818072001280931000000000000f03f42100100000000000000ffffffffffffffff4800"  # a
    "124e0a0277301032181020082880013080083840520c6465636f64655f6669727374610000000000001440"  # the worker w0
    "699a9999999999d93f712d431cebe2361a3f79000000000000e03f8101fca9f1d24d62503f"
    "12200a0277311040181020082880013080083840520c6465636f64655f6669727374"  # w1, which has no step times yet
    "1a07656c6173746963220667617468657231fca9f1d24d62503f3995d626e80b2e113e410000000000001840"  # the rest
)
"""The message as gateways of earlier versions send it."""


def message() -> pb.GetLoadResponse:
    response = placement_facts(VIEW)
    response.now_s = 6.0
    response.requests.extend(encode_arrival(arrival_of(trace)) for trace in TRACES)
    return response


def test_the_message_is_the_same_to_the_byte() -> None:
    assert message().SerializeToString(deterministic=True) == GOLDEN


def test_what_is_read_is_what_the_router_knows() -> None:
    read = decode(pb.GetLoadResponse.FromString(GOLDEN))
    assert read == load_of(VIEW, TRACES, 6.0)
    assert [worker.worker_id for worker in read.workers] == ["w0"]
    assert [each.marks for each in read.arrivals] == [(1, 2**64 - 1), ()]
    assert [each.is_met for each in read.arrivals] == [False, None]
    assert [(each.ttft_s, each.tpot_s) for each in read.arrivals] == [(1.0, None), (None, 0.02)]


def test_a_policy_without_the_setting_has_none() -> None:
    assert decode(pb.GetLoadResponse(policy="joint")).decodes is None


def test_windows_and_experts_are_read_as_they_are_written() -> None:
    layout = KvLayout.sized(1000, [WindowKv(window=512, bytes_per_token=900)])
    steps = STEPS._replace(experts_ms=4.0, expert_share=0.25)
    worker = WorkerView(worker_info("w0", kv_layout=layout), WorkerLoad(), steps=steps)
    view = ClusterView((worker,), 0, 0, placement=VIEW.placement)
    (found,) = decode(placement_facts(view)).workers
    assert found == capacity_of(worker)
    assert (found.kv_layout, found.steps) == (layout, steps)


def test_tiers_and_fetches_are_read_as_they_are_written() -> None:
    tiers = (
        TierCounts(name="host", capacity_bytes=1 << 40, extent_ms=0.5),
        TierCounts(name="disk", capacity_bytes=1 << 41, extent_ms=4.0),
    )
    info = msgspec.structs.replace(worker_info("w0"), fetches=True)
    worker = WorkerView(info, WorkerLoad(), steps=STEPS, tiers=tiers)
    (found,) = decode(placement_facts(ClusterView((worker,), 0, 0, placement=VIEW.placement))).workers
    assert found == capacity_of(worker)
    assert [(tier.name, tier.num_bytes, tier.extent_ms) for tier in found.tiers] == [
        ("host", 1 << 40, 0.5),
        ("disk", 1 << 41, 4.0),
    ]
    assert found.fetches


def test_what_cannot_be_is_refused_by_its_field() -> None:
    for name, num_bytes, ms in (
        ("tape", 1, 1.0),
        ("host", 0, 1.0),
        ("host", 1, 0.0),
        ("host", 1, math.nan),
        ("host", 1, math.inf),
    ):
        tier = pb.TierCapacity(name=name, bytes=num_bytes, extent_ms=ms)
        with pytest.raises(ValueError, match=r"^tiers: the gateway has "):
            decode(pb.GetLoadResponse(workers=[pb.WorkerCapacity(kv_bytes_per_token=8, tiers=[tier], base_ms=1.0)]))
    for window, num_bytes in ((0, 1), (512, 0), (512, 8)):
        worker = pb.WorkerCapacity(
            kv_bytes_per_token=8, kv_windows=[pb.WindowKv(window=window, bytes_per_token=num_bytes)], base_ms=1.0
        )
        with pytest.raises(ValueError, match=r"^kv_windows: "):
            decode(pb.GetLoadResponse(workers=[worker]))
    with pytest.raises(ValueError, match=r"^prefix_marks: 3 are too many for a prompt of 40 tokens$"):
        decode(pb.GetLoadResponse(requests=[pb.RecentRequest(prompt_tokens=40, prefix_marks=[1, 2, 3])]))
    with pytest.raises(ValueError, match=r"^decodes: the gateway has 'scatter'"):
        decode(pb.GetLoadResponse(decodes="scatter"))
