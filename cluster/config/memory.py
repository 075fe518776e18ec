"""Sizes of KV caches and of what experts need, as the workers will have them, and checks of them: a block fits into
each cache, and all caches fit into the machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from disagg.cluster.config.cluster_config import PoolConfig, pool_path
from disagg.engine.adapters.modules import slot_bytes
from disagg.engine.cache_groups import PoolLimits, model_layout, most_blocks, rank_block_bytes, window_pools
from disagg.engine.checkpoint.formats.mxfp4 import WEIGHT_BYTES, Mxfp4
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.config import AdapterOptions, Quantization, TierOptions, device_defaults, max_prompt_steps
from disagg.engine.sharding.model_shards import rank_model, with_whole_experts
from disagg.engine.sharding.shards import Shard
from disagg.engine.sharding.stages import layer_weights
from disagg.engine.tiers.sizes import staging_bytes, tier_bytes_needed, tier_sizes
from disagg.proto.control import PoolName
from disagg.proto.errors import ConfigError
from disagg.proto.ids import kind_of
from disagg.proto.messages import KvLayout

ELEMENT_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""Bytes of one number of a dtype."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def expert_weight_bytes(model: ModelConfig, quantization: Quantization, dtype: str) -> float:
    """Bytes of one number of the experts' weights as workers load them."""
    if quantization == "stored" and isinstance(model.weight_format, Mxfp4):
        return WEIGHT_BYTES
    return ELEMENT_BYTES["int8" if quantization in ("int8", "fp8") else dtype]


class GroupPool(NamedTuple):
    """The cache of one cache group on a rank."""

    window: int
    """Tokens of its window; 0 where the KV of all tokens is kept."""
    num_blocks: int
    num_bytes: int


class StageMemory(NamedTuple):
    """What each rank of one stage of a pool's workers keeps in memory. Bytes."""

    layers: range
    """Numbers of the stage's layers."""
    weights: int
    """Matrices of the layers, embedding and head; without norms and biases."""
    groups: tuple[GroupPool, ...]
    """Caches of the cache groups of which the stage has layers; empty where their size is measured."""
    experts: int
    """Weights of its experts, a part of `weights`."""
    scratch: int
    """What its experts need beside weights."""
    adapters: int
    """Its slots for adapters."""

    @property
    def kv(self) -> int:
        """All caches."""
        return sum(group.num_bytes for group in self.groups)


class PoolCache(NamedTuple):
    """The KV caches of a pool's workers. Of several stages the largest decides how many blocks all of them have."""

    name: PoolName
    pool: PoolConfig
    model: ModelConfig
    stage_layers: tuple[range, ...]
    """Layers of each stage."""
    dtype: str
    """Name of the KV's dtype."""
    activation_bytes: int
    """Bytes of one number of a hidden state."""
    weight_bytes: float
    """Bytes of one number of the experts' weights."""
    draft: ModelConfig | None = None
    """Draft model of the pool, whose KV takes as many blocks."""
    tier_bytes: int = 0
    """Host memory of each worker for KV beside its cache."""
    has_folder: bool = False
    """Whether each worker keeps KV in files, too."""
    adapters: AdapterOptions | None = None
    """Adapters that each worker may load."""

    @property
    def is_counted_only(self) -> bool:
        """Whether blocks are counted and have no memory: an encoder keeps no KV."""
        return self.model.encoder is not None

    @property
    def configured_bytes(self) -> int | None:
        """The `kv_cache_bytes` of each rank; None if the size is measured on a GPU, or given as blocks, or if there is
        no KV."""
        if self.is_counted_only:
            return None
        size = self.pool.kv_cache_bytes
        if size == "auto":
            size = device_defaults(self.pool.device).kv_cache_bytes
        return None if size == "auto" or self.pool.num_blocks is not None else size

    @property
    def block_bytes(self) -> int:
        """Bytes of the smallest cache of the largest stage, with the heads of the first rank: one block, and the pools
        of windows beside it."""
        return max(sum(group.num_bytes for group in self._groups(layers, 1)) for layers in self.stage_layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches of all workers with their tiers of host memory and the buffers of files, of their slots
        for adapters, and of what their experts need beside weights. A cache whose size is measured counts as 0."""
        if self.is_counted_only:
            return 0
        ranks = sum(self._rank_bytes(stage) for stage in self.stages) * self.pool.tp
        return (ranks + self.tier_bytes + self.staging_bytes) * self.pool.size

    def _rank_bytes(self, stage: StageMemory) -> int:
        """Of what `num_bytes` counts, that of each rank of a stage."""
        is_sized_by_bytes = self.pool.num_blocks is None and self.pool.pp == 1
        kv = self.configured_bytes or 0 if is_sized_by_bytes else stage.kv
        return kv + (stage.scratch if kv else 0) + stage.adapters

    @property
    def staging_bytes(self) -> int:
        """Bytes of each worker's buffers between its cache and its files."""
        return staging_bytes(self.layout, self.pool.tp) if self.has_folder else 0

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the first cache group on each rank; None if the size is measured."""
        if self.pool.num_blocks is not None or (num_bytes := self.configured_bytes) is None:
            return self.pool.num_blocks
        size, limits = self.pool.tokens_per_block, self._limits
        sizes = [self._block_bytes(layers) for layers in self.stage_layers]
        return min(most_blocks(self.layout, size, limits, num_bytes, block_bytes) for block_bytes in sizes)

    @property
    def stages(self) -> tuple[StageMemory, ...]:
        """The memory of each rank, stage by stage."""
        return tuple(self._stage(layers) for layers in self.stage_layers)

    def _stage(self, layers: range) -> StageMemory:
        model = self._rank_model(layers)
        num_blocks, options = self.num_blocks, self.adapters
        slots = 0 if options is None else options.max_loaded
        max_rank = 0 if options is None else options.max_rank
        of_stage = dataclasses.replace(self.model, layers=self.model.layers[layers.start : layers.stop])
        return StageMemory(
            layers,
            int(_num_weights(model, layers, self.model.num_layers) * self.weight_bytes),
            self._groups(layers, num_blocks) if num_blocks else (),
            int(model.num_expert_weights * self.weight_bytes),
            model.scratch_bytes(self.pool.tokens_per_step, self.activation_bytes),
            slots and slots * slot_bytes(of_stage, Shard(0, self.pool.tp), max_rank, self.activation_bytes),
        )

    def _groups(self, layers: range, num_blocks: int) -> tuple[GroupPool, ...]:
        """The caches of each rank of a stage with these layers, whose first cache group has so many blocks; those of
        which it has no layer are left out. A draft model's KV is in the first one."""
        pools = (num_blocks, *window_pools(self.layout, num_blocks, self.pool.tokens_per_block, self._limits))
        return tuple(
            GroupPool(group.window, blocks, blocks * each)
            for group, blocks, each in zip(self.layout.groups, pools, self._block_bytes(layers), strict=True)
            if each
        )

    def _rank_model(self, layers: range) -> ModelConfig:
        """The part of the model that the first rank of a stage with these layers has."""
        whole = with_whole_experts(self.model) if self.pool.ep else self.model
        rank = rank_model(whole, Shard(0, self.pool.tp))
        return dataclasses.replace(rank, layers=rank.layers[layers.start : layers.stop])

    @property
    def layout(self) -> KvLayout:
        """Layout of a token's KV."""
        return model_layout(self.model, self.dtype, ELEMENT_BYTES[self.dtype])

    @property
    def _limits(self) -> PoolLimits:
        pool = self.pool
        num_steps = 1 if kind_of(self.name) == "decode" else max_prompt_steps(pool.pp)
        return PoolLimits(min(pool.max_num_seqs, pool.tokens_per_step), pool.tokens_per_step * num_steps)

    def _block_bytes(self, layers: range) -> tuple[int, ...]:
        """Bytes of one block of each cache group, with the heads of a rank and those of its layers that are among
        `layers`."""
        pool, shard = self.pool, Shard(0, self.pool.tp)
        first, *others = [rank_block_bytes(group, pool.tokens_per_block, shard, layers) for group in self.layout.groups]
        if self.draft is not None:
            draft = model_layout(self.draft, self.dtype, ELEMENT_BYTES[self.dtype], keeps_all=True)
            first += pool.tokens_per_block * draft.bytes_per_token
        return (first, *others)


def check_block(cache: PoolCache) -> None:
    """Raises `ConfigError`, with both sizes, for a cache that holds no block."""
    num_bytes, block_bytes = cache.configured_bytes, cache.block_bytes
    if num_bytes is not None and num_bytes < block_bytes:
        raise ConfigError(
            f"{pool_path(cache.name)}.kv_cache_bytes: {num_bytes} bytes hold no block of {cache.pool.tokens_per_block} "
            f"tokens of this model, which takes {block_bytes}{_with_windows(cache)}"
        )


def _with_windows(cache: PoolCache) -> str:
    """What else than a block is in the smallest cache of a model with windows."""
    if len(cache.layout.groups) == 1:
        return ""
    return f" with the windows of one sequence and one step of {cache.pool.tokens_per_step} tokens"


def check_no_windows(cache: PoolCache, key: str) -> None:
    """Raises `ConfigError` for a model with windows, whose KV is not kept or sent in extents. `key` is what asks for
    that."""
    num_groups = len(cache.layout.groups)
    if num_groups > 1:
        raise ConfigError(
            f"{key}: is for models without windows; the model of {pool_path(cache.name)} has {num_groups} cache groups"
        )


def check_tiers_hold(cache: PoolCache, tiers: TierOptions, max_model_len: int | None) -> None:
    """Raises `ConfigError`, with both sizes, for a tier of the pool's workers that does not hold the longest sequence.
    `max_model_len`: as configured; None for what the model and the cache allow."""
    if max_model_len is None:
        max_model_len = cache.model.max_positions
        if cache.num_blocks is not None:
            max_model_len = min(max_model_len, cache.num_blocks * cache.pool.tokens_per_block)
    needed = tier_bytes_needed(cache.layout, cache.pool.tp, max_model_len)
    for key, size in tier_sizes(tiers):
        if 0 < size < needed:
            raise ConfigError(
                f"kv_cache.tiers.{key}: {size} is less than the KV of max_model_len {max_model_len} in "
                f"{pool_path(cache.name)}, {needed}"
            )


def check_fits(caches: Sequence[PoolCache], memory_bytes: int) -> None:
    """Raises `ConfigError`, with the sizes, where the caches of all workers on CPUs are more than their machine has.

    Args:
        caches: the caches of all pools.
        memory_bytes: memory of the machine.
    """
    on_cpu = [cache for cache in caches if cache.pool.device == "cpu"]
    total = sum(cache.num_bytes for cache in on_cpu)
    if total <= memory_bytes:
        return
    largest = max(on_cpu, key=lambda cache: cache.num_bytes)
    key = "kv_cache_bytes" if largest.pool.num_blocks is None else "num_blocks"
    size = largest.pool.size
    raise ConfigError(
        f"{pool_path(largest.name)}.{key}: {_shown(largest.num_bytes)} for {size} worker{'s' if size > 1 else ''}; the "
        f"KV caches of all workers take {_shown(total)}, and this machine has {_shown(memory_bytes)}"
    )


def memory_notes(caches: Sequence[PoolCache]) -> tuple[str, ...]:
    """The memory of each rank, for pools whose model has windows, experts or adapters: each pool of blocks, and what
    experts and slots of adapters take; of pools with stages that of each stage, with weights and KV; and what workers
    keep in host memory."""
    tiers = [
        f"{pool_path(cache.name)}: each worker keeps up to {_in_mib(cache.tier_bytes)} of KV in host memory"
        for cache in caches
        if cache.tier_bytes
    ]
    return (*[note for cache in caches if not cache.is_counted_only for note in _rank_notes(cache)], *tiers)


def _rank_notes(cache: PoolCache) -> list[str]:
    path, stages = pool_path(cache.name), cache.stages
    if len(stages) == 1:
        parts = _memory_parts(cache, stages[0])
        return [f"{path}: each rank has {', '.join(parts)}"] if parts else []
    notes = []
    for number, stage in enumerate(stages):
        parts = [f"weights of {_in_mib(stage.weights)}", *_memory_parts(cache, stage)]
        place = f"stage {number}, layers {stage.layers.start} to {stage.layers.stop - 1}"
        notes.append(f"{path}: each rank of {place}, has {', '.join(parts)}")
    return notes


def _memory_parts(cache: PoolCache, stage: StageMemory) -> list[str]:
    size = cache.pool.tokens_per_block
    parts = [
        f"KV of {f'the last {group.window}' if group.window else 'all'} tokens in {group.num_blocks} blocks "
        f"({group.num_blocks * size} tokens, {_in_mib(group.num_bytes)})"
        for group in stage.groups
        if len(cache.layout.groups) > 1 or cache.pool.pp > 1
    ]
    if stage.scratch:
        parts.append(f"experts of {_in_mib(stage.experts)} and {_in_mib(stage.scratch)} to compute them")
    if (options := cache.adapters) is not None:
        parts.append(f"slots for {options.max_loaded} adapters of {_in_mib(stage.adapters)}")
    return parts


def _num_weights(rank: ModelConfig, layers: range, num_layers: int) -> int:
    """Weights of the matrices of a rank, whose part of the model has the stage's `layers` only: with the embedding on
    the first stage and the head on the last."""
    ends = (layers.start == 0) + (layers.stop == num_layers)
    return sum(layer_weights(rank, layer) for layer in rank.layers) + ends * rank.vocab_size * rank.hidden_size


def _in_mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def machine_memory() -> int:
    """Bytes of memory that the processes of this machine, or of this container, may use together."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    memory = int(fields["MemTotal"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it has `max`
        memory = min(memory, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    return memory


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
