"""The content of a process of a cluster, a worker (`worker_host.py`) or the gateway (`gateway_host.py`), and its run as
a child process of the launcher without Ray.

    host = WorkerHost(config, resolve, secret) or GatewayHost(spec, resolve, secret)
    host.start();  ...  host.crashed or host.rejected?  ...;  host.stop()

    child process: configuration on standard input -> host.start() -> SIGTERM or the parent's end -> host.stop()

Both launchers use hosts: the child processes of `processes.py` and the actors of `on_ray/host_actor.py`. A host reports
to the controller by itself, also when it cannot start; `resolve` returns where the controller is now. Exit status of a
child process: 0 after a stop, or when the controller rejected it; 1 when the start failed; 3 when the running process
broke.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from disagg.cluster.system.children import read_config, terminate_when_orphaned
from disagg.cluster.system.logs import setup_logging
from disagg.cluster.system.process_tools import StopFlag, Stopped, age_s
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.blocking_stream import Resolve
from disagg.proto.messages import StartPhase

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""Seconds that running work may take to end when a process is stopped."""


class StartError(RuntimeError):
    """A host could not start. Its log has the reason with its traceback, and it was reported to the controller."""


class Host(Protocol):
    """The content of a process: a worker or a gateway."""

    crashed: threading.Event
    """Set when the process can no longer work, and should end with a fault."""
    rejected: threading.Event
    """Set when the controller rejected it: the process should end."""

    def start(self) -> None:
        """Start, and block until it can be used. Raises `StartError`; then only the process is left, which should
        end."""
        ...

    def stop(self) -> None:
        """Stop, and block until all of its resources are freed."""
        ...


C = TypeVar("C", bound=msgspec.Struct)

EXIT_START_FAILED = 1
EXIT_CRASHED = 3
POLL_S = 0.2


class ChildConfig(msgspec.Struct, Generic[C], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message to a child process on its standard input."""

    content: C
    controller: str
    """Address of the controller, host:port."""
    secret: ClusterSecret
    """Secret of the cluster."""
    ordered_s: float | None = None
    """Time at which the process was ordered, by the monotonic clock of this machine."""


Phases = tuple[StartPhase, ...]


def first_phases(ordered_s: float | None, loaded_s: float, began_s: float, now: float) -> Phases:
    """Phases of a start until our code runs.

    Args:
        ordered_s: time of the order; None where it is not known.
        loaded_s: time at which the template of the process had loaded; 0 without a template.
        began_s: time at which the process existed.
        now: present time; all four by one clock, in seconds.
    """
    code = StartPhase("code", max(0.0, now - began_s))
    if ordered_s is None:
        return (code,)
    template_s = min(max(0.0, loaded_s - ordered_s), max(0.0, began_s - ordered_s))
    waited = (StartPhase("template", template_s),) if loaded_s else ()
    return (*waited, StartPhase("launch", max(0.0, began_s - ordered_s - template_s)), code)


def run_child(
    kind: type[C], make_host: Callable[[C, Resolve, ClusterSecret, Phases], Host], loaded_s: float = 0.0
) -> int:
    """Be a child process with this configuration type and content; returns the exit status. `loaded_s`: as in
    `first_phases`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops us
    stop = StopFlag(signal.SIGTERM)
    setup_logging(os.environ)
    try:
        with stop.interruptible():
            config = read_config(ChildConfig[kind])  # type: ignore[valid-type]  # a type argument at run time
            terminate_when_orphaned()
            now = time.monotonic()
            phases = first_phases(config.ordered_s, loaded_s, now - age_s(), now)
            host = make_host(config.content, lambda: config.controller, config.secret, phases)
            host.start()
    except Stopped:
        return 0
    except Exception as error:
        if not isinstance(error, StartError):  # which the host has logged
            logger.exception("could not start")
        return EXIT_START_FAILED
    while not (stop.wait(POLL_S) or host.crashed.is_set() or host.rejected.is_set()):
        pass
    crashed = host.crashed.is_set()
    host.stop()
    return EXIT_CRASHED if crashed else 0
