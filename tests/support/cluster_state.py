"""Waits for states that a cluster reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from disagg.client import AsyncClient, ClusterState

POLL_S = 0.02


async def until_counts(
    client: AsyncClient, count: Callable[[ClusterState], object], expected: object, timeout_s: float = 20.0
) -> None:
    """What is counted in the cluster's state comes to what is expected: workers report now and then."""
    for _ in range(round(timeout_s / POLL_S)):
        counts = count(await client.cluster_state())
        if counts == expected:
            break
        await asyncio.sleep(POLL_S)
    assert counts == expected


def requests_of(state: ClusterState) -> tuple[int, int]:
    """(queued, running)."""
    return state.queued_requests, state.running_requests
