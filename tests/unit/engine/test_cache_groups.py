"""Which cache groups layers form, and what of a prefix is kept and sent."""

from __future__ import annotations

import pytest

from disagg.engine.cache_groups import RESUME_SHARE, LayerKv, PoolLimits, layout_of, most_blocks, window_pools
from disagg.proto.errors import ConfigError
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


def test_rows_of_8_bits_have_their_scale_behind_them() -> None:
    layout = layout_of([FULL, NARROW, FULL], "int8", 1)
    assert [group.bytes_per_token for group in layout.groups] == [2 * 2 * 2 * (8 + 2), 2 * 2 * (8 + 2)]
    for dim, share in ((64, 66 / 128), (128, 130 / 256)):  # of bf16
        kind = [LayerKv(0, 3, dim, dim)] * 4
        assert layout_of(kind, "int8", 1).bytes_of(1000) == share * layout_of(kind, "bfloat16", 2).bytes_of(1000)


# ---------------------------------------------------------------- pools


LIMITS = PoolLimits(max_num_seqs=8, token_budget=64)
MIXED = layout_of([FULL, NARROW, NARROW], "float32", 4)
"""128 bytes a token of the full group, 256 of the window, which takes five blocks of a sequence."""


def test_windows_have_room_for_all_sequences_a_step_and_resume_points() -> None:
    (pool,) = window_pools(MIXED, 1000, 16, LIMITS)
    least = 8 * 5 + 4
    num_bytes = 1000 * 128 + pool * 256
    assert pool > least
    assert (pool - least) * 256 <= RESUME_SHARE * num_bytes < (pool + 1 - least) * 256 + RESUME_SHARE * 256


def test_a_small_cache_has_room_for_fewer_windows() -> None:
    assert window_pools(MIXED, 40, 16, LIMITS)[0] == 24 + int(24 * 0.15 / 0.85 * (40 * 128 + 24 * 256) / (24 * 256))
    assert window_pools(layout_of([FULL], "float32", 4), 40, 16, LIMITS) == ()


@pytest.mark.parametrize("cache_bytes", [1_000_000, 3_000_000, 123_456_789])
def test_all_pools_together_fill_the_cache(cache_bytes: int) -> None:
    blocks = most_blocks(MIXED, 16, LIMITS, cache_bytes, (16 * 128, 16 * 256))

    def bytes_with(num_blocks: int) -> int:
        return 16 * (num_blocks * 128 + window_pools(MIXED, num_blocks, 16, LIMITS)[0] * 256)

    assert bytes_with(blocks) <= cache_bytes < bytes_with(blocks + 1)


def test_full_layers_of_several_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="KV heads of several shapes"):
        layout_of([FULL, FULL._replace(num_heads=4)], "float32", 4)


def test_a_hand_over_of_gemma_3_sends_little_more_than_a_fifth() -> None:
    """Of Gemma 3 270M, 15 of whose 18 layers have windows of 512 tokens, with 8,192 tokens."""
    layers = [LayerKv(0 if number % 6 == 5 else 512, 1, 256, 256) for number in range(18)]
    layout = layout_of(layers, "bfloat16", 2)
    whole = layout_of([layer._replace(window=0) for layer in layers], "bfloat16", 2)
    assert layout.bytes_of(8192) == 8192 * 3 * 1024 + 512 * 15 * 1024
    assert layout.bytes_of(8192) / whole.bytes_of(8192) == 0.21875
