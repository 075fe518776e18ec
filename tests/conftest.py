"""What holds for every test: nothing that it started is left when it ends. And how garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator

import pytest

from tests.support.leftovers import Snapshot, leftovers, mark_this_run, pending_tasks

GRACE_S = 30.0
"""How long an end may take to be seen: a thread that returns, a process that is reaped, a task of gRPC's."""


def pytest_configure() -> None:
    mark_this_run()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for while tests are collected, which makes none and took half of the time; nor among what
    there is then, modules and tests, while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Fails a test that leaves a thread, a task of ours or a process behind.

    Set up first, so torn down after everything else. What a fixture of a wider scope started does not count.
    """
    before = Snapshot.take()
    with pending_tasks(GRACE_S) as tasks:
        yield
    left = tasks + leftovers(before, GRACE_S)
    if left:
        pytest.fail("left over: " + "; ".join(left), pytrace=False)
