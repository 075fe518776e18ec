"""Workers that fail again and again: in virtual time, under load, and word for word."""

from __future__ import annotations

import logging

import msgspec
import pytest

from disagg.proto.ids import WorkerId
from disagg.router.config import RouterConfig
from disagg.router.workers.circuit_breakers import Subject
from tests.support.router import (
    EMPTY,
    PLAIN,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)
from tests.unit.router.workers.failing_fleet import FailingFleet, Fault, Leg

P = [f"p{i}" for i in range(8)]
D = [f"d{i}" for i in range(8)]
PAIR = Subject("transfer", WorkerId("p0"), WorkerId("d0"))


# ---------------------------------------------------------------- under load


@pytest.mark.parametrize(
    ("leg", "worker"), [("prefill", "p0"), ("transfer", "p0"), ("transfer", "d0"), ("decode", "d0")]
)
def test_one_worker_of_eight_that_fails_fast_fails_no_request(leg: Leg, worker: str) -> None:
    """It costs a few attempts: those that were there when its breaker opened, and a trial now and then."""
    fleet = FailingFleet([*P, *D], [Fault(leg, worker)])
    fleet.run(800)
    assert fleet.outcomes == {"length": 800}
    code = {"prefill": "prefill_failed", "transfer": "kv_transfer_failed", "decode": "decode_failed"}[leg]
    assert 3 <= fleet.core.counters[code] < 20
    assert fleet.core.holdings() == EMPTY


@pytest.mark.parametrize(("leg", "worker"), [("prefill", "p0"), ("transfer", "p0"), ("decode", "d0")])
def test_it_is_used_like_the_others_again_once_it_works(leg: Leg, worker: str) -> None:
    """And nothing is kept of it."""
    fleet = FailingFleet([*P[:2], *D[:2]], [Fault(leg, worker, end=1.0)])
    fleet.run(800)
    assert fleet.outcomes == {"length": 800}
    late = [name for when, name in fleet.placed if when > 2.1]
    other = worker[0] + "1"
    assert late.count(worker) == pytest.approx(late.count(other), rel=0.6)
    assert fleet.core.counters["worker_lost"] == 0
    breakers = fleet.core._fleet.breakers
    assert breakers.states() == {}
    assert (breakers.changes["breaker_opened"] > 0, breakers.trials()) == (True, {})
    fleet.now += 100.0
    fleet.run(400)
    assert len(breakers) == 0


def test_a_pair_that_fails_is_left_out_and_its_workers_are_not() -> None:
    config = RouterConfig(local_prefill="never")
    fleet = FailingFleet(["p0", "p1", "d0", "d1"], [Fault("transfer", "p0", "d0")], config=config)
    fleet.run(800)
    assert fleet.outcomes == {"length": 800}
    breakers = fleet.core._fleet.breakers
    assert set(breakers.states()) == {PAIR}
    assert min(fleet.dispatches.values()) > 200
    assert 3 <= fleet.core.counters["kv_transfer_failed"] < 20


def test_a_pair_that_cannot_be_formed_costs_the_requests_that_found_it_half_their_target() -> None:
    """Packets between them are dropped: connecting takes 20 s. Without a target a request waits for 2 s."""
    for config, longest_s in ((RouterConfig(), 2.2), (RouterConfig(ttft_slo_s=1.0), 0.7)):
        config = msgspec.structs.replace(config, local_prefill="never")
        fleet = FailingFleet(["p0", "p1", "d0", "d1"], [Fault("pair", "p0", "d0")], config=config, rate=100.0)
        fleet.run(1000)
        assert fleet.outcomes == {"length": 1000}
        slow = [first_s for first_s in fleet.first_token_s.values() if first_s > 0.1]
        assert 0.4 < max(slow) < longest_s
        # Those that came before the first of them was refused, which is a third of what comes; then a trial at a time.
        assert len(slow) < 80
        assert set(fleet.core._fleet.breakers.states()) == {PAIR}
        assert fleet.core.counters["kv_transfer_failed"] == 0


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_where_every_worker_of_a_role_fails_it_is_as_without_breakers(leg: Leg) -> None:
    """All are tried, requests end with the same errors, and once the workers are well they are used."""
    names = ["p0", "p1", "d0", "d1"]
    faults = [Fault(leg, name, end=1.0) for name in names if name[0] == leg[0]]
    fleet = FailingFleet(names, faults, config=RouterConfig(local_prefill="never"), rate=100.0)
    fleet.run(400)
    assert set(fleet.outcomes) <= {"length", f"{leg}_failed", "retry_budget"}
    assert fleet.outcomes["length"] >= 300
    assert fleet.core.holdings() == EMPTY
    assert fleet.core._fleet.breakers.states() == {}


def test_a_request_that_fails_wherever_it_runs_leaves_no_worker_out() -> None:
    it = Scenario("p0", "p1", "p2", "d0", config=RouterConfig(local_prefill="never", failure_pause_s=0.01))
    lines: list[str] = it.submit("poison")
    attempts = 0
    while not any(line.startswith("fail ") for line in lines):
        [prefill] = [line.split()[1] for line in lines if line.startswith("dispatch")]
        it.now += 0.1
        lines = it.update(prefill, end_update("poison", attempts, "failed"))
        attempts += 1
        if not any(line.startswith(("dispatch", "fail")) for line in lines):
            lines = it.at(it.now + 0.1)
    # Five that count, and five that did not because others were healthy.
    assert attempts == 10
    assert it.core._fleet.breakers.states() == {}


# ---------------------------------------------------------------- word for word


@pytest.mark.parametrize(
    ("ttft_slo_s", "deadline", "timeout_s"),
    [(None, None, 2.0), (1.0, None, 0.5), (60.0, None, 2.0), (0.2, None, 0.25), (None, 3.0, 1.5), (1.0, 0.8, 0.4)],
)
def test_the_wait_for_a_pair_follows_the_target_and_the_deadline(
    ttft_slo_s: float | None, deadline: float | None, timeout_s: float
) -> None:
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, ttft_slo_s=ttft_slo_s, admission=False))
    it.start(routed_request("r0", deadline=deadline), "p0", "d0")
    assert it.dispatched["r0/0"].message.pair_timeout_s == timeout_s


def test_what_waited_for_a_pair_goes_elsewhere_and_the_pair_is_left_out_at_once() -> None:
    it = Scenario("p0", "p1", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.now = 2.0
    refused = end_update("r0", 0, "refused", detail="pair with d0: not formed after 2.0 s", in_transfer=True)
    assert it.update("p0", refused) == ["cancel d0 r0/0", "dispatch p1 r0/1 -> d1"]
    assert set(it.core._fleet.breakers.states()) == {PAIR}
    assert (it.core.counters["pair_refused"], it.core.counters["kv_transfer_failed"]) == (1, 0)
    it.cancel("r0")
    placed = {line.replace(f" {name}/0", "") for name in ("r1", "r2", "r3", "r4", "r5") for line in it.submit(name)}
    assert placed == {"dispatch p0 -> d1", "dispatch p1 -> d0", "dispatch p1 -> d1"}


def test_what_p_says_of_its_pair_while_the_prompt_is_computed_is_no_fault_of_its_prefill() -> None:
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, max_attempts=1))
    it.start("r0", "p0", "d0")
    lines = it.update("p0", end_update("r0", 0, "failed", in_transfer=True))
    assert lines == ["cancel d0 r0/0", "fail r0 UnavailableError kv_transfer_failed"]


TRIPS = msgspec.structs.replace(PLAIN, breaker_failures=2, failure_pause_s=0.001)


def fail_prefills(it: Scenario, *names: str, on: str = "p0", decode: str = "d0") -> None:
    for name in names:
        it.start(name, on, decode)
    for name in names:
        it.update(on, end_update(name, 0, "failed", detail="no luck"))


def test_a_half_open_worker_gets_one_request_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    it = Scenario("p0", "d0", config=TRIPS)
    fail_prefills(it, "r0", "r1")
    it.at(0.4)  # the only one of its role: used nevertheless
    assert it.up("p1") == []
    assert it.submit("r2") == ["dispatch p1 r2/0 -> d0"]
    assert it.submit("r3") == ["dispatch p1 r3/0 -> d0"]
    assert it.core.next_wakeup() == 0.5
    it.at(0.5)
    assert it.submit("r4") == ["dispatch p0 r4/0 -> d0"]
    assert it.submit("r5") == ["dispatch p1 r5/0 -> d0"]
    assert it.update("p0", prefilled_update("r4", 0)) == []
    assert it.submit("r6") == ["dispatch p0 r6/0 -> d0"]
    assert [record.getMessage() for record in caplog.records] == [
        "p0: circuit breaker open, prefill failed (no luck); using other workers, next trial in 0.5 s",
        "p0: circuit breaker of prefill half-open, attempt r4/0 is its trial",
        "p0: circuit breaker closed, prefill works again after 0.5 s; it gets requests as before",
    ]
    assert it.core.view(it.now).events["breaker_opened"] == 1
    assert it.core.view(it.now).events["breaker_closed"] == 1


def test_the_view_says_what_a_worker_is_left_out_of() -> None:
    it = Scenario("p0", "p1", "d0", config=TRIPS)
    fail_prefills(it, "r0")
    it.cancel("r0")
    fail_prefills(it, "r1")
    it.now = 0.2
    [p0] = [view for view in it.core.view(it.now).workers if view.info.worker_id == "p0"]
    assert p0.open_breakers == ("prefill has been failing for 0 s (no luck), next trial in 0.3 s",)


def test_a_trial_that_is_cancelled_makes_way_for_another() -> None:
    """`start` asserts where a request goes."""
    it = Scenario("p0", "p1", "d0", config=TRIPS)
    fail_prefills(it, "r0")
    it.cancel("r0")
    fail_prefills(it, "r1")
    it.cancel("r1")
    it.at(0.5)
    it.start("r2", "p0", "d0")
    it.start("r3", "p1", "d0")
    it.cancel("r2")
    it.start("r4", "p0", "d0")


def test_a_decode_worker_has_passed_its_trial_after_some_tokens() -> None:
    it = Scenario("p0", "d0", "d1", config=TRIPS)
    for name in ("r0", "r1"):
        assert it.submit(routed_request(name, max_tokens=50))[0].endswith("/0 -> d0")
        it.update("p0", prefilled_update(name, 0))
        it.update("d0", handed_over_update(name, 0), end_update(name, 0, "failed"))
        it.cancel(name)
    it.at(0.5)
    it.start(routed_request("r2", max_tokens=50), "p0", "d0")
    it.update("d0", handed_over_update("r2", 0), tokens_update("r2", 0, 0, *range(31)))
    assert set(it.core._fleet.breakers.trials()) == {Subject("decode", WorkerId("d0"))}
    it.update("d0", tokens_update("r2", 0, 31, 31))
    assert it.core._fleet.breakers.states() == {}
    it.cancel("r2")
    assert it.core._fleet.breakers.trials() == {}


def test_a_request_that_only_a_worker_that_is_left_out_can_hold_goes_there() -> None:
    """`start` asserts where a request goes."""
    it = Scenario("p0", worker_info("p1", max_model_len=100), "d0", config=TRIPS)
    fail_prefills(it, "r0")
    it.cancel("r0")
    fail_prefills(it, "r1")
    it.cancel("r1")
    it.start("short", "p1", "d0")
    it.start(routed_request("long", 200), "p0", "d0")


def test_a_lost_worker_begins_anew() -> None:
    it = Scenario("p0", "d0", config=TRIPS)
    fail_prefills(it, "r0", "r1")
    breakers = it.core._fleet.breakers
    assert (len(breakers), breakers.next_of(None)) == (1, 0.5)
    it.lost("p0")
    assert (len(breakers), breakers.next_of(None)) == (0, None)


def refused_by_its_target(it: Scenario, name: str, at: float) -> None:
    """A request that may wait 0.25 s for its pair waits in vain and leaves."""
    request = msgspec.structs.replace(routed_request(name), ttft_slo_s=0.3)
    it.now = at - 0.25
    it.start(request, "p0", "d0")
    assert it.dispatched[f"{name}/0"].message.pair_timeout_s == 0.25
    it.now = at
    detail = "pair with d0: not formed after 0.2 s"
    it.update("p0", end_update(name, 0, "refused", detail=detail, in_transfer=True))
    it.cancel(name)


def test_a_tight_target_is_no_fault_of_a_pair_that_is_being_formed() -> None:
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, admission=False))
    for number in range(5):
        refused_by_its_target(it, f"r{number}", 0.25 + 0.3 * number)
    assert it.core._fleet.breakers.states() == {}
    assert it.core.counters["pair_refused"] == 5


def test_a_pair_that_is_not_formed_for_as_long_as_any_request_waits_is_left_out() -> None:
    """By requests with tight targets alone: 2 s after the first one was placed."""
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, admission=False))
    for number in range(3):
        refused_by_its_target(it, f"r{number}", 0.25 + 0.8 * number)
        assert it.core._fleet.breakers.states() == {}
    refused_by_its_target(it, "r3", 2.0)
    assert set(it.core._fleet.breakers.states()) == {PAIR}


@pytest.mark.parametrize("how", ["formed", "long ago", "new incarnation"])
def test_waits_in_vain_are_forgotten(how: str) -> None:
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, admission=False))
    refused_by_its_target(it, "r0", 0.25)
    if how == "formed":
        it.now = 1.0
        it.start("r1", "p0", "d0")
        it.update("p0", prefilled_update("r1", 0))
        it.update("d0", handed_over_update("r1", 0), end_update("r1", 0, "stop"))
    elif how == "new incarnation":
        it.lost("d0")
        it.up("d0")
    else:
        it.now = 9.0
    refused_by_its_target(it, "r2", max(it.now, 2.0) + 0.3)
    assert it.core._fleet.breakers.states() == {}


def test_a_pair_that_cannot_be_formed_is_left_out_at_once_whatever_the_target() -> None:
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, admission=False))
    it.start(msgspec.structs.replace(routed_request("r0"), ttft_slo_s=0.3), "p0", "d0")
    it.now = 0.1
    it.update("p0", end_update("r0", 0, "refused", detail="pair with d0: connection refused", in_transfer=True))
    assert set(it.core._fleet.breakers.states()) == {PAIR}
