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
"""How long a start takes, before one of a worker of its pool was measured."""
MORE_S = 0.5
"""What a start takes beside its phases: the process, registering, the probe."""
MOST_FAULTS = 2
"""A worker with more faults in a row is not expected to come."""

TRANSITIONS: dict[WorkerPhase, frozenset[WorkerPhase]] = {
    "starting": frozenset({"starting", "ready", "failed", "lost", "stopping"}),
    "ready": frozenset({"starting", "ready", "draining", "lost", "failed"}),
    "draining": frozenset({"stopping"}),
    "stopping": frozenset({"starting"}),
    "lost": frozenset({"starting", "ready", "lost", "draining", "stopping", "failed"}),
    "failed": frozenset({"starting", "ready", "failed", "stopping"}),
}
"""Phase -> those that may follow. A worker is forgotten from `stopping` only."""


def worker_id(pool: PoolName, index: int) -> WorkerId:
    """The stable name of a place in a pool, such as `prefill-0` or `qwen/prefill-0`."""
    return WorkerId(f"{pool}-{index}")


def split_worker_id(name: WorkerId) -> tuple[PoolName | None, int]:
    """Pool and index of a name that `worker_id` made; no pool for any other name."""
    text, _, index = name.rpartition("-")
    return (text, int(index)) if kind_of(text) in get_args(PoolKind) and index.isdecimal() else (None, 0)


@dataclass(slots=True)
class Worker:
    """One place in a pool, taken or to be taken. Owner: the controller's core."""

    worker_id: WorkerId
    pool: PoolName
    index: int
    phase: WorkerPhase = "starting"
    info: WorkerInfo | None = None
    """Of its present process, until that is gone."""
    is_proven: bool = False
    """Whether that process was ready once."""
    start_id: str = ""
    """Of the latest start; empty where an earlier controller started it and it has not registered here."""
    config_hash: str = ""
    """Names the configuration of its present process, or of the one that is being started."""
    unready_since: float | None = None
    """When the start began that it has not come back from; of a start by others, when its process registered."""
    num_starts: int = 0
    num_faults: int = 0
    """Failed starts and losses in a row."""
    detail: str = ""
    """Why it was lost or failed, the last time."""
    pending: str = ""
    """What its start waits for."""
    doing: str = ""
    """What its start has been busy with for a while."""
    start_s: float | None = None
    """How long its latest start took."""
    expected_at: float | None = None
    """When it is expected to be ready; None where it is, or is not expected."""
    due: float | None = None
    """When `lost` or `failed` is started anew, or `draining` is stopped, if nothing happens before."""
    ready_since: float = 0.0
    was_killed: bool = False
    """Because it hung; `detail` says how."""

    def enter(self, phase: WorkerPhase, *, due: float | None = None) -> None:
        """Enter `phase`; raises `ValueError` where the table forbids it, and changes nothing."""
        if phase not in TRANSITIONS[self.phase]:
            raise ValueError(f"{self.worker_id}: {self.phase} -> {phase}")
        self.phase, self.due, self.doing = phase, due, ""

    def listens(self, info: WorkerInfo, now: float) -> None:
        """That process of it is there, and is to be probed."""
        if self.phase != "starting" and not self.is_current(info.incarnation):
            self.num_starts += 1  # by Ray, not by us
        self.enter("starting")
        self.info, self.is_proven, self.was_killed = info, False, False
        self.start_id, self.config_hash = info.start_id, info.config_hash
        if self.unready_since is None:
            self.unready_since = now

    def ready(self, info: WorkerInfo, now: float) -> None:
        """That process of it can be used."""
        if self.phase != "starting" and not self.is_current(info.incarnation):
            self.num_starts += 1  # by Ray, not by us
        self.enter("ready")
        self.info, self.ready_since, self.was_killed, self.is_proven = info, now, False, True
        self.start_id, self.config_hash, self.unready_since = info.start_id, info.config_hash, None
        if info.start_phases:
            self.start_s = sum(phase.seconds for phase in info.start_phases) + MORE_S

    def fault(self, phase: WorkerPhase, why: str, now: float) -> None:
        """Its process failed; it is started again after a pause."""
        ready_for_s = now - self.ready_since if self.info is not None and self.is_proven else None
        num_faults, pause_s = next_start(self.num_faults, ready_for_s)
        self.enter(phase, due=now + pause_s)
        self.num_faults, self.detail, self.info, self.is_proven = num_faults, why, None, False
        self.expected_at = None

    def expect(self, usual_s: float, now: float, *, is_desired: bool) -> None:
        """Estimate when it is ready, unless that is known. `usual_s`: of a start that was not measured."""
        is_coming = self.phase in ("starting", "lost", "failed") or (self.phase == "stopping" and is_desired)
        if not is_coming or self.num_faults > MOST_FAULTS:
            self.expected_at = None
        elif self.expected_at is None:
            begins_at = now if self.due is None or self.info is not None else self.due
            self.expected_at = begins_at + (usual_s if self.start_s is None else self.start_s)

    @property
    def model(self) -> str:
        """The key of its model; empty in a cluster of one."""
        return model_of(self.pool)

    @property
    def is_member(self) -> bool:
        """Whether it is in the gateways' membership. A lost one may run: gateways detect that by their own sessions."""
        return self.info is not None and self.is_proven and self.phase in ("ready", "lost", "draining")

    def is_current(self, incarnation: Incarnation) -> bool:
        """Whether that is its present process."""
        return self.info is not None and self.info.incarnation == incarnation

    def is_latest_start(self, start_id: str) -> bool:
        """Whether that is its latest start; true where one of the two is unknown."""
        return not (start_id and self.start_id) or start_id == self.start_id

    def record(self, probing: str = "") -> WorkerRecord:
        """For the cluster state that `disagg status` shows. While it starts, `detail` is why it waits; `probing`: what
        its probe does."""
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
    """The records of workers, in the order of their pools. `doing`: what a new one waits for."""
    found = sorted(workers, key=lambda worker: (pools.index(worker.pool), worker.index))
    return tuple(worker.record(doing(worker.worker_id)) for worker in found)


def num_ready(workers: Iterable[Worker], pool: PoolName) -> int:
    """Workers of a pool that can be used."""
    return sum(worker.pool == pool and worker.phase == "ready" for worker in workers)


def complete_models(sizes: Mapping[PoolName, int], workers: Collection[Worker]) -> list[bool]:
    """Of each model, whether a worker of each of its pools is ready, but for pools without any. The first gateway waits
    for all of them; one that is started again serves those that are there."""
    complete: dict[str, bool] = {}
    for pool, size in sizes.items():
        complete[model_of(pool)] = complete.get(model_of(pool), True) and (not size or num_ready(workers, pool) > 0)
    return list(complete.values())


def misfit(info: WorkerInfo, others: Sequence[WorkerInfo]) -> str | None:
    """Why a worker cannot work with others of its model, which fit each other; None if it can."""
    other = next(iter(others), None)
    if other is not None and info.fingerprint != other.fingerprint:
        return f"it runs another model ({info.fingerprint}) than {other.worker_id} ({other.fingerprint})"
    if other is not None and info.kv_layout != other.kv_layout:
        return f"its KV layout ({info.kv_layout}) is not that of {other.worker_id} ({other.kv_layout})"
    return None
