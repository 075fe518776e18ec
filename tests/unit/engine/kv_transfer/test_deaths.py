"""Either worker dies at any moment, and comes back as another incarnation of itself. The other one holds nothing for
it, what was committed goes on, and what failed is answered exactly by the next attempt."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.pair import WorkerPair, prompt_of, spec_of


def three_attempts() -> WorkerPair:
    pair = WorkerPair(credits=2)
    pair.d.run_alone(spec_of("warm", prompt_of(35, 600)))
    for number, num_tokens in enumerate((37, 20, 50)):
        pair.offer(spec_of(f"r{number}", prompt_of(num_tokens, 300 * number)))
    return pair


def moments(seed: int, stride: int) -> Iterator[WorkerPair]:
    """The same life, stopped after 0, `stride`, 2 * `stride`, ... deliveries."""
    whole = three_attempts()
    whole.run_randomly(seed)
    for num_deliveries in range(0, whole.num_delivered, stride):
        pair, dice = three_attempts(), random.Random(seed)
        for _ in range(num_deliveries):
            pair.deliver(dice.choice(pair.ready()))
        yield pair


def assert_holds_nothing(pair: WorkerPair, side: str) -> None:
    shell = pair.sender if side == "p" else pair.receiver
    engine = pair.p if side == "p" else pair.d
    assert not any(shell.machine.holdings().values())
    assert not shell.slots_in_use
    counts, problems = engine.core.audit()
    assert (problems, any(counts.values())) == ([], False)


@pytest.mark.parametrize(
    ("seed", "stride"),
    [(0, 2), (1, 3), *(pytest.param(seed, 1, marks=pytest.mark.slow) for seed in range(4))],
)
@pytest.mark.parametrize("dead", ["p", "d"])
def test_a_worker_dies_at_every_point_and_returns(dead: str, seed: int, stride: int) -> None:
    """In continuous integration it dies at each second or third point, in two orders of deliveries."""
    survivor = "d" if dead == "p" else "p"
    num_again = 0
    for pair in moments(seed, stride):
        pair.die(dead)
        pair.run_randomly(seed)
        assert_holds_nothing(pair, survivor)
        pair.assert_answers_are_right()
        if dead == "p":
            for key in pair.specs:
                if pair.committed(key):
                    assert pair.answer(key) == pair.expected(key)
        else:
            assert all(len(pair.p_overs[key]) == 1 for key in pair.specs)
        num_again += offer_again(pair)
        pair.run_randomly(seed)
        for key in pair.specs:
            if key.attempt == 1:
                assert pair.answer(key) == pair.expected(key)
        assert_holds_nothing(pair, "p")
        assert_holds_nothing(pair, "d")
    assert num_again > 10


def offer_again(pair: WorkerPair) -> int:
    """What was not answered goes on after its tokens over a new pair, as the router does it; how many."""
    pair.reconnect()
    failed = [key for key in pair.specs if len(pair.answer(key)) < pair.specs[key].sampling.max_tokens]
    for key in failed:
        emitted = tuple(pair.answer(key))
        again = msgspec.structs.replace(pair.specs[key], attempt=1, emitted_token_ids=emitted)
        pair.offer(again)
    return len(failed)


@pytest.mark.parametrize("dead", ["p", "d"])
def test_what_the_old_life_had_said_cannot_reach_the_new_one(dead: str) -> None:
    """Messages and bytes of an incarnation that is over die with its stream and transport."""
    for pair in moments(4, 5):
        pair.die(dead)
        assert {"to_d", "to_p", "bytes"}.isdisjoint(pair.ready())
        pair.run()
        pair.reconnect()
        machine = pair.receiver.machine
        key = pair.offer(spec_of("new", prompt_of(20, 900)))
        pair.run()
        assert (pair.answer(key), machine.counters["stale"]) == (pair.expected(key), 0)


@pytest.mark.parametrize("seed", range(10))
def test_both_die(seed: int) -> None:
    for pair in moments(seed, 9):
        pair.die("p")
        pair.die("d")
        pair.reconnect()
        assert pair.ready() == []
        key = pair.offer(spec_of("new", prompt_of(20, 900)))
        pair.run_randomly(seed)
        assert pair.answer(key) == pair.expected(key)
