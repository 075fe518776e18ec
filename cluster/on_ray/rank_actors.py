"""The followers of a worker under Ray: one actor each, in the worker's placement group, as rank 0's is. Those of other
stages may be on other nodes than rank 0.

    rank 0      each process records where it waits for its followers, with a new incarnation
    follower    reads that in Ray's store, records which incarnation it follows, joins, serves rank 0
                rank 0 lost ──> ends; Ray starts it again ──> waits for another incarnation

So it never joins an incarnation of rank 0 again that it has followed already. A process that still follows an earlier
incarnation when rank 0 begins again hangs, and is killed then. A follower whose rank 0 Ray has given up leaves Ray.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from typing import TYPE_CHECKING, Final

import msgspec
from typing_extensions import override

from disagg.cluster.core.ranks import rank_config, rank_name
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.own_node import OwnNode, node_id
from disagg.cluster.on_ray.store import RankSettings
from disagg.cluster.system.cores import pin_process
from disagg.cluster.system.logs import setup_logging
from disagg.cluster.system.process_tools import ProcessRef, end_processes, take_environment
from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.interfaces import Ranks
from disagg.proto.clock.process_clock import process_clock

if TYPE_CHECKING:
    from disagg.engine.parallel.interfaces import StartRanks

logger = logging.getLogger(__name__)

POLL_S: Final = 0.2
ORPHAN_GRACE_S: Final = 5.0
"""Seconds that Ray may have no rank 0 before a follower ends itself."""
LEAVE_TIMEOUT_S: Final = 2.0
"""Seconds that the followers of an earlier incarnation may take to end."""
REMOTE_TIMEOUT_S: Final = LEAVE_TIMEOUT_S + 10.0
"""The same with the start of a process that ends them on another node."""
EXIT_LOST: Final = 3


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a process of rank 0 that waits for its followers."""

    incarnation: str
    """Incarnation, which differs for each process."""
    address: str
    """Address of rank 0, host:port."""
    config: WorkerConfig
    """Configuration of the whole worker; cores and address are each node's own."""


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's process, and the incarnation of rank 0 that it follows."""

    incarnation: str
    node_id: str
    pid: int
    start_ticks: int
    """Start time of the follower's process, as in `ProcessRef`."""


class RankActors(Ranks):
    """Implements `interfaces.Ranks`: Ray starts and ends the processes, so this only ends the search for rank 0."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    @override
    def stop(self) -> None:
        """Does nothing more: followers that still run are ended with the worker's placement group."""
        ray_store.delete(ray_store.leader_key(self._worker))


def rank_actors(config: WorkerConfig) -> StartRanks:
    """Lets the followers of a worker find this process of its rank 0. `config` is the whole worker's."""

    def start(leader_address: str) -> RankActors:
        incarnation = uuid.uuid4().hex
        _end_stale_followers(config)
        record = Leader(incarnation=incarnation, address=leader_address, config=config)
        ray_store.save(ray_store.leader_key(config.worker_id), record)
        return RankActors(config.worker_id)

    return start


def _end_stale_followers(config: WorkerConfig) -> None:
    """End the processes, on whatever node, that follow an earlier incarnation of rank 0: none has begun to follow this
    one. Those of a node that Ray has lost are left: they cannot be reached, and nothing of theirs is taken any more."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    stale: dict[str, list[ProcessRef]] = {}
    for rank in range(1, config.num_ranks):
        if (one := _following(rank_name(config.worker_id, rank))) is not None:
            stale.setdefault(one.node_id, []).append(ProcessRef(one.pid, one.start_ticks))
    here = stale.pop(node_id(), [])
    there = []
    for node, processes in stale.items():
        affinity = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(end_processes).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity)
        there.append(task.remote(processes, LEAVE_TIMEOUT_S))
    end_processes(here, LEAVE_TIMEOUT_S)
    if there:
        ray.wait(there, num_returns=len(there), timeout=REMOTE_TIMEOUT_S)


def _following(process: str) -> Following | None:
    return ray_store.load(ray_store.following_key(process), Following)


def delete_rank_records(worker: str, num_ranks: int) -> None:
    """Delete what the ranks of a worker have recorded."""
    if num_ranks > 1:
        ray_store.delete(ray_store.leader_key(worker))
    for rank in range(1, num_ranks):
        ray_store.delete(ray_store.following_key(rank_name(worker, rank)))


def end_followers(worker: str, num_ranks: int) -> None:
    """End the actors of a worker's followers for good."""
    import ray

    for rank in range(1, num_ranks):
        actor = ray_store.find_actor(rank_name(worker, rank))
        if actor is not None:
            ray.kill(actor, no_restart=True)


class RankActor:
    """One follower; see the module docstring."""

    def __init__(self, settings: bytes) -> None:
        self._settings = msgspec.json.decode(settings, type=RankSettings)
        take_environment(self._settings.environment)
        setup_logging(os.environ)
        self._name = rank_name(self._settings.worker, self._settings.rank)
        pin_process(self._settings.cores)
        self._node = OwnNode(self._settings)
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name="rank", daemon=True).start()

    def stop(self) -> None:
        """Follow no further rank 0. The present one stops this process, or is ended itself."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            leader = self._find_leader()
            if leader is None:
                return
            status = self._follow(leader)
        except Exception:
            logger.exception("%s crashed; Ray starts it again", self._name)
            os._exit(EXIT_LOST)
        if status != 0:
            os._exit(status)
        # Rank 0 has ended in an orderly way. So does its actor now, or Ray's place for both.
        self._find_leader()

    def _find_leader(self) -> Leader | None:
        """The rank 0 that is to be followed next; None when this process is to end."""
        process_clock().start()
        unknown_since: float | None = None
        while not self._stopping.is_set():
            following = _following(self._name)
            leader = ray_store.load(ray_store.leader_key(self._settings.worker), Leader)
            if leader is not None and (following is None or leader.incarnation != following.incarnation):
                return leader
            if ray_store.find_actor(self._settings.worker) is not None:
                unknown_since = None
            else:
                unknown_since = unknown_since or process_clock().now()
                if process_clock().now() - unknown_since >= ORPHAN_GRACE_S:
                    end_this_actor()
                    return None
            self._stopping.wait(POLL_S)
        return None

    def _follow(self, leader: Leader) -> int:
        from disagg.cluster.hosts.rank_process import (  # loads the engine, which a gateway does without
            RankStart,
            be_rank,
        )

        rank = self._settings.rank
        mine = ProcessRef.of(os.getpid())
        record = Following(
            incarnation=leader.incarnation, node_id=node_id(), pid=mine.pid, start_ticks=mine.start_ticks
        )
        ray_store.save(ray_store.following_key(self._name), record)
        config = self._node.configured(rank_config(leader.config, rank, sees_all_devices=False))
        secret = ray_store.cluster_secret()
        return be_rank(RankStart(config=config, rank=rank, leader_address=leader.address, secret=secret))


def end_this_actor() -> None:
    """End the actor that this process is, for good: without this, Ray would start it again."""
    import ray

    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
