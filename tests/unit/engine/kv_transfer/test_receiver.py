"""D's half alone, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.kv_transfer.commands import (
    BLOCKS_GONE,
    CANCELLED,
    DEADLINE,
    STUCK,
    Cause,
    ClosePair,
    JoinSequence,
    ReceiveKv,
    ReceiveOver,
    ReleaseSequence,
    ReserveBlocks,
    ScatterChunk,
    SendControl,
)
from disagg.engine.kv_transfer.pair_half import TransitionError, abort
from disagg.engine.kv_transfer.receiver import Receiver
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
from disagg.proto.messages import EndReason, TokenLogprobs
from tests.support.pair import ONE_GROUP, prompt_of, spec_of

SPEC = spec_of("a", prompt_of(20))
KEY = SPEC.key
ID: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt}
NAMED: dict[str, Any] = {**ID, "generation": 1}
GONE = Cause(Failure.PAIR_LOST, "gone")
NOTHING = {"receiving": 0, "receiving_chunks": 0, "receiving_slots": 0, "tombstones": 0}


def receiver(**options: Any) -> Receiver:
    defaults: dict[str, Any] = {"groups": ONE_GROUP, "max_chunk_bytes": 64, "credits": 2, "num_slots": 2}
    return Receiver(0.0, **{**defaults, **options})


def reserved(**options: Any) -> Receiver:
    """A receiver with one reservation, 4 of 20 tokens cached."""
    machine = receiver(**options)
    assert machine.on_message(Offer(spec=SPEC), 0.0) == [ReserveBlocks(SPEC)]
    assert machine.on_reserved(KEY, 4) == [SendControl(Reserved(**NAMED, cached_tokens=4))]
    return machine


def header(seq: int, start: int, end: int, checksum: int | None = 5) -> ChunkHeader:
    nbytes = 8 * (end - start)
    return ChunkHeader(**NAMED, seq=seq, start_token=start, end_token=end, nbytes=nbytes, checksum=checksum)


def cleared(seq: int, slot: int, nbytes: int = 64) -> list[Any]:
    return [ReceiveKv(KEY, seq, slot, nbytes), SendControl(ClearToSend(**NAMED, seq=seq, turn=seq))]


def done(seq: int, *, ok: bool = True) -> SendControl:
    return SendControl(ChunkDone(**NAMED, seq=seq, ok=ok))


def test_a_whole_hand_over() -> None:
    machine = reserved()
    assert machine.on_message(header(0, 4, 12), 0.0) == cleared(0, 0)
    assert machine.on_message(header(1, 12, 20), 0.0) == cleared(1, 1)
    assert machine.on_received(KEY, 0, True, 5) == [ScatterChunk(KEY, 0, 4, 12, slot=0, nbytes=64)]
    # Commit overtakes the last bytes: it waits for them.
    assert machine.on_message(Commit(**NAMED, token_id=99, num_chunks=2), 0.0) == []
    assert machine.on_scattered(KEY, 0, True) == [done(0)]
    # The join follows the last scatter at once; it is acknowledged when the engine has done both.
    assert machine.on_received(KEY, 1, True, 5) == [
        ScatterChunk(KEY, 1, 12, 20, slot=1, nbytes=64),
        JoinSequence(KEY, 99),
    ]
    assert machine.on_scattered(KEY, 1, True) == [
        done(1),
        SendControl(CommitAck(**NAMED)),
        ReceiveOver(KEY, "committed", kv_bytes=128, cached_tokens=4),
    ]
    assert machine.holdings() == NOTHING
    assert machine.counters == {"chunks_received": 2, "kv_bytes_received": 128}


class TestDigests:
    """What comes is compared behind its copy to the device, by the engine."""

    SCATTER = ScatterChunk(KEY, 0, 4, 20, slot=0, nbytes=128, digest=5)

    def arrived(self) -> Receiver:
        machine = reserved(digests=True, max_chunk_bytes=128)
        machine.on_message(header(0, 4, 20), 0.0)
        machine.on_message(Commit(**NAMED, token_id=99, num_chunks=1), 0.0)
        assert machine.on_received(KEY, 0, True, 0) == [self.SCATTER, JoinSequence(KEY, 99)]
        return machine

    def test_the_engine_is_told_what_must_arrive_and_the_join_follows_at_once(self) -> None:
        machine = self.arrived()
        assert machine.on_scattered(KEY, 0, True) == [
            done(0),
            SendControl(CommitAck(**NAMED)),
            ReceiveOver(KEY, "committed", kv_bytes=128, cached_tokens=4),
        ]
        assert machine.holdings() == NOTHING

    def test_another_digest_fails_the_attempt(self) -> None:
        machine = self.arrived()
        cause = Cause(Failure.CHUNK_REJECTED, "chunk 0 has another checksum than announced")
        assert machine.on_scattered(KEY, 0, False, intact=False) == [
            done(0, ok=False),
            ReleaseSequence(KEY),
            ReceiveOver(KEY, "aborted", cause, 0, 4),
            abort(KEY, cause),
        ]
        assert machine.counters["corrupt_chunks"] == 1
        assert machine.holdings() == NOTHING

    def test_another_digest_of_an_attempt_that_is_over_is_counted(self) -> None:
        machine = self.arrived()
        machine.cancel(KEY)
        assert machine.on_scattered(KEY, 0, False, intact=False) == [done(0, ok=False)]
        assert machine.counters["corrupt_chunks"] == 1
        assert machine.holdings() == NOTHING

    def test_bytes_that_came_before_their_digest_wait_for_it(self) -> None:
        machine = reserved(digests=True, max_chunk_bytes=128)
        machine.on_message(header(0, 4, 20, None), 0.0)
        assert machine.on_received(KEY, 0, True, 0) == []
        assert machine.on_message(ChunkSum(**NAMED, seq=0, checksum=5), 0.0) == [self.SCATTER]


def promised() -> Receiver:
    """All but the last chunk is there; that one was announced without a checksum and is cleared."""
    machine = receiver()
    machine.on_message(Offer(spec=SPEC), 0.0)
    machine.on_reserved(KEY, 12)
    assert machine.on_message(header(0, 12, 20, None), 0.0) == cleared(0, 0)
    machine.on_message(Commit(**NAMED, token_id=99, num_chunks=1), 0.0)
    return machine


SCATTERED = [ScatterChunk(KEY, 0, 12, 20, slot=0, nbytes=64), JoinSequence(KEY, 99)]


def test_bytes_without_a_checksum_wait_for_it() -> None:
    machine = promised()
    assert machine.on_received(KEY, 0, True, 5) == []
    assert machine.holdings()["receiving_slots"] == 1
    assert machine.on_message(ChunkSum(**NAMED, seq=0, checksum=5), 0.0) == SCATTERED


def test_a_checksum_may_come_before_its_bytes() -> None:
    machine = promised()
    assert machine.on_message(ChunkSum(**NAMED, seq=0, checksum=5), 0.0) == []
    assert machine.on_received(KEY, 0, True, 5) == SCATTERED


@pytest.mark.parametrize("bytes_first", [False, True])
def test_a_late_checksum_that_differs_fails_the_attempt(bytes_first: bool) -> None:
    machine = promised()
    effects = machine.on_received(KEY, 0, True, 5) if bytes_first else []
    effects += machine.on_message(ChunkSum(**NAMED, seq=0, checksum=6), 0.0)
    effects += [] if bytes_first else machine.on_received(KEY, 0, True, 5)
    cause = Cause(Failure.CHUNK_REJECTED, "chunk 0 has another checksum than announced")
    assert effects == [
        done(0, ok=False),
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", cause, 0, 12, 0.0),
        abort(KEY, cause),
    ]
    assert machine.holdings() == NOTHING
    assert machine.counters["corrupt_chunks"] == 1


def test_bytes_whose_checksum_never_comes_are_dropped_with_their_attempt() -> None:
    machine = promised()
    machine.on_received(KEY, 0, True, 5)
    assert machine.cancel(KEY) == [
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", CANCELLED, 0, 12, 0.0),
        abort(KEY, CANCELLED),
        done(0, ok=False),
    ]
    assert {**machine.holdings(), "tombstones": 0} == NOTHING
    assert machine.on_message(ChunkSum(**NAMED, seq=0, checksum=5), 0.0) == []
    assert machine.counters == {"chunks_received": 1, "kv_bytes_received": 64, "stale": 1}


def test_bytes_that_come_after_their_attempt_need_no_checksum() -> None:
    machine = promised()
    machine.cancel(KEY)
    assert machine.on_received(KEY, 0, True, 5) == [done(0, ok=False)]
    assert {**machine.holdings(), "tombstones": 0} == NOTHING
    assert machine.counters["corrupt_chunks"] == 0


@pytest.mark.parametrize("seq", [0, 1])
def test_a_checksum_that_nothing_waits_for_closes_the_pair(seq: int) -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    effects = machine.on_message(ChunkSum(**NAMED, seq=seq, checksum=5), 0.0)
    assert isinstance(effects[-1], ClosePair)
    assert f"a checksum for chunk {seq}" in effects[-1].cause.detail


def joining() -> Receiver:
    """The join is asked for, and one scatter under way."""
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    machine.on_message(header(1, 12, 20), 0.0)
    machine.on_message(Commit(**NAMED, token_id=99, num_chunks=2), 0.0)
    machine.on_received(KEY, 0, True, 5)
    machine.on_scattered(KEY, 0, True)
    assert machine.on_received(KEY, 1, True, 5) == [ScatterChunk(KEY, 1, 12, 20, 1, 64), JoinSequence(KEY, 99)]
    return machine


def test_a_join_behind_a_scatter_that_failed_is_taken_back() -> None:
    machine = joining()
    cause = BLOCKS_GONE
    assert machine.on_scattered(KEY, 1, False) == [
        done(1, ok=False),
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", cause, 64, 4),
        abort(KEY, cause),
    ]
    assert machine.holdings() == NOTHING


def test_a_cancel_while_joining_releases_behind_the_join() -> None:
    machine = joining()
    assert machine.cancel(KEY) == [
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", CANCELLED, 64, 4),
        abort(KEY, CANCELLED),
    ]
    assert machine.on_scattered(KEY, 1, True) == [done(1)]
    assert machine.holdings() == NOTHING


def test_a_lost_pair_while_joining_releases_behind_the_join() -> None:
    machine = joining()
    assert machine.close(1.0, GONE) == [ReleaseSequence(KEY), ReceiveOver(KEY, "aborted", GONE, 64, 4)]
    assert machine.on_scattered(KEY, 1, True) == []
    assert machine.holdings() == NOTHING


def test_a_commit_after_the_last_chunk_joins_at_once() -> None:
    machine = receiver()
    machine.on_message(Offer(spec=SPEC), 0.0)
    machine.on_reserved(KEY, 20)
    logprobs = TokenLogprobs(-0.5, (5,), (-0.25,))
    assert machine.on_message(Commit(**NAMED, token_id=7, logprobs=logprobs, num_chunks=0), 0.0) == [
        JoinSequence(KEY, 7, logprobs),
        SendControl(CommitAck(**NAMED)),
        ReceiveOver(KEY, "committed", kv_bytes=0, cached_tokens=20),
    ]


def test_without_a_slot_a_chunk_is_not_cleared() -> None:
    machine = reserved(num_slots=1)
    assert machine.on_message(header(0, 4, 12), 0.0) == cleared(0, 0)
    assert machine.on_message(header(1, 12, 20), 0.0) == []
    assert machine.on_received(KEY, 0, True, 5) == [ScatterChunk(KEY, 0, 4, 12, slot=0, nbytes=64)]
    assert machine.on_scattered(KEY, 0, True) == [done(0), *cleared(1, 0)]


def test_a_wrong_checksum_never_reaches_the_cache() -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    cause = Cause(Failure.CHUNK_REJECTED, "chunk 0 has another checksum than announced")
    assert machine.on_received(KEY, 0, True, 6) == [
        done(0, ok=False),
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", cause, 0, 4),
        abort(KEY, cause),
    ]
    assert machine.holdings() == NOTHING
    assert machine.counters["corrupt_chunks"] == 1


def test_bytes_of_a_cancelled_attempt_are_received_and_discarded() -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    machine.on_message(header(1, 12, 20), 0.0)
    machine.on_received(KEY, 1, True, 5)
    assert machine.cancel(KEY) == [
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", CANCELLED, 0, 4),
        abort(KEY, CANCELLED),
    ]
    assert machine.holdings() == {**NOTHING, "receiving_chunks": 2, "receiving_slots": 2}
    assert machine.on_received(KEY, 0, True, 5) == [done(0, ok=False)]
    assert machine.on_scattered(KEY, 1, False) == [done(1, ok=False)]
    assert machine.holdings() == NOTHING


def test_what_was_not_cleared_is_forgotten_with_its_attempt() -> None:
    machine = reserved(num_slots=1)
    machine.on_message(header(0, 4, 12), 0.0)
    machine.on_message(header(1, 12, 20), 0.0)
    machine.on_message(Abort(**ID, failure=GONE.failure, detail=GONE.detail), 0.0)
    assert machine.holdings() == {**NOTHING, "receiving_chunks": 1, "receiving_slots": 1}
    assert machine.on_received(KEY, 0, True, 5) == [done(0, ok=False)]
    assert machine.holdings() == NOTHING


def test_an_abort_of_p_is_acknowledged_always() -> None:
    machine = reserved()
    assert machine.on_message(Abort(**ID, failure=GONE.failure, detail=GONE.detail), 0.0) == [
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", GONE, 0, 4),
        SendControl(AbortAck(**ID)),
    ]
    assert machine.on_message(Abort(**ID, failure=GONE.failure, detail=GONE.detail), 0.0) == [
        SendControl(AbortAck(**ID))
    ]


def test_a_refusal() -> None:
    machine = receiver()
    machine.on_message(Offer(spec=SPEC), 0.0)
    assert machine.on_reserve_refused(KEY, "full") == [
        SendControl(Refused(**ID, reason="full")),
        ReceiveOver(KEY, "aborted", Cause(Failure.REFUSED, "full")),
    ]
    assert machine.holdings() == NOTHING


def test_an_attempt_that_ends_while_it_is_reserved_for_is_released_behind_the_reservation() -> None:
    machine = receiver()
    machine.on_message(Offer(spec=SPEC), 0.0)
    assert machine.cancel(KEY)[0] == ReleaseSequence(KEY)
    assert machine.on_reserved(KEY, 4) == []
    assert machine.on_reserve_refused(KEY, "full") == []


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("deadline", DEADLINE),
        ("cancelled", CANCELLED),
        ("preempted", Cause(Failure.ENDED, "ended on the decode worker: preempted")),
    ],
)
def test_an_end_by_the_engine_aborts_and_releases_nothing(reason: EndReason, cause: Cause) -> None:
    machine = reserved()
    assert machine.on_ended(KEY, reason) == [ReceiveOver(KEY, "aborted", cause, 0, 4), abort(KEY, cause)]
    assert machine.on_ended(KEY, reason) == []


def test_blocks_that_are_gone_fail_the_attempt() -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    machine.on_received(KEY, 0, True, 5)
    cause = BLOCKS_GONE
    assert machine.on_scattered(KEY, 0, False) == [
        done(0, ok=False),
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", cause, 0, 4),
        abort(KEY, cause),
    ]


def test_a_chunk_past_the_end_closes_the_pair() -> None:
    machine = reserved(credits=3)
    machine.on_message(header(0, 4, 12), 0.0)
    machine.on_message(header(1, 12, 18), 0.0)
    *_, last = machine.on_message(header(2, 18, 21), 0.0)
    assert isinstance(last, ClosePair)
    assert "ends at token 21 of 20" in last.cause.detail


def test_an_attempt_is_not_taken_again_while_bytes_of_it_are_to_come() -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    machine.cancel(KEY)
    for half_seconds in range(1, 25):
        machine.on_message(Offer(spec=spec_of("other", prompt_of(1))), half_seconds / 2)
        machine.tick(half_seconds / 2)
    (refused,) = machine.on_message(Offer(spec=SPEC), 12.0)
    assert isinstance(refused, SendControl)
    assert isinstance(refused.message, Refused)
    machine.on_received(KEY, 0, True, 5)
    assert machine.on_message(Offer(spec=SPEC), 12.0) == [ReserveBlocks(SPEC)]


def test_cleared_bytes_that_never_come_end_the_pair_though_p_beats() -> None:
    machine = reserved(transfer_timeout_s=3.0)
    machine.on_message(header(0, 4, 12), 0.0)
    effects: list[Any] = []
    for half_seconds in range(1, 7):
        assert effects == []
        machine.on_message(PairHeartbeat(), half_seconds / 2)
        effects = [effect for effect in machine.tick(half_seconds / 2) if effect != SendControl(PairHeartbeat())]
    assert effects == [ReleaseSequence(KEY), ReceiveOver(KEY, "aborted", STUCK, 0, 4), ClosePair(STUCK)]
    assert machine.holdings()["receiving_slots"] == 1


def test_generations_count_up() -> None:
    machine = reserved()
    other = spec_of("b", prompt_of(5))
    machine.on_message(Offer(spec=other), 0.0)
    (effect,) = machine.on_reserved(other.key, 0)
    assert isinstance(effect, SendControl)
    assert isinstance(effect.message, Reserved)
    assert effect.message.generation == 2


def test_a_broken_transport_ends_the_pair_and_its_answers_free_the_slots() -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    machine.on_message(header(1, 12, 20), 0.0)
    cause = Cause(Failure.TRANSPORT, "the transport failed while receiving")
    assert machine.on_received(KEY, 0, False) == [
        ReleaseSequence(KEY),
        ReceiveOver(KEY, "aborted", cause, 0, 4),
        ClosePair(cause),
    ]
    assert machine.holdings() == {**NOTHING, "receiving_chunks": 1, "receiving_slots": 1}
    assert machine.on_received(KEY, 1, False) == []
    assert machine.holdings() == NOTHING
    assert machine.on_message(Offer(spec=SPEC), 0.0) == []


def test_a_close_during_a_scatter_waits_for_the_engine() -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    machine.on_received(KEY, 0, True, 5)
    machine.close(0.0)
    assert machine.holdings()["receiving_slots"] == 1
    assert machine.on_scattered(KEY, 0, False) == []
    assert machine.holdings() == NOTHING


def test_inputs_that_cannot_be_raise_and_change_nothing() -> None:
    machine = reserved()
    machine.on_message(header(0, 4, 12), 0.0)
    before = machine.holdings()
    with pytest.raises(TransitionError):
        machine.on_reserved(KEY, 4)
    with pytest.raises(TransitionError):
        machine.on_scattered(KEY, 0, True)
    with pytest.raises(TransitionError):
        machine.on_received(KEY, 9, True, 5)
    assert machine.holdings() == before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"credits": 0}, "one credit"), ({"num_slots": 0}, "one staging slot"), ({"max_chunk_bytes": 7}, "one token")],
)
def test_options_that_cannot_work(options: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        receiver(**options)
