"""What waits behind a receive that is not posted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.kv_transfer.ordered_sender import OrderedSender
from disagg.proto.handover import ClearToSend, PairHeartbeat, ReceiverToSender
from disagg.proto.ids import RequestId
from tests.support.roles import key_of

A = key_of("a")


def clear(seq: int) -> ClearToSend:
    return ClearToSend(request_id=RequestId("a"), attempt=1, generation=1, seq=seq, turn=seq)


def test_a_message_behind_no_receive_is_sent_at_once() -> None:
    sent: list[ReceiverToSender] = []
    ordered = OrderedSender(sent.append)
    ordered.send(PairHeartbeat())
    ordered.wait_for((A, 0))
    ordered.posted((A, 0))
    ordered.send(clear(0))
    assert sent == [PairHeartbeat(), clear(0)]


def test_nothing_overtakes_a_receive_that_is_not_posted() -> None:
    sent: list[ReceiverToSender] = []
    ordered = OrderedSender(sent.append)
    for seq in (0, 1):
        ordered.wait_for((A, seq))
        ordered.send(clear(seq))
    ordered.send(PairHeartbeat())
    ordered.posted((A, 1))
    assert sent == []
    assert len(ordered) == 3
    ordered.posted((A, 0))
    assert sent == [clear(0), clear(1), PairHeartbeat()]
    ordered.posted((A, 0))
    assert len(sent) == 3


def test_what_is_left_when_the_stream_ends_is_never_sent() -> None:
    sent: list[ReceiverToSender] = []
    ordered = OrderedSender(sent.append)
    ordered.wait_for((A, 0))
    ordered.send(clear(0))
    ordered.drop()
    ordered.posted((A, 0))
    assert sent == []
    assert len(ordered) == 0


@given(st.permutations(range(6)), st.integers(0, 6))
def test_any_order_of_posting_keeps_the_order_of_sending(order: list[int], num_posted: int) -> None:
    sent: list[ReceiverToSender] = []
    ordered = OrderedSender(sent.append)
    for seq in range(6):
        ordered.wait_for((A, seq))
        ordered.send(clear(seq))
    for seq in order[:num_posted]:
        ordered.posted((A, seq))
    posted = set(order[:num_posted])
    first_unposted = next((seq for seq in range(6) if seq not in posted), 6)
    assert sent == [clear(seq) for seq in range(first_unposted)]
