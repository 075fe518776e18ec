"""The rollout of another configuration in a running cluster, worker by worker. Pure.

    canary ──one new worker of each pool is ready──> rolling ──all are new, and ready──> finishing ──> over
      │                                                │ wave by wave: drain, stop, start as new, ready
      └──── a new worker fails `MAX_FAILURES` times, or is not ready in time ────> the same way back

Each pool whose workers are replaced has one worker more meanwhile, behind those that are configured (a surge worker):
it is the canary, and it stands in for the one that is being replaced. Without surge workers the first wave is the
canary, and each pool has one worker less.

A wave has at most one worker of each pool. It comes from the pools that have the most left to replace, so that the last
workers of all pools are replaced together: where old and new workers form no pairs (another model, another KV layout)
neither version ever has prefill workers without decode workers. Pools of another mode are started whole before the old
ones are drained.

A worker's `config_hash` names all that its configuration says, but for its id. A worker that dies is started again as
it was before the canary is ready, and as a new one after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from disagg.cluster.core.forgotten import Forgotten
from disagg.cluster.core.workers import Worker
from disagg.proto.control import PoolName, RolledBack, RolloutState
from disagg.proto.ids import WorkerId, model_of

MAX_FAILURES = 3
"""Number of faults in a row of a new worker after which the rollout is taken back."""
READY_TIMEOUT_S = 300.0

Stage = Literal["canary", "rolling", "finishing"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of the configuration, with what the controller's core needs of it."""

    generation: int
    sizes: dict[PoolName, int]
    """Sizes of the pools that its mode uses."""
    config_hashes: dict[PoolName, str]
    """Hash of the configuration of each pool's workers."""
    drain_timeout_s: float | None = None
    """Drain timeout in seconds; None keeps the present one."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a rollout: from which target to which, and how. It is saved, so that the next controller can continue."""

    old: Target
    new: Target
    surge: bool = True
    ready_timeout_s: float = READY_TIMEOUT_S
    is_back: bool = False
    """Whether this takes back the previous rollout, which failed: then it has no limits, and continues until it is
    done."""
    why: str = ""
    """Reason of the rollback."""
    has_canary: bool = False
    """Whether the first new workers were ready."""

    @property
    def replaced(self) -> tuple[PoolName, ...]:
        """Pools that stay, and whose workers are replaced."""
        old = self.old.config_hashes
        return tuple(p for p, config_hash in self.new.config_hashes.items() if p in old and old[p] != config_hash)

    @property
    def added(self) -> tuple[PoolName, ...]:
        """Pools of the new mode only."""
        return tuple(pool for pool in self.new.config_hashes if pool not in self.old.config_hashes)

    @property
    def removed(self) -> tuple[PoolName, ...]:
        """Pools of the old mode only."""
        return tuple(pool for pool in self.old.config_hashes if pool not in self.new.config_hashes)

    @property
    def renewed(self) -> tuple[PoolName, ...]:
        """Pools all of whose workers are new in the end."""
        return (*self.replaced, *self.added)

    def changes_all(self, model: str = "") -> bool:
        """Whether no old worker of a model stays: old and new ones need not fit each other."""
        stays = set(self.old.config_hashes) - set(self.replaced) - set(self.removed)
        return not any(model_of(pool) == model for pool in stays)

    @property
    def models(self) -> frozenset[str]:
        """Keys of the models that change in any way. Other models are scaled and drained as usual meanwhile."""
        old, new = self.old, self.new
        return frozenset(
            model_of(pool)
            for pool in {**old.sizes, **new.sizes}
            if old.sizes.get(pool) != new.sizes.get(pool) or old.config_hashes.get(pool) != new.config_hashes.get(pool)
        )

    @property
    def exchanges_models(self) -> bool:
        """Whether models are added or removed. Then the rollout ends only when the gateways serve those of the new
        generation."""
        return {model_of(pool) for pool in self.old.sizes} != {model_of(pool) for pool in self.new.sizes}

    @property
    def is_needed(self) -> bool:
        """Whether any worker has to be replaced, or pools to be exchanged."""
        return bool(self.replaced or self.added or self.removed)

    @property
    def has_trial(self) -> bool:
        """Whether it begins with a canary, before which nothing else changes."""
        return not self.is_back and (self.surge or bool(self.added))

    @property
    def configured(self) -> Target:
        """Target whose settings apply that need no restart of a worker."""
        return self.new if self.has_canary or not self.has_trial else self.old

    @property
    def going_on(self) -> str:
        """Log message of a controller that continues it."""
        if self.is_back:
            what = f"taking generation {self.old.generation} of the configuration back to {self.new.generation}"
        else:
            what = f"applying generation {self.new.generation} of the configuration"
        where = "" if self.configured is self.new else ", whose first new workers were not ready yet"
        return f"an earlier controller was {what}{where}: going on with that"

    def reversed(self, why: str) -> Plan:
        """Plan of the rollback, for this reason."""
        return Plan(
            old=self.new,
            new=self.old,
            surge=self.surge,
            ready_timeout_s=self.ready_timeout_s,
            is_back=True,
            why=why,
        )


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state, for the next controller."""

    target: Target
    """The present target; during a rollout the previous one."""
    plan: Plan | None = None
    """Plan of the rollout, if there is one."""
    latest: int = 1
    """The generation that was requested last."""
    rolled_back: RolledBack | None = None
    forgotten: Forgotten = Forgotten()
    """Tenants whose KV workers drop when they come back."""


def configured(desired: Desired) -> int:
    """Generation whose settings apply that need no restart of a worker."""
    plan = desired.plan
    return (desired.target if plan is None else plan.configured).generation


class Rollout:
    """State of a plan's execution. Decides which workers are desired; the controller's core reconciles.

    Args:
        plan: the plan to execute.
        now: time at which it began, for operators.
    """

    def __init__(self, plan: Plan, now: float) -> None:
        self.plan = plan
        self.began = now
        self.stage: Stage = "canary" if plan.has_trial and not plan.has_canary else "rolling"
        self._released: set[WorkerId] = set()
        """Workers whose turn has come."""

    # ------------------------------------------------------------ what is to be there

    @property
    def pools(self) -> tuple[PoolName, ...]:
        """All pools that have workers during the rollout."""
        return tuple(dict.fromkeys((*self.plan.new.sizes, *self.plan.old.sizes)))

    def size(self, pool: PoolName) -> int:
        """Number of workers that a pool is to have now."""
        old, new = self.plan.old.sizes.get(pool, 0), self.plan.new.sizes.get(pool, 0)
        if self.stage == "finishing":
            return new
        if pool in self.plan.added:
            return min(1, new) if self.stage == "canary" else new
        extra = int(self.plan.surge and pool in self.plan.replaced)
        return (old if self.stage == "canary" else max(old, new)) + extra

    def resize(self, sizes: Mapping[PoolName, int]) -> None:
        """Set other sizes of pools of models that are not being changed."""
        old, new = (
            msgspec.structs.replace(target, sizes={**target.sizes, **sizes})
            for target in (self.plan.old, self.plan.new)
        )
        self.plan = msgspec.structs.replace(self.plan, old=old, new=new)

    def starts(self, worker: Worker) -> str:
        """Hash of the configuration with which a worker is started now. One that died after the canary gets the new
        configuration."""
        old, new = self.plan.old, self.plan.new
        if worker.pool not in new.config_hashes:
            return old.config_hashes[worker.pool]
        if self.stage == "rolling" and (self.plan.is_back or self.plan.has_canary):
            self._released.add(worker.worker_id)
        comes_in_addition = worker.index >= old.sizes.get(worker.pool, 0) and worker.pool not in self.plan.removed
        if comes_in_addition or worker.worker_id in self._released or worker.pool not in old.config_hashes:
            return new.config_hashes[worker.pool]
        return worker.config_hash or old.config_hashes[worker.pool]

    def is_new(self, worker: Worker) -> bool:
        """Whether a worker has the new configuration."""
        return worker.config_hash == self.plan.new.config_hashes.get(worker.pool)

    def fits(self, one: Worker, other: Worker) -> bool:
        """Whether two workers of a model must be able to form a pair."""
        return not self.plan.changes_all(one.model) or self.is_new(one) == self.is_new(other)

    def registered(self, worker: Worker) -> None:
        """Note that a worker has registered: after a restart of the controller, this shows that its turn was over."""
        if self.is_new(worker):
            self._released.add(worker.worker_id)

    # ------------------------------------------------------------ next steps

    def failure(self, workers: Iterable[Worker], now: float) -> str | None:
        """Reason why the rollout is to be taken back; None if it is not."""
        if self.plan.is_back or self.stage == "finishing":
            return None
        for worker in workers:
            if not self._is_on_trial(worker):
                continue
            if worker.num_faults >= MAX_FAILURES:
                return f"{worker.worker_id} failed {worker.num_faults} times: {worker.detail}"
            if worker.phase != "ready" and (due := self._ready_due(worker)) is not None and due <= now:
                why = worker.pending or worker.detail
                return f"{worker.worker_id} was not ready after {self.plan.ready_timeout_s:g} s" + (why and f": {why}")
        return None

    def next_due(self, workers: Iterable[Worker]) -> float | None:
        """Time at which `failure` may change by itself."""
        if self.plan.is_back or self.stage == "finishing":
            return None
        dues = (self._ready_due(w) for w in workers if self._is_on_trial(w) and w.phase != "ready")
        return min((due for due in dues if due is not None), default=None)

    def advance(self, workers: Mapping[WorkerId, Worker]) -> list[Worker]:
        """Enter the next stage if that is due; returns the workers to be replaced next."""
        if self.stage == "canary":
            if not all(self._is_done(w) for w in workers.values() if self._is_canary(w)) or not self._has_all(workers):
                return []
            self.stage = "rolling"
            self.plan = msgspec.structs.replace(self.plan, has_canary=True)
        if self.stage != "rolling":
            return []
        if self._has_all_bases(workers):
            self.stage = "finishing"
            return []
        turn = [w for w in self._left(workers.values()) if w.phase in ("starting", "failed")]
        if not turn:
            if not self._has_all(workers) or not all(w.phase == "ready" for w in self._watched(workers.values())):
                return []
            turn = self._next_wave(workers.values())
        self._released.update(worker.worker_id for worker in turn)
        return turn

    def is_over(self, workers: Iterable[Worker]) -> bool:
        """Whether everything is as wanted, and no other workers are left."""
        return self.stage == "finishing" and not self._leaving(workers)

    # ------------------------------------------------------------ for operators

    def state(self, workers: Iterable[Worker], now: float) -> RolloutState:
        """Progress of the rollout."""
        workers = list(workers)
        total = sum(self.plan.new.sizes[pool] for pool in self.plan.renewed)
        done = sum(
            self._is_done(w) for w in workers if w.pool in self.plan.renewed and w.index < self.plan.new.sizes[w.pool]
        )
        return RolloutState(
            generation=self.plan.new.generation,
            previous=self.plan.old.generation,
            stage=self.stage,
            is_back=self.plan.is_back,
            why=self.plan.why,
            num_done=done,
            num_workers=total,
            running_s=now - self.began,
            doing=self._doing(workers),
            next=self._next(workers),
        )

    def _doing(self, workers: list[Worker]) -> str:
        if self.stage == "finishing":
            leaving = self._leaving(workers)
            waits = "waits for the gateways to serve other models" if self.plan.exchanges_models else ""
            return f"{', '.join(leaving)} {'leaves' if len(leaving) == 1 else 'leave'}" if leaving else waits
        new = [w for w in workers if self._is_in_hand(w) and not self._is_done(w)]
        if self.stage == "canary" and new:
            return f"waits for the first new workers: {', '.join(f'{w.worker_id} is {w.phase}' for w in new)}"
        return ", ".join(f"{w.worker_id} is {w.phase}" for w in new)

    def _next(self, workers: list[Worker]) -> str:
        wave = self._next_wave(workers) if self.stage != "finishing" else []
        if wave:
            return f"replaces {' and '.join(w.worker_id for w in wave)}"
        removed = self.plan.removed if self.stage != "finishing" else ()
        if removed:
            return f"drains the pools {' and '.join(removed)}"
        has_surge = self.plan.surge and bool(self.plan.replaced)
        return "drains the workers that stood in" if has_surge and self.stage != "finishing" else ""

    # ------------------------------------------------------------ inside

    def _leaving(self, workers: Iterable[Worker]) -> list[WorkerId]:
        """Workers that have no place in the new configuration."""
        sizes, models = self.plan.new.sizes, self.plan.models
        return [w.worker_id for w in workers if w.model in models and w.index >= sizes.get(w.pool, 0)]

    def _is_done(self, worker: Worker) -> bool:
        return self.is_new(worker) and worker.phase == "ready"

    def _is_canary(self, worker: Worker) -> bool:
        is_first = worker.pool in self.plan.added and worker.index == 0
        return is_first or (
            self.plan.surge
            and worker.pool in self.plan.replaced
            and worker.index == self.plan.old.sizes.get(worker.pool, 0)
        )

    def _is_in_hand(self, worker: Worker) -> bool:
        """Whether a worker is new, or is becoming new. False for workers of pools that do not change."""
        if worker.pool not in self.plan.renewed:
            return False
        comes_in_addition = worker.pool in self.plan.replaced and worker.index >= self.plan.old.sizes[worker.pool]
        return worker.worker_id in self._released or worker.pool in self.plan.added or comes_in_addition

    def _is_on_trial(self, worker: Worker) -> bool:
        return self._is_in_hand(worker) and self.is_new(worker)

    def _ready_due(self, worker: Worker) -> float | None:
        return None if worker.unready_since is None else worker.unready_since + self.plan.ready_timeout_s

    def _watched(self, workers: Iterable[Worker]) -> list[Worker]:
        """Workers that all have to be ready before the next wave."""
        return [w for w in workers if w.pool in self.plan.renewed]

    def _has_all(self, workers: Mapping[WorkerId, Worker]) -> bool:
        """Whether each place that is desired now has a worker."""
        return self._fill({pool: self.size(pool) for pool in self.plan.renewed}, workers.values())

    def _has_all_bases(self, workers: Mapping[WorkerId, Worker]) -> bool:
        """Whether each place that stays has a new worker that is ready."""
        sizes = {pool: self.plan.new.sizes[pool] for pool in self.plan.renewed}
        return self._fill(sizes, filter(self._is_done, workers.values()))

    @staticmethod
    def _fill(sizes: Mapping[PoolName, int], workers: Iterable[Worker]) -> bool:
        """Whether these workers fill all places of pools of these sizes."""
        return sum(worker.index < sizes.get(worker.pool, 0) for worker in workers) == sum(sizes.values())

    def _left(self, workers: Iterable[Worker]) -> list[Worker]:
        """Workers of places that stay, and that have not been replaced yet."""
        return sorted(
            (
                w
                for w in workers
                if w.pool in self.plan.replaced
                and w.index < self.plan.new.sizes[w.pool]
                and w.worker_id not in self._released
                and not self.is_new(w)
            ),
            key=lambda w: (self.pools.index(w.pool), w.index),
        )

    def _next_wave(self, workers: Iterable[Worker]) -> list[Worker]:
        left: dict[PoolName, list[Worker]] = {}
        for worker in self._left(workers):
            left.setdefault(worker.pool, []).append(worker)
        most = max(map(len, left.values()), default=0)
        return [of_pool[0] for of_pool in left.values() if len(of_pool) == most]
