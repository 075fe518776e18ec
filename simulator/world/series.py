"""A run over time: queue, KV, workers, reuse, sampled at an interval."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """The state of the cluster at one moment."""

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
    """Number of workers that serve."""
    num_starting: int
    num_draining: int
    num_busy: int
    """Number of workers in a step, or with sequences that decode."""
    prompt_tokens: int
    """Prompt tokens of all requests that were answered since the start."""
    cached_tokens: int
    """Prompt tokens of these requests that the worker that computed the prompt had cached."""
    num_transfers: int
    """Number of KV transfers under way."""
