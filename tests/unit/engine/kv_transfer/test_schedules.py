"""Many random orders of everything: cancels in every state on every side, a first token that is the last one, and too
little room of every kind. What was held goes back, and who can be answered is."""

from __future__ import annotations

import random

import msgspec
import pytest

from disagg.engine.kv_transfer.receive_window import ReceiveState
from disagg.engine.kv_transfer.send_window import SendState
from disagg.proto.ids import AttemptKey
from tests.support.pair import WorkerPair, prompt_of, spec_of


def states_of(pair: WorkerPair, key: AttemptKey) -> tuple[SendState | None, ReceiveState | None]:
    """Of one attempt on P and D; None where it is not known (any more)."""
    sending = pair.sender.machine._attempts.get(key)
    receiving = pair.receiver.machine._attempts.get(key)
    return (sending and sending.state, receiving and receiving.state)  # type: ignore[return-value]  # records are true


def three_attempts() -> WorkerPair:
    pair = WorkerPair(credits=2)
    for number, num_tokens in enumerate((37, 20, 50)):
        pair.offer(spec_of(f"r{number}", prompt_of(num_tokens, 300 * number)))
    return pair


def length_of(seed: int) -> int:
    """Deliveries of a whole life in this order."""
    pair = three_attempts()
    pair.run_randomly(seed)
    return pair.num_delivered


@pytest.mark.parametrize("side", ["p", "d", "both"])
def test_cancels_in_every_state_of_many_schedules(side: str) -> None:
    seen = set()
    for seed in range(60):
        dice = random.Random(seed)
        pair = three_attempts()
        num_deliveries, order = dice.randrange(length_of(seed)), random.Random(seed)
        for _ in range(num_deliveries):
            if ready := pair.ready():
                pair.deliver(order.choice(ready))
        for key in pair.specs:
            if dice.random() < 0.6:
                seen.add(states_of(pair, key))
                pair.cancel(key, side)
        pair.run(order.choice)
        pair.assert_answers_are_right()
        pair.settle()
        pair.assert_at_rest()
        assert not pair.broken
    assert {p for p, _ in seen} >= {SendState.OFFERED, SendState.PREFILLING, SendState.COMMITTING, None}
    assert {d for _, d in seen} >= {None, *ReceiveState} - {ReceiveState.OVER}


@pytest.mark.parametrize("seed", range(30))
def test_cancels_again_and_again_from_everywhere(seed: int) -> None:
    """Also of attempts that are being given up, or are over on one side."""
    dice = random.Random(seed)
    pair = three_attempts()
    while ready := pair.ready():
        pair.deliver(dice.choice(ready))
        if dice.random() < 0.05:
            pair.cancel(dice.choice(list(pair.specs)), dice.choice(("p", "d", "both")))
    pair.assert_answers_are_right()
    pair.settle()
    pair.assert_at_rest()
    assert not pair.broken


# ---------------------------------------------------------------- the first token is the last one


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("end", ["stop", "length"])
def test_token_0_that_is_the_last_ends_on_p_whatever_the_order(end: str, seed: int) -> None:
    """In the middle of others that go on."""
    pair = WorkerPair()
    first_id = pair.expected(pair.offer(spec_of("before", prompt_of(30, 300))))[0]
    max_tokens, stop = (1, ()) if end == "length" else (4, (first_id,))
    key = pair.offer(spec_of("a", prompt_of(30, 300), max_tokens=max_tokens, stop=stop))
    pair.offer(spec_of("after", prompt_of(40, 600)))
    pair.run_randomly(seed)
    assert pair.answer(key) == [first_id]
    assert pair.ends[key] == [("p", end)]
    assert (pair.outcome(key), pair.committed(key)) == ("cancelled", False)
    others = [other for other in pair.specs if other != key]
    assert [pair.answer(other) for other in others] == [pair.expected(other) for other in others]
    pair.assert_at_rest()


# ---------------------------------------------------------------- too little room


def play_router(pair: WorkerPair, dice: random.Random, limit: int = 2000) -> int:
    """Offer again what was refused, until all is answered; how often that was."""
    num_refused = 0
    for _ in range(limit):
        pair.run(dice.choice)
        refused = [key for key, overs in pair.p_overs.items() if overs and overs[0].outcome == "refused"]
        if not refused:
            return num_refused
        num_refused += len(refused)
        for key in refused:
            del pair.p_overs[key]
            pair.offer(msgspec.structs.replace(pair.specs.pop(key), attempt=key.attempt + 1))
    raise AssertionError("not everybody was answered")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "scarce",
    [
        {"d_blocks": 5},
        {"p_blocks": 4},
        {"p_blocks": 4, "d_blocks": 5},
        {"send_slots": 1, "receive_slots": 1, "credits": 1},
        {"send_slots": 1, "receive_slots": 1, "credits": 1, "p_blocks": 4, "d_blocks": 5, "chunk_tokens": 1},
    ],
    ids=lambda scarce: "-".join(scarce),
)
def test_everybody_is_answered_however_little_room_there_is(scarce: dict[str, int], seed: int) -> None:
    """Room for one prompt and its answer at a time, and eight want it."""
    pair = WorkerPair(**scarce)  # type: ignore[arg-type]  # mypy takes the options for timeouts
    for number in range(8):
        pair.offer(spec_of(f"r{number}", prompt_of(40, 300 * number)))
    num_refused = play_router(pair, random.Random(seed))
    for key in pair.specs:
        assert pair.answer(key) == pair.expected(key)
    assert (num_refused > 0) == ("d_blocks" in scarce)
    pair.assert_at_rest()


def test_a_holder_of_room_that_dies_makes_room() -> None:
    """P's last blocks belong to an attempt whose hand-over D gave up; the next one gets them."""
    pair = WorkerPair(p_blocks=4, d_blocks=5)
    first = pair.offer(spec_of("a", prompt_of(40)))
    while not pair.messages["ChunkHeader"]:
        pair.run_some(1)
    second = pair.offer(spec_of("b", prompt_of(40, 300)))
    pair.run_some(5)
    pair.cancel(first, "d")
    assert play_router(pair, random.Random(0)) <= 1
    assert pair.answer(next(key for key in pair.specs if key.request_id == second.request_id)) != []
    pair.settle()
    pair.assert_at_rest()
