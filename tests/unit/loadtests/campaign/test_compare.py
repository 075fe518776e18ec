"""Which points a comparison measures, and what it makes of their recordings."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.loadtests.campaign.compare import (
    Comparison,
    Difference,
    compare,
    difference,
    elastic_summary,
    for_limits,
    json_rows,
    plan_points,
    point_rows,
    summary,
)
from disagg.loadtests.campaign.shapes import ClusterShape, parse_shapes
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.scenario import Scenario
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.verdict.recordings import Point, Recording, RunInfo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload
from disagg.proto.errors import ConfigError

SHAPES = parse_shapes(
    ["1p1d", "2x1-chunked:64", "2x1-chunked:128", "2x1-prefill-first"], parse_config({"model": {"path": "fake"}})
)
SCENARIO = Scenario(
    workload=RandomWorkload(isl=4, osl=2, seed=3),
    arrivals=ArrivalConfig(rate_per_s=1.0, num_requests=10, seed=5),
    slo=Slo(ttft_s=1.0),
)
RATES = (1.0, 2.0, 4.0)
LIMIT_S = {"1p1d": 4.0, "2x1-chunked:64": 1.0, "2x1-chunked:128": 2.0, "2x1-prefill-first": 1.0}
"""The largest rate that each shape serves in these tests."""


def recorded(shape: ClusterShape, point: Point, ttft_s: float, digests: Mapping[int, str]) -> Recording:
    records = [
        RequestRecord(
            index=index,
            due_s=float(index),
            sent_s=float(index),
            status="ok",
            num_prompt_tokens=4,
            max_tokens=2,
            token_times_s=(index + ttft_s, index + ttft_s + 0.1),
            end_s=index + ttft_s + 0.1,
            output_digest=digests.get(index, "same"),
        )
        for index in range(10)
    ]
    return Recording(
        info=RunInfo(point=point, duration_s=10 / (point.arrivals.rate_per_s or 1), num_requests=10), records=records
    )


def all_recorded(repeats: int = 1) -> list[Recording]:
    return [
        recorded(shape, point, 0.5 if (point.arrivals.rate_per_s or 0) <= LIMIT_S[shape.name] else 3.0, {})
        for shape, point in plan_points(SHAPES, SCENARIO, RATES, repeats)
    ]


def compared() -> Comparison:
    return compare(all_recorded(), SHAPES, [Slo(ttft_s=1.0), Slo(ttft_s=5.0)], 0.9)


def test_a_shape_may_have_rates_of_its_own() -> None:
    shapes = parse_shapes(["1p1d", "2x1-static@0.5,1"], ClusterConfig())
    points = [point for _, point in plan_points(shapes, SCENARIO, (1.0, 2.0), 1)]
    assert [(point.shape, point.arrivals.rate_per_s) for point in points] == [
        ("1p1d", 1.0),
        ("1p1d", 2.0),
        ("2x1-static", 1.0),
        ("2x1-static", 0.5),
    ]
    with pytest.raises(ConfigError, match=r"shape 1p1d: expected numbers above 0; got '0'"):
        parse_shapes(["1p1d@0"], ClusterConfig())


def test_points_go_forwards_and_back_with_arrivals_of_each_repeat() -> None:
    points = [point for _, point in plan_points(SHAPES[:2], SCENARIO, (1.0, 2.0), 2)]
    assert [(point.shape, point.arrivals.rate_per_s, point.repeat, point.arrivals.seed) for point in points] == [
        ("1p1d", 1.0, 0, 5),
        ("1p1d", 2.0, 0, 5),
        ("2x1-chunked:64", 1.0, 0, 5),
        ("2x1-chunked:64", 2.0, 0, 5),
        ("2x1-chunked:64", 2.0, 1, 6),
        ("2x1-chunked:64", 1.0, 1, 6),
        ("1p1d", 2.0, 1, 6),
        ("1p1d", 1.0, 1, 6),
    ]
    assert {point.workload for point in points} == {SCENARIO.workload}
    assert len({point.key() for point in points}) == 8


def test_the_subject_is_compared_with_the_best_of_each_kind() -> None:
    ratios = compared().ratios
    assert list(ratios) == ["chunked", "colocated", "prefill_first"]
    chunked, prefill_first = ratios["chunked"][0], ratios["prefill_first"][0]
    assert chunked is not None
    assert prefill_first is not None
    # 1p1d was served at every rate, up to 4; the others end between two rates, where attainment falls from 1 to 0.
    assert (chunked.relation, chunked.against) == (">=", "2x1-chunked:128")
    assert chunked.value == pytest.approx(4.0 / 2.2)
    assert prefill_first.relation == ">="
    assert prefill_first.value == pytest.approx(4.0 / 1.1)
    assert ratios["chunked"][1] is None  # within 5 s everybody was served at every rate


def test_the_summary_says_where_a_ratio_is_only_a_bound_and_leaves_out_what_nobody_knows() -> None:
    flat = summary(compared(), "tiny")
    assert flat["goodput_over_chunked_at_least"] == flat["goodput_over_chunked_tiny_ttft1000ms_at_least"] == 1.8182
    assert flat["goodput_over_prefill_first_at_least"] == 3.6364
    assert (flat["differing_answers"], flat["invalid_runs"]) == (0.0, 0)
    assert not [name for name in flat if "ttft5000ms" in name]


def test_rows_have_every_shape_at_every_limit_and_every_recording() -> None:
    comparison = compared()
    rows = json_rows(comparison, 0.9)
    assert [(row["shape"], row["ttft_ms"]) for row in rows] == [
        (shape.name, limit) for limit in (1000.0, 5000.0) for shape in SHAPES
    ]
    assert (rows[0]["served_per_s"], rows[0]["served_bound"]) == (4.0, "all")
    recordings = point_rows(comparison)
    assert [(row["shape"], row["rate_per_s"]) for row in recordings] == [
        (shape.name, rate) for shape in SHAPES for rate in RATES
    ]
    assert recordings[0]["ttft_p50_ms"] == 500.0
    assert recordings[0]["itl_max_ms"] == 100.0


def test_answers_are_compared_with_the_first_to_the_same_request() -> None:
    (shape, point), *_ = plan_points(SHAPES, SCENARIO, RATES, 1)
    first = recorded(shape, point, 0.5, {0: "a"})
    same = recorded(shape, point, 0.5, {0: "a"})
    other = recorded(shape, point, 0.5, {0: "b", 1: "c"})
    assert difference([first]) == Difference(num_compared=0, num_different=0)
    assert difference([first, same]) == Difference(num_compared=10, num_different=0)
    found = difference([first, same, other])
    assert found == Difference(num_compared=20, num_different=2)
    assert found.rate == 0.1
    assert difference([]).rate == 0.0


def test_a_subject_that_goes_by_targets_is_another_point_for_each_pair_of_limits() -> None:
    shapes = parse_shapes(["2x1-elastic", "1p1d", "2x1-chunked:64"], parse_config({"model": {"path": "fake"}}))
    limits = [Slo(ttft_s=1.0, tpot_s=0.2), Slo(ttft_s=5.0)]
    served = {"2x1-elastic": {limits[0]: 4.0, limits[1]: 2.0}}
    comparisons, keys = [], set()
    for slo in limits:
        compared = for_limits(shapes, slo)
        assert compared[1:] == shapes[1:]
        assert (compared[0].name, compared[0].config.slo.ttft_ms) == ("2x1-elastic", (slo.ttft_s or 0) * 1e3)
        points = plan_points(compared, SCENARIO, (1.0, 2.0, 4.0, 8.0), 1)
        keys |= {point.key() for _, point in points}
        recordings = []
        for shape, point in points:
            most = served.get(shape.name, {}).get(slo, 2.0)
            ttft_s = 0.5 if (point.arrivals.rate_per_s or 0) <= most else 9.0
            recordings.append(recorded(shape, point, ttft_s, {}))
        comparisons.append(compare(recordings, compared, [slo], 0.9))
    assert len(keys) == 4 * (2 + 2)  # the subject twice, the others once
    assert [list(each.ratios) for each in comparisons] == 2 * [["disaggregated", "best_static", "chunked", "colocated"]]
    assert elastic_summary(comparisons) == {
        "elastic_over_best_static_min": 1.0,
        "elastic_over_best_static_median": pytest.approx((1.0 + 4.4 / 2.2) / 2, abs=0.001),
        "elastic_limits": 2,
        "elastic_upper_bounds": 0,
    }
    assert elastic_summary([compare(all_recorded(), SHAPES, limits, 0.9)]) == {"elastic_limits": 0}
