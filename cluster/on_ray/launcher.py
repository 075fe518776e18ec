"""Starts and ends actors for the controller, inside the controller's own actor; implements `launcher.Launcher`.

    start_worker   placement group (one bundle a stage, each on a node with the pool's labels) -> actors of its ranks
    stop_workers   actors stop() -> ray.kill -> group removed -> seen gone

Actors and groups are detached, so that they outlive the controller's process, and have the names of what they are for,
so that the next one finds them. Neither has to be ready for `start_worker` to return: a group without a node for it
waits until there is one, which an autoscaler may bring.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.cluster.config.cluster_config import PoolConfig
from disagg.cluster.config.core_layout import num_cores
from disagg.cluster.control.launcher import Launcher
from disagg.cluster.control.plan import GatewaySpec
from disagg.cluster.core.ranks import rank_name, worker_of
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.handles import (
    STOP_TIMEOUT_S,
    actor_info,
    kill_actor_process,
    present_actors,
    present_groups,
    remove_group,
    stop_actors,
    unmet_needs,
    why_dead,
)
from disagg.cluster.on_ray.rank_actors import delete_rank_records
from disagg.cluster.on_ray.store import (
    NODE_ID_LABEL,
    NODE_SHARE,
    SLOT,
    ControllerSettings,
    ProcessSettings,
    RankSettings,
    actor_name,
)
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.logs import log_environment
from disagg.cluster.system.process_tools import describe, thread_environment
from disagg.engine.config import WorkerConfig
from disagg.engine.device_environment import device_environment
from disagg.proto.ids import WorkerId

LOOK_INTERVAL_S: Final = 1.0
"""Seconds between two lookups of actors and groups in Ray; each of them is a call."""

Bundle = dict[str, float]


class RayLauncher(Launcher):
    """Owner of the actors and placement groups of all workers and gateways."""

    restarts = True

    def __init__(self, settings: ControllerSettings) -> None:
        self._config = settings.config
        self._cores = settings.cores
        self._is_private = settings.is_private
        self._actors: dict[str, Any] = {}
        """Handles of the actors that should run, by process name; each rank of a worker is a process."""
        self._groups: dict[str, Any] = {}
        self._labels: dict[str, dict[str, str]] = {}
        """Labels of the nodes that each worker may run on, for workers that this launcher started."""
        self._prepared: set[str] = set()
        """Gateways whose processes wait for their specification."""
        self._reported: set[str] = set()
        self._exited_due = self._pending_due = 0.0
        self._pending: dict[str, str] = {}
        # Ray warns at each start that removing the group ends the actor, which is what we do.
        logging.getLogger("ray.actor").setLevel(logging.ERROR)

    # ------------------------------------------------------------ launcher.Launcher

    @override
    def running(self) -> frozenset[str]:
        """Removes groups without an actor, which an actor that ended by itself has left."""
        import ray

        found = {name: actor for name in present_actors() if (actor := ray_store.find_actor(name)) is not None}
        names = {name for name in found if worker_of(name) == name}
        groups = present_groups()
        for name in groups - names:
            remove_group(name)
        self._actors = {name: actor for name, actor in found.items() if worker_of(name) in names}
        self._groups = {name: ray.util.get_placement_group(actor_name(name)) for name in names & groups}
        return frozenset(names)

    @override
    def start_worker(self, config: WorkerConfig, controller_address: str, pool: PoolConfig) -> None:
        """Does not need the controller's address: the worker finds the controller by its name."""
        name = config.worker_id
        self._labels[name] = dict(pool.node_labels)
        settings = ProcessSettings(
            name=name,
            kind="worker",
            cores=self._cores,
            claim_cores=0 if self._is_private else _cores_to_claim(pool),
            bind_node=self._config.network.bind == "node",
            num_ranks=config.num_ranks,
        )
        environment = thread_environment(config.num_threads) | device_environment(config.device)
        share = self._worker_share(config)
        self._start(settings, config, environment, share, self._labels[name], config.pp)

    @override
    def stop_workers(self, worker_ids: Sequence[WorkerId]) -> None:
        self._stop(worker_ids)

    @override
    def keep_only(self, workers: Sequence[WorkerConfig]) -> None:
        """Does nothing, because nothing is held for other workers."""

    @override
    def prepare_gateways(self, names: Sequence[str]) -> None:
        for name in names:
            self._start_gateway(name, None)
            self._prepared.add(name)

    @override
    def start_gateway(self, spec: GatewaySpec, controller_address: str) -> None:
        """Starts it beside the controller, on the node whose address clients use."""
        if not self._is_private:  # the plan's cores are those of a machine that is not ours alone
            spec = msgspec.structs.replace(spec, cores=())
        if spec.name in self._prepared:
            self._prepared.remove(spec.name)
            ray_store.save(ray_store.gateway_spec_key(spec.name), spec)
        else:
            self._start_gateway(spec.name, spec)

    def _start_gateway(self, name: str, spec: GatewaySpec | None) -> None:
        import ray

        settings = ProcessSettings(name=name, kind="gateway", cores=self._cores)
        here = {NODE_ID_LABEL: ray.get_runtime_context().get_node_id()}
        self._start(settings, spec, thread_environment(1), _on_node(ray.util.get_node_ip_address()), here)

    @override
    def stop_gateways(self, names: Sequence[str]) -> None:
        self._stop(names, STOP_TIMEOUT_S + self._config.gateway.drain_timeout_s)

    @override
    def kill(self, name: str, pid: int) -> None:
        """Kills the process; Ray starts the actor again."""
        actor = ray_store.find_actor(name)
        if actor is not None:
            kill_actor_process(actor_info(actor), pid)

    @override
    def exited(self) -> dict[str, str]:
        """Reports the actors that Ray has given up."""
        now = time.monotonic()
        if now < self._exited_due:
            return {}
        self._exited_due = now + LOOK_INTERVAL_S
        dead = {name: info for name, actor in self._actors.items() if (info := actor_info(actor))["State"] == "DEAD"}
        news: dict[str, str] = {}
        for process in sorted(dead):  # a worker's first rank before the others
            name = worker_of(process)
            if name not in self._reported:
                news.setdefault(name, _why_exited(process, dead[process]))
        self._reported |= set(news)
        return news

    @override
    def pending(self) -> dict[str, str]:
        """Reports the groups that no node has room for."""
        now = time.monotonic()
        if now >= self._pending_due:
            self._pending_due = now + LOOK_INTERVAL_S
            self._pending = {
                name: why for name, group in self._groups.items() if (why := self._why_pending(name, group))
            }
        return self._pending

    # ------------------------------------------------------------ start

    def _start(
        self,
        settings: ProcessSettings,
        content: WorkerConfig | GatewaySpec | None,
        environment: dict[str, str],
        share: Bundle,
        labels: dict[str, str],
        num_stages: int = 1,
    ) -> None:
        """Start the actors of a process. `share`: what each rank takes of its node."""
        import ray

        from disagg.cluster.on_ray.host_actor import HostActor
        from disagg.cluster.on_ray.rank_actors import RankActor

        name = settings.name
        self._stop([name])  # whatever is left of an earlier process
        ray_store.delete(ray_store.failure_key(name))
        if isinstance(content, GatewaySpec):
            ray_store.save(ray_store.gateway_spec_key(name), content)
            content = None
        environment = environment | self._log_environment()
        settings = msgspec.structs.replace(settings, environment=environment)
        try:
            group = self._groups[name] = ray.util.placement_group(
                stage_bundles(share, settings.num_ranks, num_stages),
                strategy="PACK" if num_stages > 1 else "STRICT_PACK",
                name=actor_name(name),
                lifetime="detached",
                bundle_label_selector=[labels] * num_stages if labels else None,
            )
            options = _options(name, group, 0, share)
            self._actors[name] = (
                ray.remote(HostActor)
                .options(**options)
                .remote(msgspec.json.encode(settings), msgspec.json.encode(content))
            )
            for rank in range(1, settings.num_ranks):
                follower = rank_name(name, rank)
                rank_settings = RankSettings(
                    worker=name,
                    rank=rank,
                    cores=settings.cores,
                    claim_cores=settings.claim_cores,
                    bind_node=settings.bind_node,
                    environment=environment,
                )
                options = _options(follower, group, rank * num_stages // settings.num_ranks, share)
                self._actors[follower] = (
                    ray.remote(RankActor).options(**options).remote(msgspec.json.encode(rank_settings))
                )
        except (ValueError, ray.exceptions.RayError) as error:
            self._stop([name])
            raise LaunchError(f"Ray cannot start it: {describe(error)}") from error

    def _log_environment(self) -> dict[str, str]:
        logs = self._config.logging
        return log_environment(logs.level, logs.format, os.environ)

    def _worker_share(self, config: WorkerConfig) -> Bundle:
        """What a rank takes of its node."""
        import ray

        share: Bundle = {"GPU": 1} if config.device != "cpu" else {SLOT: 1}
        if not self._is_private and self._config.network.bind == "loopback":  # the same machine as the gateway
            share |= _on_node(ray.util.get_node_ip_address())
        return share

    def _why_pending(self, name: str, group: Any) -> str:
        """Reason as text for operators; empty if the process is placed."""
        needs = unmet_needs(group)
        labels = ", ".join(f"{key}={value}" for key, value in self._labels.get(name, {}).items())
        with_labels = f" and the labels {labels}" if labels else ""
        if not needs:
            return ""
        place = "a Ray node with" if len(needs) == 1 else f"Ray nodes for {len(needs)} stages, each of them with"
        return f"waits for {place} {needs[0]}{with_labels}"

    # ------------------------------------------------------------ stop

    def _stop(self, names: Sequence[str], timeout_s: float = STOP_TIMEOUT_S) -> None:
        processes = self._processes(names)
        actors = [actor for process in processes if (actor := ray_store.find_actor(process)) is not None]
        stop_actors(actors, timeout_s)
        for process in processes:
            self._actors.pop(process, None)
        for name in names:
            self._groups.pop(name, None)
            self._reported.discard(name)
            self._prepared.discard(name)
            ray_store.delete(ray_store.gateway_spec_key(name))
            remove_group(name)
            delete_rank_records(name, sum(worker_of(process) == name for process in processes))

    def _processes(self, names: Sequence[str]) -> list[str]:
        """Processes of these names that may have an actor: the one of that name, and other ranks."""
        wanted = set(names)
        ranks = [process for process in self._actors if worker_of(process) in wanted]
        return list(dict.fromkeys((*names, *ranks)))


def _why_exited(name: str, info: dict[str, Any]) -> str:
    """The reason that the process recorded itself, else the one that Ray reports."""
    return ray_store.load(ray_store.failure_key(name), str) or why_dead(info)


def stage_bundles(share: Bundle, num_ranks: int, num_stages: int) -> list[Bundle]:
    """The bundles of a worker, one a stage, whose ranks are on one node therefore. Stages may be on different ones."""
    return [{key: amount * (num_ranks // num_stages) for key, amount in share.items()}] * num_stages


def _cores_to_claim(pool: PoolConfig) -> int:
    """Of each rank."""
    return num_cores(pool) // pool.num_ranks if pool.cores == "auto" and pool.device == "cpu" else 0


def _options(process: str, group: Any, bundle_index: int, share: Bundle) -> Any:
    """Options of Ray for the actor of a process, which takes its share of a bundle of a placement group. Without a
    `runtime_env`: one costs a second at each start, and processes that Ray has started in advance do not fit it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "name": actor_name(process),
        "namespace": ray_store.NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "num_gpus": share.get("GPU", 0),
        "resources": {key: amount for key, amount in share.items() if key != "GPU"},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_index),
    }


def _on_node(address: str) -> Bundle:
    return {f"node:{address}": NODE_SHARE}
