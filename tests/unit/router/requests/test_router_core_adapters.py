"""Requests with adapters: where they go, what `explain` tells, and what becomes of those whose adapter is removed or
cannot be loaded."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.proto.errors import AdapterRemovedError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.proto.messages import Adapter, AdapterState, BlocksSnapshot
from disagg.router.config import PolicyName, RouterConfig
from disagg.router.requests.endings import MAX_ADAPTER_REFUSALS
from disagg.router.requests.events import AdapterRemoved
from tests.support.placing import Placing, busy, samples
from tests.support.router import Scenario, end_update, routed_request, worker_info, worker_report

SQL = Adapter(name="sql", path="sql", fingerprint="aa" * 32)
OTHER = Adapter(name="law", path="law", fingerprint="bb" * 32)
STEPS = samples(base_ms=5.0, prefill_token_ms=0.1, decode_ms=1.0)
LOADED = AdapterState(fingerprint=SQL.fingerprint, bytes=1_000_000, load_ms=100.0, uses=0)
DEMAND: dict[str, Any] = {"adapter": SQL.fingerprint, "adapter_ms": 100.0}


def has_it(placing: Placing, *names: str) -> None:
    for name in names:
        report = worker_report(name, 1, adapters=(LOADED,))
        assert placing.fleet.report(report, 0.0)


@pytest.mark.parametrize("policy", ["joint", "elastic"])
def test_workers_that_have_the_adapter_are_preferred_by_the_time_of_a_load(policy: PolicyName) -> None:
    infos = [worker_info(name, calibration=STEPS) for name in ("p0", "p1", "d0", "d1")]
    placing = Placing(policy, *map(busy, infos))
    assert placing.where(**DEMAND) == "p0 d0"
    has_it(placing, "p1", "d1")
    assert placing.where(**DEMAND) == "p1 d1"
    assert placing.where() == "p0 d0"  # the base model


def test_a_queue_that_is_longer_than_a_load_spreads_the_adapter() -> None:
    placing = Placing("joint", *(busy(worker_info(name, calibration=STEPS)) for name in ("p0", "d0")))
    placing.add(busy(worker_info("p1", calibration=STEPS), tokens=2000, seqs=1))
    has_it(placing, "p1", "d0")
    assert placing.where(**DEMAND) == "p0 d0"  # 2000 tokens take 200 ms and more
    assert placing.where(adapter=SQL.fingerprint, adapter_ms=1000.0) == "p1 d0 later"  # waiting is shorter


def test_a_holder_is_a_candidate_however_many_workers_are_ranked_before_it() -> None:
    infos = [worker_info(f"{kind}{i}", calibration=STEPS) for kind in "pd" for i in range(6)]
    placing = Placing("joint", *map(busy, infos))
    has_it(placing, "p5", "d5")
    assert placing.where(**DEMAND) == "p5 d5"


def test_colocated_workers_load_it_once() -> None:
    placing = Placing("joint", *(busy(worker_info(name, calibration=STEPS)) for name in ("c0", "c1")))
    has_it(placing, "c1")
    assert placing.where(**DEMAND) == "- c1"
    choice = placing.choose(without=["c1"], **DEMAND)
    base = placing.choose(without=["c1"])
    assert choice is not None
    assert base is not None
    assert choice.decode_weight.cost - base.decode_weight.cost == pytest.approx(100.0)
    assert choice.decode_weight.adapter_ms == 100.0
    assert choice.decode_weight.wait_ms - base.decode_weight.wait_ms == pytest.approx(100.0)


def calibrated(*names: str, **limits: Any) -> Scenario:
    config = RouterConfig(local_prefill="never", policy="joint", refusal_pause_s=0.01)
    return Scenario(*(worker_info(name, calibration=STEPS, **limits) for name in names), config=config)


def test_the_dispatch_has_the_adapter_and_explain_the_time_to_load_it() -> None:
    scenario = calibrated("p0", "p1", "d0", "d1")
    for name in ("p1", "d1"):
        scenario.report(worker_report(name, 0, BlocksSnapshot(hashes=()), adapters=(LOADED,)))
    assert scenario.submit(routed_request("r0", adapter=SQL)) == ["dispatch p1 r0/0 -> d1"]
    assert scenario.dispatched["r0/0"].message.spec.adapter == SQL
    trace = scenario.core.trace(RequestId("r0"))
    assert trace is not None
    assert trace.adapter == "sql"
    assert trace.placement is not None
    told = {(each.prefill_worker, each.decode_worker): each.adapter_ms for each in trace.placement.options()}
    assert told == {("p1", "d1"): 0.0, ("p1", "d0"): 100.0, ("p0", "d1"): 100.0, ("p0", "d0"): 200.0}
    assert scenario.submit(routed_request("r1"))[0].startswith("dispatch p0 r1/0")


def test_the_next_request_goes_where_a_load_was_ordered() -> None:
    scenario = calibrated("p0", "p1", "d0", "d1")
    first = scenario.submit(routed_request("r0", 16, adapter=SQL))
    scenario.at(0.01)  # of about 17 ms
    assert scenario.submit(routed_request("r1", 16, adapter=SQL)) == [first[0].replace("r0", "r1")]
    assert scenario.submit(routed_request("r2", 16, adapter=OTHER)) != [first[0].replace("r0", "r2")]


def test_what_waits_for_a_removed_adapter_ends_and_what_runs_goes_on() -> None:
    scenario = calibrated("p0", "d0", max_num_seqs=1)
    assert scenario.submit(routed_request("r0", adapter=SQL)) == ["dispatch p0 r0/0 -> d0"]
    for name, adapter in (("r1", SQL), ("r2", OTHER), ("r3", None)):
        assert scenario.submit(routed_request(name, adapter=adapter)) == []
    replaced = Adapter(name="sql", path="sql", fingerprint="cc" * 32)
    assert scenario.submit(routed_request("r4", adapter=replaced)) == []
    lines = scenario.handle(AdapterRemoved(replaced))
    assert sorted(lines) == [f"fail {name} AdapterRemovedError" for name in ("r1", "r4")]
    assert isinstance(scenario.errors["r1"], AdapterRemovedError)
    assert (scenario.errors["r1"].http_status, scenario.errors["r1"].code) == (404, "adapter_removed")
    assert "sql" in scenario.errors["r1"].message
    assert scenario.core.num_queued == 2
    scenario.lost("p0")  # its second attempt waits, and is no new one
    assert scenario.handle(AdapterRemoved(SQL)) == []


def test_a_worker_that_cannot_load_it_is_avoided_and_the_others_are_tried() -> None:
    scenario = Scenario(
        "p0", "d0", "d1", config=RouterConfig(local_prefill="never", policy="joint", refusal_pause_s=1.0)
    )
    line = scenario.submit(routed_request("r0", adapter=SQL))
    assert line == ["dispatch p0 r0/0 -> d0"]
    lines = scenario.update("d0", end_update("r0", 0, "refused", detail="adapter sql: its folder is not there"))
    assert lines == ["cancel p0 r0/0", "dispatch p0 r0/1 -> d1"]


def test_an_adapter_that_no_worker_loads_ends_the_request_with_its_reason() -> None:
    scenario = Scenario("p0", "d0", config=RouterConfig(local_prefill="never", policy="joint", refusal_pause_s=0.01))
    scenario.submit(routed_request("r0", adapter=SQL))
    detail = "adapter sql: its content has changed"
    for attempt in range(MAX_ADAPTER_REFUSALS):
        assert "r0" not in scenario.errors
        scenario.update("d0", end_update("r0", attempt, "refused", detail=detail))
        scenario.at(scenario.now + 1.0)
    error = scenario.errors["r0"]
    assert isinstance(error, UnavailableError)
    assert (error.code, detail in error.detail) == ("adapter_unavailable", True)
    scenario.submit(routed_request("r1", adapter=SQL))
    scenario.update("d0", end_update("r1", 0, "invalid", detail="adapter sql: q_proj has no finite values"))
    assert getattr(scenario.errors["r1"], "code", "") == "adapter_unavailable"
