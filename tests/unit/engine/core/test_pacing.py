"""Which tokens wait for the next step."""

from __future__ import annotations

import pytest

from disagg.engine.commands import Ended, Event, TokenSampled
from disagg.engine.core.outbox import TokenPacing
from disagg.proto.ids import AttemptKey, GatewayId, RequestId

KEY, GATEWAY = AttemptKey(RequestId("r"), 0), GatewayId("g")


def token(index: int) -> TokenSampled:
    return TokenSampled(KEY, GATEWAY, index, 7)


def told_at(interval_s: float, step_s: float, num_steps: int) -> list[int]:
    """The steps, each as long as the others, after which something is told."""
    pacing, told = TokenPacing(interval_s), []
    for step in range(num_steps):
        if not pacing.may_wait([token(step)], step_s, step * step_s):
            pacing.flushed(step * step_s)
            told.append(step)
    return told


@pytest.mark.parametrize(
    ("interval_s", "step_s", "expected"),
    [
        (0.0, 0.25, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1.0, 2.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1.0, 0.75, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1.0, 0.5, [0, 2, 4, 6]),
        (1.0, 0.375, [0, 2, 4, 6]),
        (1.0, 0.25, [0, 4]),
    ],
)
def test_short_steps_are_told_together(interval_s: float, step_s: float, expected: list[int]) -> None:
    assert told_at(interval_s, step_s, 8) == expected


@pytest.mark.parametrize(
    ("events", "may_wait"),
    [
        ([], True),
        ([token(1), token(9)], True),
        ([token(1), token(0)], False),
        ([token(1), Ended(KEY, GATEWAY, "length")], False),
    ],
)
def test_first_tokens_and_ends_are_flushed_at_once(events: list[Event], may_wait: bool) -> None:
    pacing = TokenPacing(1.0)
    pacing.flushed(5.0)
    assert pacing.may_wait(events, 0.25, 5.5) == may_wait
