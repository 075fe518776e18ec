"""What the routers of several models show together."""

from __future__ import annotations

from disagg.router.all_routers import together
from disagg.router.api import BackgroundView, ClusterView


def test_what_waits_behind_interactive_requests_is_told_apart_with_several_models_too() -> None:
    """Batches start lines by it: queued lines would else count as interactive requests, and prompts of lines not."""
    views = [
        ClusterView((), num_queued=3, num_running=4, background=BackgroundView(2, 1, 300)),
        ClusterView((), num_queued=5, num_running=6, background=BackgroundView(5, 0, 70)),
    ]
    found = together(views)
    assert (found.num_queued, found.num_running, found.background) == (8, 10, BackgroundView(7, 1, 370))
    assert together(views[:1]) is views[0]
