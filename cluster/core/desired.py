"""The desired state: the present target, and the rollout to another one. Pure.

    Scale ──> other sizes
    Apply ──> target ── a rollout, if workers are replaced or pools exchanged ──> the next target
                            └── fails ──> a rollout back ──> the target as it was

What holds without a restart (`Configure`) becomes that of the new generation when the first new workers are ready, or
at once where nothing is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from disagg.cluster.core.events import Command, Configure, Save
from disagg.cluster.core.rollout import Desired, Plan, Rollout, Target
from disagg.cluster.core.workers import Worker
from disagg.proto.control import PoolName, RolledBack
from disagg.proto.ids import WorkerId, model_of


class DesiredState:
    """Owner of the target and of the rollout; a part of the controller's core.

    Args:
        desired: the initial state, or the one that an earlier controller saved.
        drain_timeout_s: the configured one; see `Settings`.
    """

    def __init__(self, desired: Desired, drain_timeout_s: float) -> None:
        self.target = desired.target
        """The present target; during a rollout the previous one."""
        self.latest = desired.latest
        """The generation that was requested last."""
        self.rolled_back = desired.rolled_back
        self.forgotten = desired.forgotten
        """Tenants whose KV workers drop when they come back."""
        self.drain_timeout_s = drain_timeout_s
        self.rollout: Rollout | None = None
        self._plan = desired.plan
        """Plan of the rollout that an earlier controller began, until `begin`."""

    @property
    def sizes(self) -> dict[PoolName, int]:
        """Sizes of all pools; during a rollout the present ones."""
        rollout = self.rollout
        return dict(self.target.sizes) if rollout is None else {pool: rollout.size(pool) for pool in rollout.pools}

    @property
    def plan(self) -> Plan | None:
        """Plan of the rollout, if there is one."""
        return self._plan if self.rollout is None else self.rollout.plan

    def saved(self) -> Desired:
        """The desired state, to be saved for the next controller."""
        return Desired(
            target=self.target,
            plan=self.plan,
            latest=self.latest,
            rolled_back=self.rolled_back,
            forgotten=self.forgotten,
        )

    def is_changing(self, pool: PoolName) -> bool:
        """Whether a rollout controls the size of a pool."""
        return self.rollout is not None and model_of(pool) in self.rollout.plan.models

    def config_hash(self, worker: Worker) -> str:
        """Hash of the configuration with which a worker is started now."""
        rollout = self.rollout
        return self.target.config_hashes[worker.pool] if rollout is None else rollout.starts(worker)

    # ------------------------------------------------------------ changes

    def begin(self, now: float) -> None:
        """Continue the rollout of an earlier controller."""
        if self._plan is not None:
            self.rollout, self._plan = Rollout(self._plan, now), None

    def scale(self, sizes: Mapping[PoolName, int]) -> list[Command]:
        """Set the sizes of pools whose size no rollout controls."""
        self.target = msgspec.structs.replace(self.target, sizes={**self.target.sizes, **sizes})
        if self.rollout is not None:
            self.rollout.resize(sizes)
        return [Save()]

    def forget(self, tenant_tag: bytes, at_s: float) -> list[Command]:
        """Note a tenant. `at_s`: the time, in seconds since the epoch."""
        self.forgotten = self.forgotten.noted(tenant_tag, at_s)
        return [Save()]

    def was_ready(self, worker_id: WorkerId) -> list[Command]:
        """Note that a worker was told what it has to drop."""
        before, self.forgotten = self.forgotten, self.forgotten.was_ready(worker_id)
        return [] if self.forgotten is before else [Save()]

    def apply(self, plan: Plan, now: float) -> list[Command]:
        """Begin the rollout of another configuration."""
        self.latest, self.rolled_back = plan.new.generation, None
        if plan.is_needed:
            self.rollout = Rollout(plan, now)
        else:
            self.target = plan.new
        begins_with_trial = plan.is_needed and plan.has_trial
        return [*([] if begins_with_trial else self._configure(plan.new)), Save()]

    def roll(
        self, workers: Mapping[WorkerId, Worker], serve: Callable[[int], bool], now: float
    ) -> tuple[list[Worker], list[Command]]:
        """Take the steps of the rollout that are due, and return the workers to be replaced next.

        Args:
            workers: all of them.
            serve: whether all gateways serve the models of a generation.
            now: the time.
        """
        rollout, out = self.rollout, list[Command]()
        if rollout is None:
            return [], out
        if (why := rollout.failure(workers.values(), now)) is not None:
            self.rolled_back = RolledBack(generation=rollout.plan.new.generation, why=why)
            if rollout.plan.configured is rollout.plan.new:
                out += self._configure(rollout.plan.old)
            rollout = self.rollout = Rollout(rollout.plan.reversed(why), now)
            out.append(Save())
        had_canary = rollout.stage != "canary"
        turn = rollout.advance(workers)
        if not rollout.plan.is_back and not had_canary and rollout.stage != "canary":
            out += [*self._configure(rollout.plan.new), Save()]
        is_served = not rollout.plan.exchanges_models or serve(rollout.plan.new.generation)
        if is_served and rollout.is_over(workers.values()):
            self.target, self.rollout = rollout.plan.new, None
            out.append(Save())
        return turn, out

    def _configure(self, target: Target) -> list[Command]:
        if target.drain_timeout_s is not None:
            self.drain_timeout_s = target.drain_timeout_s
        return [Configure(target.generation)]
