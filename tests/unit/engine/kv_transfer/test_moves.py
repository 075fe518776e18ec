"""Running sequences that move from one worker (P here) to another while they decode."""

from __future__ import annotations

import random

import pytest

from disagg.engine.commands import Release
from disagg.engine.kv_transfer.commands import HoldSequence
from disagg.engine.kv_transfer.sender import Sender
from disagg.proto.handover import Abort, Commit, Extend, Failure, Offer, Reserved
from disagg.proto.ids import AttemptKey
from tests.support.pair import ONE_GROUP, Message, WorkerPair, prompt_of, spec_of


def decoding(
    pair: WorkerPair, name: str = "r", num_prompt: int = 37, max_tokens: int = 300, start: int = 6
) -> AttemptKey:
    """A sequence that decodes on P."""
    return pair.decode_on_p(spec_of(name, prompt_of(num_prompt), max_tokens=max_tokens), start)


def who_ended(pair: WorkerPair, key: AttemptKey) -> list[tuple[str, str]]:
    return pair.ends[key]


def test_a_sequence_moves_and_its_answer_is_the_same() -> None:
    pair = WorkerPair()
    key = decoding(pair)
    pair.sender.move(key, 1)
    pair.run()
    assert pair.outcome(key) == "handed_over"
    assert pair.committed(key)
    assert pair.answer(key) == pair.expected(key)
    assert who_ended(pair, key) == [("p", "moved"), ("d", "length")]
    pair.assert_at_rest()


def test_it_decodes_on_until_it_is_held_and_nothing_is_computed_again() -> None:
    pair = WorkerPair()
    key = decoding(pair)
    pair.sender.move(key, 1)
    seen: list[Message] = []

    def watch(message: Message) -> list[Message]:
        seen.append(message)
        return [message]

    pair.tampers["to_d"] = watch
    pair.run()
    offer = next(message for message in seen if isinstance(message, Offer))
    extend = next(message for message in seen if isinstance(message, Extend))
    commit = next(message for message in seen if isinstance(message, Commit))
    emitted = offer.spec.emitted_token_ids
    assert offer.move == 1
    answer = pair.expected(key)
    assert list(emitted) == answer[: len(emitted)]
    assert len(emitted) >= 5
    grown = [*emitted, *extend.token_ids, commit.token_id]
    assert grown == answer[: len(grown)]


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("start", [1, 2, 15, 16, 17])
def test_every_length_around_a_block(num_prompt: int, start: int) -> None:
    pair = WorkerPair()
    key = decoding(pair, num_prompt=num_prompt, start=start)
    pair.sender.move(key, 1)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert pair.outcome(key) == "handed_over"
    pair.assert_at_rest()


def test_what_the_other_worker_has_cached_is_not_sent() -> None:
    pair = WorkerPair()
    spec = spec_of("r", prompt_of(64), max_tokens=300)
    pair.d.run_alone(spec_of("other", prompt_of(64), max_tokens=1))
    pair.d.events.clear()
    key = pair.decode_on_p(spec, 5)
    pair.sender.move(key, 1)
    pair.run()
    assert pair.p_overs[key][0].cached_tokens == 64
    assert pair.chunk_tokens_sent < 40
    assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


def test_without_room_it_stays_and_is_not_interrupted() -> None:
    pair = WorkerPair(d_blocks=2)
    key = decoding(pair)
    pair.sender.move(key, 1)
    pair.run()
    assert [(over.outcome, over.stays) for over in pair.p_overs[key]] == [("refused", True)]
    assert who_ended(pair, key) == [("p", "length")]
    assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


def test_it_moves_back_and_forth() -> None:
    """The same key is offered on the same pair again, and again."""
    pair = WorkerPair()
    key = decoding(pair, max_tokens=200)
    pair.sender.move(key, 1)
    pair.run_some(12)
    pair.sender.cancel(key)
    pair.run_some(30)
    assert [over.stays for over in pair.p_overs[key]] == [True]
    pair.sender.move(key, 2)
    pair.run()
    assert pair.p_overs[key][-1].outcome == "handed_over"
    assert pair.answer(key) == pair.expected(key)
    pair.settle()
    pair.assert_nothing_is_held()


def test_an_old_offer_is_refused() -> None:
    pair = WorkerPair()
    key = decoding(pair)
    pair.sender.move(key, 2)
    pair.run()
    late = Offer(spec=pair.moves[key], move=2)
    pair.to_d.append(late)
    pair.run()
    assert pair.messages["Refused"] == 1
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(30))
def test_random_orders_with_cancelled_moves_and_cancelled_requests(seed: int) -> None:
    dice = random.Random(seed)
    pair = WorkerPair(credits=dice.choice((1, 2, 3)), token_budget=dice.choice((8, 20)))
    keys = [decoding(pair, f"r{n}", 20 + 9 * n, 120, 1 + dice.randrange(20)) for n in range(3)]
    released = set()
    number = 0
    while ready := pair.ready():
        pair.deliver(dice.choice(ready))
        roll = dice.random()
        key = dice.choice(keys)
        if roll < 0.03 and key not in pair.sender.machine._attempts and key not in pair.receiver.machine._attempts:
            number += 1
            pair.sender.move(key, number)
        elif roll < 0.045:
            pair.sender.cancel(key)
        elif roll < 0.05 and number > 2:
            released.add(key)
            pair.cancel(key, "both")
            pair.p.commands.append(Release(key))
    pair.assert_answers_are_right()
    for key in set(keys) - released:
        reasons = [reason for _, reason in who_ended(pair, key) if reason != "moved"]
        assert reasons in (["length"], ["failed"])
        if reasons == ["length"]:
            assert pair.answer(key) == pair.expected(key)
    pair.settle()
    pair.assert_nothing_is_held()


LONGER_THAN_A_MOVE = 90
"""Tokens of an answer that is not over before its move is."""


def length_of_move() -> int:
    pair = WorkerPair()
    decoding(pair, max_tokens=LONGER_THAN_A_MOVE)
    (key,) = pair.specs
    pair.sender.move(key, 1)
    turn = 0
    while not pair.p_overs[key]:
        ready = pair.ready()
        pair.deliver(ready[turn % len(ready)])
        turn += 1
    return turn + 5


@pytest.mark.parametrize("how", ["break", "die"])
def test_the_other_worker_is_lost_at_every_point(how: str) -> None:
    """Before the commit it goes on where it is; after it, it is here or there, or it ends here as failed."""
    seen = set()
    for num_deliveries in range(length_of_move()):
        pair = WorkerPair()
        key = decoding(pair, max_tokens=LONGER_THAN_A_MOVE)
        pair.sender.move(key, 1)
        pair.run_some(num_deliveries)
        if pair.sender.machine.closed:
            continue
        pair.break_stream() if how == "break" else pair.die("d")
        pair.run()
        pair.assert_answers_are_right()
        ended = [reason for side, reason in who_ended(pair, key) if side == "p"]
        seen.add(tuple(ended))
        if ended == ["length"]:
            assert pair.answer(key) == pair.expected(key)
        if how == "die" and ended == ["failed"]:
            assert not any(over.stays for over in pair.p_overs[key])
        if how == "break":
            pair.assert_nothing_is_held()
        else:
            counts, problems = pair.p.core.audit()
            assert problems == []
            assert not any(counts.values())
    assert seen == {("length",), ("failed",), ("moved",)}


def test_corrupted_bytes_end_the_move_and_change_nothing() -> None:
    pair = WorkerPair()
    key = decoding(pair)
    pair.wire.corrupt_next = True
    pair.sender.move(key, 1)
    pair.run()
    assert [(over.outcome, over.stays) for over in pair.p_overs[key]] in ([("failed", True)], [("failed", False)])
    pair.assert_answers_are_right()
    pair.assert_nothing_is_held()


def test_the_answer_ends_while_it_moves() -> None:
    for num_tokens in range(7, 14):
        pair = WorkerPair()
        key = decoding(pair, max_tokens=num_tokens)
        pair.sender.move(key, 1)
        pair.run()
        assert pair.answer(key) == pair.expected(key)
        assert who_ended(pair, key)[-1][1] == "length"
        pair.assert_nothing_is_held()


@pytest.mark.parametrize("token_ids", [(), (-1,), tuple(range(301))], ids=["none", "negative", "beyond"])
def test_a_false_extension_closes_the_pair(token_ids: tuple[int, ...]) -> None:
    def tamper(message: Message) -> list[Message]:
        if isinstance(message, Extend):
            return [
                Extend(
                    request_id=message.request_id,
                    attempt=message.attempt,
                    generation=message.generation,
                    token_ids=token_ids,
                )
            ]
        return [message]

    pair = WorkerPair(tampers={"to_d": tamper})
    key = decoding(pair)
    pair.sender.move(key, 1)
    pair.run()
    assert pair.broken
    assert "Extend" in pair.receiver.close_detail
    pair.assert_answers_are_right()
    assert pair.answer(key) == pair.expected(key)
    pair.assert_nothing_is_held()


def test_a_prompt_does_not_grow() -> None:
    pair = WorkerPair()
    key = pair.offer(spec_of("r", prompt_of(20)))
    while "Reserved" not in pair.messages:
        pair.deliver(pair.ready()[0])
    pair.to_d.append(Extend(request_id=key.request_id, attempt=0, generation=1, token_ids=(5,)))
    pair.run()
    assert pair.broken


def test_it_is_held_once_what_is_worth_a_payload_has_arrived() -> None:
    """A sender alone: 20 tokens are known, a payload has 8, so that 16 + 4 go while it decodes."""
    machine = Sender(0.0, groups=ONE_GROUP, max_chunk_bytes=64, credits=3, num_slots=3)
    spec = spec_of("r", prompt_of(20))
    machine.offer(spec, 0.0, 1)
    out = machine.on_message(Reserved(request_id=spec.request_id, attempt=0, generation=1, cached_tokens=17), 0.0)
    assert out == [HoldSequence(spec.key, 20)]  # 3 tokens are less than half a payload
    assert machine.on_held(spec.key, False)[0].message == Abort(  # type: ignore[union-attr]
        request_id=spec.request_id, attempt=0, failure=Failure.KV_GONE, detail="its KV is gone on the prefill worker"
    )
