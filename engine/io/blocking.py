"""Blocking calls of the asyncio thread, each on a daemon thread of its own.

The loop's default executor will not do for waits that a peer can prolong: it has a handful of threads, so that a few
absent peers would delay all transfers, and neither a loop nor a process ends before its threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Closable(Protocol):
    """Resource that `open_on_thread` opens."""

    def close(self) -> None:
        """Release it; may block."""
        ...


C = TypeVar("C", bound=Closable)


async def call_on_thread(name: str, function: Callable[[], T]) -> T:
    """The result of `function()`, which runs on a new thread. It goes on if the caller is cancelled.

    Raises:
        RuntimeError: if no thread can be started; and whatever `function` raises.
    """
    return await asyncio.wrap_future(_start(name, function))


async def open_on_thread(name: str, open_it: Callable[[], C]) -> C:
    """Await `open_it()` on a thread of its own. If the caller was cancelled meanwhile, what is opened later is
    closed."""
    call = _start(name, open_it)
    try:
        return await asyncio.wrap_future(call)
    except asyncio.CancelledError:
        call.add_done_callback(lambda done: _close_late(name, done))
        raise


def _start(name: str, function: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled: a blocking call cannot be interrupted
    threading.Thread(target=_run, args=(function, future), name=name, daemon=True).start()
    return future


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _close_late(name: str, call: Future[C]) -> None:
    if call.exception() is None:
        _start(name, call.result().close)
