"""`disagg load` from its options to its reports, with the fake server and with real clusters of the fake model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.cli import load_commands as commands
from disagg.cluster.config.cluster_config import parse_config
from disagg.loadtests.campaign.shapes import parse_shapes
from disagg.loadtests.generator.fake_server import FakeTiming
from disagg.loadtests.generator.load_generator import GeneratorOptions
from disagg.loadtests.scenario import Overrides
from tests.support.fake_server import fake_server

SCENARIO = """
workload: {kind: random, isl: [8, 40], osl: 6}
arrivals: {rate_per_s: 30, num_requests: 12}
slo: {ttft_s: 20, tpot_s: 5}
"""


@pytest.fixture
def options(tmp_path: Path) -> commands.Common:
    """A scenario whose limits every request meets."""
    scenario = tmp_path / "easy.yaml"
    scenario.write_text(SCENARIO)
    return commands.Common(
        scenario=str(scenario),
        overrides=Overrides(num_requests=12),
        generator=GeneratorOptions(nice=0),
        html=tmp_path / "report.html",
        json=tmp_path / "report.json",
    )


def read_json(path: Path | None) -> dict[str, Any]:
    assert path is not None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_run_prints_a_verdict_and_writes_both_reports(options: commands.Common) -> None:
    output = io.StringIO()
    with fake_server(FakeTiming(ttft_s=0.02, tpot_s=0.002, refuse_every=4)) as server:
        status = commands.run(options, server.address, None, Console(file=output, width=200))
    report = read_json(options.json)
    assert {name: report["summary"][name] for name in ("sent", "ok", "refused", "attainment")} == {
        "sent": 12,
        "ok": 9,
        "refused": 3,
        "attainment": 0.75,
    }
    # A generator that was late on a busy machine makes the run invalid, which the verdict then reports.
    is_valid = report["summary"]["is_valid"] == 1
    assert status == (commands.EXIT_MISSED if is_valid else commands.EXIT_INVALID)
    assert ("MISSED: 75.0 % of 12 requests" if is_valid else "INVALID: ") in output.getvalue()
    assert options.html is not None
    assert "<svg" in options.html.read_text()


def test_a_sweep_of_a_running_gateway_keeps_what_it_measured(options: commands.Common, tmp_path: Path) -> None:
    search = commands.search_of(20.0, 40.0, 0.9)
    output = io.StringIO()
    with fake_server(FakeTiming(ttft_s=0.02, tpot_s=0.002)) as server:
        commands.sweep(options, server.address, search, tmp_path / "out", 1, Console(file=output, width=200))
        again = commands.sweep(options, server.address, search, tmp_path / "out", 1, Console(file=io.StringIO()))
    report = read_json(options.json)
    assert [(row["rate_per_s"], row["attainment"]) for row in report["rows"]] == [(20.0, 1.0), (40.0, 1.0)]
    assert report["summary"]["served_per_s_at_least"] == 40.0
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 2
    assert again == (commands.EXIT_INVALID if report["summary"]["invalid_runs"] else commands.EXIT_MET)


@pytest.mark.slow
def test_a_comparison_measures_each_shape_once_and_finds_the_same_answers(
    options: commands.Common, tmp_path: Path
) -> None:
    base = parse_config({"model": {"path": "fake", "dtype": "float32"}, "transfer": {"transport": "shm"}})
    shapes = parse_shapes(["1p1d", "2x1-chunked:64"], base)
    out = tmp_path / "out"

    def compare() -> tuple[int, str]:
        output = io.StringIO()
        console = Console(file=output, width=200)
        return commands.compare(
            options, shapes, [30.0], 1, commands.slos_of(["-:5000"]), out, 1, console, has_targets=False
        ), output.getvalue()

    compare()
    report = read_json(options.json)
    recorded = [row for row in report["rows"] if row["kind"] == "recording"]
    assert [(row["shape"], row["num_requests"], row["num_ok"]) for row in recorded] == [
        ("1p1d", 12, 12),
        ("2x1-chunked:64", 12, 12),
    ]
    scored = [(row["shape"], row["ttft_ms"], row["tpot_ms"]) for row in report["rows"] if row["kind"] == "score"]
    assert scored == [(shape, ttft, 5000.0) for ttft in (20_000.0, None) for shape in ("1p1d", "2x1-chunked:64")]
    assert report["summary"]["differing_answers"] == 0.0
    status, printed = compare()
    assert printed.count("recorded before") == 2
    assert status == (commands.EXIT_INVALID if report["summary"]["invalid_runs"] else commands.EXIT_MET)
