"""A gateway that stood still: its clock does not count that, and the deadlines of its clients do."""

from __future__ import annotations

import msgspec

from disagg.router.requests.events import StoodStill
from tests.support.router import EMPTY, Scenario, routed_request


def test_deadlines_are_nearer_and_nothing_else_is() -> None:
    it = Scenario("p0", "d0")
    for name, deadline in (("past", 30.0), ("later", 60.0)):
        it.start(msgspec.structs.replace(routed_request(name), deadline=deadline), "p0", "d0")
    it.start("none", "p0", "d0")
    it.now = 1.0
    assert it.handle(StoodStill(40.0)) == ["cancel p0 past/0", "cancel d0 past/0", "fail past DeadlineError"]
    assert it.at(19.9) == []
    assert it.at(20.0) == ["cancel p0 later/0", "cancel d0 later/0", "fail later DeadlineError"]
    it.cancel("none")
    assert it.core.holdings() == EMPTY


def test_a_wait_for_a_worker_goes_on() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.lost("d0")
    it.now = 1.0
    assert it.handle(StoodStill(40.0)) == []
    assert it.at(2.4) == []
    assert it.up("d0") == ["cancel d0 r0/0", "dispatch p0 r0/1 -> d0"]
    assert it.dispatched["r0/1"].message.spec.timeout_s is None


def test_another_attempt_has_what_is_left_of_the_deadline() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start(msgspec.structs.replace(routed_request("r0"), deadline=60.0), "p0", "d0")
    it.handle(StoodStill(40.0))
    it.lost("d0")
    assert it.dispatched["r0/1"].message.spec.timeout_s == 20.0
