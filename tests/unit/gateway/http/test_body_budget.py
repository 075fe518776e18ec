"""Which unfinished body is given up when together they hold too much."""

from __future__ import annotations

import pytest

from disagg.gateway.http.body_budget import BodyBudget


def test_bytes_count_until_the_body_is_finished() -> None:
    budget = BodyBudget(10)
    body = budget.start("a")
    assert budget.received(body, 10) == []
    assert (budget.num_bytes, len(budget)) == (10, 1)
    budget.finish(body)
    budget.finish(body)
    assert (budget.num_bytes, len(budget)) == (0, 0)


def test_the_body_without_progress_for_longest_is_given_up() -> None:
    budget = BodyBudget(10)
    first, second, third = (budget.start("a") for _ in range(3))
    for body in (first, second, third):
        assert budget.received(body, 3) == []
    assert budget.received(first, 1) == []
    assert budget.received(third, 1) == [second]
    assert budget.received(second, 100) == []  # it is counted no longer
    assert budget.num_bytes == 8


@pytest.mark.parametrize("num_bodies", [1, 20])
def test_the_tenant_that_holds_most_pays(num_bodies: int) -> None:
    budget = BodyBudget(100)
    other = budget.start("b")
    assert budget.received(other, 40) == []
    hoard = [budget.start("a") for _ in range(num_bodies)]
    given_up = [refused for body in hoard for refused in budget.received(body, 60 // num_bodies)]
    given_up += budget.received(other, 5)
    assert given_up == hoard[: len(given_up)]
    assert len(given_up) == (1 if num_bodies == 1 else 2)
    assert other.num_bytes == 45


def test_a_body_that_is_too_much_alone_is_given_up_itself() -> None:
    budget = BodyBudget(10)
    body = budget.start("a")
    assert budget.received(body, 11) == [body]
    assert (budget.num_bytes, len(budget)) == (0, 0)


def test_bodies_without_bytes_are_not_given_up() -> None:
    budget = BodyBudget(10)
    empty, full, last = (budget.start("a") for _ in range(3))
    assert budget.received(full, 10) == []
    assert budget.received(last, 1) == [full]
    assert budget.received(empty, 9) == []
