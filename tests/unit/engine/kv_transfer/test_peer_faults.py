"""What a peer may get wrong: lies, repeats, losses, silence. The pair may be lost; memory and answers never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from disagg.engine.kv_transfer.commands import DEADLINE, STUCK, Cause
from disagg.proto.handover import (
    Abort,
    AbortAck,
    ChunkDone,
    ChunkHeader,
    ClearToSend,
    Commit,
    CommitAck,
    Failure,
    Offer,
    PairHeartbeat,
    PairRefused,
    PairWelcome,
    Refused,
    Reserved,
)
from disagg.proto.ids import Incarnation, RequestId
from tests.support.pair import Message, WorkerPair, prompt_of, spec_of

NUM_TOKENS = 37
CHUNK = 8


def pair_with(tamper: Callable[[Message], list[Message]]) -> WorkerPair:
    pair = WorkerPair(tamper=tamper)
    pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    pair.offer(spec_of("b", prompt_of(20, 300)))
    return pair


def changed(kind: type, at: int | None = None, **changes: Any) -> Callable[[Message], list[Message]]:
    """Changes fields of the messages of one kind (and chunk) of request a; a value may be a function of the old one."""

    def tamper(message: Message) -> list[Message]:
        if type(message) is not kind or getattr(message, "request_id", "") != "a":
            return [message]
        if at is not None and message.seq != at:  # type: ignore[union-attr]
            return [message]
        fields = {name: new(getattr(message, name)) if callable(new) else new for name, new in changes.items()}
        return [msgspec.structs.replace(message, **fields)]

    return tamper


def assert_pair_was_closed_cleanly(pair: WorkerPair, side: str) -> None:
    machine, shell = (pair.sender.machine, pair.sender) if side == "p" else (pair.receiver.machine, pair.receiver)
    assert machine.counters["violations"] == 1
    assert shell.close_cause is not None
    assert shell.close_cause.failure is Failure.VIOLATION
    pair.assert_answers_are_right()
    pair.assert_at_rest()


def plus(number: int) -> Callable[[int], int]:
    return lambda old: old + number


@pytest.mark.parametrize(
    "lie",
    [
        changed(ChunkHeader, at=1, nbytes=plus(8)),
        changed(ChunkHeader, at=1, nbytes=plus(-8)),
        changed(ChunkHeader, at=1, nbytes=0, end_token=CHUNK),
        changed(ChunkHeader, at=1, end_token=plus(1)),
        changed(ChunkHeader, at=1, end_token=plus(1), nbytes=plus(8)),  # more than a payload may have
        changed(ChunkHeader, at=1, start_token=plus(-1), end_token=plus(-1)),  # overlaps
        changed(ChunkHeader, at=1, start_token=plus(1), end_token=plus(1)),  # leaves a gap
        changed(ChunkHeader, at=1, start_token=-8, end_token=0),
        changed(ChunkHeader, at=1, end_token=CHUNK - 1, nbytes=-8),
        changed(ChunkHeader, at=1, end_token=1 << 62),
        changed(Commit, num_chunks=plus(1)),
        changed(Commit, num_chunks=plus(-1)),
        changed(Commit, token_id=-1),
        changed(Commit, token_id=None),  # only a prefix has none
    ],
)
def test_a_header_or_commit_that_lies_closes_the_pair(lie: Callable[[Message], list[Message]]) -> None:
    pair = pair_with(lie)
    pair.run()
    assert_pair_was_closed_cleanly(pair, "d")


@pytest.mark.parametrize("seq", [0, 2, 7, -1])
def test_a_chunk_out_of_turn_closes_the_pair(seq: int) -> None:
    def tamper(message: Message) -> list[Message]:
        if isinstance(message, ChunkHeader) and message.request_id == "a" and message.seq == 1:
            return [msgspec.structs.replace(message, seq=seq)]
        return [message]

    pair = pair_with(tamper)
    pair.run()
    assert_pair_was_closed_cleanly(pair, "d")


@pytest.mark.parametrize("kind", [ChunkHeader, Commit])
def test_a_repeated_or_lost_announcement_closes_the_pair(kind: type) -> None:
    for copies in (0, 2):
        if kind is Commit and copies == 0:
            continue  # D waits; the request's deadline ends that, see below
        seen: list[Message] = []

        def tamper(message: Message, seen: list[Message] = seen, copies: int = copies) -> list[Message]:
            if type(message) is not kind or seen:
                return [message]
            seen.append(message)
            return [message] * copies

        pair = WorkerPair(tamper=tamper, receive_slots=1)
        pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
        pair.run()
        assert_pair_was_closed_cleanly(pair, "d")


def test_announcing_beyond_the_credits_closes_the_pair() -> None:
    pair = WorkerPair(credits=9, send_slots=9, receive_slots=1)
    pair.receiver.machine._window._credits = 2
    pair.offer(spec_of("a", prompt_of(100)))
    pair.run()
    assert "without a credit" in pair.receiver.close_detail
    assert_pair_was_closed_cleanly(pair, "d")


@pytest.mark.parametrize("receive_slots", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_credits_are_never_exceeded(receive_slots: int, seed: int) -> None:
    """`WorkerPair` checks P's count after every delivery, and D would close the pair."""
    pair = WorkerPair(credits=2, send_slots=5, receive_slots=receive_slots)
    for number in range(4):
        pair.offer(spec_of(f"r{number}", prompt_of(60, 100 * number)))
    pair.run_randomly(seed)
    assert (pair.broken, pair.messages["ChunkHeader"]) == (False, 32)


@pytest.mark.parametrize(
    "lie",
    [
        changed(Reserved, cached_tokens=NUM_TOKENS + 1),
        changed(Reserved, cached_tokens=-1),
        changed(ClearToSend, seq=plus(1000)),
        changed(ClearToSend, generation=plus(1)),
        changed(ClearToSend, request_id=RequestId("nobody")),
    ],
)
def test_an_answer_of_d_that_lies_closes_the_pair(lie: Callable[[Message], list[Message]]) -> None:
    pair = pair_with(lie)
    pair.run()
    assert_pair_was_closed_cleanly(pair, "p")


@pytest.mark.parametrize(
    "message",
    [
        Reserved(request_id=RequestId("a"), attempt=0, generation=1, cached_tokens=0),
        Refused(request_id=RequestId("a"), attempt=0, reason=""),
        ClearToSend(request_id=RequestId("a"), attempt=0, generation=1, seq=99, turn=99),
        CommitAck(request_id=RequestId("a"), attempt=0, generation=1),
        AbortAck(request_id=RequestId("a"), attempt=0),
        PairRefused(reason="too late"),
        PairWelcome(incarnation=Incarnation("x"), pair_name="x", transport="local", credits=1, max_chunk_bytes=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_does_not_fit_closes_the_pair_on_p(message: Any) -> None:
    pair = WorkerPair()
    pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    while not pair.messages["ChunkHeader"]:
        pair.run_some(1)
    pair.to_p.append(message)
    pair.run()
    assert_pair_was_closed_cleanly(pair, "p")


def test_an_empty_offer_closes_the_pair() -> None:
    pair = WorkerPair()
    pair.to_d.append(Offer(spec=spec_of("a", [])))
    pair.run()
    assert "without tokens" in pair.receiver.close_detail
    assert_pair_was_closed_cleanly(pair, "d")


@pytest.mark.parametrize(
    "stale",
    [
        ChunkHeader(
            request_id=RequestId("a"),
            attempt=0,
            generation=77,
            seq=0,
            start_token=0,
            end_token=8,
            nbytes=64,
            checksum=0,
        ),
        Commit(request_id=RequestId("a"), attempt=0, generation=0, token_id=1, num_chunks=5),
        Commit(request_id=RequestId("a"), attempt=1, generation=1, token_id=1, num_chunks=5),
        Offer(spec=spec_of("a", prompt_of(NUM_TOKENS))),
    ],
    ids=["header", "commit", "commit-of-another-attempt", "offer"],
)
@pytest.mark.parametrize("num_deliveries", [12, 40, 200])
def test_stale_messages_are_dropped_and_counted(stale: Any, num_deliveries: int) -> None:
    pair = WorkerPair()
    key = pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    pair.run_some(num_deliveries)
    pair.to_d.append(stale)
    pair.run()
    assert pair.receiver.machine.counters["stale"] == 1
    assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


@pytest.mark.parametrize(
    "stale",
    [
        Refused(request_id=RequestId("nobody"), attempt=0, reason=""),
        ChunkDone(request_id=RequestId("nobody"), attempt=0, generation=1, seq=0),
        ChunkDone(request_id=RequestId("a"), attempt=0, generation=9, seq=0),
        CommitAck(request_id=RequestId("a"), attempt=0, generation=9),
        CommitAck(request_id=RequestId("nobody"), attempt=0, generation=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_stale_answers_are_dropped_and_counted(stale: Any) -> None:
    pair = WorkerPair()
    key = pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    pair.run_some(20)
    pair.to_p.append(stale)
    pair.run()
    assert pair.sender.machine.counters["stale"] == 1
    assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


def test_a_reservation_that_nobody_asked_for_is_given_back() -> None:
    pair = WorkerPair()
    pair.to_d.append(Offer(spec=spec_of("ghost", prompt_of(20))))
    pair.run()
    assert [over.outcome for overs in pair.d_overs.values() for over in overs] == ["aborted"]
    pair.assert_at_rest()


def test_aborts_repeat_without_harm() -> None:
    pair = WorkerPair(tamper=lambda message: [message] * (2 if isinstance(message, Abort | AbortAck) else 1))
    key = pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    pair.run_some(30)
    pair.cancel(key, "both")
    pair.run()
    pair.assert_at_rest()


def test_an_offer_of_an_attempt_that_is_over_is_refused() -> None:
    pair = WorkerPair()
    spec = spec_of("a", prompt_of(NUM_TOKENS))
    pair.offer(spec)
    pair.run_some(30)
    pair.cancel(spec.key, "d")
    pair.run()
    pair.p_overs.clear()
    pair.offer(spec)
    pair.run()
    assert pair.outcome(spec.key) == "refused"
    pair.assert_at_rest()


# ---------------------------------------------------------------- silence


@pytest.mark.parametrize("num_deliveries", range(0, 90, 3))
@pytest.mark.parametrize("silent", ["p", "d"])
def test_silence_ends_all_attempts(silent: str, num_deliveries: int) -> None:
    pair = WorkerPair()
    key = pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    pair.run_some(num_deliveries)
    listening = {"p": silent == "d", "d": silent == "p"}
    for _ in range(30):
        pair.tick(0.5, **listening)
        for name in pair.ready():
            if name[0] in (("d",) if silent == "p" else ("p",)) and name not in ("to_p", "to_d"):
                pair.deliver(name)
    machine: Any = pair.receiver.machine if silent == "p" else pair.sender.machine
    overs: Any = pair.d_overs.get(key, []) if silent == "p" else pair.p_overs[key]
    assert not any(machine.holdings().values())
    peer = "prefill" if silent == "p" else "decode"
    lost = Cause(Failure.LEASE_LOST, f"lease lost: the {peer} worker was silent for 5.0 s")
    assert all(over.cause == lost for over in overs if over.outcome not in ("handed_over", "committed"))
    pair.break_stream()
    pair.run()
    pair.assert_at_rest()
    pair.assert_answers_are_right()


def test_heartbeats_alone_keep_a_lease() -> None:
    pair = WorkerPair()
    key = pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    for _ in range(60):
        pair.tick(0.5)
        for name in pair.ready():
            if name in ("to_d", "to_p", "d_command", "d_event"):
                pair.deliver(name)
    assert pair.d_overs[key] == []
    assert pair.messages["PairHeartbeat"] == 120
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


def test_a_peer_that_beats_and_does_not_send_is_cut_off() -> None:
    pair = WorkerPair(transfer_timeout_s=4.0)
    pair.offer(spec_of("a", prompt_of(NUM_TOKENS)))
    for _ in range(40):
        pair.tick(0.5)
        for name in pair.ready():
            if name != "bytes":
                pair.deliver(name)
    assert STUCK in (pair.sender.close_cause, pair.receiver.close_cause)
    pair.run()
    pair.assert_at_rest()


def test_a_lost_commit_ends_with_the_deadline() -> None:
    pair = WorkerPair(tamper=lambda message: [] if isinstance(message, Commit) else [message])
    key = pair.offer(spec_of("a", prompt_of(NUM_TOKENS), timeout_s=3.0))
    pair.settle(4.0)
    assert pair.outcome(key) == "cancelled"
    assert ("d", "deadline") in pair.ends[key] or ("p", "deadline") in pair.ends[key]
    pair.assert_at_rest()


def test_an_offer_without_an_answer_ends_with_the_deadline() -> None:
    pair = WorkerPair(tamper=lambda message: [] if isinstance(message, Offer) else [message])
    key = pair.offer(spec_of("a", prompt_of(NUM_TOKENS), timeout_s=3.0))
    pair.settle(2.0)
    assert pair.p_overs[key] == []
    pair.settle(2.0)
    assert (pair.outcome(key), pair.p_overs[key][0].cause) == ("cancelled", DEADLINE)
    pair.assert_at_rest()


def test_a_beat_changes_nothing() -> None:
    pair = WorkerPair()
    pair.to_d.append(PairHeartbeat())
    pair.to_p.append(PairHeartbeat())
    pair.run()
    pair.assert_at_rest()
