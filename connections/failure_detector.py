"""A failure detector: which processes are silent, and which are stuck in one step.

    watch ──> heartbeat, heartbeat, ... ──silent for too long, or one step of its engine lasts too long──> suspected
                    ^                                                                                        │
                    └──────────────────────── heartbeat, and not stuck ──────────────────────────────────────┘

A process that is stopped sends nothing, on connections that stay open. One whose engine hangs in a collective still
reports, with the time for which its engine has been in the step; a long prompt takes seconds too, so that limit is
larger, and follows what the worker itself predicts for the step where its processor is slow.

Pure. Each gateway (`router/shell/server.py`) and the controller (`cluster/control/supervisor.py`) have one. It is only
for processes that hang: one that ends breaks its connections, which gateways notice in `router/shell/worker_link.py`
and the controller in `cluster/control/service.py`; both then call `forget`.

Silence is counted by the clock of the listener's process (`proto/clock/`), which leaves out the time for which that
stood still. A listener that was busy heard nothing either, but that time counts: what arrived meanwhile waits to be
read. So a sweep that is late judges no silence, and the next one does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

SWEEP_S = 0.25
"""How often `FailureDetector.sweep` is to be called."""
_LATE_S = 2 * SWEEP_S
"""Seconds after the previous sweep from which on a sweep is late: its process was busy."""
_PATIENCE = 6.0
"""Largest duration of a step, as a multiple of its predicted duration."""
_MOST_PATIENCE = 20.0
"""Largest duration of a step as a multiple of the limit, whatever was predicted."""


@dataclass(slots=True)
class _Watched:
    last_seen: float
    stuck_after_s: float
    step_s: float = 0.0
    expected_s: float = 0.0
    doing: str = ""
    is_suspected: bool = False

    @property
    def is_stuck(self) -> bool:
        limit_s = self.stuck_after_s
        return self.step_s > max(limit_s, min(_PATIENCE * self.expected_s, _MOST_PATIENCE * limit_s))


class FailureDetector(Generic[K]):
    """Watches processes by key. Has one owner; all times are read from the clock of its process.

    Args:
        silent_after_s: silence that makes a process suspected; infinite for never.
        stuck_after_s: length of one step of its engine that does; infinite for never.
    """

    def __init__(self, silent_after_s: float, stuck_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._stuck_after_s = stuck_after_s
        self._watched: dict[K, _Watched] = {}
        self._swept_at = math.inf
        self._is_to_judge = False
        """Whether the next sweep judges silence even if it is late as well."""

    def __contains__(self, key: object) -> bool:
        return key in self._watched

    def watch(self, key: K, now: float, stuck_after_s: float | None = None) -> None:
        """Watch a process, which has just sent something. One that was watched before starts anew.

        Args:
            stuck_after_s: its own limit instead of the detector's.
        """
        limit_s = self._stuck_after_s if stuck_after_s is None else stuck_after_s
        self._watched[key] = _Watched(now, limit_s)

    def forget(self, key: K) -> None:
        """Stop watching a process. Does nothing for an unknown key."""
        self._watched.pop(key, None)

    def heartbeat(
        self, key: K, now: float, step_s: float | None = None, doing: str = "", expected_s: float = 0.0
    ) -> bool:
        """Note that a message of the process was received. Returns whether that ends a suspicion. Unknown keys are
        ignored.

        Args:
            step_s: seconds that its engine has been in its present step; None if the message does not say so.
            doing: what the engine does in it, for the log.
            expected_s: predicted duration of that step in seconds; 0 where no step lasts long.
        """
        watched = self._watched.get(key)
        if watched is None:
            return False
        watched.last_seen = now
        if step_s is not None:
            watched.step_s, watched.doing, watched.expected_s = step_s, doing, expected_s
        if not watched.is_suspected or watched.is_stuck:
            return False
        watched.is_suspected = False
        return True

    def sweep(self, now: float) -> list[tuple[K, str, bool]]:
        """The processes that are suspected from now on, each with the reason, such as `was unresponsive for 2.6 s`, and
        whether the reason is a step that does not end."""
        is_late = now > self._swept_at + _LATE_S
        judges_silence = self._is_to_judge or not is_late
        self._swept_at, self._is_to_judge = now, not judges_silence
        found = []
        for key, watched in self._watched.items():
            silence_s = now - watched.last_seen if judges_silence else 0.0
            if not watched.is_suspected and (why := self._why(watched, silence_s)):
                watched.is_suspected = True
                found.append((key, *why))
        return found

    def _why(self, watched: _Watched, silence_s: float) -> tuple[str, bool] | None:
        if silence_s >= self._silent_after_s:
            return f"was unresponsive for {silence_s:.1f} s", False
        if watched.is_stuck:
            doing = f" ({watched.doing})" if watched.doing else ""
            predicted = f", which was predicted to last {watched.expected_s:.0f} s" if watched.expected_s >= 1 else ""
            return f"has been busy for {watched.step_s:.0f} s{predicted}{doing}", True
        return None


def limit(seconds: float | None) -> float:
    """A limit from the configuration in seconds; infinite for None, which means never."""
    return math.inf if seconds is None else seconds
