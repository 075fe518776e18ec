"""An autoscaler in a simulated cluster: the policies that serve, given what a real gateway would report. Its decisions
take no virtual time; a worker that is added serves after the cold start of its pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from disagg.autoscaler.policy import Observation, Policy, PoolObservation
from disagg.proto.autoscaling import MAX_REQUEST_SAMPLES, Decision, LoadReport
from disagg.router.telemetry.load_report import load_report
from disagg.simulator.cluster import SimulatedCluster

GATEWAY = "gateway"


class Resize(NamedTuple):
    """A decision to resize, and its outcome."""

    time_s: float
    pool: str
    before: int
    after: int
    reason: str


class Scaler:
    """Looks at the cluster every `interval_s`, from then on until the last request has ended."""

    def __init__(self, cluster: SimulatedCluster, policy: Policy, interval_s: float) -> None:
        self._cluster = cluster
        self._policy = policy
        self._interval_s = interval_s
        self._pools = {pool.name: pool for pool in cluster.spec.pools}
        self._began: set[str] = set()
        """Pools of which a worker has started."""
        self.resizes: list[Resize] = []
        self.decision: Decision | None = None
        cluster.loop.after(interval_s, self._look)

    def _look(self) -> None:
        cluster, now = self._cluster, self._cluster.loop.now
        if cluster.users.is_done:
            return
        core = cluster.gateway.core
        report = load_report(core.view(now), core.recent(MAX_REQUEST_SAMPLES), now)
        self.decision = decision = self._policy.decide(self._observation({GATEWAY: report}), now)
        for pool in decision.pools:
            if pool.wanted != pool.size:
                self.resizes.append(Resize(now, pool.name, pool.size, pool.wanted, pool.reason))
                cluster.resize(pool.name, pool.wanted)
                self._began.add(pool.name)
        cluster.loop.after(self._interval_s, self._look)

    def _observation(self, reports: Mapping[str, LoadReport]) -> Observation:
        pools = {}
        for name, spec in self._pools.items():
            desired, ready = self._cluster.pool_size(name)
            cold_start_s = spec.cold_start_s if name in self._began else None
            pools[name] = PoolObservation(desired=desired, ready=ready, cold_start_s=cold_start_s)
        return Observation(reports=reports, pools=pools)
