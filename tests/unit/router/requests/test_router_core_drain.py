"""The core's answers, word for word: workers that leave."""

from tests.support.router import (
    EMPTY,
    Scenario,
    end_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)


def test_an_idle_worker_is_drained_at_once() -> None:
    it = Scenario("p0", "d0", "d1")
    assert it.drain("d0") == ["drained d0 1"]
    assert it.drain("d0") == []
    it.start("r0", "p0", "d1")
    it.start("r1", "p0", "d1")


def test_a_busy_worker_is_drained_when_its_last_sequence_ends() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.start("r1", "p0", "d1")
    assert it.drain("d0") == []
    it.hand_over("r0", "p0", "d0", 7)
    assert it.update("d0", end_update("r0", 0, "stop")) == ["finish r0 stop 1 cached=0", "drained d0 1"]
    it.start("r2", "p0", "d1")


def test_a_prefill_worker_is_drained_after_the_hand_over() -> None:
    it = Scenario("p0", "p1", "d0")
    it.start("r0", "p0", "d0")
    assert it.drain("p0") == []
    assert it.update("p0", prefilled_update("r0", 0)) == []
    assert it.cancel("r0") == ["cancel p0 r0/0", "cancel d0 r0/0", "fail r0 RequestCancelledError", "drained p0 1"]
    it.start("r1", "p1", "d0")


def test_the_loss_of_a_draining_worker_needs_no_word_and_its_next_life_is_used() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.drain("d0") == []
    assert it.lost("d0") == ["cancel p0 r0/0"]
    assert it.up(worker_info("d0", incarnation="2")) == ["dispatch p0 r0/1 -> d0"]


def test_a_request_is_moved_on_purpose_as_often_as_operators_like() -> None:
    """All decode workers are drained one after the other, and the answer takes longer than each drain may."""
    names = ["d0", "d1", "d2", "d3", "d4", "d5"]
    it = Scenario("p0", *names)
    [line] = it.submit(routed_request("r0", max_tokens=100))
    for attempt in range(5):
        decode = line.split(" -> ")[1]
        it.hand_over("r0", "p0", decode, 2 * attempt, attempt=attempt, index=2 * attempt)
        it.update(decode, tokens_update("r0", attempt, 2 * attempt + 1, 7))
        assert it.drain(decode) == []
        [line] = it.lost(decode)
        assert line.startswith(f"dispatch p0 r0/{attempt + 1} -> ")
    assert (it.core.counters["worker_left"], it.core.counters["worker_lost"]) == (5, 0)


def test_another_life_at_the_same_place_is_not_draining() -> None:
    it = Scenario("p0", "d0")
    assert it.drain("d0") == ["drained d0 1"]
    assert it.up(worker_info("d0", incarnation="2")) == []
    it.start("r0", "p0", "d0")


def test_the_same_life_that_greets_again_is_still_draining() -> None:
    it = Scenario("p0", "d0", "d1")
    assert it.drain("d0") == ["drained d0 1"]
    assert it.up("d0") == []
    it.start("r0", "p0", "d1")
    it.start("r1", "p0", "d1")


def test_a_stranger_and_an_earlier_life_are_not_drained() -> None:
    it = Scenario("p0", worker_info("d0", incarnation="2"))
    assert it.drain("d0", incarnation="1") == []
    it.start("r0", "p0", "d0")
    assert it.cancel("r0")[-1] == "fail r0 RequestCancelledError"
    assert it.core.holdings() == EMPTY


def test_while_its_only_worker_drains_a_request_waits() -> None:
    it = Scenario("p0", "d0")
    it.drain("d0")
    assert it.submit("r0") == []
    it.now = 1.0
    assert it.up(worker_info("d0", incarnation="2")) == ["dispatch p0 r0/0 -> d0"]


def test_a_worker_that_is_not_to_drain_any_more_is_used_again() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.drain("d0") == []
    assert it.submit("r1") == []
    assert it.resume("d0") == ["dispatch p0 r1/0 -> d0"]
    assert it.resume("d0") == []
    assert it.cancel("r0") == ["cancel p0 r0/0", "cancel d0 r0/0", "fail r0 RequestCancelledError"]
    assert it.drain("d0") == []
    assert it.cancel("r1")[-1] == "drained d0 1"


def test_a_worker_that_hangs_is_not_used_because_its_drain_ends() -> None:
    it = Scenario("p0", "d0", "d1")
    it.drain("d0")
    it.suspected("d0")
    assert it.resume("d0") == []
    it.start("r0", "p0", "d1")
    it.start("r1", "p0", "d1")
    assert it.heard("d0") == []
    it.start("r2", "p0", "d0")
