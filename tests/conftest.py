"""What holds for every test: nothing that it started is left when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.leftovers import Snapshot, leftovers, mark_this_run, pending_tasks

GRACE_S = 30.0
"""How long an end may take to be seen: a thread that returns, a process that is reaped, a task of gRPC's."""


def pytest_configure() -> None:
    mark_this_run()


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
