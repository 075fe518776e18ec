"""One worker in the observed state: its phases, and which may follow which. Pure.

       registered, probed          Scale, Drain             empty or late
starting ───────────────> ready ───────────────> draining ───────────────> stopping ──> gone, or starting again
   │  ^                   │   ^                                              ^
   │  └── retry ──┐  left │   │ registered                                   │
   v              │       v   │                                              │
 failed ──────────┼──>   lost ───────────────────────────────────────────────┘
                  └── by way of `stopping`, so that nothing of the earlier process is left

A worker that registers stays `starting` until a probe has gone through it (`cluster/core/probes.py`). A new process of
one that was ready, lost or failed, which the launcher started by itself, goes back to `starting` for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from disagg.cluster.core.backoff import next_start
from disagg.proto.control import PoolKind, PoolName, WorkerPhase, WorkerRecord
from disagg.proto.ids import Incarnation, WorkerId, kind_of, model_of
from disagg.proto.messages import WorkerInfo

USUAL_START_S = 10.0
"""Assumed duration of a start in seconds, before one of a worker of its pool was measured."""
MORE_S = 0.5
"""Seconds that a start takes beside its phases: the process, registering, the probe."""
MOST_FAULTS = 2
"""A worker with more faults in a row is not expected to become ready."""

TRANSITIONS: dict[WorkerPhase, frozenset[WorkerPhase]] = {
    "starting": frozenset({"starting", "ready", "failed", "lost", "stopping"}),
    "ready": frozenset({"starting", "ready", "draining", "lost", "failed"}),
    "draining": frozenset({"stopping"}),
    "stopping": frozenset({"starting"}),
    "lost": frozenset({"starting", "ready", "lost", "draining", "stopping", "failed"}),
    "failed": frozenset({"starting", "ready", "failed", "stopping"}),
}
"""Phases that may follow each phase. A worker is forgotten from `stopping` only."""


def worker_id(pool: PoolName, index: int) -> WorkerId:
    """The stable name of a place in a pool, such as `prefill-0` or `qwen/prefill-0`."""
    return WorkerId(f"{pool}-{index}")


def split_worker_id(name: WorkerId) -> tuple[PoolName | None, int]:
    """Pool and index of a name that `worker_id` made; the pool is None for any other name."""
    text, _, index = name.rpartition("-")
    return (text, int(index)) if kind_of(text) in get_args(PoolKind) and index.isdecimal() else (None, 0)


@dataclass(slots=True)
class Worker:
    """One place in a pool, with or without a process. Owner: the controller's core."""

    worker_id: WorkerId
    pool: PoolName
    index: int
    phase: WorkerPhase = "starting"
    info: WorkerInfo | None = None
    """Information about its present process, until that has ended."""
    is_proven: bool = False
    """Whether that process was ready at any time."""
    start_id: str = ""
    """Id of the latest start; empty where an earlier controller started it and it has not registered yet."""
    config_hash: str = ""
    """Hash of the configuration of its present process, or of the one that is being started."""
    unready_since: float | None = None
    """Time since which it is not ready: the beginning of its start or, if others started the process, its
    registration."""
    num_starts: int = 0
    num_faults: int = 0
    """Number of failed starts and losses in a row."""
    detail: str = ""
    """Reason why it was last lost or failed."""
    pending: str = ""
    """What its start waits for, as text."""
    doing: str = ""
    """What its start has been doing for a while, as text."""
    start_s: float | None = None
    """Duration of its latest start in seconds."""
    expected_at: float | None = None
    """Time at which it is expected to be ready; None where it is ready, or not expected."""
    due: float | None = None
    """Time at which a `lost` or `failed` worker is started again, or a `draining` one is stopped, if nothing happens
    before."""
    ready_since: float = 0.0
    was_killed: bool = False
    """Whether it was killed because it hung; `detail` has the reason."""

    def enter(self, phase: WorkerPhase, *, due: float | None = None) -> None:
        """Enter `phase`; raises `ValueError` where the table forbids it, and changes nothing."""
        if phase not in TRANSITIONS[self.phase]:
            raise ValueError(f"{self.worker_id}: {self.phase} -> {phase}")
        self.phase, self.due, self.doing = phase, due, ""

    def listens(self, info: WorkerInfo, now: float) -> None:
        """Note that a new process of it listens, and is to be probed."""
        if self.phase != "starting" and not self.is_current(info.incarnation):
            self.num_starts += 1  # by Ray, not by us
        self.enter("starting")
        self.info, self.is_proven, self.was_killed = info, False, False
        self.start_id, self.config_hash = info.start_id, info.config_hash
        if self.unready_since is None:
            self.unready_since = now

    def ready(self, info: WorkerInfo, now: float) -> None:
        """Note that its process is ready."""
        if self.phase != "starting" and not self.is_current(info.incarnation):
            self.num_starts += 1  # by Ray, not by us
        self.enter("ready")
        self.info, self.ready_since, self.was_killed, self.is_proven = info, now, False, True
        self.start_id, self.config_hash, self.unready_since = info.start_id, info.config_hash, None
        if info.start_phases:
            self.start_s = sum(phase.seconds for phase in info.start_phases) + MORE_S

    def fault(self, phase: WorkerPhase, why: str, now: float) -> None:
        """Note that its process failed; it is started again after a pause."""
        ready_for_s = now - self.ready_since if self.info is not None and self.is_proven else None
        num_faults, pause_s = next_start(self.num_faults, ready_for_s)
        self.enter(phase, due=now + pause_s)
        self.num_faults, self.detail, self.info, self.is_proven = num_faults, why, None, False
        self.expected_at = None

    def expect(self, usual_s: float, now: float, *, is_desired: bool) -> None:
        """Estimate when it will be ready, unless that is known. `usual_s`: duration of a start that was not
        measured."""
        is_coming = self.phase in ("starting", "lost", "failed") or (self.phase == "stopping" and is_desired)
        if not is_coming or self.num_faults > MOST_FAULTS:
            self.expected_at = None
        elif self.expected_at is None:
            begins_at = now if self.due is None or self.info is not None else self.due
            self.expected_at = begins_at + (usual_s if self.start_s is None else self.start_s)

    @property
    def model(self) -> str:
        """Key of its model; empty in a cluster of one model."""
        return model_of(self.pool)

    @property
    def is_member(self) -> bool:
        """Whether it is in the gateways' membership. A lost one may still run: gateways detect its end by their own
        sessions."""
        return self.info is not None and self.is_proven and self.phase in ("ready", "lost", "draining")

    def is_current(self, incarnation: Incarnation) -> bool:
        """Whether that incarnation is its present process."""
        return self.info is not None and self.info.incarnation == incarnation

    def is_latest_start(self, start_id: str) -> bool:
        """Whether that start is its latest one; true if one of the two ids is unknown."""
        return not (start_id and self.start_id) or start_id == self.start_id

    def record(self, probing: str = "") -> WorkerRecord:
        """Record for the cluster state that `disagg status` shows. While it starts, `detail` is why it waits;
        `probing`: what its probe does."""
        return WorkerRecord(
            worker_id=self.worker_id,
            pool=self.pool,
            phase=self.phase,
            info=None if self.phase == "starting" else self.info,
            num_starts=self.num_starts,
            detail=(probing or self.pending or self.doing if self.phase == "starting" else "") or self.detail,
        )


def in_order(
    workers: Iterable[Worker], pools: Sequence[PoolName], doing: Callable[[WorkerId], str]
) -> tuple[WorkerRecord, ...]:
    """Records of the workers, in the order of their pools. `doing`: returns what a new one waits for."""
    found = sorted(workers, key=lambda worker: (pools.index(worker.pool), worker.index))
    return tuple(worker.record(doing(worker.worker_id)) for worker in found)


def num_ready(workers: Iterable[Worker], pool: PoolName) -> int:
    """Number of ready workers of a pool."""
    return sum(worker.pool == pool and worker.phase == "ready" for worker in workers)


def complete_models(sizes: Mapping[PoolName, int], workers: Collection[Worker]) -> list[bool]:
    """Whether a worker of each pool is ready, for each model, ignoring pools without any. The first gateway waits for
    all of them; one that is started again serves the complete models."""
    complete: dict[str, bool] = {}
    for pool, size in sizes.items():
        complete[model_of(pool)] = complete.get(model_of(pool), True) and (not size or num_ready(workers, pool) > 0)
    return list(complete.values())


def misfit(info: WorkerInfo, others: Sequence[WorkerInfo]) -> str | None:
    """Reason why a worker cannot work with others of its model, which fit each other; None if it can."""
    other = next(iter(others), None)
    if other is not None and info.fingerprint != other.fingerprint:
        return f"it runs another model ({info.fingerprint}) than {other.worker_id} ({other.fingerprint})"
    if other is not None and info.kv_layout != other.kv_layout:
        return f"its KV layout ({info.kv_layout}) is not that of {other.worker_id} ({other.kv_layout})"
    return None
