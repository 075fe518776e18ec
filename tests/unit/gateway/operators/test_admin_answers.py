"""What operators are told of requests and of the cluster."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from disagg.gateway.operators.admin_answers import cluster_state, counts_of, explanation, explanation_json, with_others
from disagg.proto.control import ControlState, GatewayRecord, PoolState
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import StepSample
from disagg.router.api import RequestTrace
from disagg.router.config import RouterConfig
from disagg.router.statistics import Rates
from disagg.v1 import inference_pb2 as pb
from tests.support.metrics import busy_view
from tests.support.router import (
    Scenario,
    end_update,
    fetched_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)


def explained(it: Scenario, name: str) -> pb.ExplainRequestResponse:
    trace = it.core.trace(RequestId(name))
    assert trace is not None
    return explanation(trace, clock_to_epoch_s=1000.0)


def test_a_running_request_is_explained() -> None:
    it = Scenario("p0", "p1", "d0", config=RouterConfig(local_prefill="never", policy="least_loaded"))
    it.now = 2.5
    it.submit(msgspec.structs.replace(routed_request("r0", 64), trace_parent="00-a-b-01"), arrival=2.0)
    it.now = 3.0
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0, 16))
    found = explained(it, "r0")
    assert (found.outcome, found.prompt_tokens, found.completion_tokens) == ("running", 64, 1)
    assert (found.arrived_at, found.trace_parent, found.policy) == (1002.0, "00-a-b-01", "least_loaded")
    assert (found.chosen.prefill_worker, found.chosen.decode_worker) == ("p0", "d0")
    assert not found.chosen.HasField("ttft_ms")
    assert [(option.prefill_worker, option.decode_worker) for option in found.options] == [("p0", "d0"), ("p1", "d0")]
    assert [(span.stage, span.worker, span.start_ms) for span in found.spans] == [
        ("tokenize", "", 0.0),
        ("route", "", 500.0),
        ("kv_alloc_wait", "d0", 500.0),
        ("prefill_queue", "p0", 500.0),
        ("prefill", "p0", 500.0),
        ("kv_transfer_exposed", "d0", 1000.0),
    ]
    assert [span.HasField("end_ms") for span in found.spans] == [True, True, True, True, True, False]


def test_an_ended_request_is_explained() -> None:
    it = Scenario("p0", "d0")
    it.submit(routed_request("r0", 64, max_tokens=3))
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0))
    it.now = 1.0
    it.update("d0", handed_over_update("r0", 0, kv_bytes=4096), tokens_update("r0", 0, 1, 8))
    it.now = 1.25
    it.update("d0", tokens_update("r0", 0, 2, 9), end_update("r0", 0, "length", drafts=(4, 1)))
    found = explained(it, "r0")
    assert (found.drafted_tokens, found.accepted_tokens) == (4, 1)
    assert (found.outcome, found.completion_tokens, found.kv_bytes, found.max_itl_ms) == ("length", 3, 4096, 1000.0)
    assert found.spans[-1] == pb.StageSpan(stage="decode", worker="d0", start_ms=1000.0, end_ms=1250.0)


def test_a_fetch_is_explained_with_what_it_was_compared_with() -> None:
    steps = (StepSample(1.0 + 128 * 0.5, 128), StepSample(1.0 + 16 * 0.5, 16))
    workers = [msgspec.structs.replace(worker_info(name, calibration=steps), fetches=True) for name in ("p0", "d0")]
    it = Scenario(*workers, config=RouterConfig(local_prefill="never", policy="joint"))
    request = routed_request("r0", 600)
    it.holds("d0", request, 32)
    it.submit(request)
    compute, peer = explained(it, "r0").ways
    assert (compute.kind, compute.source, compute.tokens, compute.get_ms, compute.chosen) == (
        "compute",
        "",
        0,
        0.0,
        False,
    )
    assert (peer.kind, peer.source, peer.tokens, peer.chosen) == ("peer", "d0", 512, True)
    assert peer.get_ms > 50.0 > peer.prefill_ms
    assert compute.prefill_ms > peer.get_ms + peer.prefill_ms
    assert not explained(it, "r0").HasField("fetched")
    it.update("p0", fetched_update("r0", "d0", "done", tokens=512, kv_bytes=1 << 40, transfer_s=0.25))
    found = explained(it, "r0")
    assert found.fetched == pb.FetchedKv(source="d0", outcome="done", tokens=512, bytes=1 << 40, ms=250.0)
    assert explanation_json(found)["fetched"]["bytes"] == 1 << 40


def test_a_refused_request_is_explained_without_a_choice() -> None:
    it = Scenario("p0", "d0")
    it.now = 1.0
    it.submit(routed_request("r0", deadline=0.5))
    found = explained(it, "r0")
    assert found.detail == "the deadline passed before the request was queued"
    assert (found.outcome, found.attempts, found.policy, len(found.options)) == ("timeout", 0, "", 0)
    assert not found.HasField("chosen")


def test_what_guardrails_did_is_explained() -> None:
    made = {("g", "r", "answer", "stop", "no"): 1, ("g", "", "prompt", "replace", ""): 2}
    trace = RequestTrace(request_id=RequestId("r"), outcome="stop", guardrails=made)
    found = explanation(trace, clock_to_epoch_s=0.0)
    assert found.outcome == "content_filter"
    assert [(one.rule, one.subject, one.action, one.count) for one in found.guardrails] == [
        ("", "prompt", "replace", 2),
        ("r", "answer", "stop", 1),
    ]
    trace.outcome = "cancelled"
    assert explanation(trace, clock_to_epoch_s=0.0).outcome == "cancelled"


def test_the_state_has_stages_targets_transfers_and_rates() -> None:
    view = dataclasses.replace(busy_view(), slos={"ttft": (3, 4)}, rates=Rates(1.5, 20.0))
    known = ControlState(
        pools=(PoolState(name="prefill", desired=2, ready=1),),
        workers=(),
        gateways=(),
    )
    found = cluster_state(view, known)
    assert [(stage.stage, stage.requests) for stage in found.stages] == [
        ("queued", 1),
        ("prefill", 1),
        ("transfer", 2),
        ("decode", 3),
    ]
    assert list(found.slos) == [pb.SloState(slo="ttft", met=3, total=4)]
    assert list(found.transfers) == [
        pb.TransferState(prefill_worker="p0", decode_worker="d0", transport="gloo", transfers=3, bytes=4096, failures=2)
    ]
    assert (found.requests_per_s, found.output_tokens_per_s) == pytest.approx((1.5, 20.0))
    assert [worker.worker_id for worker in found.workers] == ["d0", "p0"]
    assert [(pool.name, pool.desired, pool.ready) for pool in found.pools] == [("prefill", 2, 1)]


def test_the_state_has_tokens_a_step_of_workers_that_decode_and_their_drafts() -> None:
    found = cluster_state(busy_view(), ControlState(pools=(), workers=(), gateways=()))
    assert {w.worker_id: (w.tokens_per_step, w.drafted_tokens, w.accepted_tokens) for w in found.workers} == {
        "d0": (1.75, 40, 12),
        "p0": (0.0, 0, 0),
    }
    assert {w.worker_id: (w.prompt_tokens, w.loaded_tokens, w.fetched_tokens) for w in found.workers} == {
        "d0": (0, 0, 0),
        "p0": (84 + 16, 12, 384),
    }


def test_addresses_are_for_admins_and_transfers_for_those_who_see_counts() -> None:
    known = ControlState(pools=(PoolState(name="decode", desired=1, ready=1),), workers=(), gateways=())
    whole = cluster_state(busy_view(), known)
    assert whole.transfers
    assert all(worker.address and worker.incarnation and worker.pid for worker in whole.workers)
    public = cluster_state(busy_view(), known, with_addresses=False, with_counts=False)
    assert list(public.transfers) == []
    assert [(w.address, w.incarnation, w.pid, w.detail) for w in public.workers] == [("", "", 0, "")] * len(
        whole.workers
    )
    assert [(w.worker_id, w.kv_blocks_total) for w in public.workers] == [
        (w.worker_id, w.kv_blocks_total) for w in whole.workers
    ]


def test_the_state_says_what_a_worker_is_left_out_of() -> None:
    view = busy_view()
    lines = ("prefill has been failing for 3 s (no luck), next trial in 1.0 s",)
    workers = tuple(
        dataclasses.replace(w, open_breakers=lines if w.info.worker_id == "p0" else ()) for w in view.workers
    )
    found = cluster_state(dataclasses.replace(view, workers=workers), ControlState(pools=(), workers=(), gateways=()))
    details = {worker.worker_id: worker.detail for worker in found.workers}
    assert details == {"d0": "", "p0": "quarantined: prefill has been failing for 3 s (no luck), next trial in 1.0 s"}


def test_counts_of_the_other_gateways_are_added() -> None:
    view = busy_view()
    records = tuple(
        GatewayRecord(gateway_id=GatewayId(name), address="a:1", pid=1, name=name, counts=counts_of(view))
        for name in ("gateway", "gateway-1")
    )
    known = ControlState(pools=(), workers=(), gateways=records)
    both = with_others(view, known, "gateway")
    assert (both.num_queued, both.num_running) == (2 * view.num_queued, 2 * view.num_running)
    assert both.stages == {stage: 2 * count for stage, count in view.stages.items()}
    assert both.slos == {slo: (2 * met, 2 * total) for slo, (met, total) in view.slos.items()}
    assert both.rates == Rates(*(2 * rate for rate in view.rates))
    assert both.workers is view.workers
    alone = ControlState(pools=(), workers=(), gateways=records[:1])
    assert with_others(view, alone, "gateway") is view
    state = cluster_state(both, known, with_addresses=False)
    assert [(gateway.name, gateway.phase, gateway.pid) for gateway in state.gateways] == [
        ("gateway", "ready", 0),
        ("gateway-1", "ready", 0),
    ]
