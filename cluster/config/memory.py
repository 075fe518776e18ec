"""Checks of KV cache sizes: a block fits into each cache, and all caches fit into the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from disagg.cluster.config.cluster_config import PoolConfig, pool_path
from disagg.engine.cache_groups import PoolLimits, model_layout, window_pools
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.config import device_defaults
from disagg.engine.sharding.shards import Shard
from disagg.proto.control import PoolName
from disagg.proto.errors import ConfigError

_ELEMENT_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class PoolCache(NamedTuple):
    """The KV caches of a pool's workers."""

    name: PoolName
    pool: PoolConfig
    model: ModelConfig
    dtype: str
    """Name of the KV's dtype."""
    draft: ModelConfig | None = None
    """Draft model of the pool, whose KV takes as many blocks."""

    @property
    def configured_bytes(self) -> int | None:
        """The `kv_cache_bytes` of each rank; None if the size is measured on a GPU, or given as blocks."""
        size = self.pool.kv_cache_bytes
        if size == "auto":
            size = device_defaults(self.pool.device).kv_cache_bytes
        return None if size == "auto" or self.pool.num_blocks is not None else size

    @property
    def block_bytes(self) -> int:
        """Bytes of the smallest cache, with the heads of the first rank: one block, and the pools of windows beside
        it."""
        return self._bytes_of(1)

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches of all workers, and of what their experts need beside weights; 0 if the size is
        measured."""
        num_blocks = self.pool.num_blocks
        each = self.configured_bytes or 0 if num_blocks is None else self._bytes_of(num_blocks)
        if each:
            each += self.model.scratch_bytes(self.pool.tokens_per_step, _ELEMENT_BYTES[self.dtype])
        return each * self.pool.tp * self.pool.size

    def _bytes_of(self, num_blocks: int) -> int:
        element_bytes, pool = _ELEMENT_BYTES[self.dtype], self.pool
        layout = model_layout(self.model, self.dtype, element_bytes)
        limits = PoolLimits(min(pool.max_num_seqs, pool.tokens_per_step), pool.tokens_per_step)
        pools = (num_blocks, *window_pools(layout, num_blocks, pool.tokens_per_block, limits))
        num_bytes = 0
        for group, blocks in zip(layout.groups, pools, strict=True):
            held = len(Shard(0, pool.tp).kv_heads(group.num_heads))
            num_bytes += blocks * pool.tokens_per_block * group.bytes_per_token // group.num_heads * held
        if self.draft is not None:
            draft_bytes = self.draft.kv_head_bytes(element_bytes) * self.draft.num_kv_heads
            num_bytes += num_blocks * pool.tokens_per_block * draft_bytes
        return num_bytes


def check_block(cache: PoolCache) -> None:
    """Raises `ConfigError`, with both sizes, for a cache that holds no block."""
    num_bytes, block_bytes = cache.configured_bytes, cache.block_bytes
    if num_bytes is not None and num_bytes < block_bytes:
        raise ConfigError(
            f"{pool_path(cache.name)}.kv_cache_bytes: {num_bytes} bytes hold no block of {cache.pool.tokens_per_block} "
            f"tokens of this model, which takes {block_bytes}"
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


def machine_memory() -> int:
    """Bytes of memory that the processes of this machine, or of this container, may use together."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    memory = int(fields["MemTotal"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it has `max`
        memory = min(memory, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    return memory


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
