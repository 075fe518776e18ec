"""How many bytes extents and their buffers take. Pure, and light to import: the launcher asks, too."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.engine.config import TierOptions
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.proto.messages import EXTENT_TOKENS, KvLayout, ParallelShape

MAX_STAGING = 8
"""Buffers, of an extent each, between blocks and files."""


def extent_bytes(layout: KvLayout, tp: int) -> int:
    """Bytes of an extent of a worker of stages of `tp` ranks, all ranks together; how many stages changes nothing."""
    shape = ParallelShape(tp=tp)
    return EXTENT_TOKENS * plan_pair(layout, shape, shape).groups[0].token_bytes


def staging_bytes(layout: KvLayout, tp: int) -> int:
    """Bytes of the buffers between a worker's blocks and its files."""
    return MAX_STAGING * extent_bytes(layout, tp)


def tier_bytes_needed(layout: KvLayout, tp: int, max_model_len: int) -> int:
    """Bytes that a tier must have at least: the KV of the longest sequence."""
    return -(-max_model_len // EXTENT_TOKENS) * extent_bytes(layout, tp)


def tier_sizes(options: TierOptions) -> Sequence[tuple[str, int]]:
    """Field and bytes of each tier; 0 for one that there is not."""
    return ("host_bytes", options.host_bytes), ("disk.bytes", 0 if options.disk is None else options.disk.bytes)
