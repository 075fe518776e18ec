"""Covering arrays: few rows of levels in which each allowed pair of levels of two factors stands together. Pure.

    factors, excluded ──covering_rows──> few rows that cover all allowed pairs
                      ──pair_rows──────> a row for each pair of levels that are not plain, the others plain if they can

Greedy and deterministic: the same factors give the same rows (one row at a time, each level by the most new pairs, as
in AETG: Cohen et al., "The AETG system", 1997).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Row = Mapping[str, str]
"""Factor -> level."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors, in their order, each with a level."""

NUM_STARTS = 24
"""Pairs that are not covered yet from which a row is tried."""


@dataclass(frozen=True)
class Factor:
    """What is varied. The first of its levels is the plain one."""

    name: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class Excluded:
    """Levels that may not stand together in a row."""

    levels: Row
    reason: str

    def is_in(self, row: Row) -> bool:
        """Whether a row, or a part of one, has all of them."""
        return all(row.get(name) == level for name, level in self.levels.items())


def covering_rows(factors: Sequence[Factor], excluded: Sequence[Excluded]) -> list[dict[str, str]]:
    """Rows that contain every allowed pair, and nothing that is excluded."""
    uncovered = dict.fromkeys(allowed_pairs(factors, excluded))
    rows: list[dict[str, str]] = []
    while uncovered:
        starts = list(uncovered)[:: max(1, len(uncovered) // NUM_STARTS)]
        tried = [_row_from(dict(start), factors, excluded, uncovered) for start in starts]
        best = max(tried, key=lambda row: sum(pair in uncovered for pair in pairs_of(row, factors)))
        rows.append(best)
        for pair in pairs_of(best, factors):
            uncovered.pop(pair, None)
    return rows


def pair_rows(factors: Sequence[Factor], excluded: Sequence[Excluded]) -> list[dict[str, str]]:
    """A row for each allowed pair of levels of which neither is plain; the other factors are plain, but where the pair
    cannot stand without another level."""
    plain = {factor.name: factor.levels[0] for factor in factors}
    pairs = [pair for pair in allowed_pairs(factors, excluded) if all(plain[name] != level for name, level in pair)]
    return [_completed(dict(pair), factors, excluded) for pair in pairs]


def allowed_pairs(factors: Sequence[Factor], excluded: Sequence[Excluded]) -> list[Pair]:
    """Every pair that some row can contain, in the order of the factors and levels."""
    return [
        ((one.name, first), (other.name, second))
        for one, other in combinations(factors, 2)
        for first, second in product(one.levels, other.levels)
        if next(_completions({one.name: first, other.name: second}, factors, excluded), None) is not None
    ]


def pairs_of(row: Row, factors: Sequence[Factor]) -> list[Pair]:
    """The pairs of a row, or of a part of one."""
    there = [(factor.name, row[factor.name]) for factor in factors if factor.name in row]
    return list(combinations(there, 2))


def _row_from(
    row: dict[str, str], factors: Sequence[Factor], excluded: Sequence[Excluded], uncovered: Mapping[Pair, None]
) -> dict[str, str]:
    """A row with these levels; the others are chosen one by one, by how many new pairs each one adds."""
    for factor in factors:
        if factor.name in row:
            continue
        choices = [{**row, factor.name: level} for level in factor.levels]
        possible = [each for each in choices if next(_completions(each, factors, excluded), None) is not None]
        row = max(possible, key=lambda each: sum(pair in uncovered for pair in pairs_of(each, factors)))
    return {factor.name: row[factor.name] for factor in factors}


def _completed(row: dict[str, str], factors: Sequence[Factor], excluded: Sequence[Excluded]) -> dict[str, str]:
    """The whole row with these levels that has the fewest other ones that are not plain."""
    plain = {factor.name: factor.levels[0] for factor in factors}
    rows = _completions(row, factors, excluded)
    best = min(rows, key=lambda each: sum(level != plain[name] for name, level in each.items()))
    return {factor.name: best[factor.name] for factor in factors}


def _completions(
    row: dict[str, str], factors: Sequence[Factor], excluded: Sequence[Excluded]
) -> Iterator[dict[str, str]]:
    """All whole rows with these levels, those with plain levels first. Only factors that something excludes a level of
    are varied; the others are plain."""
    if any(each.is_in(row) for each in excluded):
        return
    bound = {name for each in excluded for name in each.levels}
    missing = [factor for factor in factors if factor.name not in row]
    if not missing:
        yield row
        return
    factor = missing[0]
    for level in factor.levels if factor.name in bound else factor.levels[:1]:
        yield from _completions({**row, factor.name: level}, factors, excluded)
