"""The benchmark of steps by slack: its goodput, and what it says of one cell and of streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.elastic.steps import RATES, Cells, cluster, goodput, streams_row, summary
from disagg.loadtests.verdict.goodput import Slo

SLO = Slo(ttft_s=2.0, tpot_s=0.020)


@pytest.mark.parametrize(("last_good", "expected"), [(-1, 0.0), (7, (RATES[7] + RATES[8]) / 2), (33, RATES[33])])
def test_goodput_is_where_nine_tenths_are_within_the_limits(last_good: int, expected: float) -> None:
    def run(rate_per_s: float) -> Any:
        return SimpleNamespace(attainment=lambda slo: 0.95 if RATES.index(rate_per_s) <= last_good else 0.85)

    assert goodput(run, SLO) == pytest.approx(expected)


def test_slack_serves_what_fixed_chunks_do_not() -> None:
    """At 1.9 requests/s with a tight TPOT: short chunks starve prompts, long ones streams."""
    cells = Cells("fixed", num_requests=120, num_seeds=1)
    assert cells.run(cluster("slack", 1024), 1.9, SLO).attainment(SLO) >= 0.98
    for name in ("chunked:16", "chunked:64", "chunked:512", "prompts first"):
        assert cells.fixed(name, None, 1.9).attainment(SLO) <= 0.8, name


def test_streams_keep_their_pace_beside_more_prompts_than_can_be_computed() -> None:
    row = streams_row("slack", "slack", 1024, every_s=1.0, max_itl_ms=18.0, num_waves=1)
    assert row["kept"] == 1.0
    assert row["itl_p99_ms"] <= row["target_ms"]
    assert streams_row("chunked:32", "decode_first", 32, every_s=1.0, num_waves=1)["kept"] == 0.0


def test_the_summary_takes_the_worst_cell() -> None:
    rows: list[dict[str, Any]] = [
        {"workload": "fixed", "over_fixed": 1.4, "over_last": 1.2},
        {"workload": "fixed", "over_fixed": 1.1, "over_last": 0.9},
        {"workload": "fixed", "over_fixed": None, "over_last": None},
        {"setting": "slack", "kept": 0.975},
    ]
    assert summary(rows) == {
        "fixed_over_fixed_min": 1.1,
        "fixed_over_fixed_median": 1.25,
        "fixed_over_last_min": 0.9,
        "fixed_over_last_median": 1.05,
        "streams_kept_min": 0.975,
    }
