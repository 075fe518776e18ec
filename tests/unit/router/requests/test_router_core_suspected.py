"""Word for word: workers that hang on sessions that stand, and how often a request may be tried again."""

from __future__ import annotations

import msgspec

from tests.support.router import (
    EMPTY,
    PLAIN,
    Scenario,
    end_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)

# ---------------------------------------------------------------- suspected workers


def test_what_a_suspected_worker_had_goes_on_elsewhere_and_it_is_told() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    assert it.suspected("d0") == ["cancel d0 r0/0", "dispatch p0 r0/1 -> d1"]
    assert it.dispatched["r0/1"].message.spec.emitted_token_ids == (7,)
    assert (it.core.counters["suspicion"], it.core.counters["worker_suspected"]) == (1, 1)


def test_both_legs_are_told() -> None:
    it = Scenario("p0", "p1", "d0")
    it.start("r0", "p0", "d0")
    assert it.suspected("p0") == ["cancel d0 r0/0", "cancel p0 r0/0", "dispatch p1 r0/1 -> d0"]


def test_late_output_of_a_suspected_worker_is_dropped() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    it.suspected("d0")
    assert it.update("d0", tokens_update("r0", 0, 1, 8), end_update("r0", 0, "length")) == []
    assert it.core.counters["stale_attempt"] == 2
    it.update("p0", prefilled_update("r0", 1))
    assert it.update("d1", tokens_update("r0", 1, 1, 8)) == ["emit r0 [8]"]


def test_nothing_is_placed_on_a_suspected_worker_until_it_speaks() -> None:
    it = Scenario("p0", "d0", "d1")
    assert it.suspected("d0") == []
    for request in ("r0", "r1", "r2"):
        it.start(request, "p0", "d1")
    assert it.heard("d0") == []
    it.start("r3", "p0", "d0")


def test_a_request_waits_for_the_only_worker_to_speak_again() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.suspected("d0") == ["cancel p0 r0/0", "cancel d0 r0/0"]
    assert it.submit("r1") == ["fail r1 UnavailableError no_decode_capacity"]
    it.now = 2.0
    assert it.heard("d0") == ["dispatch p0 r0/1 -> d0"]


def test_a_request_does_not_wait_for_ever_for_a_hung_worker() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.suspected("d0")
    assert it.at(2.5) == ["fail r0 UnavailableError no_decode_capacity"]
    assert it.core.holdings() == EMPTY


def test_a_suspected_worker_may_be_lost_and_come_back() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.suspected("d0")
    assert it.lost("d0") == []
    assert it.suspected("d0") == []
    assert it.heard("d0") == []
    assert it.core.counters["stale_incarnation"] == 2
    assert it.up(worker_info("d0", incarnation="2")) == []
    it.start("r1", "p0", "d0")


def test_a_new_session_of_a_suspected_worker_is_a_sign_of_life() -> None:
    it = Scenario("p0", "d0", "d1")
    it.suspected("d0")
    assert it.up("d0") == []
    it.start("r0", "p0", "d0")


def test_a_draining_worker_that_hangs_is_empty_and_stays_out() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    assert it.drain("d0") == []
    assert it.suspected("d0") == ["cancel p0 r0/0", "cancel d0 r0/0", "dispatch p0 r0/1 -> d1", "drained d0 1"]
    assert it.heard("d0") == []
    it.start("r1", "p0", "d1")


def test_a_suspected_worker_that_is_to_drain_is_empty_at_once() -> None:
    it = Scenario("p0", "d0", "d1")
    it.suspected("d0")
    assert it.drain("d0") == ["drained d0 1"]
    assert it.heard("d0") == []
    it.start("r1", "p0", "d1")


def test_the_view_says_who_is_suspected() -> None:
    it = Scenario("p0", "d0")
    it.suspected("d0")
    assert [(view.info.worker_id, view.is_suspected) for view in it.core.view(it.now).workers] == [
        ("d0", True),
        ("p0", False),
    ]


# ---------------------------------------------------------------- tries again

SCARCE = msgspec.structs.replace(PLAIN, retry_burst=1, retry_share=0.5, failure_pause_s=0.001)


def test_tries_again_are_a_share_of_the_traffic() -> None:
    it = Scenario("p0", "d0", config=SCARCE)
    it.start("r0", "p0", "d0")
    it.start("r1", "p0", "d0")
    assert it.update("p0", end_update("r0", 0, "failed")) == ["cancel d0 r0/0"]
    assert it.update("p0", end_update("r1", 0, "failed", detail="no luck")) == [
        "cancel d0 r1/0",
        "fail r1 UnavailableError retry_budget",
    ]
    assert str(it.errors["r1"]).endswith("failed on p0: no luck")
    it.start("r2", "p0", "d0")
    it.start("r3", "p0", "d0")
    assert it.update("p0", end_update("r3", 0, "failed")) == ["cancel d0 r3/0"]
    assert it.at(1.0) == ["dispatch p0 r0/1 -> d0", "dispatch p0 r3/1 -> d0"]


def test_the_loss_of_a_worker_moves_all_that_it_had_once() -> None:
    it = Scenario("p0", "d0", "d1", config=SCARCE)
    names = [f"r{i}" for i in range(6)]
    for name in names:
        it.submit(routed_request(name, 20))
    placed = [line for line in it.lost("d0") if line.startswith("dispatch")]
    assert placed == ["dispatch p0 r0/1 -> d1", "dispatch p0 r2/1 -> d1", "dispatch p0 r4/1 -> d1"]
    lines = it.lost("d1")
    assert [line for line in lines if "retry_budget" in line] == [
        "fail r2 UnavailableError retry_budget",
        "fail r4 UnavailableError retry_budget",
    ]
    assert it.core.holdings()["requests"] == 4
