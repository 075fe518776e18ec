"""The simulator's benchmark: its trace, its runs, its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulator import command
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Slo
from disagg.simulator.step_times.interface import StepWork


def record(index: int, ttft_s: float, tpot_s: float) -> RequestRecord:
    times = (ttft_s, ttft_s + tpot_s)
    return RequestRecord(
        index=index, due_s=0.0, sent_s=0.0, status="ok", num_prompt_tokens=1, max_tokens=2, token_times_s=times
    )


def test_a_trace_of_its_own_is_simulated_by_both_engines(tmp_path: Path) -> None:
    command.write_trace(tmp_path / "trace.jsonl", 40)
    requests = command.read_outline(tmp_path / "trace.jsonl", 30)
    assert len(requests.requests) == 30
    rows = [command.measure(engine, "joint", requests) for engine in ("fast", "exact")]
    assert [row["answered"] for row in rows] == [30, 30]
    fast, exact = rows
    for name in ("reuse", "ttft_mean_ms", "tpot_mean_ms"):
        assert fast[name] == pytest.approx(exact[name], rel=0.05)
    flat = command.summary(rows, {}, 0.25, 2 * fast["ttft_mean_ms"])
    assert flat["ttft_mean_over_dynamo"] == 0.5
    assert flat["prefix_reuse"] == fast["reuse"]
    assert (flat["prefix_reuse_dynamo"], flat["exact_requests_per_s"]) == (0.25, exact["requests_per_s"])
    assert flat["tpot_error"] is None


def test_what_was_not_measured_is_null() -> None:
    assert set(command.summary([], {}, None, None).values()) == {None}


def test_step_times_are_the_polynomials() -> None:
    times = command.MockerTimes(1000)
    assert times.step_s(StepWork(1000, 0, 0, 0)) == pytest.approx((0.4209989 + 15.18344 + 16.50142) / 1e3)
    assert times.step_s(StepWork(0, 0, 2, 100)) == pytest.approx((-0.2574 + 5.401 + 5.74) / 1e3)
    assert times.step_s(StepWork(0, 0, 2, 5000)) == pytest.approx((-25.74 + 54.01 + 5.74) / 1e3)


def test_errors_are_relative_to_the_recorded_run() -> None:
    recorded = [record(0, 1.0, 0.010), record(1, 2.0, 0.020)]
    simulated = [record(0, 1.1, 0.011), record(1, 2.2, 0.022)]
    errors = command.compare(recorded, simulated, Slo(ttft_s=2.0), 1.0)
    assert errors["tpot_error"] == pytest.approx(0.1)
    assert errors["ttft_p50_error"] == pytest.approx(0.1)
    assert errors["goodput_error"] == -0.5
