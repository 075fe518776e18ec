"""The prefix hash is a wire contract: fixed vectors, and the properties that routing and caching rest on."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.block_hash import (
    HASH_BLOCK_TOKENS,
    HASH_BYTES,
    chain_hashes,
    child_hash,
    max_cached_tokens,
    root_hash,
)
from disagg.proto.token_ids import pack_token_ids

token_ids = st.integers(0, 2**32 - 1)
ROOT = root_hash("model-a")


def test_an_adapter_has_a_root_of_its_own() -> None:
    """H("disagg/1\\0" | "model-a+adapter" | "\\0" | salt)."""
    expected = hashlib.sha256(b"disagg/1\0model-a+f00d\0tenant").digest()[:16]
    assert root_hash("model-a", b"tenant", "f00d") == expected
    assert root_hash("model-a", b"tenant", "") == root_hash("model-a", b"tenant")
    assert len({root_hash("model-a", adapter=name) for name in ("", "f00d", "f00e")}) == 3


def test_vectors() -> None:
    root = root_hash("model-a", b"tenant")
    assert root.hex() == "abf2ccc54dba0999830637441d2b7524"
    hashes = [block_hash.hex() for block_hash in chain_hashes(root, pack_token_ids(range(32)))]
    assert hashes == ["1af844422227b1e1bb5f2ea77f8925f0", "d20aa0e1bc1f6e2cff9210151b4003fb"]


def test_the_definition_spelled_out() -> None:
    root = hashlib.sha256(b"disagg/1\0model-a\0").digest()[:16]
    block = b"".join(token.to_bytes(4, "little") for token in range(100, 116))
    assert root_hash("model-a") == root
    assert chain_hashes(ROOT, pack_token_ids(range(100, 116))) == [hashlib.sha256(root + block).digest()[:16]]


@pytest.mark.parametrize(
    ("num_tokens", "num_hashes"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (160, 10)]
)
def test_only_full_blocks_have_a_hash(num_tokens: int, num_hashes: int) -> None:
    hashes = chain_hashes(ROOT, pack_token_ids(range(num_tokens)))
    assert len(hashes) == num_hashes
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)


@given(st.lists(token_ids, max_size=80), st.lists(token_ids, max_size=40))
def test_a_prefix_has_a_prefix_of_the_hashes(prefix: list[int], suffix: list[int]) -> None:
    hashes = chain_hashes(ROOT, pack_token_ids(prefix))
    assert chain_hashes(ROOT, pack_token_ids(prefix + suffix))[: len(hashes)] == hashes


@given(st.lists(token_ids, min_size=48, max_size=48), st.integers(0, 47))
def test_a_changed_token_changes_its_block_and_all_later_ones(ids: list[int], position: int) -> None:
    changed = [*ids]
    changed[position] ^= 1
    before, after = (chain_hashes(ROOT, pack_token_ids(each)) for each in (ids, changed))
    first = position // HASH_BLOCK_TOKENS
    assert [a == b for a, b in zip(before, after, strict=True)] == [index < first for index in range(3)]


def test_the_chain_can_be_extended_block_by_block() -> None:
    first, second = chain_hashes(ROOT, pack_token_ids(range(32)))
    assert child_hash(first, pack_token_ids(range(16, 32))) == second


def test_roots_differ_by_model_and_tenant() -> None:
    roots = {root_hash("model-a"), root_hash("model-b"), root_hash("model-a", b"x"), root_hash("model-a", b"y")}
    assert len(roots) == 4


@pytest.mark.parametrize("num_tokens", [0, 15, 17])
def test_a_block_of_another_length_is_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"16 tokens, not {num_tokens}"):
        child_hash(ROOT, pack_token_ids(range(num_tokens)))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "cached"), [(0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48)]
)
def test_the_last_token_never_counts_as_cached(num_prompt_tokens: int, cached: int) -> None:
    assert max_cached_tokens(num_prompt_tokens) == cached
