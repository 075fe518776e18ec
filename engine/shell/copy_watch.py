"""Waits for the copies out of the cache that a device makes, so that the engine thread need not.

    engine thread    `Gathering` ──> watch()
    this thread      waits, takes the checksum ──> `Gathered` to the asyncio side, at once
                     an error                  ──> `GatherFailed` to the engine, which ends the sequence, or the worker

Copies are on one stream, so they are waited for in their order. The thread is started with the first copy: a worker on
a CPU has none. A buffer is kept by its copy until that is over, whatever has become of its pair.

A copy is made behind the steps that were launched before it, so the time for which it is waited for counts from the end
of the last of these. A device or rank that hangs shows by that time as it does by the length of a step, also where no
step is under way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from disagg.engine.commands import Gathered, GatherFailed, Gathering


@dataclass(slots=True)
class _Watched:
    gathering: Gathering
    num_steps_before: int
    since: float = 0.0
    """When the wait began: that for this copy, or the last end of a step before it, if that was later."""


class CopyWatch:
    """Owner: the engine thread, whose copies these are; `num_open` and `waiting_s` may be read by any.

    Args:
        answer: called on this class's thread with each `Gathered`.
        post: called there with each `GatherFailed`.
        clock: the time in seconds; any thread.
    """

    def __init__(
        self,
        answer: Callable[[Gathered], None],
        post: Callable[[GatherFailed], None],
        clock: Callable[[], float],
    ) -> None:
        self._answer = answer
        self._post = post
        self._clock = clock
        self._queue: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_begun = self._num_ended = 0
        self._num_steps = 0
        self._waited: _Watched | None = None
        """The copy that is waited for. Set by this class's thread."""

    @property
    def num_open(self) -> int:
        """Copies that are not answered."""
        return self._num_begun - self._num_ended

    def waiting_s(self) -> float:
        """Seconds for which the oldest copy has been waited for, with all steps before it computed; 0 without any."""
        waited = self._waited
        return 0.0 if waited is None else self._clock() - waited.since

    def steps_ended(self, num_steps: int) -> None:
        """So many steps have ended since the start."""
        waited = self._waited
        if waited is not None and self._num_steps < min(num_steps, waited.num_steps_before):
            waited.since = self._clock()
        self._num_steps = num_steps

    def watch(self, gathering: Gathering, num_steps_before: int = 0) -> None:
        """Answer it when it is done. `num_steps_before`: how many steps were launched since the start."""
        self._num_begun += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-copies", daemon=True)
            self._thread.start()
        self._queue.put(_Watched(gathering, num_steps_before))

    def stop(self, timeout_s: float) -> bool:
        """End the thread when all copies are over; whether it ended in time. No copy may be given from now on."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (watched := self._queue.get()) is not None:
            watched.since = self._clock()
            self._waited = watched
            try:
                self._finish(watched.gathering)
            finally:
                self._num_ended += 1
                self._waited = None
            del watched  # with its buffer; the next one may be long in coming

    def _finish(self, gathering: Gathering) -> None:
        key, seq = gathering.key, gathering.seq
        try:
            gathering.copying.wait()
            checksum = gathering.copying.checksum()
        except Exception as error:
            self._post(GatherFailed(key, seq, error))
        else:
            self._answer(Gathered(key, seq, ok=True, checksum=checksum, most_tokens=gathering.most_tokens))
