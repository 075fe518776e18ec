"""Drafts by lookup: what followed the last tokens of a text where they stood before, in prompt and output.

    text      ... the quick brown fox jumps ... the quick brown
    match         ^^^^^^^^^^^^^^^                ^^^^^^^^^^^^^^^   3 to 16 tokens: the longest, of several the latest
    drafts                        fox jumps ...

The method is prompt lookup decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding), with the
longest match in place of the first. Candidates are found by their last three tokens, as in the hash chains of LZ77
compressors: the latest MOST_CANDIDATES occurrences of these three are compared, so that a text that repeats them a
thousand times costs no more.

The index of a text is a function of its ids alone: it is built at the first proposal and extended by what is new, and
another worker builds the same one. Two parts hold an entry for each position:

- Sorted arrays, 12 bytes a position, made at once by numpy: 0.1 ms for 1,000 tokens.
- A table of the latest positions, at most `TAIL` of them, which are merged into the arrays when it is full: about 150
  bytes a position, so at most 80 KB a sequence.

The last MOST_TOKENS tokens of a text are searched. What stands before them is not found again: a match at a
recent place is the better one anyway, and the output is never left out.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from disagg.engine.request import Sequence
from disagg.engine.speculation.proposer import NOTHING, Proposal, Proposer

LEAST_MATCH, MOST_MATCH = 3, 16
"""Lengths of a match, in tokens; a longer one counts as one of `MOST_MATCH`."""
MOST_TOKENS = 65_536
"""Number of last tokens of a text that are searched."""
MOST_CANDIDATES = 64
"""Number of occurrences of the last three tokens that are compared, the latest first."""
TAIL = 512
"""Number of positions in the table beside the arrays."""

_ID_BITS = 21
_MASK = (1 << 63) - 1
"""Keys are three ids of 21 bits. Larger ids are mixed, and told apart when the tokens are compared."""


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a text."""

    end: int
    """Position behind it."""
    length: int


class TextIndex:
    """Positions of a text by the three tokens before them. Owner: the sequence.

    Args:
        most_tokens: number of last tokens that are searched.
        tail: number of positions in the table beside the arrays.
    """

    __slots__ = ("_ends", "_key", "_keys", "_latest", "_most_tokens", "_num_indexed", "_previous", "_tail")

    def __init__(self, most_tokens: int = MOST_TOKENS, tail: int = TAIL) -> None:
        self._most_tokens = most_tokens
        self._tail = tail
        self._keys = np.empty(0, dtype=np.int64)
        """Keys of the older positions, ascending."""
        self._ends = np.empty(0, dtype=np.int32)
        """Positions of these keys; ascending where keys are equal."""
        self._latest: dict[int, int] = {}
        """Latest position of each key in the table."""
        self._previous: list[int] = []
        """For each position of the table the one before it with the same key; 0 if there is none."""
        self._num_indexed = LEAST_MATCH - 1
        """Last position that is indexed."""
        self._key = 0
        """Key of the last tokens of the text."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, and an estimate of those of the table."""
        return self._keys.nbytes + self._ends.nbytes + 150 * len(self._previous)

    def extend(self, text: Seq[int]) -> None:
        """Index what the text has behind what was indexed before; its end itself is no occurrence yet."""
        last = len(text) - 1
        num_new = last - self._num_indexed
        assert num_new >= 0 or self._num_indexed < LEAST_MATCH, "the text became shorter"
        if num_new > self._tail:
            self._build(text)
        elif num_new > 0:
            if len(self._previous) + num_new > self._tail:
                self._merge(text)
            self._append(text)

    def find(self, text: Seq[int]) -> Match | None:
        """The longest occurrence of the text's last tokens before its end, of several the latest; None without one of
        three tokens. `extend` has seen the text."""
        size = len(text)
        best, best_end = LEAST_MATCH - 1, 0
        last_tokens = text[-MOST_MATCH:]
        for end in self._candidates(size):
            if end <= best:
                break
            if text[end - 1 - best] != text[size - 1 - best]:
                continue
            if text[max(0, end - MOST_MATCH) : end] == last_tokens:
                return Match(end, len(last_tokens))
            length, most = 0, min(MOST_MATCH, end)
            while length < most and text[end - 1 - length] == text[size - 1 - length]:
                length += 1
            if length > best:
                best, best_end = length, end
        return Match(best_end, best) if best_end else None

    def _candidates(self, size: int) -> list[int]:
        """Positions with the key of the text's end among its last tokens, the latest first."""
        oldest = max(LEAST_MATCH, size - self._most_tokens)
        found: list[int] = []
        first = self._num_indexed + 1 - len(self._previous)
        end = self._latest.get(self._key, 0)
        while end >= oldest and len(found) < MOST_CANDIDATES:
            found.append(end)
            end = self._previous[end - first]
        num_left = MOST_CANDIDATES - len(found)
        keys = self._keys
        low = int(keys.searchsorted(self._key)) if num_left else len(keys)
        if low < len(keys) and keys[low] == self._key:
            high = int(keys.searchsorted(self._key, "right"))
            older = self._ends[max(low, high - num_left) : high].tolist()
            found += [end for end in reversed(older) if end >= oldest]
        return found

    def _append(self, text: Seq[int]) -> None:
        latest, previous = self._latest, self._previous
        first = self._num_indexed + 1
        key = _key(text, first)
        for end in range(first, len(text)):
            previous.append(latest.get(key, 0))
            latest[key] = end
            key = ((key << _ID_BITS) ^ text[end]) & _MASK
        self._num_indexed = len(text) - 1
        self._key = key

    def _merge(self, text: Seq[int]) -> None:
        """Move the table into the arrays, and drop positions that are not searched any more."""
        last = self._num_indexed
        first = last + 1 - len(self._previous)
        oldest = last - self._most_tokens
        keys, ends = self._keys, self._ends
        if len(ends) and oldest > 0:
            is_recent = ends >= oldest
            keys, ends = keys[is_recent], ends[is_recent]
        new_keys, new_ends = _sorted(text, max(first, oldest), last)
        at = keys.searchsorted(new_keys, "right")
        self._keys, self._ends = np.insert(keys, at, new_keys), np.insert(ends, at, new_ends)
        self._latest, self._previous = {}, []

    def _build(self, text: Seq[int]) -> None:
        """Index all of the text anew."""
        last = len(text) - 1
        self._keys, self._ends = _sorted(text, max(LEAST_MATCH, last - self._most_tokens), last)
        self._latest, self._previous = {}, []
        self._num_indexed = last
        self._key = _key(text, last + 1)


def _key(text: Seq[int], end: int) -> int:
    return ((text[end - 3] << 2 * _ID_BITS) ^ (text[end - 2] << _ID_BITS) ^ text[end - 1]) & _MASK


def _sorted(text: Seq[int], first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Keys of the positions [first, last], ascending, and these positions."""
    ids = np.array(text[first - LEAST_MATCH : last], dtype=np.int64)
    keys = ((ids[:-2] << 2 * _ID_BITS) ^ (ids[1:-1] << _ID_BITS) ^ ids[2:]) & _MASK
    order = keys.argsort(kind="stable")
    return keys[order], (order + first).astype(np.int32)


class Lookup(Proposer):
    """The proposer by lookup in a sequence's own text. The index is in `Sequence.draft_index`."""

    @override
    def propose(self, sequence: Sequence, most: int) -> Proposal:
        if most <= 0:
            return NOTHING
        text = sequence.token_ids
        index: TextIndex | None = sequence.draft_index
        if index is None:
            index = sequence.draft_index = TextIndex()
        index.extend(text)
        match = index.find(text)
        if match is None:
            return NOTHING
        drafts = continuation(text, match.end, most)
        for stop_id in sequence.spec.sampling.stop_token_ids:
            if stop_id in drafts:
                del drafts[drafts.index(stop_id) :]
        return Proposal(tuple(drafts), match.length) if drafts else NOTHING

    @override
    def forget(self, sequence: Sequence) -> None:
        sequence.draft_index = None


def continuation(text: list[int], start: int, most: int) -> list[int]:
    """`most` ids from `start` on. Behind the end of the text they repeat: what follows a match that overlaps the end
    is a text with that period."""
    ids = text[start : start + most]
    period = len(text) - start
    while len(ids) < most:
        ids += ids[len(ids) - period : len(ids) - period + most - len(ids)]
    return ids
