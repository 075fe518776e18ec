from __future__ import annotations

from disagg.engine.speculation.looks import LONGEST_REST, LOOKS_OF_A_REST, Looks


def look(looks: Looks, num_accepted: int, price: float = 0.0, num_rows: int = 1) -> int:
    """One look and what came of it; how many steps rest behind it."""
    looks.looked(num_rows, price)
    looks.accepted(num_accepted)
    looks.settle()
    num_resting = 0
    while looks.rests():
        num_resting += 1
    return num_resting


def rests(num_looks: int, num_accepted: int, price: float = 0.0, num_rows: int = 1) -> list[int]:
    looks = Looks()
    return [look(looks, num_accepted, price, num_rows) for _ in range(num_looks)]


def test_looks_that_pay_are_made_before_each_step() -> None:
    assert rests(500, 1, price=0.5) == [0] * 500


def test_looks_in_vain_become_rare() -> None:
    found = rests(200, 0)
    first = found.index(1)
    assert found[:first] == [0] * first
    assert found[first:] == [min(LONGEST_REST, 1 + i // LOOKS_OF_A_REST) for i in range(200 - first)]


def test_drafts_that_cost_more_than_they_give_are_in_vain() -> None:
    assert rests(200, 1, price=1.5)[-1] == LONGEST_REST
    assert rests(200, 1, price=0.995)[-1] == LONGEST_REST


def test_a_gain_is_a_share_of_the_step() -> None:
    assert rests(500, 1, price=0.8, num_rows=10)[-1] == 0
    assert rests(500, 1, price=0.8, num_rows=32)[-1] == LONGEST_REST


def test_one_look_that_pays_ends_the_rest() -> None:
    looks = Looks()
    for _ in range(200):
        look(looks, 0)
    assert look(looks, 0) == LONGEST_REST
    assert look(looks, 8) == 0
    assert look(looks, 0) == 0


def test_nothing_is_settled_before_a_look() -> None:
    looks = Looks()
    for _ in range(500):
        looks.settle()
    assert not looks.rests()
