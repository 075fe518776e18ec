"""The plans of the generations that processes of a cluster may have, and the checks of a new one before anything
changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from disagg.cluster.config.cluster_config import (
    ClusterConfig,
    PoolConfig,
    active_pools,
    models_of,
    parse_config,
    pool_path,
)
from disagg.cluster.config.model_pools import path_prefix
from disagg.cluster.control.changes import compare
from disagg.cluster.control.plan import ClusterPlan, plan_cluster
from disagg.cluster.core.adapters import Adapters, Base, Bases
from disagg.cluster.core.core import ControlCore
from disagg.cluster.core.rollout import Desired, Plan, Target, configured
from disagg.cluster.models.catalog import FAKE_MODEL
from disagg.engine.config import WorkerConfig
from disagg.gateway.stores import check_stores
from disagg.gateway.text import checkpoint
from disagg.proto.control import AdapterRecord, ApplyReply, ApplyRequest, ControlRefused, PoolName
from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_PLANS = 3
"""Number of times that an `apply` is planned before it is refused because sizes or the generation change meanwhile."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of a cluster, as it is saved."""

    config: ClusterConfig
    restarts: int = 0
    """Number of requests to replace workers although nothing differs."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the next controller needs."""

    desired: Desired
    generations: dict[int, Generation]
    layout: dict[PoolName, int]
    """Sizes by which cores and devices are laid out."""
    adapters: tuple[AdapterRecord, ...] = ()
    """Adapters of the configuration and of operators."""

    @property
    def present(self) -> ClusterConfig:
        """Configuration whose settings apply that need no restart of a process."""
        return self.generations[configured(self.desired)].config


class Plans:
    """Owner of the plans. Changed on the controller's loop, and read by its launcher's thread.

    Args:
        plan: plan of the configuration that the controller was started with.
        saved: state that an earlier controller saved, whose configurations are used instead.
    """

    def __init__(self, plan: ClusterPlan, saved: SavedState | None = None) -> None:
        self._layout: Mapping[PoolName, int] = plan.sizes if saved is None else saved.layout
        self.configured = 1 if saved is None else configured(saved.desired)
        """Generation whose settings apply that need no restart of a process."""
        self._available, self._cpu_dtype = plan.available, plan.cpu_dtype
        self._memory_bytes = plan.memory_bytes
        self.adapters = Adapters(() if saved is None else saved.adapters)
        """The registered adapters."""
        if saved is None:
            self._plans = {1: replace(plan, layout=self._layout)}
            return
        self._plans = {}
        for number, generation in saved.generations.items():
            try:
                found = plan_cluster(generation.config, plan.available, plan.cpu_dtype, plan.memory_bytes)
            except ConfigError as error:
                if number == self.configured:
                    raise
                logger.warning("generation %d of the configuration can no longer be started: %s", number, error)
                continue
            self._plans[number] = replace(found, layout=saved.layout, restarts=generation.restarts)

    def __getitem__(self, generation: int) -> ClusterPlan:
        return self._plans[generation]

    def target(self, generation: int, sizes: Mapping[PoolName, int] | None = None) -> Target:
        """Target of the controller's core for a generation."""
        plan = self._plans[generation]
        return Target(
            generation=generation,
            sizes={**plan.sizes, **(sizes or {})},
            config_hashes={name: config_hash_of(plan, name) for name in plan.sizes},
            drain_timeout_s=plan.config.controller.drain_timeout_s,
        )

    @property
    def present(self) -> ClusterPlan:
        """Plan of the generation that is configured."""
        return self._plans[self.configured]

    @property
    def bases(self) -> Bases:
        """The models of the generation that is configured, for their adapters."""
        return {
            key: Base(alone.model.served_name)
            if (section := alone.adapters) is None
            else Base(alone.model.served_name, section.models, section.folder)
            for key, alone in models_of(self.present.config).items()
        }

    def add(self, generation: int, plan: ClusterPlan) -> None:
        """Add the plan of a generation."""
        self._plans = {**self._plans, generation: plan}

    def keep(self, generations: Collection[int]) -> bool:
        """Keep only these generations; returns whether others were dropped."""
        before = len(self._plans)
        self._plans = {number: plan for number, plan in self._plans.items() if number in generations}
        return len(self._plans) < before

    @property
    def workers(self) -> list[WorkerConfig]:
        """Configuration of one worker of each pool of each plan."""
        return [plan.worker(pool, 0) for plan in self._plans.values() for pool in plan.sizes]

    def saved(self, desired: Desired) -> SavedState:
        """State for the next controller."""
        generations = {
            number: Generation(config=plan.config, restarts=plan.restarts) for number, plan in self._plans.items()
        }
        return SavedState(
            desired=desired, generations=generations, layout=dict(self._layout), adapters=self.adapters.records
        )

    def worker(self, pool: PoolName, index: int, config_hash: str) -> tuple[WorkerConfig, PoolConfig]:
        """Configuration with which a worker is started. If no plan has that hash, it is the latest configuration of its
        pool."""
        with_pool = [plan for _, plan in sorted(self._plans.items(), reverse=True) if pool in plan.sizes]
        plan = next((plan for plan in with_pool if config_hash_of(plan, pool) == config_hash), with_pool[0])
        config = msgspec.structs.replace(plan.worker(pool, index), config_hash=config_hash)
        return config, plan.pool(pool)

    def plan(self, request: ApplyRequest, running: Target, latest: int) -> tuple[ApplyReply, Plan, ClusterPlan]:
        """Plan the change that a request asks for. Reads the model's folder.

        Args:
            running: the present target.
            latest: the generation that was requested last; the new one has the next number.

        Raises:
            ConfigError: naming a field that has a bad value or cannot be changed.
        """
        config = read_config(request.config)
        check_stores(config.gateway, config.gateway.record_events)
        old = self._plans[running.generation]
        new = replace(
            plan_cluster(config, self._available, self._cpu_dtype, self._memory_bytes),
            layout=self._layout,
            restarts=old.restarts + request.restart,
        )
        sizes = dict(new.sizes)
        for name, size in running.sizes.items():  # an operator's, or the autoscaler's; 0 is only the latter's
            if name in sizes and old.sizes[name] == sizes[name] and (size or config.autoscaler.enabled):
                sizes[name] = size
        wanted = Target(
            generation=latest + 1,
            sizes=sizes,
            config_hashes={name: config_hash_of(new, name) for name in new.sizes},
            drain_timeout_s=config.controller.drain_timeout_s,
        )
        plan = Plan(old=running, new=wanted, surge=request.surge, ready_timeout_s=request.ready_timeout_s)
        pools = (*plan.renewed, *plan.removed)
        changes = compare(old.config, config, pools)
        for change in changes:
            if change.how == "refused":
                raise ConfigError(f"{change.field}: {change.detail}")
        for key, path in new.model_paths.items():
            check_served(old.model_paths.get(key), path, f"{path_prefix(key)}model.path")
        if not request.surge:
            for name in plan.replaced:
                if running.sizes[name] == 1:
                    raise ConfigError(
                        f"{pool_path(name)}.size: without a surge worker its only worker cannot be replaced"
                    )
        return ApplyReply(generation=latest + 1, changes=tuple(changes), pools=pools), plan, new

    async def plan_present(self, request: ApplyRequest, core: ControlCore) -> tuple[ApplyReply, Plan, ClusterPlan]:
        """Call `plan` on another thread, for the target that the core has when it returns.

        Raises:
            ConfigError: as `plan`, or if the target changes during each try.
        """
        for _ in range(MAX_PLANS):
            running, latest = core.target, core.latest
            planned = await asyncio.to_thread(self.plan, request, running, latest)
            if (core.target, core.latest) == (running, latest):
                return planned
        why = f"the sizes or the generation of the cluster changed {MAX_PLANS} times while this was planned"
        raise ConfigError(f"file: {why}; try again")


def read_config(raw: bytes) -> ClusterConfig:
    """Read and check a configuration from JSON. Raises `ConfigError`."""
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"the configuration: no JSON: {error}") from None
    return parse_config(values)


def config_hash_of(plan: ClusterPlan, pool: PoolName) -> str:
    """Hash of all that a plan says about the workers of a pool, except for their ids and devices."""
    config, place = plan.worker(pool, 0), dict(active_pools(plan.config))[pool]
    content = [config, place.cores, sorted(place.node_labels.items())]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:12]


def check_served(old: str | None, new: str, field: str = "model.path") -> None:
    """Refuse a model whose files for the gateway differ from the old version's: one gateway serves both versions.
    Without an `old` one the model is added, and the gateway must be able to read all of its files.

    Raises:
        ConfigError: naming `field` and what differs.
    """
    if old == new:
        return
    if old is None:
        if new != FAKE_MODEL:
            _served(new, field)
        return
    if FAKE_MODEL in (old, new):
        raise ConfigError(f"{field}: the model without weights has another tokenizer")
    before, after = _served(old, field), _served(new, field)
    for name, value in before.items():
        if after[name] != value:
            raise ConfigError(
                f"{field}: {new} has another {name} than {old}; the gateway would have to change with its workers"
            )


def _served(path: str, field: str) -> dict[str, object]:
    """Data that a gateway reads from a checkpoint folder."""
    folder = Path(path)
    config = checkpoint.model_config(folder)
    try:
        tokenizer = hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()
    except OSError as error:
        raise ConfigError(f"{field}: {folder / 'tokenizer.json'}: cannot be read ({error.strerror})") from None
    return {
        "tokenizer": tokenizer,
        "chat template": (checkpoint.chat_template_source(folder), checkpoint.special_tokens(folder)),
        "set of end tokens": checkpoint.eos_ids(folder, config),
        "vocabulary": config.vocab_size,
        "context length": config.max_position_embeddings,
    }


def refusal_of(error: ConfigError) -> ControlRefused:
    """The reply to a request that has a mistake; its message begins with the field."""
    field, _, message = str(error).partition(": ")
    return ControlRefused(field=field, message=message)
