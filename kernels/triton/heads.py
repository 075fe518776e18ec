"""How the attention kernels divide query heads.

A kernel computes tiles of query heads, each of which reads one KV head. In most models these are the heads that share a
KV head. In latent attention all query heads share one, up to 128 of them, and a tile of 64 is the most whose sums fit
into registers: 64 rows of 512 numbers are half of those of a multiprocessor. So they are divided into several tiles,
which read the same keys, mostly from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MAX_LATENT_GROUP, MAX_FP32_LATENT_GROUP = 64, 16
"""Largest number of query heads of a tile of latent attention."""
LEAST_SHARED_BYTES, MUCH_SHARED_BYTES = 160 << 10, 220 << 10
"""Shared memory of a program without which latent attention is not computed here (an A100 has 163 KiB), and with which
its tiles are the larger ones (an H100 has 227 KiB)."""


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """The query heads of a call."""

    count: int
    """Number of tiles: as many as KV heads, or parts of the query heads that share the only one."""
    group: int
    """Query heads of a tile."""
    dim: int
    """Numbers of a value."""
    tail: int
    """Numbers of a key behind those that are its value; 0 where values have a cache of their own."""

    @property
    def dim_padded(self) -> int:
        """`dim` as a kernel holds it."""
        return int(triton.next_power_of_2(self.dim))

    @property
    def tail_padded(self) -> int:
        """`tail` as a kernel holds it."""
        return max(16, int(triton.next_power_of_2(self.tail))) if self.tail else 0

    @property
    def rows(self) -> int:
        """The least rows of a program, which tensor cores take."""
        return max(16, int(triton.next_power_of_2(self.group)))


def head_tiles(num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> HeadTiles:
    """Divide the query heads, of this dtype. Values of fewer numbers than keys are the first ones of them."""
    if value_dim == key_dim:
        return HeadTiles(num_kv_heads, num_heads // num_kv_heads, key_dim, 0)
    assert num_kv_heads == 1, "latent attention has one KV head"
    most = MAX_FP32_LATENT_GROUP if dtype == torch.float32 else MAX_LATENT_GROUP
    group = max(size for size in range(1, min(num_heads, most) + 1) if num_heads % size == 0)
    return HeadTiles(num_heads // group, group, value_dim, key_dim - value_dim)
