"""The common prefixes of prompts, without their tokens: block hashes that are equal where the tokens would be.

    parts of an outlined request ──extend──> PromptText ──answered──> the conversation so far ──extend──> ...

The hash of a full block inside one part follows from the block hash before the part, the part's key and the position in
it; no token is drawn for it. Real token ids stand only behind the last full block (and in answers), where workers hash
them themselves when an answer fills the block (`proto/block_hash.py`). All other ids are 0, which are not read.

Blocks of a part that are found together or not at all can share one hash (`HashRuns`): then a long prompt costs the
router's index and a fast worker a few entries instead of hundreds.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from typing import SupportsIndex, overload

from disagg.loadtests.workload.workload import PromptPart
from disagg.proto.block_hash import HASH_BLOCK_TOKENS, HASH_BYTES, chain_hashes
from disagg.proto.ids import BlockHash
from disagg.proto.token_ids import TOKEN_ID_BYTES, PackedTokenIds

VOCAB_SIZE = 1 << 20
STOP_TOKEN = 1
"""The token id that ends an answer."""
MAX_RUN = 32
"""Most 16-token blocks that share a hash: 512 tokens, the block of Mooncake's traces."""
MIN_RUNS = 1024
"""Least number of runs that fit into the smallest cache, so that it makes little difference that they are evicted as a
whole."""
_BLOCK_BYTES = HASH_BLOCK_TOKENS * TOKEN_ID_BYTES


class HashRuns(tuple[BlockHash, ...]):
    """The hashes of a chain in which blocks in a row share one. Its length and what stands at an index are those of the
    chain of all blocks; iterating gives each hash once, which is what a set or an index of blocks needs."""

    ends: Sequence[int]
    """For each hash: the number of blocks up to its end."""

    @staticmethod
    def of(hashes: Sequence[BlockHash], ends: Sequence[int]) -> HashRuns:
        """A chain of these hashes."""
        runs = HashRuns(hashes)
        runs.ends = ends
        return runs

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, index: SupportsIndex) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BlockHash, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> BlockHash | tuple[BlockHash, ...]:
        if isinstance(index, slice):
            return self._slice(index)
        at, ends = index.__index__(), self.ends
        if at < 0 and ends:
            at += ends[-1]
        return tuple.__getitem__(self, bisect_right(ends, at) if at >= 0 else len(ends))

    def __add__(self, other: tuple[BlockHash, ...]) -> HashRuns:  # type: ignore[override]
        length = len(self)
        if isinstance(other, HashRuns):
            ends = [length + end for end in other.ends]
        else:
            ends = list(range(length + 1, length + len(other) + 1))
        return HashRuns.of((*self, *other), [*self.ends, *ends])

    def _slice(self, index: slice) -> tuple[BlockHash, ...]:
        start, stop, step = index.indices(len(self))
        if step != 1:
            places = map(bisect_right, repeat(self.ends), range(start, stop, step))
            return tuple(map(tuple.__getitem__, repeat(self), places))
        if stop <= start:
            return HashRuns.of((), ())
        first, last = bisect_right(self.ends, start), bisect_right(self.ends, stop - 1)
        ends = [end - start for end in self.ends[first:last]]
        return HashRuns.of(tuple.__getitem__(self, slice(first, last + 1)), [*ends, stop - start])


@dataclass(frozen=True, slots=True)
class PromptText:
    """A text of which only lengths and hashes are known."""

    hashes: tuple[BlockHash, ...]
    """Hashes of the full blocks."""
    tail: bytes
    """The packed token ids behind the last full block."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text."""
        return len(self.hashes) * HASH_BLOCK_TOKENS + len(self.tail) // TOKEN_ID_BYTES

    @property
    def token_ids(self) -> PackedTokenIds:
        """The packed ids, as a request carries them."""
        return PackedTokenIds(self.tail.rjust(len(self.hashes) * _BLOCK_BYTES + len(self.tail), b"\0"))


EMPTY = PromptText((), b"")


def run_for(num_cached_tokens: int) -> int:
    """Number of blocks that may share a hash where the smallest cache holds `num_cached_tokens` tokens."""
    return max(1, min(MAX_RUN, num_cached_tokens // HASH_BLOCK_TOKENS // MIN_RUNS))


def extend(text: PromptText, parts: tuple[PromptPart, ...], root: BlockHash, run: int = 1) -> PromptText:
    """The text with these parts appended. `root` is the parent of its first block. With a `run` above 1 up to `run`
    blocks share a hash, and the hashes are `HashRuns`."""
    hashes, tail = list(text.hashes), text.tail
    ends = list(text.hashes.ends) if isinstance(text.hashes, HashRuns) else list(range(1, len(hashes) + 1))
    for num_tokens, names in parts:
        key = repr(names).encode()
        start = 0
        if tail:
            start = min(num_tokens, HASH_BLOCK_TOKENS - len(tail) // TOKEN_ID_BYTES)
            tail += _id_of(key) * start
            if len(tail) < _BLOCK_BYTES:
                continue
            parent = hashes[-1] if hashes else root
            hashes.append(BlockHash(hashlib.sha256(parent + tail + key).digest()[:HASH_BYTES]))
            ends.append(ends[-1] + 1 if ends else 1)
            tail = b""
        num_blocks, num_left = divmod(num_tokens - start, HASH_BLOCK_TOKENS)
        if num_blocks:
            parent = hashes[-1] if hashes else root
            seed = b"%b%d %b" % (parent, start, key) if start else parent + b"0 " + key
            before = ends[-1] if ends else 0
            if num_blocks == run > 1:  # most often, in a trace of blocks
                hashes.append(BlockHash(blake2b(seed, digest_size=HASH_BYTES).digest()))
                ends.append(before + run)
            elif run > 1:
                hashes += _run_hashes(seed, num_blocks, run)
                ends += range(before + run, before + num_blocks, run)
                ends.append(before + num_blocks)
            else:
                hashes += _part_hashes(seed, num_blocks)
        if num_left:
            tail = _id_of(key) * num_left
    return PromptText(HashRuns.of(hashes, ends) if run > 1 else tuple(hashes), tail)


def answered(text: PromptText, answer_ids: list[int], root: BlockHash) -> PromptText:
    """The text with an answer appended, hashed as workers do it."""
    rest = PackedTokenIds(text.tail + struct.pack(f"<{len(answer_ids)}I", *answer_ids))
    new = chain_hashes(text.hashes[-1] if text.hashes else root, rest)
    return PromptText(text.hashes + tuple(new), rest[len(new) * _BLOCK_BYTES :])


def answer_token(index: int) -> int:
    """The token id that all tokens of a request's answer have."""
    return 2 + index % (VOCAB_SIZE - 2)


def _run_hashes(seed: bytes, num_blocks: int, run: int) -> list[BlockHash]:
    """One hash for each `run` blocks. A shorter run at the end has another hash than a whole one."""
    hashes = _part_hashes(seed, -(-num_blocks // run))
    if rest := num_blocks % run:
        hashes[-1] = BlockHash(hashlib.sha256(b"%b%d" % (hashes[-1], rest)).digest()[:HASH_BYTES])
    return hashes


def _part_hashes(seed: bytes, num_hashes: int) -> list[BlockHash]:
    """The first `num_hashes` hashes of a part, at least one. The first one is made alone, in the fastest way: most
    parts of a trace need no other."""
    first = BlockHash(blake2b(seed, digest_size=HASH_BYTES).digest())
    rest = hashlib.shake_128(seed).digest((num_hashes - 1) * HASH_BYTES)
    return [first, *[BlockHash(rest[at : at + HASH_BYTES]) for at in range(0, len(rest), HASH_BYTES)]]


def _id_of(key: bytes) -> bytes:
    """The packed token id that stands for all tokens of a part, where ids are needed."""
    number = int.from_bytes(blake2b(key, digest_size=4).digest(), "little")
    return struct.pack("<I", 2 + number % (VOCAB_SIZE - 2))
