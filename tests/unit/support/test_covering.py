"""The generator of covering arrays: every allowed pair is in a row, nothing that is excluded is, and rows are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import Excluded, Factor, allowed_pairs, covering_rows, pair_rows, pairs_of

SWITCHES = tuple(Factor(name, ("off", "on")) for name in "abcdefghijkl")
MIXED = (Factor("a", ("0", "1", "2")), Factor("b", ("0", "1", "2", "3")), *SWITCHES[2:])
NEEDS = (Excluded({"c": "on", "d": "off"}, "c needs d"), Excluded({"d": "on", "e": "on"}, "d is not with e"))
CASES = [(SWITCHES, ()), (MIXED, ()), (SWITCHES, NEEDS), (MIXED, NEEDS)]


@pytest.mark.parametrize(("factors", "excluded"), CASES)
def test_each_allowed_pair_is_in_a_row_and_nothing_excluded_is(
    factors: tuple[Factor, ...], excluded: tuple[Excluded, ...]
) -> None:
    rows = covering_rows(factors, excluded)
    assert {pair for row in rows for pair in pairs_of(row, factors)} == set(allowed_pairs(factors, excluded))
    assert [list(row) for row in rows] == [[factor.name for factor in factors]] * len(rows)
    assert not [row for row in rows for each in excluded if each.is_in(row)]


def test_a_pair_is_allowed_unless_no_row_has_it() -> None:
    """Also where it is two rules together that leave no row: c needs d, and d is not with e."""
    every = {
        ((one.name, first), (other.name, second))
        for one, other in combinations(SWITCHES, 2)
        for first, second in product(one.levels, other.levels)
    }
    refused = every - set(allowed_pairs(SWITCHES, NEEDS))
    assert refused == {
        (("c", "on"), ("d", "off")),
        (("d", "on"), ("e", "on")),
        (("c", "on"), ("e", "on")),
    }
    assert set(allowed_pairs(SWITCHES, ())) == every


@pytest.mark.parametrize(("factors", "most"), [(SWITCHES, 11), (MIXED, 18)])
def test_rows_are_few_and_the_same_each_time(factors: tuple[Factor, ...], most: int) -> None:
    rows = covering_rows(factors, ())
    assert len(rows) <= most
    assert covering_rows(factors, ()) == rows


def test_a_row_for_each_pair_has_nothing_else_but_what_the_pair_needs() -> None:
    rows = pair_rows(SWITCHES[:5], NEEDS)
    found = ["".join(name for name, level in row.items() if level == "on") for row in rows]
    assert found == ["ab", "acd", "ad", "ae", "bcd", "bd", "be", "cd"]
