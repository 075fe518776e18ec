"""Several messages in one frame."""

from __future__ import annotations

import msgspec
import pytest

from disagg.proto.frames import FULL_FRAME_BYTES, frame_decoder, frame_of, frames
from disagg.proto.handover import Abort, AbortAck, CommitAck, Failure, PairHeartbeat, SenderToReceiver
from disagg.proto.ids import RequestId

BEAT = PairHeartbeat()
decode = frame_decoder(SenderToReceiver).decode


def abort(detail: str) -> Abort:
    return Abort(request_id=RequestId("r"), attempt=0, failure=Failure.OTHER, detail=detail)


def test_messages_share_a_frame_and_keep_their_order() -> None:
    said = [abort("a"), BEAT, AbortAck(request_id=RequestId("r"), attempt=0)]
    (frame,) = frames(said)
    assert decode(frame) == said
    assert list(frames([])) == []
    assert decode(frame_of(BEAT)) == [BEAT]


def test_a_full_frame_is_followed_by_another() -> None:
    half, whole = abort("x" * (FULL_FRAME_BYTES // 2)), abort("y" * FULL_FRAME_BYTES)
    said = [BEAT, half, half, BEAT, whole, BEAT, BEAT]
    assert [decode(frame) for frame in frames(said)] == [[BEAT, half], [half, BEAT], [whole], [BEAT, BEAT]]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(BEAT),
        frame_of(CommitAck(request_id=RequestId("r"), attempt=0, generation=1)),
        frame_of(BEAT) + b"\x00",
    ],
)
def test_what_is_no_frame_of_the_union_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(frame)
