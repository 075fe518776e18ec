"""The twin's side of the admin API."""

from __future__ import annotations

import msgspec
import pytest

from disagg.cli.twin.wire import load_from, message_of
from disagg.gateway.operators.admin_answers import placement_facts, recent_request
from disagg.gateway.operators.decode_placement_log import check
from disagg.proto.ids import BlockHash, RequestId
from disagg.proto.messages import Load as WorkerLoad
from disagg.proto.messages import StepCoefficients
from disagg.router.api import ClusterView, PlacementView, RequestTrace, WorkerView
from disagg.simulator.twin.comparison import Attained, Comparison
from disagg.simulator.twin.load import load_of
from disagg.v1 import inference_pb2 as pb
from tests.support.router import worker_info

STEPS = StepCoefficients(5.0, 0.4, 1e-4, 0.5, 1e-3)


def test_a_gateway_tells_what_its_router_sees() -> None:
    workers = (
        WorkerView(worker_info("w0", num_blocks=50), WorkerLoad(), steps=STEPS),
        WorkerView(worker_info("w1"), WorkerLoad(), steps=None),
        WorkerView(worker_info("w2"), WorkerLoad(), is_draining=True, steps=STEPS),
    )
    view = ClusterView(workers, 0, 0, placement=PlacementView("elastic", "gather", False, 0.001, 1e-9))
    traces = [
        RequestTrace(
            request_id=RequestId("b"), arrival=5.0, num_prompt_tokens=40, num_output_tokens=3, tpot_slo_s=0.02
        ),
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
    ]
    response = placement_facts(view)
    response.now_s = 6.0
    response.requests.extend(recent_request(trace) for trace in traces)
    read = load_from(pb.GetLoadResponse.FromString(response.SerializeToString()))
    assert read == load_of(view, traces, 6.0)
    assert [each.marks for each in read.arrivals] == [(1, 2**64 - 1), ()]
    assert [each.is_met for each in read.arrivals] == [False, None]


def test_a_policy_without_the_setting_has_none() -> None:
    assert load_from(pb.GetLoadResponse(policy="joint")).decodes is None


def test_what_cannot_be_is_refused_by_its_field() -> None:
    with pytest.raises(ValueError, match=r"^prefix_marks: 3 are too many for a prompt of 40 tokens$"):
        load_from(pb.GetLoadResponse(requests=[pb.RecentRequest(prompt_tokens=40, prefix_marks=[1, 2, 3])]))
    with pytest.raises(ValueError, match=r"^decodes: the gateway has 'scatter'"):
        load_from(pb.GetLoadResponse(decodes="scatter"))


def test_a_comparison_is_told_whole() -> None:
    comparison = Comparison(
        at_s=3.0,
        cause="first",
        num_requests=40,
        present="spread",
        chosen="gather",
        attained=(
            Attained("spread", ((1.0, 0.5), (1.15, 0.25))),
            Attained("gather", ((1.0, 0.75), (1.15, 0.5))),
        ),
        difference=0.25,
        error=0.125,
        reason="gather is better",
        measured=0.75,
        num_measured=20,
    )
    told = message_of(comparison)
    check(told, "spread")
    assert (told.cause, told.requests, told.present, told.chosen) == ("first", 40, "spread", "gather")
    assert (told.measured, told.measured_requests) == (0.75, 20)
    assert not message_of(msgspec.structs.replace(comparison, measured=None)).HasField("measured")
    assert [(each.decodes, [(p.rate_factor, p.attainment) for p in each.predictions]) for each in told.options] == [
        ("spread", [(1.0, 0.5), (1.15, 0.25)]),
        ("gather", [(1.0, 0.75), (1.15, 0.5)]),
    ]
    assert (told.difference, told.error, told.needed, told.reason) == (0.25, 0.125, 0.135, "gather is better")
