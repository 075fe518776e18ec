"""This process's connection to Ray: the interface, and what its two kinds share.

    PrivateSession (`private.py`)   folder, environment, ray.init("local") .. close: Ray ends, its processes, its folder
    JoinedSession (`joined.py`)     token, one call to the cluster, ray.init(address) .... close: this process leaves

No signal may raise inside Ray: its compiled code turns the exception into another one, or crashes. A start is ended
between calls of Ray, each of which is short but `ray.init`.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from disagg.cluster.on_ray.store import NAMESPACE
from disagg.cluster.system.children import LaunchError

INIT_OPTIONS: Final[dict[str, Any]] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "warning"}
"""Options of every `ray.init`."""


class Session(Protocol):
    """A connection to Ray."""

    is_open: bool
    """Whether Ray can be called. Set by the session itself."""

    def open(self) -> None:
        """Connect; blocks, also where a signal comes. Raises `LaunchError`."""
        ...

    def settle(self) -> None:
        """Note that everything that is started in this Ray is running."""
        ...

    def close(self) -> None:
        """Remove all that is ours in this process, and all that `open` started. Idempotent."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether Ray's head can be called. Calls to a head whose store was killed would wait for it, for a day."""
        ...


def refuse_if_connected() -> None:
    """Raise `LaunchError` if this process is in a Ray cluster already."""
    import ray

    if ray.is_initialized():
        raise LaunchError("this process is already connected to a Ray cluster")


def be_quiet() -> None:
    """Suppress output that Ray's nodes publish, such as a page about each process that died: the controller reports it.
    Lasts as long as this process; there is no public way."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *arguments, **options: None


@contextmanager
def signals_stay_ours() -> Iterator[None]:
    """Keeps `ray.init` from handling the signals of this process.

    By itself it exits in the middle of what it does at a SIGTERM, leaves a handler behind that prints a stack, and
    starts its servers in our process group, where `timeout` or a service manager ends them under our hands: Ray's
    client then aborts this process. There is no public way to prevent that.
    """
    import ray

    services, utils = ray._private.services, ray._private.utils
    popen, set_handler = services.ConsolePopen, utils.set_sigterm_handler
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    utils.set_sigterm_handler = lambda handler: None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = popen, set_handler
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
