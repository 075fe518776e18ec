"""What a worker would load from its own tiers for a request, if that is quicker than computing it. Pure.

The worker decides by itself when the request is there (`engine/tiers/load_times.py`), and loads whatever is quicker.
Here a load counts only if it wins clearly, because what a worker reports is a little old.
"""

from __future__ import annotations

import math

from disagg.proto.block_hash import max_cached_tokens
from disagg.proto.messages import EXTENT_TOKENS, TierName
from disagg.router.placement.forecast import prefill_ms
from disagg.router.placement.placement import Candidate, Demand, FetchPlan
from disagg.router.workers.prefix_index import TierMatch
from disagg.router.workers.worker import Worker

_WON_BY, _WON_BY_MS = 1.1, 5.0
"""A load must take less than computing by this factor, and by these milliseconds."""


def fetch_plan(demand: Demand, candidate: Candidate, tiers: TierMatch) -> FetchPlan | None:
    """The load that saves most; None where none saves enough."""
    worker, cached, num_tokens = candidate.worker, candidate.cached_tokens, demand.num_tokens
    most = max_cached_tokens(num_tokens) // EXTENT_TOKENS
    num_host = min(most, tiers.tokens_of(worker.bit, "host") // EXTENT_TOKENS)
    num_disk = min(most, tiers.tokens_of(worker.bit, "disk") // EXTENT_TOKENS)
    start = cached // EXTENT_TOKENS
    if max(num_host, num_disk) <= start:
        return None
    compute_ms = prefill_ms(worker, cached, num_tokens)
    best: FetchPlan | None = None
    best_ms = compute_ms
    for end in (num_host, max(num_host, num_disk)):
        from_host = max(0, min(end, num_host) - start)
        load_ms = _load_ms(worker, "host", from_host) + _load_ms(worker, "disk", end - start - from_host)
        saved_ms = compute_ms - prefill_ms(worker, end * EXTENT_TOKENS, num_tokens)
        if end > start and saved_ms > load_ms * _WON_BY + _WON_BY_MS and compute_ms - saved_ms + load_ms < best_ms:
            best_ms = compute_ms - saved_ms + load_ms
            best = FetchPlan("host" if end - start == from_host else "disk", end * EXTENT_TOKENS, load_ms)
    return best


def _load_ms(worker: Worker, tier: TierName, num_extents: int) -> float:
    """Predicted milliseconds; infinite for a tier of which the worker has told nothing yet."""
    return num_extents * worker.extent_ms.get(tier, math.inf) if num_extents > 0 else 0.0
