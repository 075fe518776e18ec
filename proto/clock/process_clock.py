"""The clock by which a process judges others: it counts only the time for which the process ran.

    process_clock().now()      seconds, like `time.monotonic`, less the time for which this process stood still
    AwakeLoop                  an event loop on that clock, so that all of its timeouts are, too

A machine is suspended or moved, a container is frozen, a process is stopped: afterwards everything that was waited for
is late at once, and nothing of it is anybody's fault. So whoever judges by time (a step that does not end, a lease, a
client that does not read, a start that takes too long) asks this clock. A client's deadline is its own and goes on
meanwhile: an owner of deadlines registers in `on_stood_still`, which gives the seconds to subtract.

A thread looks at the clock ten times a second. Where a look is late by more than `STILL_S`, and the process used hardly
any processor time in between, it stood still; if it did, it was busy, and that time counts. A process that found no
free core stood still as well. Reading the clock looks too, so that it does not matter which thread runs first
afterwards.

One for each process, as its time is; child processes begin with one of their own.
"""

from __future__ import annotations

import asyncio
import functools
import os
import selectors
import threading
import time

from typing_extensions import override

from disagg.proto.clock.still_time import LOOK_S, StillTime


class ProcessClock(StillTime):
    """The clock of this process, with a thread that reads it."""

    def __init__(self) -> None:
        super().__init__(time.monotonic, time.process_time)
        self._users = 0
        self._users_lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that reads the clock, unless it runs. It runs until `stop` was called as often as `start`.
        Until then it is the monotonic clock."""
        with self._users_lock:
            self._users += 1
            if self._thread is None:
                self._stopped = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stopped,), name="clock", daemon=True)
                self.begin()
                self._thread.start()

    def stop(self) -> None:
        """Undo one call of `start`; the last one ends the thread."""
        with self._users_lock:
            self._users -= 1
            if self._users or self._thread is None:
                return
            self.end()
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(LOOK_S):
            self.look()


@functools.cache
def process_clock() -> ProcessClock:
    """The clock by which this process judges others."""
    return ProcessClock()


os.register_at_fork(after_in_child=process_clock.cache_clear)


class AwakeLoop(asyncio.SelectorEventLoop):
    """Event loop on the process's clock: its timers and timeouts, and those of all libraries on it, use that clock."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self._awake = process_clock().now
        process_clock().start()

    @override
    def time(self) -> float:
        return self._awake()

    @override
    def close(self) -> None:
        if not self.is_closed():
            process_clock().stop()
        super().close()
