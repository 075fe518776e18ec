"""The benchmark of tenants says what it should of a router that lets them take turns."""

from __future__ import annotations

import random
import sys

import pytest

from disagg.router.api import TenantLimits
from tests.acceptance.isolation.tenants import (
    FLOODS,
    KV_FLOODS,
    Row,
    arrivals,
    kv_row,
    large_row,
    main,
    neighbour_row,
    summary,
)
from tests.acceptance.isolation.tenants_cluster import TenantsCluster, Wish


def test_a_request_takes_the_time_that_its_workers_take() -> None:
    cluster = TenantsCluster(1, 1, 4, 1000)
    cluster.ask(
        Wish(label="", tenant="", limits=TenantLimits(), prompt_tokens=200, output_tokens=11, max_tokens=100), 2
    )
    cluster.run(10.0)
    assert [seen.ttft_s for seen in cluster.seen.values()] == pytest.approx([0.02, 0.02])  # one step for both prompts
    assert [seen.ended for seen in cluster.seen.values()] == pytest.approx([0.22, 0.24], abs=1e-3)  # with the KV sent
    assert [seen.error for seen in cluster.seen.values()] == ["", ""]
    assert cluster.problems() == []


def check_neighbour(name: str, alone: Row, beside: Row) -> None:
    assert (alone["attainment"], alone["refused"]) == (1.0, 0)
    assert beside["requests"] == alone["requests"]
    assert beside["flood_answers"] > 0
    assert beside["attainment"] >= 0.98, name


def test_a_flood_costs_its_neighbour_at_most_two_points() -> None:
    alone = neighbour_row("alone", None, 5.0)
    for name in ("many calls", "long prompts", "refused"):
        check_neighbour(name, alone, neighbour_row(name, FLOODS[name], 5.0))


def test_neither_do_many_long_answers_which_would_cost_much_without_turns() -> None:
    """They are in the way later than other floods."""
    name, seconds = "n = 16", 15.0
    beside, without_turns = (
        neighbour_row(name, FLOODS[name], seconds, one_tenant=one_tenant) for one_tenant in (False, True)
    )
    check_neighbour(name, neighbour_row("alone", None, seconds), beside)
    assert without_turns["attainment"] < 0.9


@pytest.mark.slow
def test_small_requests_do_not_wait_for_a_large_one() -> None:
    without, with_large = large_row(10.0, with_large=False), large_row(10.0, with_large=True)
    assert with_large["large_answered"] == 1
    assert with_large["requests"] == without["requests"]
    assert with_large["ttft_p99_ms"] <= 1.2 * without["ttft_p99_ms"]


@pytest.mark.parametrize(
    ("name", "num_decodes"),
    [
        *((name, 1) for name in KV_FLOODS),
        ("large", 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in KV_FLOODS if name != "large"),
    ],
)
def test_no_flood_takes_the_kv_blocks_that_a_small_request_needs(name: str, num_decodes: int) -> None:
    row = kv_row(name, num_decodes, 12.0)
    assert (row["attainment"], row["refused"]) == (1.0, 0)
    assert row["flood_answers"] > 0


def test_a_run_that_is_too_short_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tenants", "--seconds", "5"])
    with pytest.raises(SystemExit):
        main()
    assert "--seconds: at least 10" in capsys.readouterr().err


def test_the_same_every_time() -> None:
    assert arrivals(5.0, 3.0, random.Random(1)) == arrivals(5.0, 3.0, random.Random(1))
    first, second = (neighbour_row("n = 16", FLOODS["n = 16"], 2.0) for _ in range(2))
    assert first == second


def test_the_summary_names_the_most_that_is_lost() -> None:
    shares = {"alone": 0.99, "many calls": 0.985, "n = 16": 0.98}
    rows = [
        {"part": "neighbour", "load": load, "one_tenant": False, "attainment": share} for load, share in shares.items()
    ]
    rows += [{"part": "neighbour", "load": "many calls", "one_tenant": True, "attainment": 0.1}]
    rows += [{"part": "large", "load": "", "ttft_p99_ms": 5.0}]
    rows += [{"part": "large", "load": "", "ttft_p99_ms": 5.5, "large_longest_ms": 900.0}]
    rows += [{"part": "kv", "load": "", "longest_ms": longest_ms} for longest_ms in (1.0, 46.0)]
    assert summary(rows) == {
        "neighbour_alone_percent": 99.0,
        "neighbour_most_lost_points": 1.0,
        "small_ttft_p99_ratio": 1.1,
        "kv_small_longest_ms": 46.0,
        "large_longest_wait_ms": 900.0,
    }
