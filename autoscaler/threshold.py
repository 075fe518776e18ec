"""A threshold scaler as in Kubernetes, for comparison: KV use and queue length, by the formula of the horizontal pod
autoscaler.

    wanted = ceil(ready * measured / target) for each metric; the largest counts. A ratio within the tolerance of 1
    changes nothing. A pool shrinks only to the largest size wanted in the last `down_after_s` (its stabilization
    window).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from disagg.autoscaler.config import AutoscalerOptions
from disagg.autoscaler.policy import Observation, PoolLimits, pool_of
from disagg.proto.autoscaling import Decision, PoolDecision


class ThresholdPolicy:
    """Sizes each pool by itself. Keeps the wanted sizes of the stabilization window."""

    def __init__(self, options: AutoscalerOptions, limits: Mapping[str, PoolLimits]) -> None:
        self._options = options
        self._limits = limits
        self._wanted: dict[str, deque[tuple[float, int]]] = {pool: deque() for pool in limits}

    def decide(self, observation: Observation, now: float) -> Decision:
        """Return the size that each pool should have."""
        return Decision(pools=tuple(self._decide(pool, observation, now) for pool in self._limits))

    def _decide(self, pool: str, observation: Observation, now: float) -> PoolDecision:
        options, limits, seen = self._options.threshold, self._limits[pool], observation.pools[pool]
        workers = [w for report in observation.reports.values() for w in report.workers if pool_of(w.worker_id) == pool]
        ready = max(1, seen.ready)
        total = sum(worker.num_blocks for worker in workers) or 1
        kv_use = sum(worker.blocks_used for worker in workers) / total
        waiting = observation.num_queued + sum(worker.num_waiting for worker in workers)
        ratios = {
            f"KV use {kv_use:.0%} (target {options.kv_use:.0%})": kv_use / options.kv_use,
            f"{waiting / ready:.1f} waiting a worker (target {options.waiting})": waiting / ready / options.waiting,
        }
        reason, ratio = max(ratios.items(), key=lambda item: item[1])
        is_near = abs(ratio - 1.0) <= options.tolerance
        wanted = limits.clamp(seen.desired if is_near else max(1, math.ceil(ready * ratio)))
        history = self._wanted[pool]
        if not history:
            history.append((now, seen.desired))
        history.append((now, wanted))
        while history[0][0] < now - self._options.down_after_s:
            history.popleft()
        size = seen.desired
        held = max(each for _, each in history)
        chosen = wanted if wanted > size else limits.clamp(min(size, held))
        return PoolDecision(
            name=pool,
            size=size,
            wanted=chosen,
            reason=reason,
            change=f"more: a metric over its target by {options.tolerance:.0%}; fewer: below it for "
            f"{self._options.down_after_s:g} s",
        )
