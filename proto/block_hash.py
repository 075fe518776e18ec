"""The prefix hash: a SHA-256 chain over 16-token blocks. A wire contract: router, prefill and decode must agree on
every bit.

    root    = H("disagg/1" | fingerprint | tenant salt)             of an adapter: fingerprint "model+adapter"
    hash[i] = H(hash[i-1] | tokens of block i as little-endian u32)

H is SHA-256 cut to 16 bytes. Within one tenant's salt a collision needs about 2^64 chosen prompts; across tenants the
roots differ. The fingerprint names the weights, dtypes and rope of the model, not tensor parallelism or layout.
"""

from __future__ import annotations

import hashlib

from disagg.proto.ids import BlockHash
from disagg.proto.token_ids import TOKEN_ID_BYTES, PackedTokenIds, num_token_ids

HASH_BLOCK_TOKENS = 16
HASH_BYTES = 16

_TAG_BYTES = 8
_BLOCK_BYTES = HASH_BLOCK_TOKENS * TOKEN_ID_BYTES


def root_hash(fingerprint: str, tenant_salt: bytes = b"", adapter: str = "") -> BlockHash:
    """The parent of block 0. `tenant_salt` differs for each tenant (and each salt that a tenant chooses), and is empty
    where there is neither. `adapter` is the fingerprint of the adapter; empty for the base model."""
    if adapter:
        fingerprint = f"{fingerprint}+{adapter}"
    return BlockHash(hashlib.sha256(b"disagg/1\0" + fingerprint.encode() + b"\0" + tenant_salt).digest()[:HASH_BYTES])


def tenant_tag(tenant: str) -> bytes:
    """Name of a tenant for workers: a hash of its real name; empty if that is empty."""
    return hashlib.sha256(b"disagg/tenant\0" + tenant.encode()).digest()[:_TAG_BYTES] if tenant else b""


def child_hash(parent: BlockHash, block_token_ids: PackedTokenIds) -> BlockHash:
    """The hash of one full block after `parent`.

    Raises:
        ValueError: if there are not exactly `HASH_BLOCK_TOKENS` ids.
    """
    if len(block_token_ids) != _BLOCK_BYTES:
        raise ValueError(f"a hashed block has {HASH_BLOCK_TOKENS} tokens, not {num_token_ids(block_token_ids)}")
    return BlockHash(hashlib.sha256(parent + block_token_ids).digest()[:HASH_BYTES])


def chain_hashes(root: BlockHash, token_ids: PackedTokenIds) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`, in order; a partial last block has none."""
    hashes: list[BlockHash] = []
    parent = root
    for end in range(_BLOCK_BYTES, len(token_ids) + 1, _BLOCK_BYTES):
        parent = child_hash(parent, PackedTokenIds(token_ids[end - _BLOCK_BYTES : end]))
        hashes.append(parent)
    return hashes


def max_cached_tokens(num_prompt_tokens: int) -> int:
    """How many prompt tokens may count as cached: whole blocks, and never the last token, whose logits are needed."""
    return max(0, num_prompt_tokens - 1) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
