"""Waiting for a state without an event loop."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 20.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Until the condition holds; `what` is the error where it does not come to that."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
