"""The autoscaler in the controller: its clock, the reports of gateways, and the execution of decisions.

    LoadReport of each gateway ──┐
    ControlState ────────────────┼─ every interval_s ──> Policy.decide ──> ScaleRequest, unless dry_run
    how long starts took ────────┘                            └──> log, AutoscalerState

It uses the controller's own way to resize: a pool that shrinks drains its workers first. While no gateway reports,
sizes stay as they are, and at least 1 of each: without workers there would be no gateway again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from disagg.autoscaler.config import AutoscalerOptions
from disagg.autoscaler.policies import make_policy
from disagg.autoscaler.policy import Observation, PoolLimits, PoolObservation
from disagg.cluster.config.cluster_config import ClusterConfig, active_pools
from disagg.proto.autoscaling import AutoscalerState, Decision, LoadReport
from disagg.proto.control import ControlState, PoolName
from disagg.proto.ids import GatewayId, join_name

logger = logging.getLogger(__name__)

Resize = Callable[[dict[PoolName, int]], Awaitable[None]]


def pool_limits(config: ClusterConfig) -> dict[PoolName, PoolLimits]:
    """Limits of the pools that the mode uses."""
    return {
        name: PoolLimits(min_size=pool.min_size, max_size=pool.max_size or max(1, pool.size), weight=pool.num_ranks)
        for name, pool in active_pools(config)
    }


class AutoscalerRunner:
    """Owner of the policy. Runs on the controller's event loop, except for decisions, which take a thread.

    Args:
        config: the cluster's configuration.
        state: returns the controller's present state.
        resize: sets sizes of pools.
        decided: called after each decision.
        clock: monotonic seconds.
        model: key of the model, for logs; empty where there is one.
    """

    def __init__(
        self,
        config: ClusterConfig,
        state: Callable[[], ControlState],
        resize: Resize,
        decided: Callable[[AutoscalerState], None],
        clock: Callable[[], float],
        model: str = "",
    ) -> None:
        self._model = model
        self.options: AutoscalerOptions = config.autoscaler
        self._limits = pool_limits(config)
        self._policy = make_policy(self.options, {str(name): limits for name, limits in self._limits.items()})
        self._state = state
        self._resize = resize
        self._decided = decided
        self._clock = clock
        self._reports: dict[GatewayId, LoadReport] = {}
        self._starting: dict[str, float] = {}
        """Start times of the workers that are starting, by worker id."""
        self._cold_start_s: dict[str, float] = {}
        self._last: tuple[float, Decision] | None = None
        self._changes: Counter[str] = Counter()

    def report(self, gateway_id: GatewayId, report: LoadReport) -> None:
        """Take a gateway's report, which replaces its earlier one."""
        self._reports[gateway_id] = report

    def forget(self, gateway_id: GatewayId) -> None:
        """Drop the report of a gateway that has left."""
        self._reports.pop(gateway_id, None)

    def observe(self, state: ControlState) -> None:
        """Note how long starts of workers take; called after each change of the controller's state."""
        now = self._clock()
        for worker in state.workers:
            if worker.phase == "starting":
                self._starting.setdefault(worker.worker_id, now)
            elif (since := self._starting.pop(worker.worker_id, None)) is not None and worker.phase == "ready":
                self._cold_start_s[worker.pool] = now - since
        for gone in self._starting.keys() - {worker.worker_id for worker in state.workers}:
            del self._starting[gone]

    def snapshot(self) -> AutoscalerState:
        """The last decision and the counts of changes, for operators."""
        at_s, decision = self._last or (self._clock(), None)
        return AutoscalerState(
            policy=self.options.policy,
            dry_run=self.options.dry_run,
            decision=decision,
            age_s=max(0.0, self._clock() - at_s),
            changes=dict(self._changes),
        )

    async def run(self) -> None:
        """Decide periodically, until it is cancelled."""
        while True:
            await asyncio.sleep(self.options.interval_s)
            try:
                await self._look()
            except Exception:
                # A bug of the policy. Pools stay as they are; the next look may do.
                of = f" of model {self._model}" if self._model else ""
                logger.exception("the autoscaler%s could not decide; pools keep their sizes", of)

    async def _look(self) -> None:
        state = self._state()
        pools = {
            pool.name: PoolObservation(
                desired=pool.desired, ready=pool.ready, cold_start_s=self._cold_start_s.get(pool.name)
            )
            for pool in state.pools
        }
        if not self._reports:
            if any(pool.desired == 0 for pool in state.pools) and not self.options.dry_run:
                await self._resize({pool.name: max(1, pool.desired) for pool in state.pools})
            return
        observation = Observation(
            reports={str(name): report for name, report in self._reports.items()},
            pools={str(name): pool for name, pool in pools.items()},
        )
        decision = await asyncio.to_thread(self._policy.decide, observation, self._clock())
        is_news = self._last is None or decision.sizes != self._last[1].sizes or decision.is_change
        self._last = (self._clock(), decision)
        if is_news:
            self._log(decision)
        if decision.is_change:
            self._changes.update(
                f"{pool.name} {'up' if pool.wanted > pool.size else 'down'}"
                for pool in decision.pools
                if pool.wanted != pool.size
            )
            if not self.options.dry_run:
                await self._resize(wanted_sizes(decision, self._limits))
        self._decided(self.snapshot())

    def _log(self, decision: Decision) -> None:
        for pool in decision.pools:
            if pool.size != pool.wanted:
                verb = "would be resized" if self.options.dry_run else "is resized"
                logger.info(
                    "pool %s %s from %d to %d: %s; %s",
                    join_name(self._model, pool.name),
                    verb,
                    pool.size,
                    pool.wanted,
                    pool.reason,
                    pool.change,
                )


def wanted_sizes(decision: Decision, limits: Mapping[PoolName, PoolLimits]) -> dict[PoolName, int]:
    """Sizes of the pools that are to be resized."""
    wanted = {pool.name: pool.wanted for pool in decision.pools if pool.size != pool.wanted}
    return {name: wanted[name] for name in limits if name in wanted}
