"""How long a process stood still. Pure but for the clocks that it is given."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two readings of the clock by the thread."""
STILL_S = 1.0
"""Seconds by which a reading must be late for the process to have stood still, or to have been busy."""
BUSY_SHARE = 0.1
"""Share of that time from which on the process counts as busy: the time for which it ran, divided by the whole."""


class StillTime:
    """How long a process stood still, from looks at its clocks. Pure but for these.

    Args:
        monotonic: seconds.
        cpu: seconds of processor time of the process.
    """

    def __init__(self, monotonic: Callable[[], float], cpu: Callable[[], float]) -> None:
        self._monotonic, self._cpu = monotonic, cpu
        self._lock = threading.Lock()
        self._is_watched = False
        self._looked = self._cpu_s = 0.0
        self.seconds = 0.0
        """Total time for which the process stood still."""
        self.on_stood_still: list[Callable[[float], None]] = []
        """Functions that are called with the seconds of each standstill, on the thread that found it; each must be
        short."""

    def begin(self) -> None:
        """Expect regular readings from now on."""
        with self._lock:
            self._looked, self._cpu_s = self._monotonic(), self._cpu()
            self._is_watched = True

    def end(self) -> None:
        """Expect no more readings."""
        self._is_watched = False

    def now(self) -> float:
        """Seconds for which the process ran, from an arbitrary origin. Any thread."""
        now = self._monotonic()
        if self._is_watched and now - self._looked > STILL_S:
            self.look()
            now = self._monotonic()
        return now - self.seconds

    def look(self) -> None:
        """Read the clocks, and leave out the time since the last reading if the process stood still."""
        with self._lock:
            now, cpu_s = self._monotonic(), self._cpu()
            late_s, used_s = now - self._looked - LOOK_S, cpu_s - self._cpu_s
            self._looked, self._cpu_s = now, cpu_s
            if late_s <= STILL_S or used_s > BUSY_SHARE * late_s:
                return
            self.seconds += late_s
        logger.warning(
            "this process stood still for %.1f s (it was stopped, or its machine was): "
            "this time is not counted for timeouts",
            late_s,
        )
        for tell in list(self.on_stood_still):
            try:
                tell(late_s)
            except Exception:  # of a loop that has just ended, or a bug: the clock must go on
                logger.exception("one of those that wait for the clock could not be told")
