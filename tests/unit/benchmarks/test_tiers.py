"""The benchmark of tiers: its clusters can be configured, its figures are those of its rows, and the measurement of the
choice works on the model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiers import choice, disks, figures, links
from benchmarks.tiers.choice import CHOSEN, COMPUTED, LOADED, Choice
from benchmarks.tiers.clusters import ALL, DISK, HOST, MODES, NONE, PEER, config
from benchmarks.tiers.command import parse_arguments, workloads
from benchmarks.tiers.conversations import Turn
from benchmarks.tiers.figures import AGENTS, CONVERSATIONS, LONG
from benchmarks.tiers.sources import AT_REST, FETCHING
from disagg.cluster.config.cluster_config import parse_config
from disagg.engine.config import DiskTier, TierOptions, WorkerConfig


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_mode_is_a_configuration(name: str, mode: str) -> None:
    workload = workloads(is_quick=False)[name]
    found = parse_config(config("smollm2-135m", mode, workload, Path("/folder")))
    assert found.pools.prefill.num_blocks == workload.prefill_blocks
    disk = DiskTier(path="/folder", bytes=1 << 30)
    assert (
        found.kv_cache.tiers
        == {
            NONE: None,
            HOST: TierOptions(host_bytes=1 << 30, min_tokens=128),
            DISK: TierOptions(disk=disk, min_tokens=128),
            PEER: None,
            ALL: TierOptions(host_bytes=1 << 30, disk=disk, min_tokens=128),
        }[mode]
    )
    assert found.kv_cache.fetch == (mode in (PEER, ALL))
    assert found.placement.local_prefill == ("never" if name == AGENTS else "auto")


def test_histories_are_eight_times_the_caches_and_fit_one_by_one() -> None:
    long = workloads(is_quick=False)[LONG]
    assert 8.0 <= long.over_caches < 8.5
    for workload in workloads(is_quick=False).values():
        assert workload.longest <= 16 * workload.prefill_blocks


def test_quick_is_less_of_everything() -> None:
    quick, full = parse_arguments(["--quick"]), parse_arguments([])
    assert len(quick.lengths) < len(full.lengths)
    assert parse_arguments(["--quick", "--lengths", "256"]).lengths == [256]


def round_of(part: str, mode: str, turn: int, cached: int, ttft_s: float, *tokens: int, **how: Any) -> dict[str, Any]:
    turns = [
        Turn(conversation=n, turn=turn, prompt_tokens=100, cached_tokens=cached, ttft_s=ttft_s, token_ids=(token,))
        for n, token in enumerate(tokens)
    ]
    return figures.row_of(part, mode, 0, turns, **how)


ROWS = [
    round_of(LONG, NONE, 0, 0, 1.0, 1, 2),
    round_of(LONG, NONE, 1, 20, 1.0, 3, 4),
    round_of(LONG, ALL, 0, 0, 1.0, 1, 2),
    round_of(LONG, ALL, 1, 80, 0.5, 3, 5),
    round_of(LONG, NONE, 2, 0, 1.0, 3, 4, restarted=True),
    round_of(LONG, DISK, 2, 75, 1.0, 3, 4, restarted=True),
    round_of(AGENTS, NONE, 0, 0, 9.0, 1),
    round_of(AGENTS, NONE, 1, 0, 2.0, 1),
    round_of(AGENTS, PEER, 0, 0, 9.0, 1),
    round_of(AGENTS, PEER, 1, 0, 0.5, 1),
    {"part": "source", "phase": AT_REST, "gap_ms": [10.0], "outcomes": []},
    {"part": "source", "phase": FETCHING, "gap_ms": [11.0], "outcomes": ["done"]},
    {"part": "agents others", "mode": NONE, "tpot_ms": [10.0], "gap_ms": [], "errors": []},
    {"part": "agents others", "mode": PEER, "tpot_ms": [12.0], "gap_ms": [], "errors": ["UNAVAILABLE: gone"]},
]


def test_the_summary_is_that_of_the_rows() -> None:
    assert figures.summarize(ROWS, 0.35) == {
        "computed_none_over_all": round(360 / 240, 4),
        "computed_all_over_none": round(240 / 360, 4),
        "turn2_ttft_over_none": 0.25,
        "long_all_ttft_p50_over_none": 0.5,
        "long_all_ttft_p99_over_none": 0.5,
        "long_all_answer_p50_over_none": 0.5,
        "agents_peer_ttft_p50_over_none": 0.25,
        "agents_peer_ttft_p99_over_none": 0.25,
        "agents_peer_answer_p50_over_none": 0.25,
        "agents_peer_others_tpot_p99_over_none": 1.2,
        "restart_computed_over_cold": 0.25,
        "source_itl_p99_over_rest": 1.1,
        "choice_worst": None,
        "wrong": 1.0,
        "failed": 1.0,
        "reuse_trace": 0.35,
    }


def test_a_request_that_failed_computed_nothing_and_is_counted() -> None:
    row = figures.row_of(LONG, DISK, 0, [Turn(conversation=0, turn=1, prompt_tokens=100, error="UNAVAILABLE: gone")])
    assert (row["computed_tokens"], row["ttft_ms"], row["tokens"]) == (0, [], {})
    assert figures.summarize([row], None)["failed"] == 1.0


def ways(length: int, computed: float, loaded: float, chosen: float) -> list[dict[str, Any]]:
    found = zip((COMPUTED, LOADED, CHOSEN), (computed, loaded, chosen), strict=True)
    return [{"length": length, "repeat": 0, "way": way, "ttft_ms": ms, "token": 1} for way, ms in found]


def test_the_worst_choice_is_that_of_one_length_less_what_is_allowed() -> None:
    assert choice.worst([]) is None
    assert choice.worst(ways(128, 100.0, 200.0, 106.0) + ways(256, 300.0, 200.0, 225.0)) == 1.1


def test_a_first_token_that_differs_is_wrong() -> None:
    rows = ways(128, 1.0, 1.0, 1.0)
    assert choice.num_wrong(rows) == 0
    rows[2]["token"] = 2
    assert choice.num_wrong(rows) == 1


def test_all_three_ways_give_the_same_tokens_and_one_of_them_loads() -> None:
    worker = WorkerConfig(worker_id="bench", roles=("prefill",), model_path="fake")
    rows = list(Choice(worker, [128, 512], 1, sleep=lambda _: None).rows())
    assert [(row["length"], row["way"]) for row in rows] == [
        (length, way) for length in (128, 512) for way in (COMPUTED, LOADED, CHOSEN)
    ]
    cached = {(row["length"], row["way"]): row["cached_tokens"] for row in rows}
    assert [cached[length, COMPUTED] for length in (128, 512)] == [0, 0]
    assert [cached[length, LOADED] for length in (128, 512)] == [128, 512]
    assert choice.num_wrong(rows) == 0


@pytest.mark.parametrize("pause_s", [0.0, links.PAUSE_S], ids=["at once", "after a pause"])
@pytest.mark.parametrize("part", [links, disks], ids=["link", "disk"])
def test_what_is_slow_for_short_prefixes_is_used_for_long_ones(part: Any, pause_s: float) -> None:
    """However long ago it was used: what was learned of it counts until something newer was."""
    lengths = [128, 512, 1536]
    rows = list(part.rows(lengths, pause_s))
    loaded = {(row["length"], row["way"]): row["cached_tokens"] for row in rows}
    assert [loaded[length, COMPUTED] for length in lengths] == [0, 0, 0]
    assert [loaded[length, LOADED] for length in lengths] == lengths
    assert [loaded[length, CHOSEN] for length in lengths] == [0, 0, 1536]
    worst = choice.worst(rows)
    assert worst is not None
    assert worst <= 1.1
    assert choice.num_wrong(rows) == 0
    assert {row["part"] for row in rows} < {*figures.WORST}
