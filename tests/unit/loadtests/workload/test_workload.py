"""Plans: exact where all lengths are fixed, and with the sharing that each kind of workload promises."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.loadtests.records import PlannedRequest
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import (
    MultiTurnWorkload,
    Plan,
    RandomWorkload,
    SharedPrefixWorkload,
    TraceWorkload,
    WorkloadConfig,
    plan,
    plan_requests,
)

VOCAB = 10_000


def steady(num_requests: int, rate_per_s: float = 1.0) -> ArrivalConfig:
    return ArrivalConfig(kind="uniform", rate_per_s=rate_per_s, num_requests=num_requests)


def planned(workload: WorkloadConfig, arrivals: ArrivalConfig, *, vocab: int = VOCAB, most: int = 1 << 30) -> Plan:
    return plan(workload, arrivals, vocab_size=vocab, max_model_len=most)


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many leading tokens two prompts share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


# ---------------------------------------------------------------- random


def test_a_plan_is_this_one_on_every_machine() -> None:
    workload = RandomWorkload(isl=(2, 4), osl=(1, 9), seed=5)
    assert plan_requests(workload, steady(3), vocab_size=100, max_model_len=13) == [
        PlannedRequest(index=0, due_s=1.0, prompt_token_ids=(48, 20), max_tokens=1),
        PlannedRequest(index=1, due_s=2.0, prompt_token_ids=(97, 89), max_tokens=5),
        PlannedRequest(index=2, due_s=3.0, prompt_token_ids=(24, 86, 90, 68), max_tokens=6),
    ]


def test_random_prompts_share_nothing_and_keep_their_lengths() -> None:
    found = planned(RandomWorkload(isl=32, osl=8), steady(50))
    assert found.window_s == 50.0
    assert [request.index for request in found.requests] == list(range(50))
    assert {(len(request.prompt_token_ids), request.max_tokens) for request in found.requests} == {(32, 8)}
    assert len({request.prompt_token_ids[:2] for request in found.requests}) == 50


def test_lengths_of_a_range_reach_both_ends() -> None:
    found = planned(RandomWorkload(isl=(3, 5), osl=(1, 2)), steady(200)).requests
    assert {len(request.prompt_token_ids) for request in found} == {3, 4, 5}
    assert {request.max_tokens for request in found} == {1, 2}


def test_the_rate_changes_times_and_nothing_else() -> None:
    workload = RandomWorkload(isl=(1, 9), osl=(1, 9))
    slow, fast = planned(workload, steady(20, 1.0)).requests, planned(workload, steady(20, 2.0)).requests
    assert [msgspec.structs.replace(request, due_s=0.0) for request in slow] == [
        msgspec.structs.replace(request, due_s=0.0) for request in fast
    ]


# ---------------------------------------------------------------- shared prefixes


def test_requests_of_a_prefix_share_it_and_no_more() -> None:
    workload = SharedPrefixWorkload(num_prefixes=4, prefix_tokens=64, own_tokens=8, osl=2)
    found = planned(workload, steady(120)).requests
    groups = Counter(request.group for request in found)
    assert sorted(groups) == ["prefix 0", "prefix 1", "prefix 2", "prefix 3"]
    assert min(groups.values()) > 15
    for left, right in pairwise(found):
        assert common(left.prompt_token_ids, right.prompt_token_ids) == (64 if left.group == right.group else 0)
    assert {len(request.prompt_token_ids) for request in found} == {72}


# ---------------------------------------------------------------- conversations


def test_turns_follow_each_other_a_think_time_apart() -> None:
    workload = MultiTurnWorkload(turns=3, new_tokens=4, osl=2, think_time_s=0.5)
    found = planned(workload, steady(6, rate_per_s=3.0), most=18)
    assert [(r.index, r.due_s, r.group, r.after) for r in found.requests] == [
        (0, 1.0, "conversation 0", None),
        (1, 1.5, "conversation 0", 0),
        (2, 2.0, "conversation 0", 1),
        (3, 2.0, "conversation 1", None),
        (4, 2.5, "conversation 1", 3),
        (5, 3.0, "conversation 1", 4),
    ]
    assert found.window_s == 3.0
    assert len({request.prompt_token_ids for request in found.requests}) == 6
    with pytest.raises(ValueError, match=r"^turns: request 2 needs 18 tokens .* max_model_len is 17$"):
        planned(workload, steady(6, rate_per_s=3.0), most=17)


def test_conversations_are_cut_off_by_the_end_of_the_plan() -> None:
    workload = MultiTurnWorkload(turns=3, new_tokens=4, osl=2, think_time_s=0.5)
    by_time = planned(workload, ArrivalConfig(kind="uniform", rate_per_s=3.0, duration_s=2.1))
    assert [(r.due_s, r.group) for r in by_time.requests] == [
        (1.0, "conversation 0"),
        (1.5, "conversation 0"),
        (2.0, "conversation 0"),
        (2.0, "conversation 1"),
    ]
    assert by_time.window_s == 2.1


@given(turns=st.integers(1, 5), num_requests=st.integers(1, 40), think=st.floats(0, 9), seed=st.integers(0, 99))
def test_a_turn_comes_after_the_one_before_it(turns: int, num_requests: int, think: float, seed: int) -> None:
    workload = MultiTurnWorkload(turns=(1, turns), new_tokens=(1, 3), osl=1, think_time_s=(0.0, think), seed=seed)
    found = planned(workload, ArrivalConfig(rate_per_s=2.0, num_requests=num_requests, seed=seed))
    assert [request.index for request in found.requests] == list(range(num_requests))
    due = [request.due_s for request in found.requests]
    assert due == sorted(due)
    assert found.window_s >= max(due[-1], num_requests / 2.0)
    for request in found.requests:
        if request.after is not None:
            before = found.requests[request.after]
            assert before.index < request.index
            assert before.group == request.group
    starts = [request.group for request in found.requests if request.after is None]
    assert len(starts) == len(set(starts))


# ---------------------------------------------------------------- traces


def mooncake(folder: Path, rows: list[tuple[int, int, int, list[int]]]) -> str:
    """A trace file of (milliseconds, input tokens, output tokens, hash ids)."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def azure(folder: Path) -> str:
    path = folder / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,4000,100\n2023-11-16 18:00:03,40,1\n",
        encoding="utf-8",
    )
    return str(path)


def test_a_mooncake_trace_is_scaled_and_keeps_its_pace(tmp_path: Path) -> None:
    path = mooncake(tmp_path, [(500, 1024, 90, [7, 8]), (1500, 700, 4, [7, 9]), (4500, 20, 7, [10])])
    workload = TraceWorkload(path=path, format="mooncake", output_scale=0.1, time_scale=2.0)
    found = planned(workload, ArrivalConfig(kind="trace"))
    assert [(r.due_s, len(r.prompt_token_ids), r.max_tokens) for r in found.requests] == [
        (0.0, 32, 9),
        (2.0, 16 + 188 * 16 // 512, 1),
        (8.0, 1, 1),
    ]
    assert found.window_s == 8.0
    first, second, _ = (request.prompt_token_ids for request in found.requests)
    assert common(first, second) == 16


def test_lengths_of_a_trace_are_capped_and_its_pace_replaced(tmp_path: Path) -> None:
    path = mooncake(tmp_path, [(0, 2048, 90, [1, 2, 3, 4]), (100, 512, 4, [1])])
    workload = TraceWorkload(
        path=path, format="mooncake", tokens_per_block=512, max_input_tokens=600, max_output_tokens=50
    )
    found = planned(workload, ArrivalConfig(kind="uniform", rate_per_s=4.0, num_requests=2))
    assert [(r.due_s, len(r.prompt_token_ids), r.max_tokens) for r in found.requests] == [
        (0.25, 600, 50),
        (0.5, 512, 4),
    ]
    assert common(*(request.prompt_token_ids for request in found.requests)) == 512


def test_an_azure_trace_is_scaled(tmp_path: Path) -> None:
    workload = TraceWorkload(path=azure(tmp_path), format="azure", input_scale=0.01, output_scale=0.5)
    found = planned(workload, ArrivalConfig(kind="trace"))
    assert [(r.due_s, len(r.prompt_token_ids), r.max_tokens) for r in found.requests] == [(0.0, 40, 50), (3.0, 1, 1)]


trace_rows = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 512)), min_size=2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=trace_rows, tokens_per_block=st.sampled_from([8, 16, 512]))
def test_prompts_share_the_blocks_that_their_hash_ids_share(
    rows: list[tuple[list[int], int]], tokens_per_block: int, tmp_path: Path
) -> None:
    """Blocks of one prompt differ by position here, as chained hashes do; last blocks are compared by what is left."""
    lines = []
    for position, (choices, tail) in enumerate(rows):
        chained = [hash(tuple(choices[: at + 1])) % (1 << 40) for at in range(len(choices))]
        lines.append((position, 512 * (len(choices) - 1) + tail, 1, chained))
    workload = TraceWorkload(path=mooncake(tmp_path, lines), format="mooncake", tokens_per_block=tokens_per_block)
    found = planned(workload, ArrivalConfig(kind="trace", rate_per_s=1.0), vocab=1 << 31).requests
    for (_, left_length, _, left_ids), left in zip(lines, found, strict=True):
        assert len(left.prompt_token_ids) == (len(left_ids) - 1) * tokens_per_block + max(
            1, (left_length - 512 * (len(left_ids) - 1)) * tokens_per_block // 512
        )
        for (_, _, _, right_ids), right in zip(lines, found, strict=True):
            blocks = common(tuple(left_ids), tuple(right_ids))
            shortest = min(len(left.prompt_token_ids), len(right.prompt_token_ids))
            assert common(left.prompt_token_ids, right.prompt_token_ids) == min(blocks * tokens_per_block, shortest)


# ---------------------------------------------------------------- what cannot be


def bad_workloads(folder: Path) -> list[tuple[WorkloadConfig, ArrivalConfig, str]]:
    trace = mooncake(folder, [(0, 5, 1, [0]), (9, 5, 1, [1])])
    own_pace = ArrivalConfig(kind="trace")
    return [
        (RandomWorkload(isl=4, osl=2), own_pace, "arrivals.kind: times of a trace need a workload of kind trace"),
        (RandomWorkload(isl=30, osl=2), steady(1), "isl: request 0 needs 32 tokens with its 2 output tokens, but max"),
        (
            SharedPrefixWorkload(num_prefixes=1, prefix_tokens=30, own_tokens=1, osl=1),
            steady(1),
            "prefix_tokens: request 0 needs 32 tokens",
        ),
        (
            TraceWorkload(path=trace, format="mooncake", tokens_per_block=512, output_scale=40.0),
            own_pace,
            "max_input_tokens: request 0 needs 45 tokens",
        ),
        (
            TraceWorkload(path=trace, format="mooncake"),
            steady(3),
            "arrivals.num_requests: 3 requests would be due, but",
        ),
        (TraceWorkload(path=trace, format="mooncake", time_scale=2.0), steady(2), "time_scale: only for arrivals of"),
    ]


def test_a_plan_that_cannot_be_names_the_field(tmp_path: Path) -> None:
    for workload, arrivals, message in bad_workloads(tmp_path):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            planned(workload, arrivals, most=31)
    with pytest.raises(ValueError, match=r"^vocab_size: expected at least 1; got 0$"):
        planned(RandomWorkload(isl=1, osl=1), steady(1), vocab=0)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "random", "isl": [5, 3], "osl": 1}, "isl: expected a number of at least 1, or [least, most]; got [5, 3]"),
    ({"kind": "random", "isl": 3, "osl": 0}, "osl: expected a number of at least 1, or [least, most]; got [0, 0]"),
    ({"kind": "random", "isl": 3}, "Object missing required field `osl`"),
    ({"kind": "random", "isl": 3, "osl": 1, "turns": 2}, "Object contains unknown field `turns`"),
    ({"kind": "shared_prefix", "num_prefixes": 1, "prefix_tokens": 1, "own_tokens": [0, 1], "osl": 1}, "own_tokens: "),
    (
        {"kind": "multi_turn", "turns": 2, "new_tokens": 1, "osl": 1, "think_time_s": -1.0},
        "think_time_s: expected a number of at least 0, or [least, most]; got [-1.0, -1.0]",
    ),
    ({"kind": "trace", "path": "x", "format": "mooncake", "input_scale": 2.0}, "input_scale: not for format mooncake"),
    (
        {"kind": "trace", "path": "x", "format": "azure", "tokens_per_block": 8},
        "tokens_per_block: not for format azure",
    ),
]


@pytest.mark.parametrize(("raw", "message"), BAD_FIELDS)
def test_a_workload_that_cannot_be_names_its_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(raw, WorkloadConfig)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "workload",
    [
        RandomWorkload(isl=(1, 2), osl=3),
        SharedPrefixWorkload(num_prefixes=1, prefix_tokens=2, own_tokens=3, osl=(4, 5)),
        MultiTurnWorkload(turns=(2, 3), new_tokens=4, osl=5, think_time_s=(0.5, 1.5)),
        TraceWorkload(path="x", format="azure", input_scale=0.5),
    ],
)
def test_a_workload_survives_json(workload: WorkloadConfig) -> None:
    assert msgspec.json.decode(msgspec.json.encode(workload), type=WorkloadConfig) == workload
