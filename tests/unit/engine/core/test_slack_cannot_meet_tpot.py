"""Targets that cannot be met hold nobody back, and those that can be met are, whatever stands beside them.

A step takes 5 ms, 0.5 for each prompt token and 1 for each decode, in virtual time.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.config import Scheduling
from disagg.engine.core.slack import Slack
from disagg.engine.request import Sequence
from disagg.proto.messages import StepSample, Targets
from tests.support.engine import make_prompt, make_scheduler, make_sequence, make_spec, step_scheduler

ALONE_S = 0.006
"""A step of one decode."""
FULL_STEP_S = 0.005 + 256 * 0.0005
DAY_S = 86_400.0
CALIBRATION = (
    *(StepSample(5.0 + 0.5 * n, n, n * (n + 1) // 2) for n in (16, 128, 512)),
    *(StepSample(5.0 + 0.5 * n, n, n * 512 + n * (n + 1) // 2) for n in (16, 128, 512)),
    *(StepSample(5.0 + n, 0, 0, n, n * context) for n in (1, 8, 32) for context in (64, 512)),
)


class Asked(NamedTuple):
    arrival: float
    num_prompt: int
    num_output: int
    targets: Targets | None = None


class Served(NamedTuple):
    first_s: float
    """From arrival to the first token."""
    pace_s: float
    """Mean time of a token after the first."""


def serve(scheduling: Scheduling, asked: list[Asked], budget: int = 256) -> list[Served]:
    """What each of the requests sees, on one worker with room for all and no more: each step looks at every block."""
    slack: Slack[Sequence] | None = Slack(CALIBRATION, None, 16) if scheduling == "slack" else None
    num_blocks = 16 + sum(-(-(one.num_prompt + one.num_output) // 16) + 1 for one in asked)
    scheduler = make_scheduler(num_blocks, token_budget=budget, scheduling=scheduling, slack=slack, max_num_seqs=64)
    coming = sorted(enumerate(asked), key=lambda each: each[1].arrival)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    now = 0.0
    while coming or scheduler.sequences:
        if not scheduler.sequences:
            now = max(now, coming[0][1].arrival)
        while coming and coming[0][1].arrival <= now:
            number, one = coming.pop(0)
            prompt = make_prompt(one.num_prompt, seed=number)
            spec = make_spec(f"r{number}", prompt, max_tokens=one.num_output, targets=one.targets)
            scheduler.add(make_sequence(spec, arrival=one.arrival))
        scheduler.advance(now)
        plan, _ = step_scheduler(scheduler)
        num_prompt = sum(entry.num_tokens for entry in plan.prefills)
        now += (5.0 + 0.5 * num_prompt + len(plan.decodes)) / 1e3
        for entry in plan.entries:
            if entry.samples:
                name = str(entry.sequence.key.request_id)
                first.setdefault(name, now)
                last[name] = now
    return [
        Served(
            first[f"r{number}"] - one.arrival,
            (last[f"r{number}"] - first[f"r{number}"]) / max(1, one.num_output - 1),
        )
        for number, one in enumerate(asked)
    ]


@pytest.mark.parametrize("tpot_s", [1e-12, 1e-6, 0.003, 0.9 * ALONE_S])
def test_a_target_below_the_step_of_one_row_holds_no_prompt_back(tpot_s: float) -> None:
    answer = Asked(0.0, 16, 900, Targets(tpot_s=tpot_s, output_tokens=900.0))
    asked = [answer, Asked(0.02, 2000, 20)]
    assert serve("slack", asked)[1].first_s == pytest.approx(serve("decode_first", asked)[1].first_s)


def test_an_operators_target_below_that_step_costs_nothing() -> None:
    targets = Targets(tpot_s=0.5 * ALONE_S, output_tokens=40.0)
    asked = [Asked(0.1 * number, 200, 40, targets) for number in range(60)]
    assert serve("slack", asked) == serve("decode_first", asked)


CANNOT_MEET_TPOT = st.one_of(
    st.none(),
    st.builds(
        Targets,
        tpot_s=st.one_of(st.none(), st.floats(-12, -2.23).map(lambda power: 10.0**power)),
        ttft_s=st.sampled_from([None, 1e-12]),
        output_tokens=st.floats(1.0, 300.0),
    ),
    st.builds(Targets, tpot_s=st.sampled_from([None, DAY_S]), ttft_s=st.none(), output_tokens=st.floats(1.0, 300.0)),
)
"""Targets that cannot be met, or not be missed."""
REQUEST = st.builds(Asked, st.floats(0.0, 5.0), st.integers(1, 1000), st.integers(1, 100), CANNOT_MEET_TPOT)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(REQUEST, min_size=2, max_size=12, unique_by=lambda each: each.arrival))
def test_no_first_token_is_later_for_targets_that_cannot_be_met(asked: list[Asked]) -> None:
    """By more than a tenth, and a step: which of two prompts has the last tokens of a step may differ."""
    for ours, plain in zip(serve("slack", asked), serve("decode_first", asked), strict=True):
        assert ours.first_s <= 1.1 * plain.first_s + FULL_STEP_S


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(REQUEST, min_size=1, max_size=8), st.floats(2.0, 4.0), st.integers(50, 150))
def test_targets_that_can_be_met_are_beside_those_that_cannot(
    others: list[Asked], looseness: float, num_output: int
) -> None:
    """A stream with time to spare also when all the others decode beside it."""
    target_s = looseness * (5.0 + len(others) + 1) / 1e3
    stream = Asked(0.0, 16, num_output, Targets(tpot_s=target_s, output_tokens=float(num_output)))
    assert serve("slack", [stream, *others])[0].pace_s <= target_s
