"""Scenarios one after the other."""

from __future__ import annotations

import pytest

from disagg.loadtests.verdict.goodput import Slo
from disagg.simulator.world.phases import load_of_phases, make_phases

EVEN = {"kind": "uniform", "rate_per_s": 2.0}
RAW = [
    {"name": "a", "duration_s": 2, "workload": {"kind": "random", "isl": 10, "osl": 5}, "arrivals": EVEN,
     "slo": {"ttft_s": 1.0}},
    {"duration_s": 1.5, "workload": {"kind": "random", "isl": 20, "osl": 6}, "arrivals": EVEN},
]  # fmt: skip


def test_phases_follow_each_other_with_their_own_lengths_limits_and_names() -> None:
    load = load_of_phases(make_phases(RAW), max_model_len=100)
    found = [(r.outlined.due_s, r.outlined.num_prompt_tokens, r.outlined.group, r.targets) for r in load.requests]
    first, second = ("a", Slo(ttft_s=1.0)), ("phase 1", Slo())
    assert found == [(0.5, 10, *first), (1.0, 10, *first), (1.5, 10, *first), (2.5, 20, *second), (3.0, 20, *second)]
    assert [request.outlined.index for request in load.requests] == list(range(5))
    assert load.window_s == 3.5


def test_equal_phases_ask_different_things() -> None:
    load = load_of_phases(make_phases([RAW[0], RAW[0]]), max_model_len=100)
    assert len({request.outlined.parts for request in load.requests}) == 6


def test_turns_keep_their_conversation() -> None:
    turns = {"kind": "multi_turn", "turns": 2, "new_tokens": 10, "osl": 5, "think_time_s": 0.25}
    phase = {"duration_s": 4, "workload": turns, "arrivals": {"kind": "uniform", "rate_per_s": 2.0}}
    load = load_of_phases(make_phases([RAW[0], phase]), max_model_len=100)
    after = [(r.outlined.index, r.outlined.after) for r in load.requests if r.outlined.after is not None]
    assert after == [(4, 3), (6, 5), (8, 7)]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "phases: expected a list of 1 to 1000 phases"),
        ({}, "phases: expected a list"),
        ([3], r"phases\[0\]: expected the keys duration_s, workload and arrivals"),
        ([{**RAW[0], "duration_s": "x"}], r"phases\[0\].duration_s: expected a time above 0; got 'x'"),
        ([RAW[0], {**RAW[0], "workload": {"kind": "none"}}], r"phases\[1\]: workload"),
        ([{**RAW[0], "colour": 1}], r"phases\[0\]: .*colour"),
    ],
)
def test_mistakes_are_named(raw: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_phases(raw)


def test_a_phase_that_does_not_fit_the_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"phases\[1\]: isl: request 0 needs 26 tokens"):
        load_of_phases(make_phases(RAW), max_model_len=20)
