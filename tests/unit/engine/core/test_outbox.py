"""What one turn has for each gateway."""

from __future__ import annotations

from disagg.engine.core.outbox import Outbox
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import End, HandedOver, PrefillDone, StepUpdate, TokenLogprobs, TokenOut
from tests.support.engine import key_of

ONE, TWO = GatewayId("one"), GatewayId("two")
A, B = RequestId("a"), RequestId("b")


def test_tokens_of_an_attempt_are_one_entry_and_each_gateway_gets_its_own() -> None:
    outbox = Outbox()
    outbox.token(ONE, key_of("a"), 4, 40)
    outbox.token(TWO, key_of("b"), 0, 10)
    outbox.token(ONE, key_of("a"), 5, 50)
    outbox.token(ONE, key_of("a", attempt=2), 0, 60)
    assert outbox.flush() == {
        ONE: StepUpdate(tokens=(TokenOut(A, 1, 4, (40, 50)), TokenOut(A, 2, 0, (60,)))),
        TWO: StepUpdate(tokens=(TokenOut(B, 1, 0, (10,)),)),
    }


def test_logprobs_go_with_the_tokens_of_the_attempts_that_have_them() -> None:
    outbox = Outbox()
    first, second = TokenLogprobs(-0.5, (4,), (-0.25,)), TokenLogprobs(-1.0, (5,), (-1.0,))
    outbox.token(ONE, key_of("a"), 4, 40, first)
    outbox.token(ONE, key_of("b"), 0, 10)
    outbox.token(ONE, key_of("a"), 5, 50, second)
    assert outbox.flush() == {
        ONE: StepUpdate(tokens=(TokenOut(A, 1, 4, (40, 50), (first, second)), TokenOut(B, 1, 0, (10,))))
    }


def test_a_flush_takes_everything_and_starts_anew() -> None:
    outbox = Outbox()
    outbox.token(ONE, key_of("a"), 0, 1)
    outbox.flush()
    assert outbox.flush() == {}
    outbox.token(ONE, key_of("a"), 1, 2)
    assert outbox.flush() == {ONE: StepUpdate(tokens=(TokenOut(A, 1, 1, (2,)),))}


def test_all_kinds_share_one_update_in_the_order_in_which_they_came() -> None:
    outbox = Outbox()
    moved = HandedOver(request_id=B, attempt=1, kv_bytes=8, cached_tokens=0, transport="gloo")
    outbox.prefill_done(ONE, key_of("a"), 16)
    outbox.handed_over(ONE, moved)
    outbox.end(ONE, key_of("b"), "failed", "why", 3)
    outbox.end(ONE, key_of("a"), "stop")
    assert outbox.flush() == {
        ONE: StepUpdate(
            prefilled=(PrefillDone(request_id=A, attempt=1, cached_tokens=16),),
            handed_over=(moved,),
            ends=(
                End(request_id=B, attempt=1, reason="failed", detail="why", cached_tokens=3),
                End(request_id=A, attempt=1, reason="stop"),
            ),
        )
    }
