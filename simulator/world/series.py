"""What a run looks like over time: queue, KV, workers, reuse, sampled at an interval."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """The cluster at one moment."""

    time_s: float
    num_queued: int
    """Requests that wait for a worker."""
    num_in_flight: int
    """Requests that were sent and have not ended."""
    kv_use: float
    """Share of all KV blocks that sequences hold or are promised."""
    kv_cached: float
    """Share of all KV blocks that hold reusable content only."""
    num_up: int
    """Workers that serve."""
    num_starting: int
    num_draining: int
    num_busy: int
    """Workers in a step, or with sequences that decode."""
    prompt_tokens: int
    """Of all requests that were answered since the start."""
    cached_tokens: int
    """Of these, those that the worker that computed the prompt had."""
    num_transfers: int
    """Under way."""
