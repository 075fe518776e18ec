"""Control messages that are lost, doubled, exchanged, old, or of another size, one at a time: every message of lives in
which all kinds occur. Each attempt is answered exactly or fails on both sides, and nothing is held in the end."""

from __future__ import annotations

import itertools
import random

import pytest

from disagg.engine.failpoints import MESSAGES
from disagg.engine.kv_transfer.commands import STUCK
from tests.support.pair import Message, WorkerPair, prompt_of, spec_of
from tests.unit.engine.kv_transfer.pair_faults import (
    SCENARIOS,
    TRANSFER_TIMEOUT_S,
    OneFault,
    assert_exact_or_failed,
    faults,
)

ACTIONS = ("drop", "duplicate", "reorder", "stale", "resize")


def test_every_kind_of_message_occurs() -> None:
    kinds = {kind for scenario in SCENARIOS for kind in scenario.play().messages}
    assert kinds == set(MESSAGES) - {"CloseWhenIdle"}  # which is for the link around a sender


@pytest.mark.parametrize(
    ("action", "stride"),
    [
        ("drop", 1),
        ("resize", 1),
        *((action, 2) for action in ("duplicate", "reorder", "stale")),
        *(pytest.param(action, 1, marks=pytest.mark.slow) for action in ("duplicate", "reorder", "stale")),
    ],
)
def test_one_fault_at_each_message(action: str, stride: int) -> None:
    """In continuous integration three of the actions are tried on each second message."""
    num_runs = 0
    outcomes = set()
    for scenario, fault in itertools.islice(faults(action), None, None, stride):
        pair = scenario.play(fault.tampers)
        if fault.num_done:
            assert_exact_or_failed(scenario, pair)
            outcomes.add(tuple(pair.outcome(key) for key in pair.specs))
            num_runs += 1
    assert num_runs >= (30 if action == "resize" else 100 // stride)
    assert ("handed_over",) * 3 in outcomes or action == "resize"
    assert any("failed" in each for each in outcomes)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_one_fault_in_any_order_of_the_queues(action: str, seed: int) -> None:
    for number, (scenario, fault) in enumerate(faults(action)):
        if number % 7 == seed:
            pair = scenario.play(fault.tampers, random.Random(1000 * seed + number).choice)
            assert_exact_or_failed(scenario, pair)


class ManyFaults:
    """Loses, doubles and holds back some messages of one way."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._held: list[Message] = []

    def __call__(self, message: Message) -> list[Message]:
        match self._dice.choice(("pass",) * 12 + ("drop", "duplicate", "hold", "hold")):
            case "drop":
                return []
            case "duplicate":
                return [message, message]
            case "hold" if not self._held:
                self._held.append(message)
                return []
            case "hold":
                return [message, self._held.pop()]
        return [message]


@pytest.mark.parametrize("seed", range(60))
def test_many_faults_at_once(seed: int) -> None:
    dice = random.Random(seed)
    scenario = SCENARIOS[seed % len(SCENARIOS)]
    pair = scenario.play({"to_d": ManyFaults(dice), "to_p": ManyFaults(dice)}, dice.choice)
    assert_exact_or_failed(scenario, pair)


# ---------------------------------------------------------------- what ends the wait for a lost message


def losing(way: str, kind: str, **options: int) -> WorkerPair:
    """A pair that loses the first message of a kind."""
    return WorkerPair(tampers=OneFault(way, kind, "drop").tampers, transfer_timeout_s=TRANSFER_TIMEOUT_S, **options)  # type: ignore[arg-type]  # mypy takes the options for timeouts


@pytest.mark.parametrize(
    ("way", "kind"), [("to_d", "Offer"), ("to_p", "Reserved"), ("to_d", "Commit"), ("to_p", "CommitAck")]
)
def test_a_lost_question_or_answer_fails_its_attempt_and_no_other(way: str, kind: str) -> None:
    pair = losing(way, kind)
    lost = pair.offer(spec_of("a", prompt_of(20)))
    other = pair.offer(spec_of("b", prompt_of(20, 300)))
    pair.settle(TRANSFER_TIMEOUT_S - 0.5)
    assert pair.p_overs[lost] == []
    pair.settle(1.5)
    assert (pair.outcome(lost), pair.p_overs[lost][0].cause) == ("failed", STUCK)
    assert (pair.outcome(other), pair.answer(other)) == ("handed_over", pair.expected(other))
    assert not pair.broken
    pair.settle()
    pair.assert_at_rest()
    # D had taken it over where only the acknowledgement was lost: then its answer stands.
    assert pair.committed(lost) == (kind == "CommitAck")


@pytest.mark.parametrize(("way", "kind"), [("to_d", "Abort"), ("to_p", "AbortAck")])
def test_a_lost_abort_closes_the_pair(way: str, kind: str) -> None:
    pair = losing(way, kind)
    key = pair.offer(spec_of("a", prompt_of(40)))
    pair.run_some(20)
    pair.cancel(key, "p")
    pair.settle(TRANSFER_TIMEOUT_S + 1.0)
    assert pair.sender.close_cause == STUCK
    pair.assert_at_rest()


@pytest.mark.parametrize(("way", "kind"), [("to_d", "ChunkHeader"), ("to_p", "ClearToSend"), ("to_p", "ChunkDone")])
def test_a_chunk_that_waits_for_ever_closes_the_pair(way: str, kind: str) -> None:
    """With one credit nothing follows that would show the loss."""
    pair = losing(way, kind, credits=1)
    key = pair.offer(spec_of("a", prompt_of(40)))
    pair.settle(TRANSFER_TIMEOUT_S + 1.0)
    assert STUCK in (pair.sender.close_cause, pair.receiver.close_cause)
    assert pair.outcome(key) == "failed"
    pair.assert_at_rest()


def test_bytes_whose_checksum_is_lost_are_not_used() -> None:
    pair = losing("to_d", "ChunkSum")
    key = pair.offer(spec_of("a", prompt_of(20)))
    pair.settle(TRANSFER_TIMEOUT_S + 1.0)
    assert (pair.outcome(key), pair.committed(key)) == ("failed", False)
    assert pair.receiver.machine.counters["chunks_received"] == 3
    pair.assert_at_rest()


def test_chunks_that_are_cleared_out_of_order_close_the_pair_before_a_byte_is_sent() -> None:
    pair = WorkerPair(tampers=OneFault("to_p", "ClearToSend", "reorder").tampers)
    pair.offer(spec_of("a", prompt_of(20)))
    pair.run()
    assert "receive 1 was posted, but 0 ClearToSend came before it" in pair.sender.close_detail
    assert pair.receiver.machine.counters["chunks_received"] == 0
    pair.assert_at_rest()
