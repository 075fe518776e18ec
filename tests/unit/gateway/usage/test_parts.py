"""What calls of one answer count for together: once for an honest client, and for what was delivered to any other."""

from __future__ import annotations

import random
from array import array

import pytest

from disagg.gateway.usage.counts import Counts, Key, Part
from disagg.gateway.usage.parts import MAX_CONTINUED, Continued, Known, continued, marks_of

KEY = Key("a", 10, "m")
ANSWER = tuple(range(1000, 1200))


def _part(
    token_ids: tuple[int, ...], had: int = 0, made: int | None = None, *, prompt: int = 40, failed: int = 0
) -> Part:
    num_made = len(token_ids) if made is None else made
    counts = Counts(1, failed, prompt, 16, num_made)
    return Part(KEY, b"stream", True, True, counts, array("I", token_ids).tobytes(), had)


def _count(*parts: Part) -> tuple[list[Counts], Known]:
    """Of calls one after the other."""
    found: list[Continued] = []
    for part in parts:
        found.append(continued(part, found[-1].known if found else None))
    return [each.counts for each in found], found[-1].known


def test_an_answer_that_breaks_and_goes_on_counts_once() -> None:
    counts, known = _count(
        _part(ANSWER[:100], failed=1),
        _part(ANSWER[:150], had=95, failed=1),
        _part(ANSWER[:120], had=110),  # broke off before it came so far
        _part(ANSWER, had=120),
    )
    assert counts == [
        Counts(1, 1, 40, 16, 100),
        Counts(0, 0, 0, 0, 50),
        Counts(0, 0, 0, 0, 0),
        Counts(0, 0, 0, 0, 50),
    ]
    assert (known.completion_tokens, known.num_continued, known.marks) == (
        200,
        3,
        marks_of(array("I", ANSWER).tobytes()),
    )


def test_tokens_that_were_made_and_never_came_here_count_once() -> None:
    counts, _ = _count(_part(ANSWER[:90], made=100), _part(ANSWER, had=80))
    assert [each.completion_tokens for each in counts] == [100, 100]


def test_another_answer_counts_though_its_client_says_that_it_goes_on() -> None:
    """As with another text in `resume`."""
    other = (*ANSWER[:7], 5, *ANSWER[8:])
    counts, known = _count(_part(ANSWER[:199]), _part(other[:199], had=7), _part(other[:199], had=190))
    assert counts == [Counts(1, 0, 40, 16, 199), Counts(1, 0, 40, 16, 199), Counts()]
    assert (known.completion_tokens, known.num_continued) == (199, 1)
    counts, _ = _count(_part(ANSWER[:199]), *(_part((i, *ANSWER[1:199]), had=1) for i in range(9)))
    assert counts == [Counts(1, 0, 40, 16, 199)] * 10


def test_an_answer_is_delivered_twice_at_most_for_what_it_counts() -> None:
    parts = [_part(ANSWER[:199])] * 6
    counts, _ = _count(*parts)
    assert [each.completion_tokens for each in counts] == [199, 0, 199, 199, 199, 199]


def test_an_answer_does_not_go_on_for_ever() -> None:
    counts, _ = _count(*[_part(ANSWER[:5], had=5)] * (MAX_CONTINUED + 3))
    assert [each.requests for each in counts] == [1, *[0] * MAX_CONTINUED, 1, 0]
    assert sum(each.prompt_tokens for each in counts) == 80


def test_a_continuation_that_brings_nothing_loses_nothing() -> None:
    counts, _ = _count(_part(ANSWER[:100]), _part((), failed=1, prompt=0), _part(ANSWER, had=100))
    assert [each.completion_tokens for each in counts] == [100, 0, 100]
    assert sum(each.failed for each in counts) == 1
    assert sum(each.prompt_tokens for each in counts) == 40


@pytest.mark.parametrize("seed", range(30))
def test_whatever_clients_say_at_least_half_of_what_is_delivered_counts(seed: int) -> None:
    dice = random.Random(seed)
    parts, delivered = [], 0
    for _ in range(12):
        ids = list(ANSWER[: dice.randrange(201)])
        for _ in range(dice.choice((0, 0, 1))):
            ids[dice.randrange(len(ids)) if ids else 0 : None] = [dice.randrange(9)] * dice.randrange(60)
        had = dice.randrange(len(ids) + 1)
        delivered += len(ids) - had
        parts.append(_part(tuple(ids), had))
    counts, _ = _count(*parts)
    assert 2 * sum(each.completion_tokens for each in counts) >= delivered


@pytest.mark.parametrize("seed", range(30))
def test_a_client_whose_connection_breaks_often_counts_once(seed: int) -> None:
    dice = random.Random(seed)
    parts, had, came = [], 0, 0
    while came < 190:
        came = min(199, came + dice.randrange(15, 60))
        parts.append(_part(ANSWER[:came], had))
        had = came - dice.randrange(7)
    parts.append(_part(ANSWER, had))
    counts, _ = _count(*parts)
    assert sum(each.completion_tokens for each in counts) == len(ANSWER)
    assert (sum(each.requests for each in counts), sum(each.prompt_tokens for each in counts)) == (1, 40)
