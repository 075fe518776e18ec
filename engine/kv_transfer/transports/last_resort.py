"""What to do when evidence cannot come: end the process.

A buffer under transfer is free again when the transport is known to have let go of it. If the call that makes it let
go hangs, no timeout gives that knowledge, and a worker that went on could answer with other requests' KV. Whoever
watches the process starts it again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
EXIT_STATUS = 3


def _exit_process() -> None:
    logging.shutdown()
    os._exit(EXIT_STATUS)


def return_or_exit(
    call: Callable[[], object],
    what: str,
    timeout_s: float = ABORT_TIMEOUT_S,
    exit_process: Callable[[], None] = _exit_process,
) -> None:
    """Make a call that must return in time; otherwise the process ends, from another thread. The call must not hold
    the interpreter's lock while it hangs."""

    def give_up() -> None:
        logger.critical("%s did not return in %g s; ending the process", what, timeout_s)
        exit_process()

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        call()
    finally:
        timer.cancel()
