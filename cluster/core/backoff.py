"""Pauses before a process that ended is started again. Pure.

The controller's own restarts take `next_start`. Ray restarts an actor within a second, for ever, and the controller
does not see it: a worker that dies while it loads would load for ever, at the cost of its neighbours. So an actor's
starts are recorded, and one that follows too many short runs begins with the pause of `next_actor_start`.
"""

from __future__ import annotations

import msgspec

STABLE_S = 60.0
"""Seconds after which a running process counts as healthy: its next fault is a first one."""
FIRST_PAUSE_S = 0.5
"""Seconds before the start that follows the loss of a healthy process."""
MAX_BACKOFF_S = 30.0
FREE_STARTS = 2
"""Number of starts of an actor in a row without a pause: the first one, and the first one after a fault."""


def next_start(num_faults: int, ready_for_s: float | None) -> tuple[int, float]:
    """Consequence of a process's fault: the number of faults in a row, this one included, and the pause before the next
    start.

    Args:
        num_faults: number of faults before it.
        ready_for_s: how long the process was ready until now; None if it was not.
    """
    num_faults = faults_in_a_row(num_faults, ready_for_s)
    was_fine = ready_for_s is not None and num_faults == 1
    return num_faults, FIRST_PAUSE_S if was_fine else backoff_s(num_faults)


def backoff_s(num_faults: int) -> float:
    """Pause after 1, 2, 3, ... faults in a row: 1, 2, 4, 8, 16, 30 s. After a process that had been healthy the first
    pause is `FIRST_PAUSE_S` instead (see `next_start`), so that the pauses are 0.5, 2, 4 .. 30 s."""
    return min(2.0 ** (num_faults - 1), MAX_BACKOFF_S)


def faults_in_a_row(num_before: int, ready_for_s: float | None) -> int:
    """Number of faults in a row, including the present one.

    Args:
        num_before: number of faults before it.
        ready_for_s: how long the process was ready until now; None if it was not.
    """
    return 1 if ready_for_s is not None and ready_for_s >= STABLE_S else num_before + 1


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """The record of the starts of one process."""

    count: int = 0
    """Number of starts in a row that each followed a short run."""
    last: float = 0.0
    """Time at which the last start began, after its pause; seconds of the wall clock, which outlives processes."""


def next_actor_start(earlier: Starts, now: float) -> tuple[Starts, float]:
    """The record of a start that is about to begin, and the pause before it, in seconds."""
    is_short = 0.0 <= now - earlier.last < STABLE_S
    count = earlier.count + 1 if is_short else 1
    pause_s = min(2.0 ** (count - FREE_STARTS - 1), MAX_BACKOFF_S) if count > FREE_STARTS else 0.0
    return Starts(count=count, last=now + pause_s), pause_s
