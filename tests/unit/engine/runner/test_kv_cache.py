"""Block arithmetic and the layout of the paged cache."""

from __future__ import annotations

import pytest
import torch

from disagg.engine.batch_arrays import blocks_for_tokens
from disagg.engine.cache_groups import LayerKv, layout_of
from disagg.engine.runner.model.kv_cache import KvCache, count_blocks
from disagg.proto.errors import ConfigError
from disagg.proto.messages import ONE_RANK, KvLayout

LAYOUT = KvLayout.dense(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", bytes_per_token=3 * 2 * 2 * 8 * 4)
BLOCK_BYTES = 16 * LAYOUT.bytes_per_token


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "num_blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (64, 32, 2)]
)
def test_blocks_for_tokens(num_tokens: int, block_size: int, num_blocks: int) -> None:
    assert blocks_for_tokens(num_tokens, block_size) == num_blocks


def test_blocks_fill_the_bytes_that_are_given() -> None:
    assert count_blocks(LAYOUT, 16, kv_cache_bytes=10 * BLOCK_BYTES, num_blocks=None) == 10
    assert count_blocks(LAYOUT, 16, kv_cache_bytes=10 * BLOCK_BYTES - 1, num_blocks=None) == 9
    assert count_blocks(LAYOUT, 32, kv_cache_bytes=10 * BLOCK_BYTES, num_blocks=None) == 5


def test_a_number_of_blocks_goes_before_bytes() -> None:
    assert count_blocks(LAYOUT, 16, kv_cache_bytes=1, num_blocks=7) == 7


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_bytes is 100; one block of this model takes {BLOCK_BYTES}"):
        count_blocks(LAYOUT, 16, kv_cache_bytes=100, num_blocks=None)
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, not 0"):
        count_blocks(LAYOUT, 16, kv_cache_bytes=1 << 30, num_blocks=0)


def test_layer_views_are_parts_of_one_tensor() -> None:
    cache = KvCache(LAYOUT, num_blocks=5, block_size=16, device=torch.device("cpu"))
    assert cache.tensor_NL2KBD.shape == (5, 3, 2, 2, 16, 8)
    assert cache.nbytes == 5 * BLOCK_BYTES
    cache.tensor_NL2KBD.zero_()

    keys, values = cache.layer(1)
    keys[4, 1, 15] = 1.0
    values[0, 0, 2] = 2.0

    assert keys.shape == values.shape == (5, 2, 16, 8)
    assert cache.tensor_NL2KBD.sum() == 8 * 1.0 + 8 * 2.0
    assert cache.tensor_NL2KBD[4, 1, 0, 1, 15].eq(1.0).all()
    assert cache.tensor_NL2KBD[0, 1, 1, 0, 2].eq(2.0).all()


def test_latents_have_one_plane_of_which_values_are_the_first_columns() -> None:
    layout = layout_of([LayerKv(0, 1, 12, 0, 8)] * 3, "float32", 4)
    cache = KvCache(layout, num_blocks=5, block_size=16, device=torch.device("cpu"))
    assert cache.tensor_NL2KBD.shape == (5, 3, 1, 1, 16, 12)
    assert cache.nbytes == 5 * count_blocks(layout, 16, 16 * 3 * 12 * 4, None) * 16 * 3 * 12 * 4
    cache.tensor_NL2KBD.zero_()
    keys, values = cache.layer(1)
    keys[4, 0, 15] = torch.arange(12.0)
    assert values.shape == (5, 1, 16, 8)
    assert values[4, 0, 15].tolist() == list(range(8))
    buffer = torch.empty(3 * 3 * 12 * 4, dtype=torch.uint8)
    cache.gather_part([0, 4], 29, 32, buffer, ONE_RANK)
    assert buffer.view(torch.float32).view(3, 3, 12)[1, 2].tolist() == list(range(12))
    cache.scatter_part([2], 0, 3, buffer, ONE_RANK)
    assert cache.layer(1)[1][2, 0, 2].tolist() == list(range(8))
