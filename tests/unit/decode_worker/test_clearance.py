"""What waits behind a receive that is not posted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.decode_worker.clearance import Clearance
from disagg.proto.handover import ClearToSend, PairHeartbeat, ReceiverToSender
from disagg.proto.ids import RequestId
from tests.support.roles import key_of

A = key_of("a")


def clear(seq: int) -> ClearToSend:
    return ClearToSend(request_id=RequestId("a"), attempt=1, generation=1, seq=seq, turn=seq)


def test_what_waits_for_nothing_is_said_at_once() -> None:
    said: list[ReceiverToSender] = []
    clearance = Clearance(said.append)
    clearance.say(PairHeartbeat())
    clearance.wait_for((A, 0))
    clearance.posted((A, 0))
    clearance.say(clear(0))
    assert said == [PairHeartbeat(), clear(0)]


def test_nothing_overtakes_a_receive_that_is_not_posted() -> None:
    said: list[ReceiverToSender] = []
    clearance = Clearance(said.append)
    for seq in (0, 1):
        clearance.wait_for((A, seq))
        clearance.say(clear(seq))
    clearance.say(PairHeartbeat())
    clearance.posted((A, 1))
    assert said == []
    assert len(clearance) == 3
    clearance.posted((A, 0))
    assert said == [clear(0), clear(1), PairHeartbeat()]
    clearance.posted((A, 0))
    assert len(said) == 3


def test_what_is_left_when_the_stream_ends_is_never_said() -> None:
    said: list[ReceiverToSender] = []
    clearance = Clearance(said.append)
    clearance.wait_for((A, 0))
    clearance.say(clear(0))
    clearance.drop()
    clearance.posted((A, 0))
    assert said == []
    assert len(clearance) == 0


@given(st.permutations(range(6)), st.integers(0, 6))
def test_any_order_of_posting_keeps_the_order_of_saying(order: list[int], num_posted: int) -> None:
    said: list[ReceiverToSender] = []
    clearance = Clearance(said.append)
    for seq in range(6):
        clearance.wait_for((A, seq))
        clearance.say(clear(seq))
    for seq in order[:num_posted]:
        clearance.posted((A, seq))
    posted = set(order[:num_posted])
    first_unposted = next((seq for seq in range(6) if seq not in posted), 6)
    assert said == [clear(seq) for seq in range(first_unposted)]
