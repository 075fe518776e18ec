"""Once workers and links are as fast as before, they are used as before; and so are those that calibrated wrongly."""

from __future__ import annotations

import math

import pytest

from benchmarks.slow_times.cells import Cell, Outcome
from benchmarks.slow_times.command import cells, has_recovered, prompts_differ, row, spread, summary

COVERING = [
    Cell("1p1d", "all", 6.0, 40.0, 2.0),
    Cell("2p2d", "one", 5.0, 10.0, 2.0, has_targets=False),
    Cell("2x1-elastic", "all", 100.0, 10.0, 2.0),
    Cell("2p2d", "calibration", 6.0, 0.0, 2.0, local_prefill="never"),
    Cell("2x1-chunked:512", "calibration", 20.0, 0.0, 2.0),
    Cell("2x1-chunked:512", "calibration", 0.01, 0.0, 2.0),
]
"""All shapes, who is slow, with targets and without them, with local prefill and without it."""
MORE = [
    Cell("1p1d", "all", 20.0, 40.0, 2.0),
    Cell("1p1d", "one", 5.0, 60.0, 2.0, local_prefill="never"),
    Cell("2p2d", "one", 5.0, 60.0, 4.0, has_targets=False),
    Cell("1p1d", "calibration", 20.0, 0.0, 2.0),
    Cell("2p2d", "calibration", 6.0, 0.0, 4.0, local_prefill="never"),
    Cell("2x1-elastic", "calibration", 100.0, 0.0, 2.0),
]
"""The same at other factors and higher loads."""


@pytest.mark.parametrize("cell", COVERING, ids=lambda cell: "-".join(map(str, cell)))
def test_all_is_as_before(cell: Cell) -> None:
    found = row(cell)
    assert found["recovered"], found


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*MORE, *spread(cells(), 60)], ids=lambda cell: "-".join(map(str, cell)))
def test_all_is_as_before_over_the_grid(cell: Cell) -> None:
    found = row(cell)
    assert found["recovered"], found


def outcome(share: float, prompts: dict[str, float], pools: dict[str, float]) -> Outcome:
    return Outcome(10.0, share, 1 - share, prompts, pools)


def test_what_counts_as_recovered() -> None:
    pools = {"prefill": 0.9, "decode": 0.1}
    before = outcome(1.0, {"prefill-0": 0.5, "prefill-1": 0.5, "decode-0": 1.0}, pools)
    assert has_recovered(outcome(0.98, {"prefill-0": 0.4, "prefill-1": 0.6}, {"prefill": 1.0}), before)
    assert not has_recovered(outcome(0.9, before.prompts, pools), before)
    unused = outcome(1.0, {"prefill-1": 1.0}, {"prefill": 1.0})
    assert prompts_differ(unused, before) == 0.5
    assert not has_recovered(unused, before)
    assert not has_recovered(before._replace(from_s=math.inf), before)


def test_the_summary_takes_the_worst_cell() -> None:
    rows = [
        {"share": 1.0, "share_without": 1.0, "prompts_differ": 0.1, "recovered": True},
        {"share": 0.5, "share_without": 0.9, "prompts_differ": 0.3, "recovered": False},
    ]
    found = summary(rows)
    assert (found["recovered"], found["prompts_differ_max"]) == (0.5, 0.3)
    assert found["share_lost_max"] == pytest.approx(0.4)
