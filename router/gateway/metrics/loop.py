"""The metrics of the gateway's own event loop and of its threads for long work; see docs/observability.md."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import Metric

from disagg.router.gateway.event_loop.loop_times import LIMITS_S, LoopTimes
from disagg.router.gateway.event_loop.offload import Offload
from disagg.router.gateway.metrics.families import counter, gauge


def loop_families(times: LoopTimes, offload: Offload | None) -> Iterator[Metric]:
    """All of them."""
    yield gauge(
        "disagg_gateway_loop_longest_seconds",
        "Longest turn of the gateway's event loop above 5 ms: of the last minute or two, and since the start.",
        ("window",),
        [(("minute",), times.recent_longest_s(time.monotonic())), (("start",), times.longest_s)],
    )
    yield counter(
        "disagg_gateway_loop_long_turns",
        "Turns of the gateway's event loop that took longer than so many seconds.",
        ("longer_than",),
        [((f"{limit_s:g}",), count) for limit_s, count in zip(LIMITS_S, times.num_long, strict=True)],
    )
    yield gauge(
        "disagg_gateway_offloaded_bytes",
        "Size of the prompts that are tokenized on threads, or wait for that.",
        (),
        [((), 0 if offload is None else offload.num_bytes)],
    )
    yield gauge(
        "disagg_gateway_offloaded_waiting",
        "Prompts that wait for a thread to tokenize them.",
        (),
        [((), 0 if offload is None else offload.num_waiting)],
    )
