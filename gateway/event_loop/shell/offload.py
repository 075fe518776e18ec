"""Work that is too long for the event loop runs on a few threads, in the order of `fair_order`.

    run ──small──> done at once on the event loop
     └───large──> waits for its tenant's turn ──> a thread ──> result
                     └─ OverloadedError, DeadlineError, or the caller is cancelled

A thread cannot be interrupted: work that was started runs to its end, and its bytes count until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from disagg.gateway.event_loop.fair_order import FairOrder, Work
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import DeadlineError

T = TypeVar("T")


class Offload:
    """Owner of the threads; used on one event loop.

    Args:
        num_threads: how many pieces of work run at a time; of one tenant, all but one.
        inline_bytes: work with an input up to this size runs on the event loop.
        max_bytes: of all inputs that wait or are worked on; beyond that work is refused.
        max_tenant_bytes: the same for one tenant.
        what: the inputs are, for errors.
        clock: monotonic seconds, the clock of the deadlines.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        inline_bytes: int,
        max_bytes: int,
        max_tenant_bytes: int,
        what: str = "prompts",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._inline_bytes = inline_bytes
        self._order = FairOrder(max_bytes, max_tenant_bytes, max(1, num_threads - 1), what)
        self._clock = process_clock().now if clock is None else clock
        self._num_idle = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="offload")
        self._waiting: dict[Work, tuple[Callable[[], Any], asyncio.Future[Any]]] = {}
        self._running: dict[Work, asyncio.Future[Any]] = {}

    @property
    def num_waiting(self) -> int:
        """Pieces of work that wait for a thread."""
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs that wait or are worked on."""
        return self._order.num_bytes

    def is_inline(self, num_bytes: int) -> bool:
        """Whether work with an input of this size runs on the event loop."""
        return num_bytes <= self._inline_bytes

    async def run(
        self,
        work: Callable[[], T],
        *,
        tenant: str,
        num_bytes: int,
        deadline: float | None = None,
    ) -> T:
        """Run `work` in its tenant's turn; returns or raises what it does.

        Args:
            work: touches nothing of the event loop.
            tenant: whose turn it takes.
            num_bytes: size of its input.
            deadline: it is not started later.

        Raises:
            OverloadedError: if too many bytes wait, of the tenant or of all.
            DeadlineError: if the deadline passed before its turn.
        """
        if self.is_inline(num_bytes):
            return work()
        entry = Work(tenant, num_bytes, deadline)
        self._order.offer(entry)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[entry] = (work, result)
        self._start_next()
        try:
            return await result
        finally:
            if self._order.cancel(entry):  # the caller left before its turn
                del self._waiting[entry]

    def close(self) -> None:
        """Cancel waiting work and wait for running work. Call it when no more work comes. Idempotent."""
        for entry, (_, result) in self._waiting.items():
            self._order.cancel(entry)
            result.cancel()
        self._waiting.clear()
        self._executor.shutdown()

    def _start_next(self) -> None:
        while self._num_idle:
            entry, late = self._order.take(self._clock())
            for dropped in late:
                _, result = self._waiting.pop(dropped)
                if not result.done():
                    result.set_exception(DeadlineError("the deadline passed while the request waited for a thread"))
            if entry is None:
                return
            work, self._running[entry] = self._waiting.pop(entry)
            self._num_idle -= 1
            self._executor.submit(self._work, asyncio.get_running_loop(), entry, work)

    def _work(self, loop: asyncio.AbstractEventLoop, entry: Work, work: Callable[[], Any]) -> None:
        """Run `work` on a thread and pass its result to the event loop."""
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # for the caller, whatever it is
            error = raised
        try:
            loop.call_soon_threadsafe(self._ended, entry, value, error)
        except RuntimeError:  # the loop was closed meanwhile: there is no waiter
            return

    def _ended(self, entry: Work, value: Any, error: BaseException | None) -> None:
        result = self._running.pop(entry)
        self._num_idle += 1
        self._order.finished(entry)
        if not result.done():
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)
        self._start_next()
