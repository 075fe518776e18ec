"""Makes gRPC work, and work fast, with the standard library that Locust has patched for gevent.

gRPC's own integration (`init_gevent`) waits for each message in a native thread of gevent's pool and hands it to the
greenlet that reads the stream. What a message costs is mostly that: a thread is woken, takes the interpreter, and wakes
the event loop. Two things make it cheaper, by about a third together:

- a pool that does nothing but hand over calls and results (`HandOverPool`), set on the hub, as gevent allows;
- gRPC's older way to poll its sockets, in the thread that waits. The newer one polls in threads of its own, so that
  each message goes through one thread more. A gRPC without this switch logs that and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import gevent
from gevent import monkey
from gevent.hub import Waiter
from gevent.threadpool import ThreadPool

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")  # read when gRPC is loaded

from grpc.experimental import gevent as grpc_gevent  # type: ignore[attr-defined]

T = TypeVar("T")

_start_new_thread = monkey.get_original("_thread", "start_new_thread")
_SimpleQueue = monkey.get_original("_queue", "SimpleQueue")


class HandOverPool(ThreadPool):
    """A thread pool whose `apply` costs little: a native queue to a thread, a callback back to the event loop.

    Threads are made as calls need them, stay, and end with the process. Used from the hub's thread only.
    """

    def __init__(self) -> None:
        hub = gevent.get_hub()
        super().__init__(maxsize=hub.threadpool_size, hub=hub)
        self._loop = hub.loop
        self._idle: list[Any] = []
        """Queues of the threads that wait for a call."""

    def apply(
        self, func: Callable[..., T], args: Sequence[Any] | None = None, kwds: Mapping[str, Any] | None = None
    ) -> T:
        """Make the call in a native thread, and return its result or raise its exception; other greenlets run
        meanwhile."""
        tasks = self._idle.pop() if self._idle else self._new_thread()
        waiter: Waiter[Any] = Waiter()
        tasks.put((func, args or (), kwds or {}, waiter))
        try:
            result, error = waiter.get()
        except BaseException:  # this greenlet was killed: the thread ends when its call does, its result is dropped
            waiter.clear()
            tasks.put(None)
            raise
        self._idle.append(tasks)
        if error is not None:
            raise error
        found: T = result
        return found

    def _new_thread(self) -> Any:
        tasks = _SimpleQueue()
        _start_new_thread(self._work, (tasks,))
        return tasks

    def _work(self, tasks: Any) -> None:
        """Run the loop of one thread, which ends at None."""
        run_in_loop = self._loop.run_callback_threadsafe
        while (task := tasks.get()) is not None:
            func, args, kwds, waiter = task
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = func(*args, **kwds), None
            except BaseException as error:  # raised by `apply`
                outcome = None, error
            run_in_loop(waiter.switch, outcome)
            del task, func, args, kwds, waiter, outcome


def init_grpc() -> None:
    """Let blocked gRPC calls wait in greenlets. To be called once per process, after gevent's patches and before the
    first channel."""
    gevent.get_hub().threadpool = HandOverPool()
    grpc_gevent.init_gevent()
