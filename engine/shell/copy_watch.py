"""Waits for the copies out of the cache that a device makes, so that the engine thread need not.

    engine thread    `Gathering` ──> watch()
    this thread      waits, takes the checksum ──> `Gathered` to the asyncio side, at once
                     an error                  ──> `GatherFailed` to the engine, which ends the sequence, or the worker

Copies are on one stream, so they are waited for in their order. The thread is started with the first copy: a worker on
a CPU has none. A buffer is kept by its copy until that is over, whatever has become of its pair.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from disagg.engine.commands import Gathered, GatherFailed, Gathering


class CopyWatch:
    """Owner: the engine thread, whose copies these are; `num_open` may be read by any.

    Args:
        answer: called on this class's thread with each `Gathered`.
        post: called there with each `GatherFailed`.
    """

    def __init__(self, answer: Callable[[Gathered], None], post: Callable[[GatherFailed], None]) -> None:
        self._answer = answer
        self._post = post
        self._queue: queue.SimpleQueue[Gathering | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_begun = self._num_ended = 0

    @property
    def num_open(self) -> int:
        """Copies that are not answered."""
        return self._num_begun - self._num_ended

    def watch(self, gathering: Gathering) -> None:
        """Answer it when it is done."""
        self._num_begun += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-copies", daemon=True)
            self._thread.start()
        self._queue.put(gathering)

    def stop(self, timeout_s: float) -> bool:
        """End the thread when all copies are over; whether it ended in time. No copy may be given from now on."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (gathering := self._queue.get()) is not None:
            self._finish(gathering)
            self._num_ended += 1
            del gathering  # with its buffer; the next one may be long in coming

    def _finish(self, gathering: Gathering) -> None:
        key, seq = gathering.key, gathering.seq
        try:
            gathering.copying.wait()
            checksum = gathering.copying.checksum()
        except Exception as error:
            self._post(GatherFailed(key, seq, error))
        else:
            self._answer(Gathered(key, seq, ok=True, checksum=checksum, most_tokens=gathering.most_tokens))
