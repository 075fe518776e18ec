"""Extents: the unit in which tiers keep KV. Pure.

    tokens    0 ........ 127 | 128 ....... 255 | 256 ....
    blocks    h0 h1 ...   h7 | h8 ...      h15 | h16 ...      hashes of 16 tokens, each over all tokens before it
    extents   key = h7       | key = h15       |              a shorter tail is in no extent, and is computed again

An extent is found by the hash of its last block, which covers the model, the tenant and all tokens up to it. So its KV
is right wherever it is found, and two chains that begin alike share extents.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import BlockHash
from disagg.proto.messages import EXTENT_TOKENS, HASHES_PER_EXTENT

NO_PARENT = BlockHash(b"")
"""Parent of the first extent of a chain."""


class Extent(NamedTuple):
    """The name of an extent."""

    key: BlockHash
    parent: BlockHash
    """Key of the extent before it; `NO_PARENT` for the first one."""
    tag: bytes = b""
    """Tag of the tenant that it belongs to; empty where there are no tenants."""


class Chain(NamedTuple):
    """The extents of one sequence, from its first token on."""

    keys: tuple[BlockHash, ...]
    block_keys: tuple[BlockHash, ...]
    """The hashes by which the blocks of all these extents are found in the device cache."""
    tag: bytes = b""
    is_copy: bool = False
    """The KV came from another worker, which has it too."""

    def blocks_of(self, index: int) -> tuple[BlockHash, ...]:
        """The keys of the blocks of one extent."""
        per_extent = len(self.block_keys) // len(self.keys)
        return self.block_keys[index * per_extent : (index + 1) * per_extent]


def extent_keys(hashes: Seq[BlockHash], num_tokens: int) -> tuple[BlockHash, ...]:
    """The keys of the whole extents in the first `num_tokens` tokens of a chain with these 16-token hashes."""
    num_extents = min(num_tokens // EXTENT_TOKENS, len(hashes) // HASHES_PER_EXTENT)
    return tuple(hashes[HASHES_PER_EXTENT - 1 : num_extents * HASHES_PER_EXTENT : HASHES_PER_EXTENT])


def chain_of(hashes: Seq[BlockHash], num_tokens: int, block_size: int, tag: bytes, *, is_copy: bool) -> Chain:
    """The chain of the first `num_tokens` tokens; `block_size` divides an extent."""
    keys = extent_keys(hashes, num_tokens)
    per_block = block_size // HASH_BLOCK_TOKENS
    num_hashes = len(keys) * HASHES_PER_EXTENT
    return Chain(keys, tuple(hashes[per_block - 1 : num_hashes : per_block]), tag, is_copy)
