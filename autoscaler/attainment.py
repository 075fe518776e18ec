"""The policy `attainment`: as few workers as meet the targets of the arriving requests.

    rate = (arrivals, now or when a new worker would serve; + waiting requests / DRAIN_S) x correction
    more workers    at once, where the present ones are not enough for `rate` (`Sizing.grown`)
    fewer workers   where fewer would have been enough for `rate` x margin at each look of the last `down_after_s`, and
                    no size was changed in that time (`Sizing.shrunk`)
    none            when nothing has come for `zero_after_s`; one of each at the first request

So a worker is removed only if the rate is a margin below the one that adds it, and never within `down_after_s` after a
change. `correction` grows if requests miss targets that they meet by the estimate: if the step times or the arrivals
differ from the assumptions of the estimate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from disagg.autoscaler.config import AutoscalerOptions
from disagg.autoscaler.demand import Arrivals, Kinds, Rate
from disagg.autoscaler.policy import Observation, PoolLimits
from disagg.autoscaler.sizing import RATE_STEP, Service, Sizing
from disagg.proto.autoscaling import Decision, PoolDecision

MARGIN, ERRORS, MOST_MARGIN = 1.1, 2.0, 1.5
"""Fewer workers must be enough for the rate times a margin before one is removed. The margin is `MARGIN`, or 1 plus
`ERRORS` relative standard errors of the rate if that is more, and at most `MOST_MARGIN`."""
LEAST_PER_S = 1e-3
"""Requests per second that pools are sized for, at least, while nothing arrives and they are not emptied."""
DRAIN_S = 30.0
"""Seconds within which the waiting requests are to be worked off."""
JUDGED_AFTER_S = 75.0
"""Seconds for which all pools must have had their wanted sizes before measured attainment is compared with the
estimate: it is counted over a minute."""
LEAST_JUDGED = 20
CORRECT_EVERY_S = 30.0
_CORRECTION, _MOST_CORRECTION, _RELAXATION = 1.1, 2.0, 0.98
_TOLERANCE = 0.03
"""Shortfall of the measured attainment below goal and estimate, as a share of requests, that corrects nothing."""


class AttainmentPolicy:
    """Sizes the pools of one cluster for attainment. Owner of the history: arrivals, step times, rates, the
    correction."""

    def __init__(self, options: AutoscalerOptions, limits: Mapping[str, PoolLimits]) -> None:
        self._options = options
        self._limits = limits
        self._arrivals, self._kinds = Arrivals(), Kinds()
        self._service = Service(options.warm_after_s)
        self._sizing: Sizing | None = None
        self._rates: deque[tuple[float, float]] = deque()
        """Pairs (time of a decision, requests per second that fewer workers must have been enough for)."""
        self._sizes: dict[str, int] = {}
        """The size of each pool at the latest decision."""
        self._changed_s = -math.inf
        self._began_s: float | None = None
        self._unsettled_s = -math.inf
        """When the ready workers of a pool last differed in number from those wanted."""
        self.correction = 1.0
        self._corrected_s = -math.inf
        self._edges: dict[tuple[str, tuple[tuple[str, int], ...]], str] = {}

    def decide(self, observation: Observation, now: float) -> Decision:
        """Return the size that each pool should have."""
        if self._began_s is None:
            self._began_s = now
        reports = observation.reports
        self._arrivals.take(reports, now)
        is_new = [self._kinds.take(reports, now), self._service.take(reports, now)]
        is_known = bool(self._kinds.kinds) and all(pool in self._service.models for pool in self._limits)
        if is_known and (any(is_new) or self._sizing is None):
            self._sizing = Sizing(
                self._service,
                self._kinds.kinds,
                self._limits,
                self._options.attainment,
                self._options.max_utilization,
            )
            self._edges = {}
        if not all(pool.is_settled for pool in observation.pools.values()):
            self._unsettled_s = now
        rate = self._arrivals.rate(now, self._horizon_s(observation))
        if self._is_idle(observation, now):
            return self._emptied(observation)
        sizing = self._sizing
        if sizing is None:
            return self._held(observation, rate)
        self._correct(observation, sizing, rate, now)
        per_s = (max(rate.level, rate.forecast, LEAST_PER_S) + observation.num_queued / DRAIN_S) * self.correction
        sizes = self._chosen(sizing, observation, rate, per_s, now)
        why = self._why(observation, sizing, rate, per_s, sizes)
        return self._decision(
            observation, rate, {pool: (size, why, self._change(sizing, pool, sizes)) for pool, size in sizes.items()}
        )

    # ------------------------------------------------------------ how many

    def _chosen(self, sizing: Sizing, observation: Observation, rate: Rate, per_s: float, now: float) -> dict[str, int]:
        sizes = {pool: limits.clamp(observation.pools[pool].desired) for pool, limits in self._limits.items()}
        if sizes != self._sizes:  # by us or by an operator
            self._sizes, self._changed_s = sizes, now
        margin = max(MARGIN, 1.0 + ERRORS * rate.error / max(rate.level, LEAST_PER_S))
        self._rates.append((now, per_s * min(margin, MOST_MARGIN)))
        hold_s = self._options.down_after_s
        while self._rates[0][0] < now - hold_s:
            self._rates.popleft()
        grown = sizing.grown(per_s, sizes)
        if grown != sizes or now < self._changed_s + hold_s:
            return {pool: self._limits[pool].clamp(size) for pool, size in grown.items()}
        return sizing.shrunk(max(per_s for _, per_s in self._rates), sizes)

    def _horizon_s(self, observation: Observation) -> float:
        """Seconds from now until a worker that is started serves requests."""
        starts = (pool.cold_start_s for pool in observation.pools.values())
        cold = [self._options.cold_start_s if seconds is None else seconds for seconds in starts]
        return max(cold, default=0.0) + self._options.interval_s

    def _is_idle(self, observation: Observation, now: float) -> bool:
        """Whether nothing has come for so long that pools may be emptied, or are empty and stay so."""
        if observation.num_in_flight or self._began_s is None:
            return False
        if all(limits.min_size for limits in self._limits.values()):
            return False
        is_empty = any(pool.desired == 0 for pool in observation.pools.values())
        if is_empty and self._arrivals.last_s < now:
            return True
        return now - max(self._began_s, self._arrivals.last_s) >= self._options.zero_after_s

    def _correct(self, observation: Observation, sizing: Sizing, rate: Rate, now: float) -> None:
        if now < max(self._unsettled_s + JUDGED_AFTER_S, self._corrected_s + CORRECT_EVERY_S):
            return
        judged = sum(report.num_judged for report in observation.reports.values())
        if judged < LEAST_JUDGED:
            return
        met = sum(report.num_met for report in observation.reports.values()) / judged
        goal = self._options.attainment
        sizes = {pool: max(1, seen.desired) for pool, seen in observation.pools.items()}
        estimated = sizing.attained(rate.level * self.correction, sizes).share
        self._corrected_s = now
        tolerance = max(_TOLERANCE, 4.0 * math.sqrt(goal * (1.0 - goal) / judged))
        if met < goal - tolerance and met < estimated - _TOLERANCE:
            self.correction = min(_MOST_CORRECTION, self.correction * _CORRECTION)
        elif met > goal:
            self.correction = max(1.0, self.correction * _RELAXATION)

    # ------------------------------------------------------------ words

    def _emptied(self, observation: Observation) -> Decision:
        reason = f"nothing came for {self._options.zero_after_s:g} s"
        sizes = {
            pool: limits.min_size if limits.min_size == 0 else observation.pools[pool].desired
            for pool, limits in self._limits.items()
        }
        change = "the next request"
        return self._decision(
            observation,
            Rate(level=0.0, error=0.0, forecast=0.0),
            {pool: (self._limits[pool].clamp(size), reason, change) for pool, size in sizes.items()},
        )

    def _held(self, observation: Observation, rate: Rate) -> Decision:
        sizes = {pool: self._limits[pool].clamp(seen.desired) for pool, seen in observation.pools.items()}
        reason, change = "nothing was measured yet", "requests, and their step times"
        if rate.level > 0.0 or observation.num_in_flight:
            sizes = {pool: self._limits[pool].clamp(max(1, size)) for pool, size in sizes.items()}
        return self._decision(observation, rate, {pool: (size, reason, change) for pool, size in sizes.items()})

    def _decision(self, observation: Observation, rate: Rate, sizes: Mapping[str, tuple[int, str, str]]) -> Decision:
        kinds = self._kinds.kinds
        number = len(kinds) or 1
        return Decision(
            pools=tuple(
                PoolDecision(
                    name=pool, size=observation.pools[pool].desired, wanted=wanted, reason=reason, change=change
                )
                for pool, (wanted, reason, change) in sizes.items()
            ),
            requests_per_s=rate.level,
            forecast_per_s=rate.forecast,
            prompt_tokens_per_s=rate.level * sum(kind.computed for kind in kinds) / number,
            output_tokens_per_s=rate.level * sum(kind.output for kind in kinds) / number,
        )

    def _why(self, observation: Observation, sizing: Sizing, rate: Rate, per_s: float, sizes: Mapping[str, int]) -> str:
        parts = [f"{rate.level:.3g} requests/s arrive"]
        if rate.forecast > rate.level:
            parts.append(f"{rate.forecast:.3g} forecast")
        if observation.num_queued:
            parts.append(f"{observation.num_queued} wait")
        if self.correction > 1.0:
            parts.append(f"x {self.correction:.2f} for missed targets")
        found = sizing.attained(per_s, {pool: max(1, size) for pool, size in sizes.items()})
        return f"{', '.join(parts)}: {found.share:.0%} are estimated to meet their targets"

    def _change(self, sizing: Sizing, pool: str, sizes: Mapping[str, int]) -> str:
        """The rates at which the pool would be resized, in words."""
        key = (pool, tuple(sorted(sizes.items())))
        if key not in self._edges:
            self._edges[key] = self._found_edges(sizing, pool, {name: max(1, size) for name, size in sizes.items()})
        return self._edges[key]

    def _found_edges(self, sizing: Sizing, pool: str, sizes: Mapping[str, int]) -> str:
        limits, size, parts = self._limits[pool], sizes[pool], []
        if size >= limits.max_size:
            parts.append(f"max_size is {limits.max_size}")
        else:
            above = _edge(lambda rate: sizing.grown(rate, sizes)[pool] > size)
            parts.append("never more" if above is None else f"more from {above:.3g} requests/s on")
        if size <= max(1, limits.min_size):
            parts.append(f"min_size is {limits.min_size}")
        else:
            below = _edge(lambda rate: sizing.shrunk(rate, sizes)[pool] == size)
            seconds = self._options.down_after_s
            if below is not None:
                parts.append(f"fewer when it has been below {below / MARGIN:.3g} for {seconds:g} s")
        return "; ".join(parts)


def _edge(is_above: Callable[[float], bool]) -> float | None:
    """The rate from which on a condition holds; None where it never does."""
    low, high = 1e-3, 1e6
    if not is_above(high):
        return None
    while high > low * RATE_STEP:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high
