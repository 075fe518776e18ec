"""Which cache groups the layers of a model form. Pure.

Layers that keep the KV of the same tokens, in the same shape, are one group: one tensor, one pool of blocks, one block
table of each sequence. The prefix index goes by the first group, which keeps all tokens. A model whose layers all have
windows keeps all tokens of its widest ones therefore: its attention still looks at the window only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from disagg.engine.checkpoint.model_config import LayerConfig, ModelConfig
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError
from disagg.proto.messages import CacheGroup, KvLayout

RESUME_SHARE = 0.15
"""Share of the bytes of all caches, for the resume points of a model with windows."""
CONTEXT_WINDOWS = 2
"""Windows that the shortest contexts are long for which a small cache is divided among its groups."""


SCALE_BYTES: Final[Mapping[str, int]] = {"int8": 2}
"""Bytes behind the numbers of each row of a dtype: its scale (`kernels/kv_rows.py`)."""


class LayerKv(NamedTuple):
    """What one layer keeps of a token, and of which tokens."""

    window: int
    """Tokens that a token attends to, itself included; 0 for all before it."""
    num_heads: int
    """Number of KV heads."""
    key_dim: int
    value_dim: int
    """Width of a head's values; 0 where they are the first `value_prefix` columns of its keys."""
    value_prefix: int = 0


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """Window of each layer; 0 for none, and for one that no sequence outgrows."""
    windows = [layer.attention.window or 0 for layer in config.layers]
    return tuple(0 if window >= config.max_exact_len else window for window in windows)


def row_bytes(dim: int, dtype: str, element_bytes: float) -> float:
    """Bytes of the `dim` numbers that a KV head keeps of a token, K or V; none of none. `element_bytes`: of one number
    of `dtype`."""
    return dim * element_bytes + SCALE_BYTES.get(dtype, 0) if dim else 0.0


def layout_of(layers: Sequence[LayerKv], dtype: str, element_bytes: float) -> KvLayout:
    """The layout of a model with these layers, in their order. `element_bytes`: bytes of one number of `dtype`.

    Raises:
        ConfigError: if layers that attend to all tokens have heads of several shapes.
    """
    kinds: dict[LayerKv, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(number)
    widest = max(kinds, key=lambda kind: (kind.window == 0, kind.window))
    ordered = sorted(kinds, key=lambda kind: (kind != widest, kind.window > 0, kinds[kind][0]))
    if sum(kind.window == 0 for kind in kinds) > 1:
        raise ConfigError("layers without a window have KV heads of several shapes, which is not supported")
    groups = []
    for kind in ordered:
        window = 0 if kind == widest else kind.window
        head_bytes = sum(row_bytes(dim, dtype, element_bytes) for dim in (kind.key_dim, kind.value_dim))
        groups.append(
            CacheGroup(
                kind="window" if window else "full",
                layers=tuple(kinds[kind]),
                num_heads=kind.num_heads,
                key_dim=kind.key_dim,
                value_dim=kind.value_dim,
                value_prefix=kind.value_prefix,
                dtype=dtype,
                bytes_per_token=int(kind.num_heads * len(kinds[kind]) * head_bytes),
                window=window,
            )
        )
    return KvLayout(groups=tuple(groups))


def model_layout(config: ModelConfig, dtype: str, element_bytes: float, *, keeps_all: bool = False) -> KvLayout:
    """The layout of a model. `keeps_all`: also what has left a window is kept.

    Raises:
        ConfigError: as `layout_of`.
    """
    windows = (0,) * config.num_layers if keeps_all else layer_windows(config)
    layers = [_layer_kv(config, layer, window) for layer, window in zip(config.layers, windows, strict=True)]
    return layout_of(layers, dtype, element_bytes)


def check_kv_dtype(config: ModelConfig, dtype: str, path: str = "") -> None:
    """Refuse what has no kernels: rows in 8 bits of latent attention. `path` leads to the field in the user's file.

    Raises:
        ConfigError: naming field and value.
    """
    if dtype == "int8" and any(layer.attention.latent is not None for layer in config.layers):
        raise ConfigError(f"{path}kv_cache_dtype: int8 is not supported for latent attention, which this model has")


def _layer_kv(config: ModelConfig, layer: LayerConfig, window: int) -> LayerKv:
    heads, dim, latent = config.num_kv_heads, config.head_dim, layer.attention.latent
    if latent is None:
        return LayerKv(window, heads, dim, dim)
    return LayerKv(window, heads, dim, 0, latent.latent_dim)


# ---------------------------------------------------------------- pools


def window_blocks(window: int, block_size: int) -> int:
    """Blocks that a window takes if it ends with a block."""
    return -(-window // block_size)


def most_held(window: int, block_size: int) -> int:
    """Blocks that a sequence may hold between two steps: its window, the block that it begins in, and the next one."""
    return window_blocks(window, block_size) + 2


class PoolLimits(NamedTuple):
    """What the pools of windows are made for."""

    max_num_seqs: int
    token_budget: int


def window_pools(layout: KvLayout, num_blocks: int, block_size: int, limits: PoolLimits) -> tuple[int, ...]:
    """Blocks of each group beside the first one, which has `num_blocks`: as many as `max_num_seqs` sequences and one
    step hold, or as many sequences as the first group has blocks for if each is `CONTEXT_WINDOWS` windows long; and a
    share for resume points."""
    groups = layout.groups[1:]
    least = []
    for group in groups:
        most = most_held(group.window, block_size)
        num_seqs = min(limits.max_num_seqs, max(1, num_blocks // (CONTEXT_WINDOWS * most)))
        least.append(num_seqs * most + -(-limits.token_budget // block_size))
    windows = sum([pool * group.bytes_per_token for pool, group in zip(least, groups, strict=True)])
    more = RESUME_SHARE / (1 - RESUME_SHARE) * (num_blocks * layout.groups[0].bytes_per_token + windows)
    return tuple([pool + int(pool * more / windows) for pool in least])


def head_block_bytes(group: CacheGroup, block_size: int) -> int:
    """Bytes of a block of one head of one layer."""
    return block_size * group.bytes_per_token // (len(group.layers) * group.num_heads)


def rank_block_bytes(group: CacheGroup, block_size: int, shard: Shard, layers: range | None = None) -> int:
    """Bytes of a block on a rank, which has these of the model's layers, None for all, with its share of the heads."""
    num_held = sum(layers is None or layer in layers for layer in group.layers)
    return head_block_bytes(group, block_size) * len(shard.kv_heads(group.num_heads)) * num_held


def most_blocks(
    layout: KvLayout, block_size: int, limits: PoolLimits, cache_bytes: int, block_bytes: tuple[int, ...]
) -> int:
    """Blocks of the first group with which the caches of all groups take at most `cache_bytes`. `block_bytes`: of one
    block of each group, with the layers and heads of a rank; 0 for a group of which its stage has no layer. Without one
    of the first group it is no more than one head of one layer of that group allows, which another stage has."""
    first, *others = block_bytes
    low, high = 0, cache_bytes // (first or head_block_bytes(layout.groups[0], block_size))
    while others and low < high:
        middle = (low + high + 1) // 2
        pools = window_pools(layout, middle, block_size, limits)
        needed = middle * first + sum([pool * each for pool, each in zip(pools, others, strict=True)])
        low, high = (middle, high) if needed <= cache_bytes else (low, middle - 1)
    return high
