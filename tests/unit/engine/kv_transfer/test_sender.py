"""P's half alone, message by message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.engine.kv_transfer.commands import (
    CANCELLED,
    DEADLINE,
    KV_GONE,
    STUCK,
    Cause,
    ClosePair,
    GatherChunk,
    ReleaseSequence,
    SendControl,
    SendKv,
    SendOver,
    StartPrefill,
)
from disagg.engine.kv_transfer.pair_half import TransitionError, abort
from disagg.engine.kv_transfer.sender import Sender
from disagg.proto.handover import (
    Abort,
    AbortAck,
    ChunkDone,
    ChunkHeader,
    ChunkSum,
    ClearToSend,
    Commit,
    CommitAck,
    Failure,
    Offer,
    PairHeartbeat,
    Refused,
    Reserved,
)
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from tests.support.pair import ONE_GROUP, prompt_of, spec_of

SPEC = spec_of("a", prompt_of(20))
KEY = SPEC.key
ID: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt}
NAMED: dict[str, Any] = {**ID, "generation": 7}


def sender(**options: Any) -> Sender:
    defaults: dict[str, Any] = {"groups": ONE_GROUP, "max_chunk_bytes": 64, "credits": 2, "num_slots": 2}
    return Sender(0.0, **{**defaults, **options})


def prefilling(**options: Any) -> Sender:
    """A sender whose one attempt is reserved for, with 4 of 20 tokens on D."""
    machine = sender(**options)
    assert machine.offer(SPEC, 0.0) == [SendControl(Offer(spec=SPEC))]
    assert machine.on_message(Reserved(**NAMED, cached_tokens=4), 0.0) == [StartPrefill(SPEC)]
    return machine


def header(seq: int, start: int, end: int, checksum: int | None) -> SendControl:
    nbytes = 8 * (end - start)
    return SendControl(
        ChunkHeader(**NAMED, seq=seq, start_token=start, end_token=end, nbytes=nbytes, checksum=checksum)
    )


def test_a_whole_hand_over() -> None:
    machine = prefilling()
    assert machine.on_chunk_planned(KEY, 7) == []  # less than half a payload
    assert machine.on_chunk_planned(KEY, 14) == [GatherChunk(KEY, 0, 4, 12, slot=0, nbytes=64)]
    assert machine.on_prefill_computed(KEY, 99) == [GatherChunk(KEY, 1, 12, 20, slot=1, nbytes=64)]
    assert machine.on_gathered(KEY, 0, True, 64, checksum=11) == [
        header(0, 4, 12, 11),
        header(1, 12, 20, None),
        SendControl(Commit(**NAMED, token_id=99, num_chunks=2)),
    ]
    assert machine.on_gathered(KEY, 1, True, 64, checksum=12) == [SendControl(ChunkSum(**NAMED, seq=1, checksum=12))]
    assert machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0) == [SendKv(KEY, 0, slot=0, nbytes=64)]
    assert machine.on_message(ClearToSend(**NAMED, seq=1, turn=1), 0.0) == [SendKv(KEY, 1, slot=1, nbytes=64)]
    assert machine.on_sent(KEY, 0, True) == []
    assert machine.holdings() == {"sending": 1, "sending_chunks": 2, "sending_slots": 1}
    # The second chunk is done on D before our transport says that it left.
    assert machine.on_message(ChunkDone(**NAMED, seq=0), 0.0) == []
    assert machine.on_message(ChunkDone(**NAMED, seq=1), 0.0) == []
    assert machine.on_message(CommitAck(**NAMED), 0.0) == [
        SendOver(KEY, "handed_over", kv_bytes=128, cached_tokens=4),
        ReleaseSequence(KEY),
    ]
    assert machine.holdings() == {"sending": 0, "sending_chunks": 1, "sending_slots": 1}
    assert machine.on_sent(KEY, 1, True) == []
    assert machine.holdings() == {"sending": 0, "sending_chunks": 0, "sending_slots": 0}
    assert machine.counters == {"chunks_sent": 2, "kv_bytes_sent": 128}


def test_nothing_to_send_commits_at_once() -> None:
    machine = sender()
    machine.offer(SPEC, 0.0)
    machine.on_message(Reserved(**NAMED, cached_tokens=20), 0.0)
    assert machine.on_chunk_planned(KEY, 20) == []
    logprobs = TokenLogprobs(-0.5, (5,), (-0.5,))
    assert machine.on_prefill_computed(KEY, 5, logprobs) == [
        SendControl(Commit(**NAMED, token_id=5, logprobs=logprobs, num_chunks=0))
    ]


def test_without_a_credit_a_gathered_chunk_waits() -> None:
    machine = prefilling(credits=1)
    machine.on_prefill_computed(KEY, 99)
    assert machine.on_gathered(KEY, 0, True, 64, 11) == [header(0, 4, 12, 11)]
    assert machine.on_gathered(KEY, 1, True, 64, 12) == []
    machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    assert machine.on_sent(KEY, 0, True) == []
    assert machine.on_message(ChunkDone(**NAMED, seq=0), 0.0) == [
        header(1, 12, 20, 12),
        SendControl(Commit(**NAMED, token_id=99, num_chunks=2)),
    ]


def test_without_a_slot_a_computed_chunk_waits() -> None:
    machine = prefilling(num_slots=1)
    assert machine.on_prefill_computed(KEY, 99) == [GatherChunk(KEY, 0, 4, 12, slot=0, nbytes=64)]
    machine.on_gathered(KEY, 0, True, 64, 11)
    machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    assert machine.on_sent(KEY, 0, True) == [
        GatherChunk(KEY, 1, 12, 20, slot=0, nbytes=64),
        header(1, 12, 20, None),
        SendControl(Commit(**NAMED, token_id=99, num_chunks=2)),
    ]


def test_the_sequence_is_not_released_while_a_gather_is_to_come() -> None:
    machine = prefilling()
    machine.on_chunk_planned(KEY, 14)
    assert machine.cancel(KEY) == [abort(KEY, CANCELLED), SendOver(KEY, "cancelled", CANCELLED, 0, 4)]
    assert machine.on_message(AbortAck(**ID), 0.0) == []
    assert machine.holdings() == {"sending": 0, "sending_chunks": 1, "sending_slots": 1}
    assert machine.on_gathered(KEY, 0, True, 64, 11) == [ReleaseSequence(KEY)]
    assert not any(machine.holdings().values())


def test_a_cleared_chunk_is_sent_though_its_attempt_was_cancelled() -> None:
    machine = prefilling()
    machine.on_prefill_computed(KEY, 99)
    machine.on_gathered(KEY, 0, True, 64, 11)
    machine.on_gathered(KEY, 1, True, 64, 12)
    assert ReleaseSequence(KEY) in machine.cancel(KEY)
    assert machine.holdings()["sending_slots"] == 2  # D may still clear both
    assert machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0) == [SendKv(KEY, 0, slot=0, nbytes=64)]
    assert machine.on_message(AbortAck(**ID), 0.0) == []
    assert machine.holdings() == {"sending": 0, "sending_chunks": 1, "sending_slots": 1}  # now only the first
    machine.on_sent(KEY, 0, True)
    machine.on_message(ChunkDone(**NAMED, seq=0, ok=False), 0.0)
    assert not any(machine.holdings().values())


@pytest.mark.parametrize(("cause", "outcome"), [(CANCELLED, "cancelled"), (DEADLINE, "failed")])
def test_an_abort_of_d_ends_the_attempt(cause: Cause, outcome: Any) -> None:
    machine = prefilling()
    machine.on_chunk_planned(KEY, 14)
    machine.on_gathered(KEY, 0, True, 64, 11)
    assert machine.on_message(Abort(**ID, failure=cause.failure, detail=cause.detail), 0.0) == [
        SendControl(AbortAck(**ID)),
        SendOver(KEY, outcome, cause, 64, 4),
        ReleaseSequence(KEY),
    ]
    assert not any(machine.holdings().values())


def test_a_rejected_chunk_fails_its_attempt() -> None:
    machine = prefilling()
    machine.on_chunk_planned(KEY, 14)
    machine.on_gathered(KEY, 0, True, 64, 11)
    machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    machine.on_sent(KEY, 0, True)
    cause = Cause(Failure.CHUNK_REJECTED, "the decode worker rejected chunk 0")
    assert machine.on_message(ChunkDone(**NAMED, seq=0, ok=False), 0.0) == [
        abort(KEY, cause),
        SendOver(KEY, "failed", cause, 64, 4),
        ReleaseSequence(KEY),
    ]


def test_lost_kv_fails_its_attempt() -> None:
    machine = prefilling()
    machine.on_chunk_planned(KEY, 14)
    cause = KV_GONE
    assert machine.on_gathered(KEY, 0, False) == [
        abort(KEY, cause),
        SendOver(KEY, "failed", cause, 0, 4),
        ReleaseSequence(KEY),
    ]
    assert machine.holdings() == {"sending": 1, "sending_chunks": 0, "sending_slots": 0}


def test_a_refusal_releases_nothing() -> None:
    machine = sender()
    machine.offer(SPEC, 0.0)
    refused = SendOver(KEY, "refused", Cause(Failure.REFUSED, "full"))
    assert machine.on_message(Refused(**ID, reason="full"), 0.0) == [refused]
    assert not any(machine.holdings().values())


@pytest.mark.parametrize("answer", [Reserved(**NAMED, cached_tokens=0), Refused(**ID, reason="full")])
def test_an_answer_that_crossed_our_abort_changes_nothing(answer: Any) -> None:
    machine = sender()
    machine.offer(SPEC, 0.0)
    machine.cancel(KEY)
    assert machine.on_message(answer, 0.0) == []
    assert machine.holdings()["sending"] == 1
    assert machine.on_message(AbortAck(**ID), 0.0) == []
    assert not any(machine.holdings().values())


def test_a_broken_transport_ends_the_pair_and_its_answers_free_the_slots() -> None:
    machine = prefilling()
    machine.on_prefill_computed(KEY, 99)
    for seq in (0, 1):
        machine.on_gathered(KEY, seq, True, 64, 11)
        machine.on_message(ClearToSend(**NAMED, seq=seq, turn=seq), 0.0)
    cause = Cause(Failure.TRANSPORT, "the transport failed while sending")
    assert machine.on_sent(KEY, 0, False) == [
        SendOver(KEY, "failed", cause, 128, 4),
        ReleaseSequence(KEY),
        ClosePair(cause),
    ]
    assert machine.holdings() == {"sending": 0, "sending_chunks": 1, "sending_slots": 1}
    assert machine.on_sent(KEY, 1, False) == []
    assert not any(machine.holdings().values())
    assert machine.on_message(CommitAck(**NAMED), 0.0) == []
    assert machine.tick(9.0) == []


def test_inputs_that_cannot_be_raise_and_change_nothing() -> None:
    machine = prefilling()
    machine.on_chunk_planned(KEY, 14)
    before = machine.holdings()
    with pytest.raises(TransitionError, match="offered before"):
        machine.offer(SPEC, 0.0)
    with pytest.raises(TransitionError, match="chunk 5"):
        machine.on_gathered(KEY, 5, True, 64, 0)
    with pytest.raises(TransitionError, match="SENT in"):
        machine.on_sent(KEY, 0, True)
    assert machine.holdings() == before


def test_an_abort_carries_its_cause() -> None:
    assert abort(KEY, DEADLINE) == SendControl(Abort(**ID, failure=Failure.DEADLINE, detail="the deadline passed"))


def test_late_engine_events_are_ignored() -> None:
    machine = prefilling()
    machine.cancel(KEY)
    assert machine.on_chunk_planned(KEY, 14) == []
    assert machine.on_prefill_computed(KEY, 1) == []
    assert machine.cancel(KEY) == []


def beat_until(machine: Sender, until_s: float) -> list[Any]:
    """Ticks of a pair whose peer beats too; all effects but beats."""
    effects: list[Any] = []
    for half_seconds in range(1, int(until_s * 2) + 1):
        machine.on_message(PairHeartbeat(), half_seconds / 2)
        effects += [effect for effect in machine.tick(half_seconds / 2) if effect != SendControl(PairHeartbeat())]
    return effects


def test_cleared_bytes_that_never_leave_end_the_pair() -> None:
    machine = prefilling(transfer_timeout_s=3.0)
    machine.on_chunk_planned(KEY, 14)
    machine.on_gathered(KEY, 0, True, 64, 11)
    machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    assert beat_until(machine, 2.5) == []
    assert beat_until(machine, 3.0) == [SendOver(KEY, "failed", STUCK, 64, 4), ReleaseSequence(KEY), ClosePair(STUCK)]
    assert machine.holdings()["sending_slots"] == 1


def test_an_abort_that_is_never_answered_ends_the_pair() -> None:
    machine = prefilling(transfer_timeout_s=3.0)
    machine.cancel(KEY)
    assert beat_until(machine, 2.5) == []
    assert beat_until(machine, 3.0) == [ClosePair(STUCK)]


def test_a_tick_beats() -> None:
    machine = sender()
    assert machine.tick(0.5) == [SendControl(PairHeartbeat())]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"credits": 0}, "one credit"), ({"num_slots": 0}, "one staging slot"), ({"max_chunk_bytes": 7}, "one token")],
)
def test_options_that_cannot_work(options: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sender(**options)


def test_slots_go_first_to_whose_stream_waits_and_then_to_what_is_due_first() -> None:
    machine = sender(num_slots=1, credits=9)
    late, soon, complete = (
        msgspec.structs.replace(SPEC, request_id=RequestId(name), timeout_s=timeout_s)
        for name, timeout_s in [("late", 9.0), ("soon", 2.0), ("complete", None)]
    )
    for spec in (late, soon, complete):
        machine.offer(spec, 0.0)
        reserved = Reserved(request_id=spec.request_id, attempt=spec.attempt, generation=7, cached_tokens=4)
        machine.on_message(reserved, 0.0)
    effects = machine.on_chunk_planned(late.key, 19)
    for spec, end in ((soon, 12), (complete, 20)):
        assert machine.on_chunk_planned(spec.key, end) == []  # no slot is free
    order: list[tuple[str, int, int]] = []
    while gathers := [effect for effect in effects if isinstance(effect, GatherChunk)]:
        (chunk,) = gathers
        request_id, attempt = chunk.key
        machine.on_gathered(chunk.key, chunk.seq, True, chunk.nbytes, 0)
        clear = ClearToSend(request_id=request_id, attempt=attempt, generation=7, seq=chunk.seq, turn=len(order))
        machine.on_message(clear, 0.0)
        order.append((request_id, chunk.start, chunk.end))
        effects = machine.on_sent(chunk.key, chunk.seq, True)
    assert order == [("late", 4, 12), ("complete", 4, 12), ("complete", 12, 20), ("soon", 4, 12), ("late", 12, 19)]
