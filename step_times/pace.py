"""The time that a decoding sequence has saved by its TPOT target. Pure; for workers and routers.

A TPOT target is the mean over a whole answer, so a sequence that decodes faster saves time, which its worker may spend
on prompts. With the first token at f, target l, k tokens out, R still to come, and s the time of a step without
prompts, its slack is

    f + (1 - RESERVE) l (k - 1 + R) - now - MARGIN R s     R = max(LEAST_REST o, o - k), o the answer's length, guessed
                                                           short
"""

from __future__ import annotations

from collections.abc import Mapping

from disagg.proto.ids import WorkerId
from disagg.proto.messages import StepCoefficients

MARGIN = 1.2
"""Expected over present time of steps: other sequences will join, and answers may be longer than expected."""
LEAST_REST = 0.15
"""Tokens that an answer is expected to have left, as a share of its expected length, when it outgrows that."""
SHORT = 0.1
"""The share of the expected length of an answer that its slack counts with, unless it is the most that the request
allows. Time that is spent in advance on the strength of tokens that never come makes a short answer late; time that was
not spent in advance is spent later."""
RESERVE = 0.02
"""The share of its target that no sequence spends: steps take longer than predicted, and a client sees tokens later
than the worker."""


def tokens_left(num_done: int, num_most: int, expected: float) -> float:
    """Tokens that an answer has still to come, guessed short. `expected`: the mean length of answers; `num_most`: of
    this one."""
    if expected < num_most:
        expected *= SHORT
    return min(num_most - num_done, max(LEAST_REST * expected, expected - num_done))


def slack_ms(left_ms: float, rest: float, step_ms: float, alone_ms: float, paced_ms: float) -> float | None:
    """The slack of a sequence, in milliseconds. Its last token is due in `left_ms`, `rest` tokens are to come, and its
    target allows `paced_ms` for all tokens after the first. None where it would be late even alone on the worker, with
    steps of `alone_ms`."""
    return None if left_ms < rest * alone_ms else left_ms - RESERVE * paced_ms - MARGIN * rest * step_ms


def note_of_target(tpot_ms: float | None, steps: Mapping[WorkerId, StepCoefficients]) -> str:
    """A note for operators on a configured TPOT target that no worker can meet; empty where one can, or nothing was
    measured. `steps`: the coefficients of the workers that decode."""
    if tpot_ms is None or not steps:
        return ""
    alone_ms = {worker_id: each.ms_of(0, 0, 1, 0) for worker_id, each in steps.items()}
    fastest = min(alone_ms, key=lambda worker_id: alone_ms[worker_id])
    if tpot_ms >= alone_ms[fastest]:
        return ""
    return (
        f"slo.tpot_ms is {tpot_ms:g}, and a decode step of one sequence takes {alone_ms[fastest]:.3g} ms on {fastest}: "
        "no answer can meet it, so it counts for nothing"
    )
