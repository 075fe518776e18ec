"""What the drill of equal bits asks, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.acceptance.faults.bits import Given, Pass, plan, summarize, tried_nothing


def given(*token_ids: Sequence[int], cached: int = 0) -> dict[int, Given]:
    return {number: Given(token_ids=tuple(ids), cached_tokens=cached) for number, ids in enumerate(token_ids)}


def test_requests_are_the_same_each_time_and_of_all_four_sorts() -> None:
    texts = ["some words " * 400, "other words " * 400]
    asked = plan(40, 1000, texts)
    assert asked == plan(40, 1000, texts)
    assert {(type(one.prompt), one.temperature) for one in asked} == {
        (tuple, 0.0), (tuple, 0.7), (str, 0.0), (str, 0.7),
    }  # fmt: skip
    assert [one.seed for one in asked] == list(range(40))
    assert all(20 <= len(one.prompt) <= 300 for one in asked if isinstance(one.prompt, tuple))


def test_answers_are_compared_with_those_of_the_same_request() -> None:
    reference = Pass(name="reference", answers=given([1, 2], [3, 4], [5, 6]))
    one = Pass(name="one", answers=given([1, 2], [3, 9]))
    one.answers[2] = Given(token_ids=(5,), error="TimeoutError: late")
    row = one.row(reference)
    assert (row["answers"], row["failed"], row["differing"], row["errors"]) == (3, 1, 1, ["TimeoutError: late"])


@pytest.mark.parametrize(
    ("name", "cached", "kills", "lost", "accepted", "why"),
    [
        ("hits", 0, 0, 0, 5, "too few prompts were in the prefix cache"),
        ("hits", 16, 0, 0, 5, ""),
        ("hits", 16, 0, 0, 0, "no draft was accepted"),
        ("reference", 16, 0, 0, 0, "prompts of the reference were in the prefix cache"),
        ("reference", 0, 0, 0, 0, ""),
        ("kills", 0, 0, 0, 0, "no attempt was lost"),
        ("kills", 0, 3, 0, 0, "no attempt was lost"),
        ("kills", 0, 3, 2, 0, ""),
        ("many", 0, 0, 0, 0, "no draft was accepted"),
        ("many", 0, 0, 0, 1, ""),
    ],
)
def test_a_pass_must_have_what_it_is_about(
    name: str, cached: int, kills: int, lost: int, accepted: int, why: str
) -> None:
    answers = given([1], [2], cached=cached)
    each = Pass(name=name, answers=answers, num_kills=kills, num_lost=lost, num_accepted=accepted)
    assert tried_nothing(each.row(each)) == why


def test_one_differing_answer_is_enough() -> None:
    reference = Pass(name="reference", answers=given([1], [2]))
    kills = Pass(name="kills", answers=given([1], [2]), num_kills=4, num_lost=7)
    rows = [reference.row(reference), kills.row(reference)]
    assert summarize(rows) == {
        "differing_kills": 0.0, "answers": 2.0, "differing": 0.0, "failed": 0.0, "kills": 4.0, "lost_attempts": 7.0,
        "left": 0.0, "passes_without_effect": 0.0, "met": 1.0,
    }  # fmt: skip
    kills.answers[1] = Given(token_ids=(3,))
    found = summarize([reference.row(reference), kills.row(reference)])
    assert (found["differing"], found["met"]) == (1.0, 0.0)
    assert summarize([*rows[:1], {**rows[1], "left": 1}])["met"] == 0.0
    assert summarize([*rows[:1], {**rows[1], "lost_attempts": 0}])["met"] == 0.0
