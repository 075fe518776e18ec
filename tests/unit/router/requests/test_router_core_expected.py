"""Requests without a worker, word for word: how long they wait for one that is known to be coming."""

from __future__ import annotations

import msgspec
import pytest

from disagg.proto.errors import UnavailableError
from disagg.proto.ids import WorkerId
from disagg.router.requests.events import WorkersExpected
from tests.support.router import EMPTY, PLAIN, Scenario, routed_request, tokens_update, worker_info

AGAIN = worker_info("d0", incarnation="2")


def expect(it: Scenario, **in_s: float) -> list[str]:
    return it.handle(WorkersExpected({WorkerId(name): seconds for name, seconds in in_s.items()}))


def cut_short() -> Scenario:
    """The only decode worker is lost in an answer."""
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    assert it.lost("d0") == []
    return it


def test_an_answer_waits_for_a_worker_that_is_coming() -> None:
    it = cut_short()
    assert expect(it, d0=6.0) == []
    for now in (2.5, 5.0, 9.0):
        assert it.at(now) == []
    assert it.up(AGAIN) == ["dispatch p0 r0/1 -> d0"]


def test_it_waits_also_where_that_is_known_first() -> None:
    """The controller may notice before the gateway does."""
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    assert expect(it, d0=6.0) == []
    it.lost("d0")
    assert it.at(6.0) == []
    assert it.up(AGAIN) == ["dispatch p0 r0/1 -> d0"]


def test_it_waits_for_fifteen_seconds_at_most_and_its_client_may_go_on_waiting() -> None:
    it = cut_short()
    expect(it, d0=6.0)
    assert it.at(14.9) == []
    assert it.at(15.0) == ["fail r0 UnavailableError no_worker_yet"]
    assert it.core.holdings() == EMPTY


def test_it_does_not_wait_for_one_that_comes_later_than_that() -> None:
    it = cut_short()
    expect(it, d0=60.0)
    assert it.at(2.5) == ["fail r0 UnavailableError no_worker_yet"]


def test_it_does_not_wait_where_none_is_coming() -> None:
    it = cut_short()
    assert it.at(2.5) == ["fail r0 UnavailableError no_decode_capacity"]
    it = cut_short()
    it.handle(WorkersExpected({WorkerId("prefill-1"): 1.0}))
    assert it.at(2.5) == ["fail r0 UnavailableError no_decode_capacity"]


def test_one_that_is_expected_no_longer_may_be_there_and_not_connected_yet() -> None:
    it = cut_short()
    expect(it, d0=6.0)
    it.at(8.0)
    expect(it)
    assert it.at(8.5) == []
    assert it.up(AGAIN) == ["dispatch p0 r0/1 -> d0"]
    it = cut_short()
    expect(it, d0=6.0)
    it.at(8.0)
    expect(it)
    assert it.at(13.0) == ["fail r0 UnavailableError no_decode_capacity"]


def test_a_deadline_is_not_passed_over() -> None:
    it = Scenario("p0", "d0")
    it.start(msgspec.structs.replace(routed_request("r0"), deadline=4.0), "p0", "d0")
    it.lost("d0")
    expect(it, d0=6.0)
    assert it.at(4.0) == ["fail r0 DeadlineError"]


def test_a_new_request_is_queued_while_a_worker_is_coming() -> None:
    it = Scenario("p0", "d0")
    it.lost("d0")
    expect(it, d0=6.0)
    assert it.submit("r0") == []
    assert it.at(9.0) == []
    assert it.up(AGAIN) == ["dispatch p0 r0/0 -> d0"]


@pytest.mark.parametrize(("ttft_slo_s", "is_taken"), [(5.0, False), (10.0, True)])
def test_a_new_request_whose_target_passes_before_is_refused(ttft_slo_s: float, is_taken: bool) -> None:
    it = Scenario("p0", "d0")
    it.lost("d0")
    expect(it, d0=6.0)
    lines = it.submit(msgspec.structs.replace(routed_request("r0"), ttft_slo_s=ttft_slo_s))
    assert lines == ([] if is_taken else ["fail r0 UnavailableError no_worker_yet"])


def test_an_answer_whose_workers_are_all_gone_is_not_told_of_versions() -> None:
    """Nothing was applied: whatever comes back has the same version."""
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.update("p0", tokens_update("r0", 0, 0, 7))
    it.lost("p0")
    it.lost("d0")
    assert it.at(2.5) == ["fail r0 UnavailableError no_decode_capacity"]
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.update("p0", tokens_update("r0", 0, 0, 7))
    it.lost("p0")
    it.lost("d0")
    expect(it, p0=20.0, d0=20.0)
    assert it.at(2.5) == ["fail r0 UnavailableError no_worker_yet"]
    assert isinstance(it.errors["r0"], UnavailableError)
    assert "decode" in str(it.errors["r0"])


def test_a_pool_that_others_start_for_it_is_not_waited_for() -> None:
    it = Scenario(config=msgspec.structs.replace(PLAIN, starts_workers=True))
    assert it.submit("r0") == ["fail r0 UnavailableError no_worker_yet"]
