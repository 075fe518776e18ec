"""The simulator's benchmark: its trace, its runs, its figures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from benchmarks.simulator import accuracy, command, decision, parallelism, tiers, trace
from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.loadtests.campaign.shapes import parse_shape
from disagg.loadtests.records import RequestRecord, to_line
from disagg.loadtests.verdict import recordings
from disagg.loadtests.verdict.recordings import Point, Recording, RunInfo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload
from disagg.proto.messages import EXTENT_TOKENS
from disagg.step_times.interface import StepWork


def record(index: int, ttft_s: float, tpot_s: float) -> RequestRecord:
    times = (ttft_s, ttft_s + tpot_s)
    return RequestRecord(
        index=index, due_s=0.0, sent_s=0.0, status="ok", num_prompt_tokens=1, max_tokens=2, token_times_s=times
    )


def test_a_trace_of_its_own_is_simulated_by_both_engines(tmp_path: Path) -> None:
    trace.write_trace(tmp_path / "trace.jsonl", 40)
    requests = trace.read_outline(tmp_path / "trace.jsonl", 30)
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


def test_tiers_reuse_prompts_that_device_caches_cannot_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of 4,096 tokens in turns, on one pair whose caches hold two of them. The last block of each may not
    be loaded, because one token has to be computed."""
    for module in (trace, tiers):
        monkeypatch.setattr(module, "NUM_BLOCKS", 128)
    monkeypatch.setattr(trace, "MAX_MODEL_LEN", 8_000)
    monkeypatch.setattr(tiers, "spec", partial(trace.spec, num_workers=1))
    lines = [
        {
            "timestamp": 2000 * index,
            "input_length": 4096,
            "output_length": 2,
            "hash_ids": list(range(8 * (index % 3), 8 * (index % 3) + 8)),
        }
        for index in range(9)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    rows = tiers.reuse(trace.read_outline(path, None), ("none", "host"))

    again = 6 / 9 * (4096 - EXTENT_TOKENS) / 4096
    assert [row["reuse"] for row in rows] == [0.0, pytest.approx(again)]
    assert [row["loaded"] for row in rows] == [0.0, pytest.approx(again)]
    assert tiers.summary(rows) == {"tiers_reuse": None, "tiers_ttft_mean_over_none": None}


def test_what_was_not_measured_is_null() -> None:
    assert set(command.summary([], {}, None, None).values()) == {None}


def test_step_times_are_the_polynomials() -> None:
    times = trace.MockerTimes(1000)
    assert times.step_s(StepWork(1000, 0, 0, 0)) == pytest.approx((0.4209989 + 15.18344 + 16.50142) / 1e3)
    assert times.step_s(StepWork(0, 0, 2, 100)) == pytest.approx((-0.2574 + 5.401 + 5.74) / 1e3)
    assert times.step_s(StepWork(0, 0, 2, 5000)) == pytest.approx((-25.74 + 54.01 + 5.74) / 1e3)


def folder(path: Path, name: str, times: dict[int, tuple[float, float]]) -> list[Recording]:
    """A folder of two shapes at rates 1 and 2, whose requests have these (TTFT, TPOT) at each rate; the second shape is
    twice as slow."""
    found = []
    for shape, factor in (("1p1d", 1.0), ("2x1-chunked:64", 2.0)):
        for rate, (ttft_s, tpot_s) in times.items():
            point = Point(
                shape=shape,
                shape_config=msgspec.to_builtins(parse_shape(shape, ClusterConfig()).config),
                workload=RandomWorkload(isl=100, osl=3),
                arrivals=ArrivalConfig(kind="uniform", rate_per_s=float(rate), num_requests=2),
            )
            file = recordings.begin(path / name, point)
            file.write_bytes(b"".join(to_line(record(i, factor * ttft_s, factor * tpot_s)) for i in range(2)))
            recordings.finish(path / name, RunInfo(point=point, duration_s=2.0 / rate, num_requests=2))
            found.append(recordings.load(path / name, point))
    assert all(found)
    return [each for each in accuracy.read_folder(path / name) if each in found]


def test_errors_are_relative_to_the_measured_runs(tmp_path: Path) -> None:
    measured = folder(tmp_path, "real", {1: (0.2, 0.008), 2: (0.4, 0.011)})
    simulated = folder(tmp_path, "simulated", {1: (0.22, 0.008), 2: (0.4, 0.0088)})
    compared = accuracy.Compared(name="short", measured=measured, simulated=simulated)
    points = accuracy.point_rows([compared])
    rows = {(row["shape"], row["rate"]): row for row in points}
    assert rows["1p1d", 1.0]["ttft_p50_error"] == pytest.approx(0.1)
    assert rows["1p1d", 2.0]["tpot_p90_error"] == pytest.approx(-0.2)
    flat = accuracy.summary(points, [compared])
    assert flat["ttft_p50_error"] == pytest.approx(0.1)
    assert flat["tpot_p50_error"] == pytest.approx(0.2)
    # Measured at 0.3 s and 10 ms: 1p1d meets both at rate 1 and none at rate 2; simulated the same.
    assert flat["goodput_error"] == pytest.approx(0.0)
    assert flat["difference_error_worst"] == 1.0  # at rate 2 and 0.5 s, 10 ms simulated 1p1d alone meets both
    assert (flat["orders_compared"], flat["order_kept"]) == (30, 0.9)  # not at rate 2 and 1 s, 20 ms


def test_every_point_of_a_folder_is_simulated_again(tmp_path: Path) -> None:
    folder(tmp_path, "short", {1: (0.2, 0.008), 2: (0.4, 0.011)})
    times = tmp_path / "times.yaml"
    times.write_text(
        "{kv_bytes_per_token: 1000, step: {base_ms: 5, prefill_token_ms: 0.5, decode_ms: 1}, link: "
        "{bandwidth_bytes_per_s: 1.0e+12, latency_s: 0}}"
    )
    (compared,) = accuracy.compare_folders([tmp_path / "short"], times, "exact")
    assert [len(each.records) for each in compared.simulated] == [2, 2, 2, 2]
    colocated = next(each for each in compared.simulated if each.info.point.shape == "2x1-chunked:64")
    # 64 and 36 tokens of the prompt, each with the base.
    assert colocated.records[0].ttft_s == pytest.approx(0.060, abs=1e-6)
    assert colocated.records[0].tpot_s == pytest.approx(0.006, abs=1e-6)


def test_a_decision_compares_twelve_settings() -> None:
    assert len(decision.settings()) == 12


def test_stages_bring_more_the_longer_a_prompt_is() -> None:
    """Beside SGLang's: more chunks fill four stages better; ranks over four nodes are less than four times as fast."""
    stages, ranks = parallelism.SGLANG
    short, long = (parallelism.speed_up(stages, prompt) for prompt in (32_768, 524_288))
    assert 1.0 < short < long < 4.0
    assert parallelism.speed_up(ranks, 32_768, 0.25) < parallelism.speed_up(ranks, 32_768) < 4.0


def test_published_models_have_their_sizes() -> None:
    sizes = [published.model.num_parameters / 1e9 for published in parallelism.DISTSERVE]
    assert sizes == pytest.approx([13, 66, 175], rel=0.02)
    assert parallelism.DEEPSEEK_V3.num_parameters / 1e9 == pytest.approx(671, rel=0.001)
    for published in parallelism.DISTSERVE:
        for choice in (published.prefill, published.decode):
            published.model.check_tp(choice.tp)
