"""Which cache groups layers form, and what of a prefix is kept and sent."""

from __future__ import annotations

import pytest

from disagg.engine.cache_groups import LayerKv, layout_of
from disagg.proto.messages import CacheGroup, KvLayout

FULL, NARROW = LayerKv(0, 2, 8, 8), LayerKv(40, 2, 8, 8)


def test_layers_that_are_alike_are_one_full_group() -> None:
    dense = KvLayout.dense(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", bytes_per_token=3 * 2 * 16 * 4)
    assert layout_of([FULL] * 3, "float32", 4) == dense
    assert (dense.bytes_of(100), dense.bytes_of(100, 32)) == (100 * 384, 68 * 384)


def test_windows_are_a_group_of_their_own_behind_the_full_one() -> None:
    layout = layout_of([NARROW, NARROW, FULL, NARROW], "bfloat16", 2)
    full, window = layout.groups
    assert (full.kind, full.layers, full.window, full.bytes_per_token) == ("full", (2,), 0, 64)
    assert (window.kind, window.layers, window.window, window.bytes_per_token) == ("window", (0, 1, 3), 40, 192)
    assert layout.bytes_per_token == 256


def test_latent_attention_keeps_keys_only() -> None:
    (group,) = layout_of([LayerKv(0, 1, 576, 0, 512)] * 2, "bfloat16", 2).groups
    assert (group.value_prefix, group.bytes_per_token) == (512, 2 * 576 * 2)


def test_a_model_without_full_layers_keeps_all_tokens_of_its_widest_windows() -> None:
    layout = layout_of([LayerKv(64, 1, 8, 8), LayerKv(128, 1, 8, 8)], "float32", 4)
    assert [(group.kind, group.layers, group.window) for group in layout.groups] == [
        ("full", (1,), 0),
        ("window", (0,), 64),
    ]


@pytest.mark.parametrize(
    ("num_tokens", "first"),
    [(0, 0), (40, 0), (63, 0), (64, 16), (79, 16), (80, 32), (1000, 944)],  # three blocks hold 40 tokens
)
def test_a_window_keeps_whole_blocks_before_the_last_full_one(num_tokens: int, first: int) -> None:
    group = CacheGroup(
        kind="window", layers=(0,), num_heads=1, key_dim=1, value_dim=1, dtype="fake", bytes_per_token=8, window=40
    )
    assert group.kept_from(num_tokens) == first
    assert group.bytes_of(num_tokens) == (num_tokens - first) * 8


def test_a_hand_over_sends_of_a_window_what_is_kept_and_not_there_yet() -> None:
    layout = layout_of([FULL, NARROW], "bfloat16", 2)
    assert layout.bytes_of(1000) == (1000 + 56) * 64
    assert layout.bytes_of(1000, 512) == (488 + 56) * 64
    assert layout.bytes_of(1000, 960) == (40 + 40) * 64
