"""The comparison of the automatic shape with static ones: rates, shapes, what is kept of runs, cells and the day."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.elastic.command import summary
from benchmarks.elastic.day import PHASE_S, PHASES, day_requests
from benchmarks.elastic.grid import NUM_RATES, Column, Settings, automatic_shapes, crossed, day_row, rate_at
from benchmarks.elastic.heat_map import as_text, grids_of, write_png
from benchmarks.elastic.runs import TIMING, Point, Runs, Seen, first_come, hopeless_last, spec_of
from benchmarks.elastic.workloads import lengths, requests
from disagg.loadtests.verdict.goodput import Slo
from disagg.proto.errors import ConfigError
from disagg.simulator.world.timing import LinearSteps

SLO = Slo(ttft_s=1.0, tpot_s=0.020)


def test_another_rate_is_the_same_requests_at_another_pace() -> None:
    for workload in ("512/64", "varied", "mooncake"):
        slow, fast = (requests(workload, rate_per_s, 3, 50) for rate_per_s in (1.0, 4.0))
        assert [each.parts for each in slow] == [each.parts for each in fast]
        assert [each.due_s for each in slow] == pytest.approx([4 * each.due_s for each in fast], abs=1e-5)
    with pytest.raises(ValueError, match="workload: 'chat' is none"):
        requests("chat", 1.0, 1, 1)


def test_workloads_have_the_lengths_that_they_say() -> None:
    varied = lengths("varied", 1, 4000)
    assert sum(each.num_prompt_tokens for each in varied) / 4000 == pytest.approx(512, rel=0.03)
    assert sum(each.output_tokens for each in varied) / 4000 == pytest.approx(96, rel=0.03)
    turns = lengths("mooncake", 1, 200)
    repeated = [turn for turn in turns if any(turn.parts[0] == other.parts[0] for other in turns if other is not turn)]
    assert 100 < len(repeated) < 200


def test_static_shapes_are_those_of_the_command_line() -> None:
    assert first_come(2)[-4:] == ["2x1-chunked:512", "2x1-prefill-first", "2x1-static", "1p1d"]
    assert first_come(4)[-3:] == ["1p3d", "2p2d", "3p1d"]
    assert hopeless_last(2) == [*(f"2x1-chunked:{n} last" for n in (16, 32, 64, 128, 256, 512)), "1p1d last"]
    (pool,) = spec_of("4x1-chunked:64 last", TIMING).pools
    assert (pool.size, pool.worker.scheduling, pool.worker.token_budget) == (4, "slack", 64)
    split = spec_of("1p3d last", TIMING)
    assert [(pool.size, pool.worker.scheduling) for pool in split.pools] == [(1, "slack"), (3, "decode_first")]
    assert split.router.local_prefill == "never"
    assert spec_of("2x1-gather", TIMING).router.decodes == "gather"
    assert spec_of("2x1-elastic", TIMING).router.decodes == "spread"
    with pytest.raises(ConfigError, match="shape: 'best' is none"):
        spec_of("best", TIMING)


@pytest.mark.parametrize("start", [0, 3, 41, 42, 43, NUM_RATES])
@pytest.mark.parametrize("at_least", [0, 3])
def test_the_crossing_is_found_from_anywhere(start: int, at_least: int) -> None:
    asked: list[int] = []

    def attainment(index: int) -> float:
        asked.append(index)
        return 0.96 if index <= 42 else 0.84

    assert crossed(attainment, max(start, at_least), at_least) == pytest.approx(42.5)
    assert len(set(asked)) <= 15
    assert min(asked) >= at_least


def test_no_crossing() -> None:
    assert crossed(lambda index: 0.89, 5, 2) is None
    assert crossed(lambda index: 0.9, 5, 2) == NUM_RATES


class StubRuns:
    """Requests are all within the limits up to a rate, and none beyond it."""

    def __init__(self, most: Mapping[str, float]) -> None:
        self.most = most
        self.steps = Runs(TIMING, None).steps
        self.points: list[Point] = []

    def run(self, point: Point, *, is_static: bool) -> Seen:
        self.points.append(point)
        assert is_static == (not point.shape.startswith(("2x1-slack", "2x1-elastic", "2x1-gather")))
        is_good = point.rate_per_s <= self.most.get(point.shape, 0.0)
        num_counted = point.number - point.number // 10 or len(day_requests(point.rate_per_s, point.seed)[0])
        ttft_s = 0.5 if is_good else 60.0
        return Seen(*(array("f", [value]) * num_counted for value in (ttft_s, 0.010, 0.050)))


def column(
    most: Mapping[str, float], workload: str = "varied", automatic: tuple[str, ...] = ("{n}x1-slack:1024",)
) -> tuple[StubRuns, list[dict[str, Any]]]:
    runs = StubRuns(most)
    settings = Settings(automatic=automatic, num_requests=40, num_seeds=1)
    return runs, Column(cast(Runs, runs), settings, 2, workload).rows(1.0, [0.020])


def test_a_cell_is_the_automatic_shape_over_the_best_static_one() -> None:
    most = {"2x1-chunked:64": 2.0, "1p1d": 3.0, "1p1d last": 4.0, "2x1-slack:1024": 3.6}
    runs, (row,) = column(most)
    assert (row["best_shape"], row["best_last_shape"]) == ("1p1d", "1p1d last")
    assert row["over_best"] == pytest.approx(1.2, rel=0.03)
    assert row["over_last"] == pytest.approx(0.9, rel=0.03)
    assert row["attained_by_length"] == row["best_attained_by_length"] == [1.0] * 4
    assert row["worst_quarter"] == 0.0
    assert row["pause_p99_s"] == pytest.approx(0.05)
    brought = {
        (point.shape.endswith("last"), point.brings, point.slo) for point in runs.points if "slack" not in point.shape
    }
    assert brought == {(False, "nothing", Slo()), (True, "ttft", Slo(ttft_s=1.0))}
    assert {point.slo for point in runs.points if "slack" in point.shape} == {SLO}


def test_of_the_splits_those_are_compared_that_a_twin_would() -> None:
    names, steps = Settings.automatic, Runs(TIMING, None).steps
    assert automatic_shapes(names, 2, "varied", 0.02, steps) == (
        "2x1-elastic:1024",
        "2x1-gather:1024",
        "2x1-split1:1024",
    )
    eight = automatic_shapes(names, 8, "512/64", 0.05, steps)
    assert eight[2:] == ("8x1-split1:1024", "8x1-split2:1024", "8x1-split3:1024")
    assert spec_of(eight[3], TIMING).router.decodes == "split:2"


def test_a_cell_that_no_static_shape_serves_is_left_out() -> None:
    _, (row,) = column({"2x1-slack:1024": 3.0})
    assert row["over_best"] is None
    assert summary([row]) == {"day_over_best_single": None}


def test_of_several_automatic_shapes_the_one_counts_that_other_requests_choose() -> None:
    shapes = ("{n}x1-elastic", "{n}x1-gather")
    runs, (row,) = column({"1p1d": 3.0, "2x1-elastic": 3.0, "2x1-gather": 4.0}, automatic=shapes)
    assert row["over_best"] == pytest.approx(4 / 3, rel=0.03)
    assert row["chosen"] == ["2x1-gather"]
    counted = {point.shape for point in runs.points if point.seed == 1 and not point.shape.endswith(("d", "last"))}
    assert "2x1-gather" in counted
    compared = [point for point in runs.points if point.seed == 1001]
    assert {point.shape for point in compared} == {"2x1-elastic", "2x1-gather"}
    assert {point.number for point in compared} == {220}


def test_prompts_of_one_length_are_one_part() -> None:
    _, (row,) = column({"1p1d": 3.0, "2x1-slack:1024": 3.0}, "512/64")
    assert row["attained_by_length"] == [1.0]


def test_the_day_is_the_largest_multiple_of_one_shape() -> None:
    runs = StubRuns({"2x1-chunked:64": 0.8, "1p1d": 0.9, "2x1-chunked:64 last": 0.95, "2x1-slack:1024": 1.2})
    row = day_row(cast(Runs, runs), Settings(automatic=("{n}x1-slack:1024",), num_seeds=1), 2)
    assert (row["best_shape"], row["best_last_shape"]) == ("1p1d", "2x1-chunked:64 last")
    assert row["over_best"] == pytest.approx(1.2 / 0.9, rel=0.03)
    assert summary([row]) == {"day_over_best_single": round(row["over_best"], 3)}


def test_a_multiple_of_the_day_has_more_requests_in_each_phase() -> None:
    asked, limits = day_requests(2.0, 1)
    assert len(asked) == len(limits) == sum(round(2 * phase.rate_per_s * PHASE_S) for phase in PHASES)
    assert [each.due_s for each in asked] == sorted(each.due_s for each in asked)
    assert limits[-1] == Slo(ttft_s=PHASES[-1].ttft_s, tpot_s=PHASES[-1].tpot_s)
    assert asked[-1].due_s <= len(PHASES) * PHASE_S


def test_what_a_static_shape_did_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "kept.sqlite"
    point = Point("2x1-chunked:64", "varied", 2.0, 1, 20, "nothing", Slo())
    first = Runs(TIMING, file)
    seen = first.run(point, is_static=True)
    assert (len(seen.ttfts_s), first.num_requests) == (18, 20)
    again = Runs(TIMING, file)
    assert again.run(point, is_static=True) == seen
    assert again.num_requests == 0
    for other in (point._replace(rate_per_s=2.1), point._replace(seed=2), point._replace(slo=SLO, brings="both")):
        before = again.num_requests
        again.run(other, is_static=True)
        assert again.num_requests == before + 20
    slower = TIMING._replace(step=LinearSteps(base_ms=6.0, prefill_token_ms=0.4, decode_ms=0.5))
    other_times = Runs(slower, file)
    assert other_times.run(point, is_static=True) != seen


def test_the_automatic_shape_is_simulated_each_time(tmp_path: Path) -> None:
    point = Point("2x1-slack:1024", "varied", 2.0, 1, 20, "both", SLO)
    for _ in range(2):
        runs = Runs(TIMING, tmp_path / "kept.sqlite")
        runs.run(point, is_static=False)
        assert runs.num_requests == 20


def rows() -> list[dict[str, Any]]:
    cells = [(1.0, 0.012, 1.4), (1.0, 0.020, 0.9), (2.0, 0.020, None)]
    return [
        {
            "workers": 2,
            "workload": "varied",
            "ttft_s": ttft_s,
            "tpot_s": tpot_s,
            "over_best": ratio,
            "over_last": ratio,
            "best_shape": "2x1-chunked:64",
            "best_last_shape": "1p1d last",
            "worst_quarter": -0.01,
        }
        for ttft_s, tpot_s, ratio in cells
    ]


def test_the_summary_has_the_worst_and_the_median_cell() -> None:
    assert summary(rows()) == {
        "min_2": 0.9,
        "median_2": 1.15,
        "min_2_last": 0.9,
        "median_2_last": 1.15,
        "below_2": 1,
        "worst_quarter_2": -0.01,
        "day_over_best_single": None,
    }


def test_a_heat_map_names_the_static_shapes(tmp_path: Path) -> None:
    (grid,) = grids_of(rows()).values()
    assert as_text(grid, "over_best").splitlines() == [
        "| TPOT | TTFT 1 s | TTFT 2 s |",
        "|---|---|---|",
        "| 12 ms | **1.40** (chunked:64) | - |",
        "| 20 ms | **0.90** (chunked:64) | - |",
    ]
    pytest.importorskip("matplotlib")
    write_png(tmp_path / "map.png", rows(), "map")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_rates_are_three_percent_apart() -> None:
    assert rate_at(0, 4) == pytest.approx(0.2)
    assert rate_at(11, 4) / rate_at(10, 4) == pytest.approx(1.03)
    assert math.isfinite(rate_at(NUM_RATES, 8))
