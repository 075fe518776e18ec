"""Prompt token ids as they are held and sent: packed, four bytes for each id, little-endian.

A prompt has thousands of ids and is kept as long as its request. As a tuple it is tracked by the garbage collector, and
encoded and decoded id by id; as bytes it is one object, one copy on the wire, and what `block_hash` hashes as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NewType

TOKEN_ID_BYTES = 4

PackedTokenIds = NewType("PackedTokenIds", bytes)
"""Token ids as little-endian u32. `len` and indices count bytes: see `num_token_ids` and `slice_token_ids`."""


def pack_token_ids(token_ids: Iterable[int]) -> PackedTokenIds:
    """The ids, packed.

    Raises:
        ValueError: for what is no id in [0, 2**32).
    """
    ids = tuple(token_ids)
    try:
        return PackedTokenIds(struct.pack(f"<{len(ids)}I", *ids))
    except struct.error as error:
        raise ValueError(f"a token id is no integer from 0 to {2**32 - 1}: {error}") from error


def unpack_token_ids(packed: PackedTokenIds) -> list[int]:
    """The ids.

    Raises:
        ValueError: if the last one is cut off.
    """
    check_packed("packed", packed)
    return list(struct.unpack(f"<{num_token_ids(packed)}I", packed))


def num_token_ids(packed: PackedTokenIds) -> int:
    """How many ids there are."""
    return len(packed) // TOKEN_ID_BYTES


def slice_token_ids(packed: PackedTokenIds, start: int, end: int | None = None) -> PackedTokenIds:
    """Ids [start, end), packed; up to the last one without `end`. Neither may be negative."""
    return PackedTokenIds(packed[start * TOKEN_ID_BYTES : None if end is None else end * TOKEN_ID_BYTES])


def check_packed(field: str, packed: bytes) -> None:
    """Raises `ValueError`, which names the field, where these are not whole ids."""
    if len(packed) % TOKEN_ID_BYTES:
        raise ValueError(f"{field} has {len(packed)} bytes, which is no multiple of {TOKEN_ID_BYTES}")
