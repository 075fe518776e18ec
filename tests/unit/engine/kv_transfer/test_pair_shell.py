"""The shells around both halves: what each command becomes, and which input of the half each event is."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.commands import (
    Add,
    ChunkPlanned,
    End,
    Ended,
    Extend,
    Gather,
    Gathered,
    Held,
    Hold,
    Join,
    Joined,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
    Unhold,
)
from disagg.engine.kv_transfer.commands import CANCELLED, DEADLINE, Cause, ReceiveKv, ReceiveOver, SendKv, SendOver
from disagg.engine.kv_transfer.pair_shell import ReceiverShell, SenderShell
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.sender import Sender
from disagg.proto import handover
from disagg.proto.handover import Abort, ChunkDone, ChunkHeader, ClearToSend, Commit, CommitAck, Failure, Offer
from disagg.proto.messages import ONE_RANK, ParallelShape, TokenLogprobs
from tests.support.pair import ONE_GROUP, prompt_of, spec_of
from tests.support.pair_ends import RecordedIo

SPEC = spec_of("a", prompt_of(6))
KEY, GATEWAY = SPEC.key, SPEC.gateway_id
ID: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt}
NAMED: dict[str, Any] = {**ID, "generation": 1}
LOGPROBS = TokenLogprobs(-0.5, (99,), (-0.5,))
SIZES: dict[str, Any] = {"groups": ONE_GROUP, "max_chunk_bytes": 64, "credits": 2, "num_slots": 2}
RESERVED = handover.Reserved(**NAMED, cached_tokens=0)
ENDED = Cause(Failure.ENDED, "ended on the prefill worker: length")


def sender(**options: Any) -> tuple[SenderShell, RecordedIo]:
    io = RecordedIo()
    return SenderShell(Sender(0.0, **SIZES), io, **options), io


def offered(move: int = 0, **options: Any) -> tuple[SenderShell, RecordedIo]:
    """A sender whose only attempt is reserved."""
    shell, io = sender(**options)
    shell.offer(SPEC, 0.0, move)
    assert io.calls() == [Offer(spec=SPEC, move=move)]
    shell.on_message(RESERVED, 0.0)
    return shell, io


def receiver(
    move: int = 0, *, takes_offers: bool = True, digests: bool = False, peer: ParallelShape = ONE_RANK
) -> tuple[ReceiverShell, RecordedIo]:
    """A receiver with one offer."""
    io = RecordedIo(takes_offers=takes_offers)
    shell = ReceiverShell(Receiver(0.0, **SIZES, digests=digests), io, peer)
    shell.on_message(Offer(spec=SPEC, move=move), 0.0)
    return shell, io


def test_a_prompt_is_sent() -> None:
    shell, io = offered(peer=ParallelShape(tp=2), digests=True)
    assert io.calls() == [("reserved", KEY), Add(SPEC, hold_after_prefill=True)]
    assert shell.on_event(ChunkPlanned(KEY, 6))
    gather, header = io.calls()
    assert gather == Gather(KEY, 0, 0, 6, bytes(48), ParallelShape(tp=2), digests=True)
    assert header == ChunkHeader(**NAMED, seq=0, start_token=0, end_token=6, nbytes=48, checksum=None)
    assert (shell.num_copies, shell.is_copying(KEY), shell.is_copying(spec_of("b", [1]).key)) == (1, True, False)
    assert shell.on_event(Gathered(KEY, 0, True, 5))
    assert (shell.num_copies, shell.is_copying(KEY)) == (0, False)
    assert io.calls() == [handover.ChunkSum(**NAMED, seq=0, checksum=5)]
    shell.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    assert io.calls() == [SendKv(KEY, 0, 0, 48)]
    shell.on_sent(KEY, 0, ok=True)
    shell.on_message(ChunkDone(**NAMED, seq=0, ok=True), 0.0)
    assert shell.on_event(PrefillComputed(KEY, GATEWAY, 7, 0, LOGPROBS))
    (commit,) = io.calls()
    assert isinstance(commit, Commit)
    assert (commit.token_id, commit.logprobs) == (7, LOGPROBS)
    shell.on_message(CommitAck(**NAMED), 0.0)
    assert io.calls() == [SendOver(KEY, "handed_over", None, 48), Release(KEY)]


def test_a_gather_of_a_lost_sequence_fails_the_attempt() -> None:
    shell, io = offered()
    shell.on_event(ChunkPlanned(KEY, 6))
    io.calls()
    shell.on_event(Gathered(KEY, 0, False))
    abort, over, release = io.calls()
    assert (abort.failure, over.outcome, release) == (Failure.KV_GONE, "failed", Release(KEY))


def test_a_failed_send_closes_the_pair() -> None:
    shell, io = offered()
    shell.on_event(ChunkPlanned(KEY, 6))
    shell.on_event(Gathered(KEY, 0, True))
    shell.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    io.calls()
    shell.on_sent(KEY, 0, ok=False)
    cause = Cause(Failure.TRANSPORT, "the transport failed while sending")
    assert io.calls() == [SendOver(KEY, "failed", cause, 48), Release(KEY), ("close", cause)]


def test_a_running_sequence_is_held_moved_and_ended() -> None:
    shell, io = offered(move=1)
    (gather,) = io.calls()
    assert gather == Gather(KEY, 0, 0, 6, bytes(48))
    shell.on_event(Gathered(KEY, 0, True))
    shell.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    shell.on_sent(KEY, 0, ok=True)
    shell.on_message(ChunkDone(**NAMED, seq=0, ok=True), 0.0)
    assert io.calls()[-1] == Hold(KEY, 6)
    assert shell.on_event(Held(KEY, True, (), 9, LOGPROBS))
    (commit,) = io.calls()
    assert (commit.token_id, commit.logprobs) == (9, LOGPROBS)
    shell.on_message(CommitAck(**NAMED), 0.0)
    assert io.calls() == [SendOver(KEY, "handed_over", None, 48), End(KEY, "moved")]


def test_a_running_sequence_goes_on_where_its_move_is_cancelled() -> None:
    shell, io = offered(move=1)
    shell.on_event(Gathered(KEY, 0, True))
    io.calls()
    shell.cancel(KEY)
    assert io.calls()[1:] == [SendOver(KEY, "cancelled", CANCELLED, 48, stays=True), Unhold(KEY)]


def test_a_running_sequence_ends_as_failed_where_its_commit_is_not_answered() -> None:
    shell, io = offered(move=1)
    shell.on_event(Gathered(KEY, 0, True))
    shell.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    shell.on_sent(KEY, 0, ok=True)
    shell.on_message(ChunkDone(**NAMED, seq=0, ok=True), 0.0)
    shell.on_event(Held(KEY, True, (), 9))
    io.calls()
    shell.close(0.0)
    (over, end) = io.calls()
    assert (over.outcome, over.stays) == ("failed", False)
    assert end == End(KEY, "failed", "the move to another worker failed at its end")


def test_an_attempt_that_the_engine_of_p_ended_is_cancelled() -> None:
    shell, io = offered()
    io.calls()
    assert shell.on_event(Ended(KEY, GATEWAY, "length"))
    assert io.calls()[1:] == [SendOver(KEY, "cancelled", ENDED), Release(KEY)]


@pytest.mark.parametrize("move", [0, 1])
def test_a_second_offer_of_a_key_fails_and_leaves_the_first_alone(move: int) -> None:
    shell, io = offered()
    io.calls()
    shell.offer(SPEC, 0.0, move)
    (over,) = io.calls()
    assert over == SendOver(KEY, "failed", Cause(Failure.OTHER, f"{KEY} was offered before"), stays=move > 0)
    assert shell.half.holdings()["sending"] == 1


def test_time_ends_an_attempt_of_a_silent_peer() -> None:
    shell, io = offered()
    io.calls()
    for tenths in range(1, 1000):
        shell.tick(tenths / 10)
    causes = [call.cause for call in io.calls() if isinstance(call, SendOver)]
    assert [cause and cause.failure for cause in causes] == [Failure.LEASE_LOST]


def test_an_attempt_is_received() -> None:
    shell, io = receiver(peer=ParallelShape(tp=2))
    assert io.calls() == [("offered", KEY), Reserve(SPEC)]
    assert shell.on_event(Reserved(KEY, 0))
    assert io.calls() == [RESERVED]
    shell.on_message(ChunkHeader(**NAMED, seq=0, start_token=0, end_token=6, nbytes=48, checksum=5), 0.0)
    receive, clear = io.calls()
    assert (receive, type(clear)) == (ReceiveKv(KEY, 0, 0, 48), ClearToSend)
    assert shell.num_copies == 0
    shell.on_received(KEY, 0, ok=True, checksum=5)
    assert io.calls() == [Scatter(KEY, 0, 0, 6, bytes(48), ParallelShape(tp=2))]
    assert (shell.num_copies, shell.is_copying(KEY)) == (1, True)
    assert shell.on_event(Scattered(KEY, 0, True))
    assert (shell.num_copies, shell.is_copying(KEY)) == (0, False)
    assert io.calls() == [ChunkDone(**NAMED, seq=0, ok=True)]
    shell.on_message(Commit(**NAMED, num_chunks=1, token_id=7, logprobs=LOGPROBS), 0.0)
    assert io.calls() == [Join(KEY, 7, LOGPROBS), CommitAck(**NAMED), ReceiveOver(KEY, "committed", None, 48)]


def test_a_running_sequence_grows_where_it_is_received() -> None:
    shell, io = receiver(move=1)
    shell.on_event(Reserved(KEY, 0))
    io.calls()
    shell.on_message(handover.Extend(**NAMED, token_ids=(3, 4)), 0.0)
    assert io.calls() == [Extend(KEY, (3, 4))]


def test_a_device_compares_the_digest() -> None:
    shell, io = receiver(digests=True)
    shell.on_event(Reserved(KEY, 0))
    shell.on_message(ChunkHeader(**NAMED, seq=0, start_token=0, end_token=6, nbytes=48, checksum=5), 0.0)
    io.calls()
    shell.on_received(KEY, 0, ok=True, checksum=0)
    assert io.calls() == [Scatter(KEY, 0, 0, 6, bytes(48), digest=5)]
    shell.on_event(Scattered(KEY, 0, False, intact=False))
    (over,) = (call for call in io.calls() if isinstance(call, ReceiveOver))
    assert over.cause == Cause(Failure.CHUNK_REJECTED, "chunk 0 has another checksum than announced")


def test_an_offer_of_what_the_worker_has_already_is_refused() -> None:
    shell, io = receiver(takes_offers=False)
    reason = "this attempt is here already"
    refused = handover.Refused(**ID, reason=reason)
    assert io.calls() == [("offered", KEY), refused, ReceiveOver(KEY, "aborted", Cause(Failure.REFUSED, reason))]
    assert not any(shell.half.holdings().values())


def test_an_offer_for_which_the_engine_has_no_room_is_refused() -> None:
    shell, io = receiver()
    io.calls()
    assert shell.on_event(ReserveRefused(KEY, "full"))
    over = ReceiveOver(KEY, "aborted", Cause(Failure.REFUSED, "full"))
    assert io.calls() == [handover.Refused(**ID, reason="full"), over]


def test_a_reservation_is_released_when_it_is_cancelled_and_not_when_the_engine_ended_it() -> None:
    shell, io = receiver()
    shell.on_event(Reserved(KEY, 0))
    io.calls()
    shell.cancel(KEY)
    abort = Abort(**ID, failure=Failure.CANCELLED, detail="cancelled")
    assert io.calls() == [Release(KEY), ReceiveOver(KEY, "aborted", CANCELLED), abort]
    shell, io = receiver()
    shell.on_event(Reserved(KEY, 0))
    io.calls()
    assert shell.on_event(Ended(KEY, GATEWAY, "deadline"))
    abort = Abort(**ID, failure=Failure.DEADLINE, detail=DEADLINE.detail)
    assert io.calls() == [ReceiveOver(KEY, "aborted", DEADLINE), abort]


def test_a_failed_receive_closes_the_pair() -> None:
    shell, io = receiver()
    shell.on_event(Reserved(KEY, 0))
    shell.on_message(ChunkHeader(**NAMED, seq=0, start_token=0, end_token=6, nbytes=48, checksum=5), 0.0)
    io.calls()
    shell.on_received(KEY, 0, ok=False, checksum=0)
    cause = Cause(Failure.TRANSPORT, "the transport failed while receiving")
    assert io.calls() == [Release(KEY), ReceiveOver(KEY, "aborted", cause), ("close", cause)]


def test_events_of_other_kinds_are_not_taken() -> None:
    shell, io = offered()
    io.calls()
    assert not shell.on_event(Reserved(KEY, 0))
    assert not shell.on_event(Joined(KEY))
    receiving, receiver_io = receiver()
    receiver_io.calls()
    assert not receiving.on_event(Joined(KEY))
    assert not receiving.on_event(ChunkPlanned(KEY, 6))
    assert io.calls() == receiver_io.calls() == []


def test_the_memory_of_a_staging_slot_is_allocated_once() -> None:
    shell, io = sender()
    assert io.staging == []
    first = shell.buffer(1)
    assert shell.buffer(1) is first
    assert io.staging == [bytes(64)]
    assert shell.buffer(0) is io.staging[1]
    shell.free_buffers()
    assert shell.buffer(1) is io.staging[2]
