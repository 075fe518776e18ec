"""`disagg simulate`: files in, report and exit status out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli.planning.simulate import SimulateOptions, cluster_spec, read_times, run_simulate
from disagg.cluster.config.cluster_config import parse_config
from disagg.loadtests.records import read_file
from disagg.loadtests.scenario import Overrides
from disagg.proto.errors import ConfigError
from disagg.simulator.world.users import Habits

TIMES = """
kv_bytes_per_token: 1000
step: {base_ms: 5.0, prefill_token_ms: 0.4, decode_ms: 0.5}
overheads: {message_s: 0.0005}
"""
SCENARIO = """
workload: {kind: random, isl: 100, osl: 10}
arrivals: {kind: poisson, rate_per_s: 5, num_requests: 40}
slo: {ttft_s: 0.5, tpot_s: 0.02}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "times.yaml").write_text(TIMES)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    return tmp_path


def simulated(folder: Path, **changes: object) -> tuple[int, str]:
    output = io.StringIO()
    given = {"scenario": str(folder / "scenario.yaml"), "cluster": None, "times": folder / "times.yaml", **changes}
    status = run_simulate(SimulateOptions(**given), Console(file=output, width=200))  # type: ignore[arg-type]
    return status, output.getvalue()


@pytest.mark.parametrize("engine", ["exact", "fast"])
def test_a_run_is_reported_as_a_load_test(folder: Path, engine: str) -> None:
    status, output = simulated(folder, engine=engine, records=folder / "run.jsonl", json=folder / "run.json")
    assert status == 0
    assert "MET: 100.0 % of 40 requests met TTFT 500 ms, TPOT 20 ms" in output
    records = read_file(folder / "run.jsonl")
    assert [(record.index, record.status, len(record.token_times_s)) for record in records] == [
        (index, "ok", 10) for index in range(40)
    ]
    report = json.loads((folder / "run.json").read_text())
    assert report["summary"]["attainment"] == 1.0
    assert report["rows"][0]["num_up"] == 2


def test_workers_of_several_stages_have_the_memory_of_all_and_step_as_one(folder: Path) -> None:
    """1000 bytes of KV a token, in blocks of 16 tokens."""
    pools = {"prefill": {"pp": 2, "tp": 2}, "decode": {"pp": 1}}
    text = {"pools": {name: {"size": 1, "kv_cache_bytes": 1_600_000, **each} for name, each in pools.items()}}
    config = parse_config({"model": {"path": "fake"}, **text})
    spec = cluster_spec(config, read_times(folder / "times.yaml"), "exact")
    assert [(pool.num_blocks, pool.worker.num_ranks) for pool in spec.pools] == [(400, 1), (100, 1)]


def test_a_rate_that_cannot_be_served_is_named(folder: Path) -> None:
    status, output = simulated(folder, overrides=Overrides(rate_per_s=500, num_requests=400))
    assert status == 1
    assert "The cluster does not keep up: 500 requests/s came, it answered" in output


def test_phases_are_scored_by_their_own_limits(folder: Path) -> None:
    phase = "{name: %s, duration_s: 5, workload: {kind: random, isl: 100, osl: 10}, arrivals: {rate_per_s: 4}, slo: %s}"
    phases = [phase % ("easy", "{ttft_s: 1.0}"), phase % ("hard", "{ttft_s: 0.001}")]
    (folder / "day.yaml").write_text("phases:\n" + "".join(f"  - {each}\n" for each in phases))
    status, output = simulated(folder, scenario=str(folder / "day.yaml"))
    assert status == 1
    assert "easy: 100.0%" in output
    assert "hard: 0.0%" in output


def test_a_policy_and_habits_can_be_chosen(folder: Path) -> None:
    _, output = simulated(folder, policy="round_robin", habits=Habits(max_tokens=100))
    assert "placed: 40 pair" in output


@pytest.mark.parametrize(
    ("changes", "files", "message"),
    [
        ({"policy": "best"}, {}, "placement.policy: 'best' is not allowed"),
        ({}, {"times.yaml": "step: 1"}, "--times: .*times.yaml: "),
        ({}, {"times.yaml": "{"}, "--times: .*times.yaml cannot be read"),
        ({"overrides": Overrides(rate_per_s=-1)}, {}, "rate_per_s"),
        ({}, {"scenario.yaml": SCENARIO.replace("isl: 100", "isl: 2000000")}, "isl: request 0 needs 2000010 tokens"),
        (
            {"cluster": "cluster.yaml"},
            {"cluster.yaml": "pools: {decode: {kv_cache_bytes: 15000}}"},
            "pools.decode.kv_cache_bytes: 15000 bytes hold no block of 16 tokens",
        ),
        (
            {"cluster": "cluster.yaml", "engine": "fast"},
            {"cluster.yaml": "kv_cache: {tiers: {host_bytes: 1GiB}}"},
            "^kv_cache.tiers: the fast engine knows no tiers; take the exact one$",
        ),
        (
            {},
            {
                "scenario.yaml": "{workload: {kind: trace, path: TRACE, format: azure}, arrivals: {kind: trace}}",
                "trace.csv": "TIMESTAMP,ContextTokens\n",
            },
            "GeneratedTokens: no such column",
        ),
    ],
)
def test_mistakes_are_named(folder: Path, changes: dict[str, object], files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (folder / name).write_text(text.replace("TRACE", str(folder / "trace.csv")))
    if "cluster" in changes:
        changes = {**changes, "cluster": folder / "cluster.yaml"}
    with pytest.raises(ConfigError, match=message):
        simulated(folder, **changes)
