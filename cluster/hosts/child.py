"""The life of a child process of the launcher without Ray, the same for workers and the gateway:

    configuration on standard input -> start -> wait for SIGTERM or the parent's death -> stop

Whether it started is told to the controller, not to the parent. Exit status: 0 after a stop, or when the controller has
no use for it; 1 when the start failed; 3 when the running process broke.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from disagg.cluster.hosts.host import Host, StartError
from disagg.cluster.system.logs import setup_logging
from disagg.cluster.system.process_tools import StopFlag, Stopped, read_config, terminate_when_orphaned
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.connections.blocking_stream import Resolve

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=msgspec.Struct)

EXIT_START_FAILED = 1
EXIT_CRASHED = 3
POLL_S = 0.2


class ChildConfig(msgspec.Struct, Generic[C], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a child process reads."""

    content: C
    controller: str
    """host:port."""
    secret: ClusterSecret
    """Of the cluster."""


def run_child(kind: type[C], make_host: Callable[[C, Resolve, ClusterSecret], Host]) -> int:
    """Be a child process with this configuration type and content; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it tells us
    stop = StopFlag(signal.SIGTERM)
    setup_logging(os.environ)
    try:
        with stop.interruptible():
            config = read_config(ChildConfig[kind])  # type: ignore[valid-type]  # mypy knows no type arguments at run time
            terminate_when_orphaned()
            host = make_host(config.content, lambda: config.controller, config.secret)
            host.start()
    except Stopped:
        return 0
    except Exception as error:
        if not isinstance(error, StartError):  # which the host has logged
            logger.exception("could not start")
        return EXIT_START_FAILED
    while not (stop.wait(POLL_S) or host.crashed.is_set() or host.unwanted.is_set()):
        pass
    crashed = host.crashed.is_set()
    host.stop()
    return EXIT_CRASHED if crashed else 0
