"""A twin inside a simulated cluster: it looks at the simulated router's views, as the one of a real cluster does at its
gateway's, and its decisions take no virtual time."""

from __future__ import annotations

from collections.abc import Callable

from disagg.router.requests import events
from disagg.router.telemetry.recent_load import load_of
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.twin.comparison import Comparison
from disagg.simulator.twin.twin import LEAD_IN, MOST, Twin

LOOK_S = 5.0
"""Seconds between two looks."""
MAX_TRACES = MOST + LEAD_IN


def watch(
    cluster: SimulatedCluster, twin: Twin, on_comparison: Callable[[Comparison], None] = lambda comparison: None
) -> None:
    """Let a twin look at the cluster periodically until every request has ended."""
    gateway, loop = cluster.gateway, cluster.loop

    def look() -> None:
        if cluster.users.is_done:
            return
        core, now = gateway.core, loop.now
        comparison = twin.look(load_of(core.view(now), core.recent(MAX_TRACES), now))
        if comparison is not None:
            on_comparison(comparison)
            if comparison.is_change:
                gateway.handle(events.SetDecodes(comparison.chosen))
        loop.after(LOOK_S, look)

    loop.after(LOOK_S, look)
