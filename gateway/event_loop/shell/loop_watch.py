"""Measures the turns of the gateway's event loop, and finds what it does in the long ones.

    event loop ──select──> TimedSelector: two readings of the clock a turn ──> LoopTimes
    LoopWatch, a thread: 40 looks a second; a turn above 50 ms ──> a warning with the request and the place in the code

A turn counts by the wall clock: work of ours, and time without a processor or without the interpreter's lock. The
warning has the CPU time of the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

from typing_extensions import override

from disagg.gateway.event_loop.loop_times import LIMITS_S, LoopTimes
from disagg.proto.clock.process_clock import process_clock

logger = logging.getLogger(__name__)

MAX_EVENTS = 64
"""Maximum number of sockets that one turn serves: each may take some 20 us, and thousands of connections may end at
once."""
LOOK_S = 0.025
"""Seconds between two samples: half of the duration that is logged, so that such a turn is sampled while it lasts."""
_PACKAGE = "/disagg/"


class TimedSelector(selectors.DefaultSelector):
    """The loop's selector; a turn is the time between two calls of `select`. If more sockets are ready than
    `MAX_EVENTS`, each call returns another part of them; the others are ready in the next call too."""

    def __init__(self) -> None:
        super().__init__()
        self.times = LoopTimes()
        self._now = process_clock().now
        self._first = 0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        times = self.times
        if times.began is not None:
            now = self._now()
            if (turn_s := now - times.began) > LIMITS_S[0]:
                times.turn(turn_s, now)
            times.began = None
        ready = super().select(timeout)
        if len(ready) > MAX_EVENTS:
            ready = self._some(ready)
        times.num_turns += 1
        times.began = self._now()
        return ready

    def _some(self, ready: list[tuple[selectors.SelectorKey, int]]) -> list[tuple[selectors.SelectorKey, int]]:
        first = self._first % len(ready)
        self._first = first + MAX_EVENTS
        return (ready[first:] + ready[:first])[:MAX_EVENTS]


class Sight(NamedTuple):
    """What the loop was doing at a sample within a long turn."""

    turn: int
    turn_s: float
    doing: str
    cpu_s: float
    """CPU seconds of the loop's thread, from the sample before this turn was first seen."""


class LoopWatch:
    """Owner of the sampling thread. Start and stop it on the loop's thread.

    Args:
        times: of the running loop.
    """

    def __init__(self, times: LoopTimes) -> None:
        self.times = times
        self._now = process_clock().now
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._loop_thread)
        self._cpu_s = 0.0
        self._sight: Sight | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that samples the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the sampling thread. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def state(self) -> tuple[float, str]:
        """The duration of the present turn and the place where it was sampled; may be called on any thread."""
        sight, turn = self._sight, self.times.num_turns
        return self.times.turn_s(self._now()), sight.doing if sight is not None and sight.turn == turn else ""

    def look(self) -> None:
        """Sample what the loop does; a long turn that has ended since the last sample is logged."""
        before, turn, turn_s = self._sight, self.times.num_turns, self.times.turn_s(self._now())
        cpu_s = time.clock_gettime(self._cpu_clock)
        used_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        if before is not None and before.turn != turn:
            self._report(before)
            before = self._sight = None
        if turn_s > LOOK_S:
            used_s += before.cpu_s if before is not None else 0.0
            self._sight = Sight(turn, turn_s, self._doing(), used_s)

    def _report(self, sight: Sight) -> None:
        if sight.turn_s > LIMITS_S[-1]:
            logger.warning(
                "event loop blocked for at least %.0f ms (%.0f ms CPU) by %s; all streams waited",
                sight.turn_s * 1000,
                min(sight.cpu_s, sight.turn_s) * 1000,
                sight.doing,
            )

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # a fault here must not end the watch
                logger.exception("sampling the event loop failed; next sample in 25 ms")

    def _doing(self) -> str:
        task: asyncio.Task[Any] | None = asyncio.current_task(self._loop)
        name = "a callback" if task is None else task.get_name()
        frame = sys._current_frames().get(self._loop_thread)
        return f"{name} in {_place(frame)}"


def name_task(request_id: str) -> None:
    """Name the running task by its request, for the warnings."""
    task = asyncio.current_task()
    if task is not None:
        task.set_name(f"request {request_id}")


def _place(frame: FrameType | None) -> str:
    """The innermost function of this package, or the innermost of all if there is none."""
    innermost = frame
    while frame is not None and _PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "unknown code"
    code = found.f_code
    return f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{found.f_lineno})"
