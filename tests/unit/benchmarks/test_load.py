"""The arithmetic of the benchmarks of the load generator and of interference, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.quality import load_generator
from benchmarks.serving import interference
from benchmarks.serving.interference import Measurement
from disagg.cluster.config.cluster_config import parse_config
from disagg.loadtests.generator.fake_server import FAKE_VOCAB_SIZE, FakeTiming
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.workload.workload import plan_requests
from tests.support.launch import cluster_config


def measurement(shape: str, with_arrivals: bool, *gaps_ms: float) -> Measurement:
    ttfts = (30.0, 50.0) if with_arrivals else ()
    return Measurement(
        shape=shape,
        with_arrivals=with_arrivals,
        repeat=0,
        gaps_ms=gaps_ms,
        num_cut=0,
        num_arrivals=len(ttfts),
        arrival_ttft_ms=ttfts,
    )


MEASURED = [
    measurement("disaggregated", False, 10.0, 10.0),
    measurement("disaggregated", True, 10.0, 12.0),
    measurement("chunked", False, 8.0),
    measurement("chunked", True, 16.0),
    measurement("chunked", True, 16.0),
]


def test_each_shape_is_compared_with_itself_at_rest() -> None:
    assert interference.summary(MEASURED) == {
        "itl_p99_ms_disaggregated": 11.98,
        "itl_p99_idle_ms_disaggregated": 10.0,
        "itl_p99_over_idle_disaggregated": 1.198,
        "itl_p99_ms_chunked": 16.0,
        "itl_p99_idle_ms_chunked": 8.0,
        "itl_p99_over_idle_chunked": 2.0,
    }


def test_streams_within_their_target_are_counted_over_all_repeats() -> None:
    rest = measurement("elastic", False, 10.0)
    busy = [
        replace(measurement("elastic", True, 12.0), mean_gaps_ms=(15.0, gap_ms), target_ms=15.0)
        for gap_ms in (14.0, 15.1)
    ]
    assert [each.num_kept for each in busy] == [2, 1]
    assert interference.summary([rest, *busy])["target_kept_elastic"] == 0.75


def test_the_table_has_a_line_for_rest_and_one_for_arrivals() -> None:
    columns, lines = interference.table(MEASURED)
    assert lines == [
        ("disaggregated at rest", "2", "10.0", "10.0", "10.0", "10.0", "1.00", "0", "-"),
        ("disaggregated with arrivals", "2", "11.0", "11.8", "12.0", "12.0", "1.20", "2", "40"),
        ("chunked at rest", "1", "8.0", "8.0", "8.0", "8.0", "1.00", "0", "-"),
        ("chunked with arrivals", "2", "16.0", "16.0", "16.0", "16.0", "2.00", "4", "40"),
    ]
    assert {len(line) for line in lines} == {len(columns)}


@pytest.mark.parametrize(
    ("shape", "mode", "scheduling"),
    [
        ("disaggregated", "disaggregated", None),
        ("chunked", "colocated", "decode_first"),
        ("prefill_first", "colocated", "prefill_first"),
        ("slack", "colocated", "slack"),
        ("elastic", "elastic", None),
    ],
)
def test_shapes_are_configurations_that_can_be(shape: str, mode: str, scheduling: str | None) -> None:
    options = interference.parse_arguments(["--token-budget", "256"])
    config = parse_config(cluster_config(interference.base_config(options, shape), interference.SHAPES[shape][0], 1))
    assert (config.mode, config.placement.local_prefill, config.placement.admission) == (mode, "never", False)
    if scheduling is not None:
        pool = config.pools.colocated
        assert (pool.scheduling, pool.size, pool.token_budget) == (scheduling, 2, 256)


def test_errors_are_measured_minus_planned_of_whole_answers() -> None:
    scenario = load_generator.scenario_of(rate_per_s=1.0, duration_s=30.0, isl=4, osl=3, seed=1)
    timing = FakeTiming(ttft_s=0.1, tpot_s=0.02, spread=0.5)
    first, second, *_ = plan_requests(
        scenario.workload, scenario.arrivals, vocab_size=FAKE_VOCAB_SIZE, max_model_len=100
    )
    ttft_s, tpot_s = timing.of(first.prompt_token_ids)
    start_s = first.due_s + ttft_s + 0.003
    times = tuple(start_s + index * (tpot_s + 0.001) for index in range(3))

    def record(index: int, **values: Any) -> RequestRecord:
        common = {"due_s": first.due_s, "sent_s": first.due_s, "num_prompt_tokens": 4, "max_tokens": 3}
        return RequestRecord(index=index, **{**common, **values})

    records = [record(first.index, status="ok", token_times_s=times), record(second.index, status="refused")]
    ttfts, tpots = load_generator.errors_ms(scenario, timing, records)
    assert ttfts == [pytest.approx(3.0)]
    assert tpots == [pytest.approx(1.0)]


def test_the_summary_keeps_runs_with_a_stall_apart() -> None:
    def row(p99: float, stall_s: float) -> dict[str, Any]:
        return {
            "stall_s": stall_s,
            "ttft_error_p99_ms": p99,
            "tpot_error_p99_ms": p99 / 10,
            "lateness_p99_ms": 1.0,
            "server_lag_p99_ms": 0.5,
            "errors": 0,
            "attainment": 1.0 if not stall_s else 0.8,
            "max_itl_ms": 500.0 if stall_s else 20.0,
        }

    flat = load_generator.summary([row(2.0, 0.0), row(4.0, 0.0), row(3.0, 0.0), row(600.0, 0.5)])
    assert (flat["ttft_error_p99_ms"], flat["ttft_error_p99_ms_worst"], flat["errors"]) == (3.0, 4.0, 0)
    assert (flat["attainment"], flat["attainment_with_stall"], flat["max_itl_with_stall_ms"]) == (1.0, 0.8, 500.0)
