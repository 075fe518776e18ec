"""The core's answers, word for word: sequences that move to another worker while they decode."""

import pytest

from disagg.proto.ids import WorkerId
from disagg.proto.messages import Load, WorkerInfo
from disagg.router.api import MoveMarks
from disagg.router.config import RouterConfig
from disagg.router.telemetry.spans import Span, spans_of
from tests.support.router import (
    EMPTY,
    MOVING,
    Scenario,
    end_update,
    handed_over_update,
    routed_request,
    stayed_update,
    tokens_update,
    worker_info,
    worker_report,
)


def decoding(*names: WorkerInfo | str, config: RouterConfig = MOVING, max_tokens: int = 100) -> Scenario:
    """Request r0 decodes on d0, with tokens 7 and 8, while d1 is empty."""
    it = Scenario(*(names or ("p0", "d0", "d1")), config=config)
    it.start(routed_request("r0", max_tokens=max_tokens), "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    assert it.update("d0", tokens_update("r0", 0, 1, 8)) == ["emit r0 [8]"]
    return it


def moving() -> Scenario:
    it = decoding()
    assert it.drain("d0") == ["move d0 r0/0 #1 -> d1"]
    return it


def moves(it: Scenario) -> dict[str, int]:
    return dict(it.core.view(it.now).stats.migrations)


def test_a_draining_worker_is_empty_once_its_sequence_moved() -> None:
    it = moving()
    it.now = 1.0
    assert it.update("d0", tokens_update("r0", 0, 2, 9)) == ["emit r0 [9]"]
    it.now = 1.25
    assert it.update("d1", handed_over_update("r0", 0), tokens_update("r0", 0, 2, 9)) == []
    assert it.update("d0", end_update("r0", 0, "moved")) == ["drained d0 1"]
    it.now = 1.5
    assert it.update("d1", tokens_update("r0", 0, 3, 10, 11)) == ["emit r0 [10, 11]"]
    assert it.update("d1", end_update("r0", 0, "stop")) == ["finish r0 stop 5 cached=0"]
    assert moves(it) == {"moved": 1}
    pause = it.core.view(it.now).stats.migration_pause
    assert (pause.num_observed, pause.total) == (1, 0.5)
    assert it.core.holdings() == EMPTY
    trace = it.core.trace(routed_request("r0").request_id)
    assert trace is not None
    assert (trace.decode_worker, trace.attempts) == ("d1", 1)
    assert trace.marks[0].moves == (MoveMarks(WorkerId("d0"), WorkerId("d1"), 0.0, 1.25, True),)
    assert [span for span in spans_of(trace) if span.start != span.end][-3:] == [
        Span("decode", WorkerId("d0"), 0.0, 1.25),
        Span("decode", WorkerId("d1"), 1.25, 1.5),
        Span("migration", WorkerId("d1"), 0.0, 1.25),
    ]


def test_tokens_of_the_source_that_come_last_are_put_before_those_of_the_target() -> None:
    it = moving()
    assert it.update("d1", handed_over_update("r0", 0), tokens_update("r0", 0, 4, 11)) == []
    assert it.update("d1", tokens_update("r0", 0, 5, 12)) == []
    assert it.update("d0", tokens_update("r0", 0, 2, 9, 10, 11), end_update("r0", 0, "moved")) == [
        "emit r0 [9, 10, 11, 12]",
        "drained d0 1",
    ]
    assert it.cancel("r0") == ["cancel d1 r0/0", "fail r0 RequestCancelledError"]


def test_the_source_is_done_before_the_target_says_so() -> None:
    it = moving()
    assert it.update("d0", tokens_update("r0", 0, 2, 9), end_update("r0", 0, "moved")) == [
        "emit r0 [9]",
        "drained d0 1",
    ]
    assert it.update("d1", handed_over_update("r0", 0), tokens_update("r0", 0, 3, 10)) == ["emit r0 [10]"]
    assert moves(it) == {"moved": 1}
    assert it.update("d1", end_update("r0", 0, "length")) == ["finish r0 length 4 cached=0"]
    assert it.core.holdings() == EMPTY


def test_an_answer_that_ends_on_the_target_waits_for_the_last_tokens_of_the_source() -> None:
    it = moving()
    assert (
        it.update("d1", handed_over_update("r0", 0), tokens_update("r0", 0, 3, 10), end_update("r0", 0, "stop")) == []
    )
    assert it.update("d0", tokens_update("r0", 0, 2, 9), end_update("r0", 0, "moved")) == [
        "emit r0 [9, 10]",
        "finish r0 stop 4 cached=0",
        "drained d0 1",
    ]
    assert it.core.counters["end_before_tokens"] == 0
    assert it.core.holdings() == EMPTY


@pytest.mark.parametrize("ends_early", [False, True])
def test_drafts_are_those_of_both_workers(ends_early: bool) -> None:
    """Also where the end on the target waits for the source's tokens."""
    it = moving()
    left = tokens_update("r0", 0, 2, 9), end_update("r0", 0, "moved", drafts=(9, 4))
    ended = tokens_update("r0", 0, 3, 10), end_update("r0", 0, "stop", drafts=(5, 2))
    it.update("d1", handed_over_update("r0", 0))
    for worker_id, updates in (("d1", ended), ("d0", left))[:: 1 if ends_early else -1]:
        it.update(worker_id, *updates)
    trace = it.core.trace(routed_request("r0").request_id)
    assert trace is not None
    assert (trace.outcome, trace.drafted_tokens, trace.accepted_tokens) == ("stop", 14, 6)


def test_an_answer_that_ends_on_the_source_ends_the_move() -> None:
    it = moving()
    assert it.update("d0", end_update("r0", 0, "stop")) == [
        "cancel d1 r0/0",
        "finish r0 stop 2 cached=0",
        "drained d0 1",
    ]
    assert moves(it) == {"ended": 1}
    assert it.core.holdings() == EMPTY


@pytest.mark.parametrize("refused", [True, False])
def test_what_did_not_move_stays_and_is_tried_again_after_a_pause(refused: bool) -> None:
    it = moving()
    assert it.update("d0", stayed_update("r0", 0, refused=refused)) == []
    assert it.update("d0", tokens_update("r0", 0, 2, 9)) == ["emit r0 [9]"]
    assert it.at(0.09) == []
    it.report(worker_report("d1", 0))  # what it refused is known until its next report
    assert it.at(0.2) == ["move d0 r0/0 #2 -> d1"]
    assert it.update("d0", stayed_update("r0", 0, refused=refused)) == []
    assert it.at(0.35) == []
    it.report(worker_report("d1", 1))
    assert it.at(0.45) == ["move d0 r0/0 #3 -> d1"]
    assert moves(it) == {"refused" if refused else "failed": 2}
    assert it.core.counters["decode_failed"] == it.core.counters["refused"] == 0


def test_the_target_is_lost_and_the_sequence_stays() -> None:
    it = moving()
    assert it.lost("d1") == ["keep d0 r0/0"]
    assert it.update("d0", tokens_update("r0", 0, 2, 9)) == ["emit r0 [9]"]
    assert it.update("d0", stayed_update("r0", 0)) == []
    assert it.update("d0", end_update("r0", 0, "stop")) == ["finish r0 stop 3 cached=0", "drained d0 1"]
    assert it.core.counters["worker_lost"] == 0
    assert it.core.holdings() == EMPTY


def test_the_target_hangs_and_gets_the_cancel_when_it_responds() -> None:
    it = moving()
    assert it.suspected("d1") == ["keep d0 r0/0", "cancel d1 r0/0"]
    assert it.update("d0", stayed_update("r0", 0)) == []
    assert it.update("d0", end_update("r0", 0, "stop")) == ["finish r0 stop 2 cached=0", "drained d0 1"]


def test_the_target_is_lost_with_the_sequence() -> None:
    """It had acknowledged it, and the source has let go."""
    it = moving()
    assert it.lost("d1") == ["keep d0 r0/0"]
    it.up(worker_info("d1", incarnation="2"))
    assert it.update("d0", tokens_update("r0", 0, 2, 9), end_update("r0", 0, "moved")) == [
        "emit r0 [9]",
        "dispatch p0 r0/1 -> d1",
        "drained d0 1",
    ]
    assert it.dispatched["r0/1"].message.spec.emitted_token_ids == (7, 8, 9)


def test_the_target_is_lost_before_it_has_said_that_it_has_the_sequence() -> None:
    it = moving()
    assert it.update("d0", end_update("r0", 0, "moved")) == ["drained d0 1"]
    it.up("d2")
    assert it.lost("d1") == ["dispatch p0 r0/1 -> d2"]
    assert moves(it) == {"ended": 1}


def test_the_source_is_lost_while_it_moves() -> None:
    it = moving()
    assert it.lost("d0") == ["cancel d1 r0/0", "dispatch p0 r0/1 -> d1"]
    assert it.core.counters["worker_left"] == 1  # it was draining
    assert it.update("d1", handed_over_update("r0", 0)) == []
    assert it.core.counters["stale_attempt"] == 1
    assert moves(it) == {"ended": 1}


def test_the_source_is_lost_after_the_target_has_it() -> None:
    """Tokens of the source may be lost with it, so the attempt is over."""
    it = moving()
    assert it.update("d1", handed_over_update("r0", 0)) == []
    assert it.lost("d0") == ["cancel d1 r0/0", "dispatch p0 r0/1 -> d1"]


def test_an_end_of_the_target_before_it_has_the_sequence_is_no_end() -> None:
    it = moving()
    assert it.update("d1", end_update("r0", 0, "failed")) == []
    assert it.update("d0", tokens_update("r0", 0, 2, 9)) == ["emit r0 [9]"]
    assert it.update("d0", stayed_update("r0", 0)) == []
    assert it.core.counters["decode_failed"] == 0
    assert it.cancel("r0") == ["cancel d0 r0/0", "fail r0 RequestCancelledError", "drained d0 1"]


def test_a_client_that_leaves_ends_it_on_both() -> None:
    it = moving()
    assert it.cancel("r0") == [
        "cancel d0 r0/0",
        "cancel d1 r0/0",
        "fail r0 RequestCancelledError",
        "drained d0 1",
    ]
    assert it.core.holdings() == EMPTY


def test_a_bounded_number_moves_at_a_time_those_with_most_to_come_first() -> None:
    it = Scenario("p0", "d0", config=MOVING)
    for number, max_tokens in enumerate((50, 8, 300, 100)):
        it.start(routed_request(f"r{number}", max_tokens=max_tokens), "p0", "d0")
        it.hand_over(f"r{number}", "p0", "d0", 7)
    it.up("d1")
    assert it.drain("d0") == ["move d0 r2/0 #1 -> d1", "move d0 r3/0 #1 -> d1"]
    assert it.update("d1", handed_over_update("r3", 0)) == []
    assert it.update("d0", end_update("r3", 0, "moved")) == ["move d0 r0/0 #1 -> d1"]
    assert it.update("d0", stayed_update("r2", 0)) == []
    assert it.at(0.02) == []  # r1 has too little to come, and r2 failed a moment ago


def test_a_prompt_that_is_computed_moves_once_it_decodes() -> None:
    it = Scenario("p0", "d0", config=MOVING)
    it.start(routed_request("r0", max_tokens=100), "p0", "d0")
    it.up("d1")
    assert it.drain("d0") == []
    it.hand_over("r0", "p0", "d0", 7)
    assert it.core.next_wakeup() == pytest.approx(0.05)
    assert it.at(0.05) == ["move d0 r0/0 #1 -> d1"]


def test_where_there_is_no_room_it_ends_where_it_is() -> None:
    it = decoding("p0", "d0")
    assert it.drain("d0") == []
    assert it.at(5.0) == []
    assert it.update("d0", end_update("r0", 0, "stop")) == ["finish r0 stop 2 cached=0", "drained d0 1"]
    assert it.core.next_wakeup() is None


def test_it_moves_as_soon_as_there_is_room() -> None:
    it = decoding("p0", "d0", worker_info("d1", max_num_seqs=1), max_tokens=200)
    it.start(routed_request("r1", max_tokens=200), "p0", "d1")
    assert it.drain("d0") == []
    assert it.cancel("r1") == ["cancel p0 r1/0", "cancel d1 r1/0", "fail r1 RequestCancelledError"]
    assert it.at(0.05) == ["move d0 r0/0 #1 -> d1"]


def test_a_worker_that_would_end_answers_earlier_is_no_target() -> None:
    it = decoding("p0", "d0", worker_info("d1", max_model_len=512))
    assert it.drain("d0") == []


def test_none_moves_where_that_is_off() -> None:
    it = decoding(config=RouterConfig(local_prefill="never", policy="least_loaded", migrations=0))
    assert it.drain("d0") == []
    assert it.core.next_wakeup() is None


@pytest.mark.parametrize("letter", ["c", "w"])
def test_workers_with_both_roles_hand_over_too(letter: str) -> None:
    first, second = f"{letter}0", f"{letter}1"
    it = Scenario(first, config=MOVING)
    assert it.submit(routed_request("r0", max_tokens=100)) == [f"dispatch {first} r0/0 alone"]
    assert it.update(first, tokens_update("r0", 0, 0, 7)) == ["emit r0 [7]"]
    it.up(second)
    assert it.drain(first) == [f"move {first} r0/0 #1 -> {second}"]
    assert it.update(second, handed_over_update("r0", 0)) == []
    assert it.update(first, end_update("r0", 0, "moved")) == [f"drained {first} 1"]
    assert it.update(second, tokens_update("r0", 0, 1, 8), end_update("r0", 0, "stop")) == [
        "emit r0 [8]",
        "finish r0 stop 2 cached=0",
    ]


def test_it_moves_on_when_the_next_worker_drains() -> None:
    it = decoding("p0", "d0", "d1", "d2")
    assert it.drain("d0") == ["move d0 r0/0 #1 -> d1"]
    assert it.update("d1", handed_over_update("r0", 0)) == []
    assert it.drain("d1") == []  # the first move is not over
    assert it.update("d0", end_update("r0", 0, "moved")) == ["move d1 r0/0 #2 -> d2", "drained d0 1"]


def test_a_worker_that_reports_a_move_of_nothing_fails_its_attempt() -> None:
    it = decoding("p0", "d0", "d1")
    assert it.update("d0", end_update("r0", 0, "moved")) == ["dispatch p0 r0/1 -> d1"]
    assert it.update("d0", stayed_update("r0", 1)) == []
    assert it.core.counters["wrong_worker"] == 1


def test_a_failure_after_the_commit_is_an_ordinary_retry() -> None:
    it = moving()
    assert it.update("d0", tokens_update("r0", 0, 2, 9), end_update("r0", 0, "failed")) == [
        "emit r0 [9]",
        "cancel d1 r0/0",
        "dispatch p0 r0/1 -> d1",
        "drained d0 1",
    ]


def test_loads_of_both_workers_count_while_it_moves() -> None:
    it = moving()
    assert it.core.holdings()["sequences"] == 2
    it.report(worker_report("d1", 0, load=Load(num_waiting=1)))
    assert it.update("d0", stayed_update("r0", 0)) == []
    assert it.core.holdings()["sequences"] == 1


def test_one_at_a_time_moves_from_a_worker_that_lacks_blocks() -> None:
    it = Scenario("p0", "d0", config=MOVING)
    for number, max_tokens in enumerate((50, 300, 100)):
        it.start(routed_request(f"r{number}", max_tokens=max_tokens), "p0", "d0")
        it.hand_over(f"r{number}", "p0", "d0", 7)
    it.up("d1")
    enough = Load(num_running=3, blocks_total=64, blocks_active=61, blocks_reserved=2)
    assert it.report(worker_report("d0", 0, load=enough)) == []
    scarce = Load(num_running=3, blocks_total=64, blocks_active=62)
    assert it.report(worker_report("d0", 1, load=scarce)) == ["move d0 r1/0 #1 -> d1"]
    assert it.report(worker_report("d0", 2, load=scarce)) == []
    assert it.update("d1", handed_over_update("r1", 0)) == []
    assert it.update("d0", end_update("r1", 0, "moved")) == ["move d0 r2/0 #1 -> d1"]
    assert it.report(worker_report("d0", 3, load=enough)) == []
    assert it.update("d0", stayed_update("r2", 0)) == []
    assert it.core.next_wakeup() is None
    preempted = Load(num_running=1, num_suspended=1, num_preempted=1, blocks_total=64, blocks_active=50)
    it.now = 1.0
    assert it.report(worker_report("d0", 4, load=preempted)) == ["move d0 r2/0 #2 -> d1"]


def test_none_moves_for_want_of_blocks_to_a_worker_that_is_nearly_full() -> None:
    it = decoding("p0", "d0")
    it.up("d1")
    it.report(worker_report("d1", 0, load=Load(num_running=3, blocks_total=64, blocks_active=47)))
    scarce = Load(num_running=2, blocks_total=64, blocks_active=63)
    assert it.report(worker_report("d0", 0, load=scarce)) == []
    it.report(worker_report("d1", 1, load=Load(num_running=3, blocks_total=64, blocks_active=20)))
    assert it.at(0.05) == ["move d0 r0/0 #1 -> d1"]


def there_and_back() -> Scenario:
    """r0 decodes on w0, which computed its prompt, with tokens 7 to 11: after 8 it moved to w1, and after 10 back."""
    it = Scenario("w0", config=MOVING)
    assert it.submit(routed_request("r0", max_tokens=100)) == ["dispatch w0 r0/0 alone"]
    it.update("w0", tokens_update("r0", 0, 0, 7, 8))
    it.up("w1")
    for number, (source, target, first) in enumerate((("w0", "w1", 9), ("w1", "w0", 10)), 1):
        assert it.drain(source) == [f"move {source} r0/0 #{number} -> {target}"]
        it.update(target, handed_over_update("r0", 0))
        it.update(source, end_update("r0", 0, "moved"))
        it.resume(source)
        it.update(target, tokens_update("r0", 0, number + 1, first))
    assert it.update("w0", tokens_update("r0", 0, 4, 11)) == ["emit r0 [11]"]
    return it


def test_a_sequence_that_moved_back_ends_as_an_answer_there() -> None:
    it = there_and_back()
    breakers = it.core._fleet.breakers
    passed: list[tuple[str, str | None, str]] = []
    breakers.passed = lambda leg, prefill, decode, *_: bool(passed.append((leg, prefill, decode)))  # type: ignore
    assert breakers.failed("decode", "w0", "w0", 0.0, 0.0, "boom", is_first=True) is False  # type: ignore[arg-type]
    lines = it.update("w0", end_update("r0", 0, "stop", cached_tokens=32))
    assert lines == ["finish r0 stop 5 cached=0"]
    assert passed == [("decode", "w0", "w0")]
    trace = it.core.trace(routed_request("r0").request_id)
    assert trace is not None
    assert (trace.prefill_worker, trace.decode_worker) == ("w0", "w0")
    assert moves(it) == {"moved": 2}
    assert it.core.holdings() == EMPTY
