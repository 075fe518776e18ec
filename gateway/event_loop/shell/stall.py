"""Notices that one step of a long task takes too long, for a fraction of what `asyncio.timeout` around each step costs:
one timer for all steps, which looks at the time when it fires and not at every step.

    async with StallWatch(timeout_s) as watch: ...      with watch: await write(...)      raises StalledError
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class StalledError(Exception):
    """A step took longer than allowed."""


class StallWatch:
    """Watches the steps of the task that enters it with `async with`; each `with` block is one step. Steps follow each
    other and do not overlap.

    Args:
        timeout_s: for one step.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: float | None = None
        """Time at which the running step began; None between steps."""
        self._stalled = False
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> None:
        """Start the time of a step."""
        self._since = self._loop.time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step. Raises `StalledError` if it took too long."""
        self._since = None
        # The task may have been cancelled from elsewhere too; then it stays cancelled.
        if self._stalled and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise StalledError from None

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._timeout_s
        if now < due:
            self._timer = self._loop.call_at(due, self._look)
            return
        self._stalled = True
        self._task.cancel()
