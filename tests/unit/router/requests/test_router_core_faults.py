"""The core's answers, word for word: refusals, faults, lost workers, cancels, deadlines."""

import msgspec
import pytest

from disagg.proto.block_hash import chain_hashes
from disagg.proto.errors import GRAMMAR_TOO_LARGE
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import EndReason
from disagg.proto.token_ids import pack_token_ids, unpack_token_ids
from disagg.router.requests.events import CancelRequest, Dispatch, Submit, WorkerUp
from disagg.router.requests.router_core import RouterCore
from tests.support.router import (
    EMPTY,
    PLAIN,
    ROOT,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
    worker_report,
)

# ---------------------------------------------------------------- refused


def test_a_refused_request_goes_to_another_d_at_once() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    assert it.update("p0", end_update("r0", 0, "refused", detail="no blocks")) == [
        "cancel d0 r0/0",
        "dispatch p0 r0/1 -> d1",
    ]


def test_a_refused_request_waits_a_little_where_there_is_no_other_d() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.update("p0", end_update("r0", 0, "refused")) == ["cancel d0 r0/0"]
    assert it.core.next_wakeup() == 0.05
    # It waits for reasons of its own, so that others pass.
    assert it.submit("r1") == ["dispatch p0 r1/0 -> d0"]
    # D is not asked again for as much before it has said what it holds.
    assert it.at(0.05) == []
    assert it.report(worker_report("d0", 0)) == ["dispatch p0 r0/1 -> d0"]
    assert it.update("d0", end_update("r0", 1, "refused")) == ["cancel p0 r0/1"]
    assert it.core.next_wakeup() == pytest.approx(0.15)
    assert it.at(0.16) == ["dispatch p0 r0/2 -> d0"]


def test_a_refused_request_is_the_next_one_to_be_placed() -> None:
    it = Scenario(worker_info("p0", token_budget=8), "d0", "d1")
    it.start("r0", "p0", "d0")
    assert it.submit("r1") == []
    assert it.update("p0", end_update("r0", 0, "refused")) == ["cancel d0 r0/0", "dispatch p0 r0/1 -> d1"]


def test_refusals_are_no_faults_but_not_endless() -> None:
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, max_refusals=5))
    it.start("r0", "p0", "d0")
    for attempt in range(4):
        assert it.update("p0", end_update("r0", attempt, "refused")) == [f"cancel d0 r0/{attempt}"]
        assert it.at(it.now + 1.0) == [f"dispatch p0 r0/{attempt + 1} -> d0"]
    assert it.update("p0", end_update("r0", 4, "refused", detail="full")) == [
        "cancel d0 r0/4",
        "fail r0 UnavailableError no_decode_capacity",
    ]
    assert str(it.errors["r0"]) == "refused 5 times, the last time by p0: full"
    assert it.core.holdings() == EMPTY


# ---------------------------------------------------------------- preempted


def test_a_preempted_request_goes_on_after_the_tokens_that_were_shown_and_elsewhere_first() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 100)
    it.update("d0", tokens_update("r0", 0, 1, 101))
    assert it.update("d0", end_update("r0", 0, "preempted")) == ["dispatch p0 r0/1 -> d1"]
    assert it.dispatched["r0/1"].message.spec.emitted_token_ids == (100, 101)
    assert (it.core.counters["preempted"], it.core.counters["decode_failed"]) == (1, 0)


def test_to_be_preempted_is_never_the_end_of_a_request() -> None:
    """Each time it had brought a token, after any number of refusals."""
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, max_refusals=2))
    it.start(routed_request("r0", 40, max_tokens=30), "p0", "d0")
    for index in range(20):
        attempt = 2 * index
        it.hand_over("r0", "p0", "d0", index, attempt=attempt, index=index)
        assert it.update("d0", end_update("r0", attempt, "preempted")) == []
        assert it.at(it.now + 0.05) == [f"dispatch p0 r0/{attempt + 1} -> d0"]
        assert it.update("p0", end_update("r0", attempt + 1, "refused")) == [f"cancel d0 r0/{attempt + 1}"]
        assert it.at(it.now + 0.05) == [f"dispatch p0 r0/{attempt + 2} -> d0"]
    it.hand_over("r0", "p0", "d0", 20, attempt=40, index=20)
    assert it.update("d0", end_update("r0", 40, "stop")) == ["finish r0 stop 21 cached=0"]
    assert it.core.holdings() == EMPTY


# ---------------------------------------------------------------- failed


def test_a_failed_decode_goes_on_elsewhere_after_the_tokens_that_were_shown() -> None:
    it = Scenario("p0", "d0", "d1")
    request = routed_request("r0", 40, max_tokens=30)
    it.start(request, "p0", "d0")
    it.hand_over("r0", "p0", "d0", 100)
    more = list(range(101, 110))
    it.update("d0", tokens_update("r0", 0, 1, *more))
    assert it.update("d0", end_update("r0", 0, "failed", detail="boom")) == ["dispatch p0 r0/1 -> d1"]
    spec = it.dispatched["r0/1"].message.spec
    assert (spec.attempt, spec.prompt_token_ids) == (1, request.prompt_token_ids)
    assert spec.emitted_token_ids == (100, *more)
    prompt = unpack_token_ids(request.prompt_token_ids)
    assert spec.block_hashes == tuple(chain_hashes(ROOT, pack_token_ids([*prompt, 100, *more])))
    assert len(spec.block_hashes) == len(request.block_hashes) + 1
    it.hand_over("r0", "p0", "d1", 110, attempt=1, index=10)
    last = [tokens_update("r0", 1, 11, 111), end_update("r0", 1, "stop")]
    assert it.update("d1", *last) == ["emit r0 [111]", "finish r0 stop 12 cached=0"]
    trace = it.core.trace(request.request_id)
    assert trace is not None
    assert (trace.attempts, trace.decode_worker) == (2, "d1")


def test_a_grammar_that_went_beyond_a_limit_is_told_as_such() -> None:
    it = Scenario("p0", "d0", config=PLAIN)
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 100)
    assert it.update("d0", end_update("r0", 0, "invalid", detail=GRAMMAR_TOO_LARGE)) == ["fail r0 InvalidRequestError"]
    assert str(it.errors["r0"]) == f"structured: {GRAMMAR_TOO_LARGE}"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_request_that_is_the_cause_itself_is_not_tried_again_and_costs_the_others_nothing(leg: str) -> None:
    """It names what happened, and takes no attempt of the retry budget: a fault of another is tried again."""
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, retry_burst=1, retry_share=0.0))
    for number in range(5):
        name = f"bad{number}"
        it.start(name, "p0", "d0")
        expected = [f"fail {name} UnsamplableError"]
        if leg == "decode":
            it.hand_over(name, "p0", "d0", 100)
        else:
            expected.insert(0, f"cancel d0 {name}/0")
        worker = "p0" if leg == "prefill" else "d0"
        assert it.update(worker, end_update(name, 0, "invalid", detail="no finite logit")) == expected
        assert str(it.errors[name]) == "sampling: no finite logit"
        assert getattr(it.errors[name], "code", "") == "no_token_to_sample"
    assert it.core.holdings() == EMPTY
    assert (it.core.counters["invalid"], it.core.counters["decode_failed"]) == (5, 0)
    it.start("r0", "p0", "d0")
    assert it.update("p0", end_update("r0", 0, "failed")) == ["cancel d0 r0/0"]
    assert it.at(it.now + 1.0) == ["dispatch p0 r0/1 -> d0"]


def test_what_the_lost_attempt_still_says_is_dropped() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    it.update("d0", end_update("r0", 0, "failed"))
    late = [tokens_update("r0", 0, 1, 99), handed_over_update("r0", 0), end_update("r0", 0, "stop")]
    assert it.update("d0", *late) == []
    assert it.core.counters["stale_attempt"] == 3
    assert it.update("p0", tokens_update("r0", 1, 1, 8)) == ["emit r0 [8]"]


def test_tokens_held_back_by_a_gap_die_with_their_attempt() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    assert it.update("d0", handed_over_update("r0", 0), tokens_update("r0", 0, 1, 8, 9)) == []
    assert it.update("d0", end_update("r0", 0, "failed")) == ["dispatch p0 r0/1 -> d1"]
    assert it.dispatched["r0/1"].message.spec.emitted_token_ids == ()
    assert it.update("p0", tokens_update("r0", 1, 0, 7)) == ["emit r0 [7]"]


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([("p0", "failed")], "prefill_failed"),
        ([("p0", "prefilled"), ("p0", "failed")], "kv_transfer_failed"),
        ([("d0", "failed")], "kv_transfer_failed"),
        ([("p0", "prefilled"), ("d0", "handed over"), ("d0", "failed")], "decode_failed"),
        ([("p0", "cancelled")], "prefill_failed"),
        ([("p0", "prefilled"), ("d0", "handed over"), ("d0", "cancelled")], "decode_failed"),
    ],
)
def test_after_the_last_try_the_client_hears_which_leg_failed(steps: list[tuple[str, str]], code: str) -> None:
    it = Scenario("p0", "d0", config=msgspec.structs.replace(PLAIN, max_attempts=1))
    it.start("r0", "p0", "d0")
    ends: dict[str, EndReason] = {"failed": "failed", "cancelled": "cancelled"}
    lines: list[str] = []
    for worker, step in steps:
        update = prefilled_update("r0", 0) if step == "prefilled" else handed_over_update("r0", 0)
        lines = it.update(worker, end_update("r0", 0, ends[step]) if step in ends else update)
    assert lines[-1] == f"fail r0 UnavailableError {code}"
    assert it.core.holdings() == EMPTY


def test_five_faults_are_enough() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    for attempt, again_at in enumerate((0.2, 0.7, 1.4, 2.3)):
        assert it.update("p0", end_update("r0", attempt, "failed")) == [f"cancel d0 r0/{attempt}"]
        assert it.at(again_at) == [f"dispatch p0 r0/{attempt + 1} -> d0"]
    assert it.update("p0", end_update("r0", 4, "failed")) == [
        "cancel d0 r0/4",
        "fail r0 UnavailableError prefill_failed",
    ]


def test_a_request_whose_third_worker_is_lost_gets_no_fourth() -> None:
    """It may be what kills them."""
    it = Scenario("p0", "d0", "d1", "d2", "d3")
    it.start("r0", "p0", "d0")
    assert it.lost("d0") == ["cancel p0 r0/0", "dispatch p0 r0/1 -> d2"]
    assert it.update("d2", end_update("r0", 1, "failed")) == ["cancel p0 r0/1", "dispatch p0 r0/2 -> d1"]
    assert it.lost("d1") == ["cancel p0 r0/2", "dispatch p0 r0/3 -> d3"]
    assert it.lost("d3") == ["cancel p0 r0/3", "fail r0 UnavailableError worker_lost"]
    assert it.core.holdings() == EMPTY


@pytest.mark.parametrize(("num_tokens", "num_losses"), [(63, 3), (64, 6)])
def test_an_answer_that_grows_survives_more_losses_but_not_without_a_limit(num_tokens: int, num_losses: int) -> None:
    """Fewer tokens are no progress. What kills every worker after so many ends, too."""
    it = Scenario("p0", *(f"d{i}" for i in range(8)))
    [line] = it.submit(routed_request("r0", max_tokens=500))
    for attempt in range(num_losses):
        decode = line.split(" -> ")[1]
        index = num_tokens * attempt
        it.update("p0", prefilled_update("r0", attempt))
        it.update(decode, handed_over_update("r0", attempt))
        it.update(decode, tokens_update("r0", attempt, index, *range(num_tokens)))
        [line] = it.lost(decode)
    assert line == "fail r0 UnavailableError worker_lost"


def test_an_answer_that_grows_survives_any_number_of_faults() -> None:
    it = Scenario("p0", "d0", "d1", "d2")
    [line] = it.submit(routed_request("r0", max_tokens=900))
    for attempt in range(12):
        decode = line.split(" -> ")[1]
        it.update("p0", prefilled_update("r0", attempt))
        it.update(decode, handed_over_update("r0", attempt))
        it.update(decode, tokens_update("r0", attempt, 64 * attempt, *range(64)))
        lines = it.update(decode, end_update("r0", attempt, "failed"))
        [line] = lines or it.at(it.now + 1.0)
    assert it.core.trace(RequestId("r0")).attempts == 13  # type: ignore[union-attr]


def test_p_is_out_of_it_after_the_hand_over() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    assert it.update("p0", end_update("r0", 0, "failed")) == []
    assert it.lost("p0") == []
    assert it.core.counters["late_end"] == 1
    assert it.update("d0", tokens_update("r0", 0, 1, 8)) == ["emit r0 [8]"]


def test_a_reservation_that_p_gave_up_is_not_the_end_of_the_attempt() -> None:
    """P stops on token 0 and aborts the reservation; D's word may come first."""
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.update("d0", end_update("r0", 0, "cancelled")) == []
    assert it.update("d0", handed_over_update("r0", 0)) == []
    assert it.core.counters["late_hand_over"] == 1
    end = [tokens_update("r0", 0, 0, 7), end_update("r0", 0, "stop")]
    assert it.update("p0", *end) == ["emit r0 [7]", "finish r0 stop 1 cached=0"]


def test_an_end_whose_tokens_are_missing_is_a_fault() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    bad = [handed_over_update("r0", 0), tokens_update("r0", 0, 1, 8), end_update("r0", 0, "stop")]
    assert it.update("d0", *bad) == ["dispatch p0 r0/1 -> d1"]
    assert it.core.counters["end_before_tokens"] == 1


def test_an_attempt_lost_after_the_last_token_is_an_answer() -> None:
    it = Scenario("p0", "d0")
    it.start(routed_request("r0", max_tokens=2), "p0", "d0")
    it.start(routed_request("r1", max_tokens=9, stop=[42]), "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    it.hand_over("r1", "p0", "d0", 7)
    it.update("d0", tokens_update("r0", 0, 1, 8), tokens_update("r1", 0, 1, 42))
    assert it.lost("d0") == ["finish r0 length 2 cached=0", "finish r1 stop 2 cached=0"]
    assert it.core.holdings() == EMPTY


def test_a_worker_may_speak_only_for_its_own_attempts() -> None:
    it = Scenario("p0", "p1", "d0", "d1")
    it.start("r0", "p0", "d0")
    foreign = [tokens_update("r0", 0, 0, 9), prefilled_update("r0", 0), end_update("r0", 0, "stop")]
    assert it.update("p1", *foreign) == []
    assert it.update("d0", prefilled_update("r0", 0)) == []
    assert it.update("p0", handed_over_update("r0", 0)) == []
    assert it.core.counters["wrong_worker"] == 5
    assert it.core.holdings()["tokens"] == 64


# ---------------------------------------------------------------- lost workers


def test_a_lost_worker_sends_its_requests_elsewhere_and_the_other_leg_is_told() -> None:
    it = Scenario("p0", "p1", "d0")
    it.start("r0", "p0", "d0")
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0))
    assert it.lost("p0") == ["cancel d0 r0/0", "dispatch p1 r0/1 -> d0"]
    assert it.dispatched["r0/1"].message.spec.emitted_token_ids == (7,)


def test_all_attempts_of_a_lost_worker_fail_at_once() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    it.start("r1", "p0", "d1")
    it.start("r2", "p0", "d0")
    assert it.lost("d0") == [
        "cancel p0 r0/0",
        "cancel p0 r2/0",
        "dispatch p0 r0/1 -> d1",
        "dispatch p0 r2/1 -> d1",
    ]


def test_a_request_waits_for_a_worker_to_come_back() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.lost("d0") == ["cancel p0 r0/0"]
    assert it.core.next_wakeup() == 2.5
    assert it.submit("r1") == ["fail r1 UnavailableError no_decode_capacity"]
    it.now = 2.0
    assert it.up(worker_info("d0", incarnation="2")) == ["dispatch p0 r0/1 -> d0"]


def test_a_request_does_not_wait_forever_for_a_worker() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.lost("d0")
    assert it.at(2.4) == []
    assert it.at(2.5) == ["fail r0 UnavailableError no_decode_capacity"]
    assert it.core.holdings() == EMPTY


def test_a_request_too_long_for_who_is_left_lets_others_pass() -> None:
    it = Scenario("p0", "d0", worker_info("d1", max_model_len=100))
    it.start(routed_request("long", 200), "p0", "d0")
    assert it.lost("d0") == ["cancel p0 long/0"]
    assert it.submit("r1") == ["dispatch p0 r1/0 -> d1"]
    assert it.at(2.5) == ["fail long UnavailableError no_decode_capacity"]


def test_another_life_at_the_same_place_ends_the_first() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.up(worker_info("d0", incarnation="2")) == ["cancel p0 r0/0", "dispatch p0 r0/1 -> d0"]
    peer = it.dispatched["r0/1"].message.decode_peer
    assert peer is not None
    assert peer.incarnation == "2"
    assert it.lost("d0", incarnation="1") == []
    assert it.update("d0", tokens_update("r0", 1, 0, 7), incarnation="1") == []
    assert it.core.counters["stale_incarnation"] == 2


def test_the_same_life_that_comes_back_is_told_what_was_given_up() -> None:
    it = Scenario("p0", "d0", "d1")
    it.start("r0", "p0", "d0")
    assert it.lost("d0") == ["cancel p0 r0/0", "dispatch p0 r0/1 -> d1"]
    assert it.up("d0") == ["cancel d0 r0/0"]
    assert it.lost("d0") == []
    assert it.up("d0") == []


def test_losing_workers_again_and_again_uses_up_the_tries() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    for attempt in (0, 1):
        assert it.lost("d0") == [f"cancel p0 r0/{attempt}"]
        assert it.up(worker_info("d0", incarnation=f"x{attempt}")) == [f"dispatch p0 r0/{attempt + 1} -> d0"]
    assert it.lost("d0") == ["cancel p0 r0/2", "fail r0 UnavailableError worker_lost"]
    assert it.core.holdings() == EMPTY


# ---------------------------------------------------------------- cancel and deadline


def test_cancel_in_every_phase_gives_everything_back() -> None:
    it = Scenario(worker_info("p0", token_budget=32), "d0")
    it.start("r0", "p0", "d0")
    it.submit("r1")
    assert it.cancel("r1") == ["fail r1 RequestCancelledError"]
    assert it.cancel("r0") == ["cancel p0 r0/0", "cancel d0 r0/0", "fail r0 RequestCancelledError"]
    assert it.core.holdings() == EMPTY
    it.start("r2", "p0", "d0")
    it.update("p0", prefilled_update("r2", 0))
    assert it.cancel("r2") == ["cancel p0 r2/0", "cancel d0 r2/0", "fail r2 RequestCancelledError"]
    it.start("r3", "p0", "d0")
    it.hand_over("r3", "p0", "d0", 7)
    assert it.cancel("r3") == ["cancel d0 r3/0", "fail r3 RequestCancelledError"]
    assert it.core.holdings() == EMPTY
    assert it.cancel("r3") == []
    assert it.cancel("never-heard-of") == []


def test_a_cancelled_request_makes_room_for_the_next() -> None:
    it = Scenario(worker_info("p0", token_budget=32), "d0")
    it.start("r0", "p0", "d0")
    it.submit("r1")
    assert it.cancel("r0")[-1] == "dispatch p0 r1/0 -> d0"


def test_deadlines_of_queued_and_running_requests() -> None:
    it = Scenario(worker_info("p0", token_budget=32), "d0")
    it.start(routed_request("r0", deadline=2.0), "p0", "d0")
    assert it.submit(routed_request("r1", deadline=3.0)) == []
    assert it.submit(routed_request("r2", deadline=1.0)) == []
    assert it.core.next_wakeup() == 1.0
    assert it.at(0.5) == []
    assert it.at(1.0) == ["fail r2 DeadlineError"]
    assert it.core.next_wakeup() == 2.0
    lines = ["cancel p0 r0/0", "cancel d0 r0/0", "fail r0 DeadlineError", "dispatch p0 r1/0 -> d0"]
    assert it.at(2.0) == lines
    assert it.dispatched["r1/0"].message.spec.timeout_s == 1.0
    assert it.at(3.5) == ["cancel p0 r1/0", "cancel d0 r1/0", "fail r1 DeadlineError"]
    assert (it.core.holdings(), it.core.next_wakeup()) == (EMPTY, None)


def test_any_event_notices_a_deadline_that_passed() -> None:
    it = Scenario(worker_info("p0", token_budget=32), "d0")
    it.start("r0", "p0", "d0")
    it.submit(routed_request("r1", deadline=1.0))
    it.now = 1.5
    assert it.update("p0", prefilled_update("r0", 0)) == ["fail r1 DeadlineError"]


def test_a_worker_that_gives_up_at_the_deadline() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.update("p0", end_update("r0", 0, "deadline")) == ["cancel d0 r0/0", "fail r0 DeadlineError"]


def test_the_clock_may_run_out_between_two_tries() -> None:
    it = Scenario("p0", "d0")
    it.start(routed_request("r0", deadline=0.1), "p0", "d0")
    it.update("p0", end_update("r0", 0, "failed"))
    assert it.at(0.1) == ["fail r0 DeadlineError"]


def test_pairs_are_formed_when_workers_join() -> None:
    scenario = Scenario("p0", "d0")
    assert scenario.pairs == ["pair p0 -> d0 1"]
    scenario.up("d1")
    scenario.up("p1")
    assert scenario.pairs[1:] == ["pair p0 -> d1 1", "pair p1 -> d0 1", "pair p1 -> d1 1"]
    scenario.lost("d0")
    scenario.up(worker_info("d0", incarnation="2"))
    assert scenario.pairs[4:] == ["pair p0 -> d0 2", "pair p1 -> d0 2"]


def test_no_pair_of_different_models_is_formed() -> None:
    assert Scenario(worker_info("p0", fingerprint="a"), worker_info("d0", fingerprint="b")).pairs == []


def test_a_deadline_of_a_request_that_ended_is_not_kept() -> None:
    """20,000 at a time, as the proof of finding C6 had them."""
    it = RouterCore(PLAIN, GatewayId("g0"))
    for name in ("p0", "d0"):
        it.handle(WorkerUp(worker_info(name)), 0.0)
    for number in range(20_000):
        name = f"r{number}"
        it.handle(Submit(routed_request(name, [1], deadline=600.0), 0.0), 0.0)
        it.handle(CancelRequest(RequestId(name)), 0.0)
    assert it.holdings() == EMPTY
    assert len(it._timers) <= 65
    assert it.next_wakeup() is None


# ---------------------------------------------------------------- answers that another gateway began


def test_a_resumed_answer_continues_behind_its_tokens_and_counts_its_own() -> None:
    it = Scenario("p0", "d0")
    request = msgspec.structs.replace(routed_request("r0", 64, max_tokens=5), resumed_token_ids=(7, 8))
    (dispatch,) = it.core.handle(Submit(request, it.now), it.now)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.message.spec.emitted_token_ids == (7, 8)
    assert it.update("p0", tokens_update("r0", 0, 2, 9)) == ["emit r0 [9]"]
    it.update("p0", prefilled_update("r0", 0))
    it.update("d0", handed_over_update("r0", 0))
    assert it.update("d0", tokens_update("r0", 0, 3, 10, 11)) == ["emit r0 [10, 11]"]
    assert it.update("d0", end_update("r0", 0, "length")) == ["finish r0 length 5 cached=0"]
    trace = it.core.trace(RequestId("r0"))
    assert trace is not None
    assert trace.num_output_tokens == 3
    assert it.core.holdings() == EMPTY


def test_what_a_stop_string_cut_off_counts_without_the_tokens_of_the_other_gateway() -> None:
    it = Scenario("p0", "d0")
    it.submit(msgspec.structs.replace(routed_request("r0", 64, max_tokens=9), resumed_token_ids=(7, 8)))
    it.update("p0", tokens_update("r0", 0, 2, 9))
    it.core.handle(CancelRequest(RequestId("r0"), 3), it.now)
    trace = it.core.trace(RequestId("r0"))
    assert trace is not None
    assert (trace.outcome, trace.num_output_tokens) == ("stop", 1)
    assert it.core.holdings() == EMPTY
