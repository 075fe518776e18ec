"""Both halves together over real engine cores: the good ways, and giving up at every point."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg.engine.kv_transfer.commands import PAIR_CLOSED
from disagg.proto.ids import AttemptKey
from tests.support.pair import BYTES_PER_TOKEN, WorkerPair, prompt_of, spec_of

PROMPT_LENGTHS = [1, 7, 8, 9, 15, 16, 17, 20, 21, 31, 67]
"""Around a chunk (8), a block (16) and a prefill step (20)."""


def busy_pair() -> WorkerPair:
    """Three attempts of different lengths that share staging slots; the last one shares a prefix with what D has."""
    pair = WorkerPair()
    pair.d.run_alone(spec_of("warm", prompt_of(35, 500)))
    pair.offer(spec_of("a", prompt_of(30)))
    pair.offer(spec_of("b", prompt_of(9, 300), max_tokens=2))
    pair.offer(spec_of("c", prompt_of(50, 500)))
    return pair


def keys_of(pair: WorkerPair) -> list[AttemptKey]:
    return list(pair.specs)


@pytest.mark.parametrize("num_tokens", PROMPT_LENGTHS)
def test_the_answer_is_that_of_one_worker(num_tokens: int) -> None:
    pair = WorkerPair()
    key = pair.offer(spec_of("a", prompt_of(num_tokens)))
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert pair.outcome(key) == "handed_over"
    assert pair.chunk_tokens_sent == num_tokens
    assert pair.d_overs[key][0].kv_bytes == pair.p_overs[key][0].kv_bytes == num_tokens * BYTES_PER_TOKEN
    assert pair.ends[key] == [("d", "length")]
    pair.assert_at_rest()


@pytest.mark.parametrize(
    ("warm_tokens", "num_tokens", "cached"),
    [(0, 40, 0), (15, 40, 0), (16, 40, 16), (40, 40, 32), (32, 32, 16), (40, 33, 32), (48, 100, 48)],
)
def test_only_what_d_lacks_is_sent(warm_tokens: int, num_tokens: int, cached: int) -> None:
    pair = WorkerPair()
    if warm_tokens:
        pair.d.run_alone(spec_of("warm", prompt_of(warm_tokens)))
    key = pair.offer(spec_of("a", prompt_of(num_tokens)))
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert pair.d_overs[key][0].cached_tokens == pair.p_overs[key][0].cached_tokens == cached
    assert pair.chunk_tokens_sent == num_tokens - cached
    pair.assert_at_rest()


@pytest.mark.parametrize("warm_tokens", [16, 40])
def test_p_sends_from_its_own_prefix_cache(warm_tokens: int) -> None:
    pair = WorkerPair()
    pair.p.run_alone(spec_of("warm", prompt_of(warm_tokens)))
    key = pair.offer(spec_of("a", prompt_of(40)))
    pair.run()
    assert (pair.answer(key), pair.chunk_tokens_sent) == (pair.expected(key), 40)
    pair.assert_at_rest()


def test_chunks_go_out_while_the_rest_is_computed() -> None:
    pair = WorkerPair(token_budget=20, chunk_tokens=8)
    key = pair.offer(spec_of("a", prompt_of(100)))
    while pair.p.core.load().steps < 2 or not pair.messages["ChunkHeader"]:
        ready = pair.ready()
        pair.deliver(next((name for name in ready if name != "p_step"), ready[0]))
    assert 0 < pair.chunk_tokens_sent <= 40
    assert pair.answer(key) == []
    pair.run()
    assert pair.answer(key) == pair.expected(key)


def test_small_steps_are_coalesced() -> None:
    pair = WorkerPair(token_budget=3, chunk_tokens=8)
    key = pair.offer(spec_of("a", prompt_of(31)))
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    # Half a chunk is four tokens, reached with every second step of three; the last token goes alone.
    assert pair.messages["ChunkHeader"] == 6


def test_a_sequence_that_ends_with_token_0_ends_on_p() -> None:
    pair = WorkerPair()
    key = pair.offer(spec_of("a", prompt_of(40), max_tokens=1))
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert pair.ends[key] == [("p", "length")]
    assert [over.outcome for over in pair.p_overs[key]] == ["cancelled"]
    assert [over.outcome for over in pair.d_overs[key]] == ["aborted"]
    pair.assert_at_rest()


def test_a_stop_id_as_token_0_ends_on_p() -> None:
    pair = WorkerPair()
    first = pair.expected(pair.offer(spec_of("probe", prompt_of(40))))[0]
    key = pair.offer(spec_of("a", prompt_of(40), stop=(first,)))
    pair.run()
    assert (pair.ends[key], pair.outcome(key)) == ([("p", "stop")], "cancelled")
    pair.assert_at_rest()


def test_no_room_on_d_is_refused_before_p_computes() -> None:
    pair = WorkerPair(d_blocks=3)
    key = pair.offer(spec_of("a", prompt_of(100)))
    pair.run()
    assert (pair.outcome(key), pair.p.core.load().steps) == ("refused", 0)
    assert [over.outcome for over in pair.d_overs[key]] == ["aborted"]
    pair.assert_at_rest()


def test_a_refused_attempt_can_be_offered_again() -> None:
    pair = WorkerPair(d_blocks=10)
    filler = spec_of("filler", prompt_of(100), max_tokens=40)
    pair.offer(filler)
    pair.run_some(20)
    spec = spec_of("a", prompt_of(64, 300))
    pair.offer(spec)
    pair.run()
    assert pair.p_overs.pop(spec.key)[0].outcome == "refused"
    pair.offer(spec)
    pair.run()
    assert pair.answer(spec.key) == pair.expected(spec.key)
    pair.assert_at_rest()


def test_many_attempts_share_the_slots() -> None:
    pair = busy_pair()
    pair.run()
    for key in keys_of(pair):
        assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


@pytest.mark.parametrize("seed", range(25))
def test_any_order_of_the_queues_gives_the_same_answer(seed: int) -> None:
    pair = busy_pair()
    pair.run_randomly(seed)
    for key in keys_of(pair):
        assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


@pytest.mark.parametrize(
    ("credits", "send_slots", "receive_slots"), [(1, 1, 1), (1, 3, 1), (4, 1, 3), (5, 5, 1), (2, 3, 5)]
)
def test_any_number_of_slots_and_credits_works(credits: int, send_slots: int, receive_slots: int) -> None:
    pair = WorkerPair(credits=credits, send_slots=send_slots, receive_slots=receive_slots)
    for number in range(3):
        pair.offer(spec_of(f"r{number}", prompt_of(40, 100 * number)))
    pair.run_randomly(credits)
    assert all(pair.answer(key) == pair.expected(key) for key in keys_of(pair))
    pair.assert_at_rest()


# ---------------------------------------------------------------- giving up, after any number of deliveries


def at_every_point(
    make: Callable[[], WorkerPair], act: Callable[[WorkerPair], None], stride: int = 1
) -> list[WorkerPair]:
    """`act` after n deliveries, for all n from 0 to the end, `stride` apart; then everything else is delivered."""
    whole = make()
    whole.run()
    pairs = []
    for num_deliveries in range(0, whole.num_delivered + 1, stride):
        pair = make()
        pair.run_some(num_deliveries)
        act(pair)
        pair.run()
        pairs.append(pair)
    return pairs


def one_attempt() -> WorkerPair:
    pair = WorkerPair()
    pair.offer(spec_of("a", prompt_of(37)))
    return pair


@pytest.mark.parametrize("side", ["p", "d", "both"])
def test_cancel_at_every_point(side: str) -> None:
    outcomes = set()
    for pair in at_every_point(one_attempt, lambda pair: pair.cancel(AttemptKey(*keys_of(pair)[0]), side)):
        (key,) = keys_of(pair)
        pair.assert_answers_are_right()
        pair.settle()
        pair.assert_at_rest()
        outcomes.add((pair.outcome(key), pair.committed(key)))
        if pair.outcome(key) == "handed_over" and side == "p":
            assert pair.answer(key) == pair.expected(key)
    assert outcomes >= {("cancelled", False), ("handed_over", True)}
    assert outcomes <= {("cancelled", False), ("handed_over", True), ("cancelled", True)}


@pytest.mark.parametrize("side", ["p", "d", "both"])
def test_cancelling_one_of_many_leaves_the_others_alone(side: str) -> None:
    for pair in at_every_point(busy_pair, lambda pair: pair.cancel(keys_of(pair)[0], side), stride=3):
        for key in keys_of(pair)[1:]:
            assert pair.answer(key) == pair.expected(key)
        pair.assert_answers_are_right()
        pair.settle()
        pair.assert_at_rest()


def test_the_pair_breaks_at_every_point() -> None:
    for pair in at_every_point(busy_pair, WorkerPair.break_stream):
        pair.assert_answers_are_right()
        pair.assert_at_rest()
        for key in keys_of(pair):
            if not pair.committed(key) and pair.ends[key] == []:
                assert pair.outcome(key) == "failed"
            over = pair.p_overs[key][0]
            assert over.outcome == "handed_over" or over.cause == PAIR_CLOSED


def fail_next_transfer(pair: WorkerPair) -> None:
    pair.wire.fail_next = True


def test_the_transport_breaks_at_every_point() -> None:
    num_broken = 0
    for pair in at_every_point(busy_pair, fail_next_transfer, stride=2):
        pair.assert_answers_are_right()
        pair.assert_at_rest()
        num_broken += pair.broken
    assert num_broken > 10


def corrupt_next_payload(pair: WorkerPair) -> None:
    pair.wire.corrupt_next = True


def test_corruption_fails_its_attempt_and_never_changes_an_answer() -> None:
    outcomes = []
    for pair in at_every_point(busy_pair, corrupt_next_payload):
        pair.assert_answers_are_right()
        pair.assert_at_rest()
        outcomes.append(sorted(pair.outcome(key) for key in keys_of(pair)))
        assert outcomes[-1].count("failed") == pair.wire.num_corrupted
    assert ["failed", "handed_over", "handed_over"] in outcomes
    assert outcomes[-1] == ["handed_over"] * 3


def test_after_a_break_everything_is_refused_and_nothing_moves() -> None:
    pair = one_attempt()
    pair.break_stream()
    late = pair.offer(spec_of("late", prompt_of(5)))
    pair.cancel(late, "both")
    pair.settle()
    pair.break_stream()
    assert (pair.outcome(late), pair.messages["Offer"]) == ("failed", 1)
    pair.assert_at_rest()


def test_a_cancel_before_its_offer_leaves_a_tombstone_that_turns_the_offer_away() -> None:
    pair = WorkerPair()
    spec = spec_of("a", prompt_of(20))
    pair.cancel(spec.key, "d")
    assert pair.receiver.machine.holdings()["tombstones"] == 1
    pair.offer(spec)
    pair.run()
    assert pair.outcome(spec.key) == "cancelled"
    assert not pair.asked_for_blocks
    pair.assert_at_rest()


def test_tombstones_fade() -> None:
    pair = WorkerPair()
    pair.cancel(spec_of("a", prompt_of(20)).key, "d")
    pair.settle(9.0)
    assert pair.receiver.machine.holdings()["tombstones"] == 1
    pair.settle(2.0)
    pair.assert_at_rest()


def test_a_cancel_after_the_end_leaves_nothing() -> None:
    pair = one_attempt()
    pair.run()
    pair.cancel(keys_of(pair)[0], "both")
    pair.run()
    pair.assert_at_rest()
