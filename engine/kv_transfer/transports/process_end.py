"""The last resort of transports whose library may write to KV buffers: the process ends, and is started again.

Only a library that has let go of a buffer proves that nothing writes to it any more. Where it does not let go in time,
no timeout gives that evidence, and a worker that went on could answer with other requests' KV.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from disagg.proto.clock.process_clock import process_clock

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
LONGEST_WAIT_S = 60.0
EXIT_STATUS = 3
"""Exit status of a process that `exit_process` ends."""


def exit_process() -> None:
    """End the process at once, from any thread."""
    logging.shutdown()
    os._exit(EXIT_STATUS)


def end_process(what: str, error: BaseException) -> None:
    """The device, or what serves it, cannot be used any more."""
    logger.critical("%s: ending the process", what, exc_info=error)
    exit_process()


def return_or_exit(
    call: Callable[[], object],
    what: str,
    timeout_s: float = ABORT_TIMEOUT_S,
    exit_process: Callable[[], None] = exit_process,
) -> None:
    """Make a call that must return in time; otherwise the process ends, from another thread. The call must not hold
    the interpreter's lock while it hangs."""

    clock, returned = process_clock().now, threading.Event()
    ends_at = clock() + timeout_s

    def watch() -> None:
        while (left_s := ends_at - clock()) > 0.0:
            if returned.wait(min(left_s, LONGEST_WAIT_S)):
                return
        logger.critical(
            "%s did not return in %g s; it may still write to KV buffers: ending the process", what, timeout_s
        )
        exit_process()

    threading.Thread(target=watch, name="return-or-exit", daemon=True).start()
    try:
        call()
    finally:
        returned.set()
