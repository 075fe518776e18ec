"""A call that must return, or the process ends."""

from __future__ import annotations

import logging
import threading

import pytest

from disagg.engine.kv_transfer.transports.process_end import return_or_exit

NOBODY_WAITS_S = 3600.0


def test_a_call_that_returns_ends_nothing() -> None:
    made: list[str] = []
    threads = set(threading.enumerate())
    return_or_exit(lambda: made.append("call"), "the call", NOBODY_WAITS_S, lambda: made.append("exit"))
    assert made == ["call"]
    for thread in set(threading.enumerate()) - threads:
        thread.join()  # the timer was cancelled


def test_a_call_that_raises_ends_nothing() -> None:
    def call() -> None:
        raise RuntimeError("aborted already")

    threads = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="aborted already"):
        return_or_exit(call, "the call", NOBODY_WAITS_S, lambda: pytest.fail("ended"))
    for thread in set(threading.enumerate()) - threads:
        thread.join()


def test_a_call_that_hangs_ends_the_process_loudly(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    with caplog.at_level(logging.CRITICAL):
        return_or_exit(ended.wait, "the abort", 0.001, ended.set)
    assert ended.is_set()
    assert [record.getMessage() for record in caplog.records] == [
        "the abort did not return in 0.001 s; it may still write to KV buffers: ending the process"
    ]
