"""The way of a running cluster from one configuration to another, worker by worker. Pure.

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

from disagg.cluster.core.workers import Worker
from disagg.proto.control import PoolName, RolledBack, RolloutState
from disagg.proto.ids import WorkerId, model_of

MAX_FAILURES = 3
"""Faults in a row of a new worker that end the way forward."""
READY_TIMEOUT_S = 300.0

Stage = Literal["canary", "rolling", "finishing"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of the configuration, as far as the controller's core needs it."""

    generation: int
    sizes: dict[PoolName, int]
    """Of the pools that its mode uses."""
    config_hashes: dict[PoolName, str]
    """Names the configuration of the pool's workers."""
    drain_timeout_s: float | None = None
    """None keeps the present one."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """From where to where, and how. It is saved, so that the next controller goes on."""

    old: Target
    new: Target
    surge: bool = True
    ready_timeout_s: float = READY_TIMEOUT_S
    is_back: bool = False
    """Whether it takes back the one before, which failed: then it has no limits, and goes on until it is done."""
    why: str = ""
    """Of the way back."""
    has_canary: bool = False
    """Whether the first new workers were ready."""

    @property
    def replaced(self) -> tuple[PoolName, ...]:
        """The pools that stay, and whose workers are replaced."""
        old = self.old.config_hashes
        return tuple(p for p, config_hash in self.new.config_hashes.items() if p in old and old[p] != config_hash)

    @property
    def added(self) -> tuple[PoolName, ...]:
        """The pools of the new mode only."""
        return tuple(pool for pool in self.new.config_hashes if pool not in self.old.config_hashes)

    @property
    def removed(self) -> tuple[PoolName, ...]:
        """The pools of the old mode only."""
        return tuple(pool for pool in self.old.config_hashes if pool not in self.new.config_hashes)

    @property
    def renewed(self) -> tuple[PoolName, ...]:
        """The pools all of whose workers are new in the end."""
        return (*self.replaced, *self.added)

    def changes_all(self, model: str = "") -> bool:
        """Whether no old worker of a model stays: old and new ones need not fit each other."""
        stays = set(self.old.config_hashes) - set(self.replaced) - set(self.removed)
        return not any(model_of(pool) == model for pool in stays)

    @property
    def models(self) -> frozenset[str]:
        """Keys of the models of which anything changes. Other models are scaled and drained as ever meanwhile."""
        old, new = self.old, self.new
        return frozenset(
            model_of(pool)
            for pool in {**old.sizes, **new.sizes}
            if old.sizes.get(pool) != new.sizes.get(pool) or old.config_hashes.get(pool) != new.config_hashes.get(pool)
        )

    @property
    def exchanges_models(self) -> bool:
        """Whether models come or go. Then it is over only when the gateways serve those of the new generation."""
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
        """Whose settings hold for which no worker is restarted."""
        return self.new if self.has_canary or not self.has_trial else self.old

    @property
    def going_on(self) -> str:
        """What a controller says that goes on with it."""
        if self.is_back:
            what = f"taking generation {self.old.generation} of the configuration back to {self.new.generation}"
        else:
            what = f"applying generation {self.new.generation} of the configuration"
        where = "" if self.configured is self.new else ", whose first new workers were not ready yet"
        return f"an earlier controller was {what}{where}: going on with that"

    def reversed(self, why: str) -> Plan:
        """The way back."""
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
    """What holds; during a rollout what held before it."""
    plan: Plan | None = None
    """Of the rollout."""
    latest: int = 1
    """The generation that was requested last."""
    rolled_back: RolledBack | None = None


def configured(desired: Desired) -> int:
    """The generation whose settings hold for which no worker is restarted."""
    plan = desired.plan
    return (desired.target if plan is None else plan.configured).generation


class Rollout:
    """Where a plan is. Decides what is to be there; the controller's core reconciles.

    Args:
        plan: what is carried out.
        now: when it began, for people.
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
        """All pools that have workers meanwhile."""
        return tuple(dict.fromkeys((*self.plan.new.sizes, *self.plan.old.sizes)))

    def size(self, pool: PoolName) -> int:
        """Workers of a pool that are to be there now."""
        old, new = self.plan.old.sizes.get(pool, 0), self.plan.new.sizes.get(pool, 0)
        if self.stage == "finishing":
            return new
        if pool in self.plan.added:
            return min(1, new) if self.stage == "canary" else new
        extra = int(self.plan.surge and pool in self.plan.replaced)
        return (old if self.stage == "canary" else max(old, new)) + extra

    def resize(self, sizes: Mapping[PoolName, int]) -> None:
        """Have other sizes of pools of models that are not being changed."""
        old, new = (
            msgspec.structs.replace(target, sizes={**target.sizes, **sizes})
            for target in (self.plan.old, self.plan.new)
        )
        self.plan = msgspec.structs.replace(self.plan, old=old, new=new)

    def starts(self, worker: Worker) -> str:
        """With which configuration a worker is started now. One that died after the canary takes its turn."""
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
        """Whether a worker has the configuration that is wanted."""
        return worker.config_hash == self.plan.new.config_hashes.get(worker.pool)

    def fits(self, one: Worker, other: Worker) -> bool:
        """Whether two workers of a model must be able to form a pair."""
        return not self.plan.changes_all(one.model) or self.is_new(one) == self.is_new(other)

    def registered(self, worker: Worker) -> None:
        """A worker is there; after a new controller began, that shows whose turn was over."""
        if self.is_new(worker):
            self._released.add(worker.worker_id)

    # ------------------------------------------------------------ next steps

    def failure(self, workers: Iterable[Worker], now: float) -> str | None:
        """Why the way forward ends; None where it does not."""
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
        """When `failure` may change by itself."""
        if self.plan.is_back or self.stage == "finishing":
            return None
        dues = (self._ready_due(w) for w in workers if self._is_on_trial(w) and w.phase != "ready")
        return min((due for due in dues if due is not None), default=None)

    def advance(self, workers: Mapping[WorkerId, Worker]) -> list[Worker]:
        """Enter the next stage where that is due; returns the workers whose turn comes."""
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
        """Whether all is as wanted, and nothing more."""
        return self.stage == "finishing" and not self._leaving(workers)

    # ------------------------------------------------------------ for operators

    def state(self, workers: Iterable[Worker], now: float) -> RolloutState:
        """How far it is."""
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
        """Workers for which there is no place in the end."""
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
        """Whether it is, or is becoming, a new one. Workers of pools that do not change are not."""
        if worker.pool not in self.plan.renewed:
            return False
        comes_in_addition = worker.pool in self.plan.replaced and worker.index >= self.plan.old.sizes[worker.pool]
        return worker.worker_id in self._released or worker.pool in self.plan.added or comes_in_addition

    def _is_on_trial(self, worker: Worker) -> bool:
        return self._is_in_hand(worker) and self.is_new(worker)

    def _ready_due(self, worker: Worker) -> float | None:
        return None if worker.unready_since is None else worker.unready_since + self.plan.ready_timeout_s

    def _watched(self, workers: Iterable[Worker]) -> list[Worker]:
        """The workers all of which have to be ready before the next wave."""
        return [w for w in workers if w.pool in self.plan.renewed]

    def _has_all(self, workers: Mapping[WorkerId, Worker]) -> bool:
        """Whether each place that is to be there has a worker."""
        return self._fill({pool: self.size(pool) for pool in self.plan.renewed}, workers.values())

    def _has_all_bases(self, workers: Mapping[WorkerId, Worker]) -> bool:
        """Whether each place that stays has a new worker, which is ready."""
        sizes = {pool: self.plan.new.sizes[pool] for pool in self.plan.renewed}
        return self._fill(sizes, filter(self._is_done, workers.values()))

    @staticmethod
    def _fill(sizes: Mapping[PoolName, int], workers: Iterable[Worker]) -> bool:
        """Whether these workers have all places of pools of such sizes."""
        return sum(worker.index < sizes.get(worker.pool, 0) for worker in workers) == sum(sizes.values())

    def _left(self, workers: Iterable[Worker]) -> list[Worker]:
        """Workers of places that stay, whose turn has not come."""
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
