"""The life of a child process of the launcher without Ray, the same for workers and the gateway:

    configuration on standard input -> start -> one JSON line on standard output
    -> wait for SIGTERM or the parent's death -> stop

Exit status: 0 after a stop, 1 when the start failed, 3 when the running process broke.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import TypeVar

import msgspec

from disagg.cluster.host import Host
from disagg.cluster.process_tools import ParentLine, StopFlag, Stopped, setup_logging, terminate_when_orphaned

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=msgspec.Struct)

EXIT_START_FAILED = 1
EXIT_CRASHED = 3
CRASH_POLL_S = 0.2


def run_child(kind: type[C], make_host: Callable[[C], Host]) -> int:
    """Be a child process with this configuration type and content; returns the exit status."""
    line = ParentLine()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it tells us
    stop = StopFlag(signal.SIGTERM)
    setup_logging()
    try:
        with stop.interruptible():
            config = line.read(kind)
            terminate_when_orphaned()
            host = make_host(config)
            info = host.start()
    except Stopped:
        return 0
    except Exception as error:
        logger.exception("could not start")
        line.failed(error)
        return EXIT_START_FAILED
    line.ready(info)
    while not stop.wait(CRASH_POLL_S) and not host.crashed.is_set():
        pass
    crashed = host.crashed.is_set()
    host.stop()
    return EXIT_CRASHED if crashed else 0
