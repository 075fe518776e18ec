from __future__ import annotations

import pytest

from disagg.engine.speculation.draft_counts import Acceptance
from disagg.engine.speculation.proposer import Proposal


def proposal(match_length: int, num_drafts: int = 8) -> Proposal:
    return Proposal(tuple(range(num_drafts)), match_length)


@pytest.mark.parametrize("match_length", [0, 3, 5, 10, 16])
def test_chances_never_increase_and_there_is_one_for_each_draft(match_length: int) -> None:
    chances = Acceptance().chances("a", proposal(match_length, 15))
    assert len(chances) == 15
    assert all(0.0 < after < before for before, after in zip([1.0, *chances], chances, strict=False))


def test_a_longer_match_has_a_better_chance_before_anything_was_seen() -> None:
    first = [Acceptance().chances("a", proposal(length, 1))[0] for length in range(1, 17)]
    assert first == sorted(set(first))


def test_no_drafts_have_no_chances() -> None:
    assert Acceptance().chances("a", Proposal((), 0)) == []


def test_a_place_behind_a_match_is_that_of_a_longer_match() -> None:
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.observe("a", proposal(5), 1, 0)
        acceptance.forget("a")
    two, three = acceptance.chances("b", proposal(3, 3))[1:]
    assert three / two == pytest.approx(acceptance.chances("b", proposal(5, 1))[0])
    assert three / two == pytest.approx(0.01)


def test_what_was_accepted_of_all_sequences_is_the_chance_of_a_new_one() -> None:
    acceptance = Acceptance()
    for number in range(4000):
        acceptance.observe(number, proposal(8), 1, int(number % 4 != 0))
        acceptance.forget(number)
    assert acceptance.chances("new", proposal(8, 1))[0] == pytest.approx(0.75, abs=0.01)


def test_drafts_behind_a_wrong_one_say_nothing() -> None:
    acceptance, other = Acceptance(), Acceptance()
    acceptance.observe("a", proposal(3), 8, 2)
    other.observe("a", proposal(3), 3, 2)
    assert acceptance.chances("a", proposal(3)) == other.chances("a", proposal(3))


def test_drafts_whose_outcome_is_not_known_say_nothing() -> None:
    acceptance = Acceptance()
    acceptance.observe("a", proposal(16), 0, 0)
    assert acceptance.chances("a", proposal(16)) == Acceptance().chances("a", proposal(16))


def test_a_sequence_that_copies_expects_more_than_its_worker_and_one_that_does_not_less() -> None:
    acceptance = Acceptance()
    before = acceptance.chances("new", proposal(4, 1))[0]
    for _ in range(20):
        acceptance.observe("copies", proposal(4), 1, 1)
        acceptance.observe("differs", proposal(4), 1, 0)
    copies, new, differs = (acceptance.chances(each, proposal(4, 1))[0] for each in ("copies", "new", "differs"))
    assert copies > 0.75
    assert new == pytest.approx(before, abs=0.1)
    assert differs < 0.25
    acceptance.forget("copies")
    assert acceptance.chances("copies", proposal(4, 1))[0] == new


def test_a_sequence_that_begins_to_copy_is_believed_within_ten_tokens() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.observe("a", proposal(4), 1, 0)
    assert acceptance.chances("a", proposal(4, 1))[0] < 0.02
    for length in range(4, 14):
        acceptance.observe("a", proposal(length), 1, 1)
    assert acceptance.chances("a", proposal(14, 1))[0] > 0.9


def test_drafts_of_other_methods_have_a_chance_for_each_place() -> None:
    acceptance = Acceptance()
    for number in range(2000):
        acceptance.observe(number, proposal(0), 2, 1)
        acceptance.forget(number)
    first, second, *_ = acceptance.chances("new", proposal(0))
    assert first == pytest.approx(0.99, abs=0.005)
    assert second == pytest.approx(0.0099, abs=0.0005)
    assert acceptance.chances("new", proposal(8)) == Acceptance().chances("new", proposal(8))
