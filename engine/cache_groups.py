"""Which cache groups the layers of a model form. Pure.

Layers that keep the KV of the same tokens, in the same shape, are one group: one tensor, one pool of blocks, one block
table of each sequence. The prefix index goes by the first group, which keeps all tokens. A model whose layers all have
windows keeps all tokens of its widest ones therefore: its attention still looks at the window only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from disagg.proto.messages import CacheGroup, KvLayout


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


def layout_of(layers: Sequence[LayerKv], dtype: str, element_bytes: float) -> KvLayout:
    """The layout of a model with these layers, in their order. `element_bytes`: bytes of one number of `dtype`."""
    kinds: dict[LayerKv, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(number)
    widest = max(kinds, key=lambda kind: (kind.window == 0, kind.window))
    ordered = sorted(kinds, key=lambda kind: (kind != widest, kind.window > 0, kinds[kind][0]))
    groups = []
    for kind in ordered:
        window = 0 if kind == widest else kind.window
        numbers = kind.num_heads * (kind.key_dim + kind.value_dim) * len(kinds[kind])
        groups.append(
            CacheGroup(
                kind="window" if window else "full",
                layers=tuple(kinds[kind]),
                num_heads=kind.num_heads,
                key_dim=kind.key_dim,
                value_dim=kind.value_dim,
                value_prefix=kind.value_prefix,
                dtype=dtype,
                bytes_per_token=int(numbers * element_bytes),
                window=window,
            )
        )
    return KvLayout(groups=tuple(groups))
