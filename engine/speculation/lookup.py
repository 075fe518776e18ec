"""Drafts by lookup: what followed the last tokens of a text where they stood before, in prompt and output.

    text      ... the quick brown fox jumps ... the quick brown
    match         ^^^^^^^^^^^^^^^                ^^^^^^^^^^^^^^^   1 to 16 tokens: the longest, of several the latest
    drafts                        fox jumps ...

The method is prompt lookup decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding), with the
longest match in place of the first. Candidates are found by their last three tokens, as in the hash chains of LZ77
compressors: the latest MOST_CANDIDATES occurrences of these three are compared, so that a text that repeats them a
thousand times costs no more. Without any, the latest occurrence of the last two counts, then that of the last one:
drafts behind short matches are often wrong, but which of them are worth their time is decided elsewhere
(draft_counts.py), and on answers that copy they bring a third more tokens a step than matches of three tokens alone.

The index of a text is a function of its ids alone: it is built at the first proposal and extended by what is new, and
another worker builds the same one. Two parts hold an entry for each position:

- Sorted arrays, 12 bytes a position, made at once by numpy: 0.1 ms for 1,000 tokens.
- Tables of the latest positions, at most `TAIL` of them, which are merged into the arrays when they are full: about 300
  bytes a position.

The last MOST_TOKENS tokens of a text are searched. What stands before them is not found again: a match at a
recent place is the better one anyway, and the output is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from disagg.engine.request import Sequence
from disagg.engine.speculation.proposer import NOTHING, Proposal, Proposer

MOST_MATCH = 16
"""Longest match, in tokens; a longer one counts as one of so many."""
MOST_TOKENS = 65_536
"""Number of last tokens of a text that are searched."""
MOST_CANDIDATES = 64
"""Number of occurrences of the last three tokens that are compared, the latest first."""
TAIL = 256
"""Number of positions in the tables beside the arrays."""
TABLE_BYTES = 300
"""Memory of a position in the tables, measured."""

_ORDER = 3
"""Tokens of a key."""
_BITS = 21
_ID = (1 << _BITS) - 1
"""Largest id whose keys are exact. Of a larger one the last bits count: its matches may be missed, and are never
mistaken, because the tokens are compared."""


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a text."""

    end: int
    """Position behind it."""
    length: int


class TextIndex:
    """Positions of a text by the tokens before them. Owner: the sequence.

    The key of a position has the last token before it in its highest bits, then the one before that, then the third. So
    positions behind the same one, two or three tokens are neighbours in the sorted arrays.

    Args:
        most_tokens: number of last tokens that are searched.
        tail: number of positions in the tables beside the arrays.
    """

    __slots__ = ("_by_one", "_by_three", "_by_two", "_ends", "_key", "_keys", "_most_tokens", "_num_indexed",
                 "_previous", "_tail")  # fmt: skip

    def __init__(self, most_tokens: int = MOST_TOKENS, tail: int = TAIL) -> None:
        self._most_tokens = most_tokens
        self._tail = tail
        self._keys = np.empty(0, dtype=np.int64)
        """Keys of the older positions, ascending."""
        self._ends = np.empty(0, dtype=np.int32)
        """Positions of these keys; ascending where keys are equal."""
        self._by_three: dict[int, int] = {}
        """Latest position in the tables behind each three tokens."""
        self._by_two: dict[int, int] = {}
        self._by_one: dict[int, int] = {}
        self._previous: list[int] = []
        """For each position of the tables the one before it with the same key; 0 if there is none."""
        self._num_indexed = 0
        """Last position that is indexed."""
        self._key = 0
        """Key of the end of the text."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, and about those of the tables."""
        return self._keys.nbytes + self._ends.nbytes + TABLE_BYTES * len(self._previous)

    def extend(self, text: Seq[int]) -> None:
        """Index what the text has behind what was indexed before; its end itself is no occurrence yet."""
        num_new = len(text) - 1 - self._num_indexed
        assert num_new >= 0, "the text became shorter"
        if num_new > self._tail:
            self._build(text)
        elif num_new > 0:
            if len(self._previous) + num_new > self._tail:
                self._merge(text)
            self._append(text)
        self._key = _key(text, len(text))

    def find(self, text: Seq[int]) -> Match | None:
        """The longest occurrence of the text's last tokens before its end, of several the latest; None where its last
        token is new. `extend` has seen the text."""
        size = len(text)
        oldest = max(1, size - self._most_tokens)
        key = self._key
        two, one = key >> _BITS, key >> 2 * _BITS
        bounds = (key, key + 1, two << _BITS, (two + 1) << _BITS, one << 2 * _BITS, (one + 1) << 2 * _BITS)
        low, high, *shorter = self._keys.searchsorted(bounds).tolist()
        if match := _longest(text, self._candidates(low, high, oldest)):
            return match
        for length, table, within in ((2, self._by_two.get(two), shorter[:2]), (1, self._by_one.get(one), shorter[2:])):
            end = table or self._latest(*within)
            if end >= max(oldest, length) and text[end - length : end] == text[size - length :]:
                return Match(end, length)
        return None

    def _candidates(self, low: int, high: int, oldest: int) -> list[int]:
        """Positions with the key of the text's end, the latest first; those in the arrays are [low, high)."""
        found: list[int] = []
        first = self._num_indexed + 1 - len(self._previous)
        end = self._by_three.get(self._key, 0)
        while end >= oldest and len(found) < MOST_CANDIDATES:
            found.append(end)
            end = self._previous[end - first]
        num_left = MOST_CANDIDATES - len(found)
        if low < high and num_left:
            older = self._ends[max(low, high - num_left) : high].tolist()
            found += [end for end in reversed(older) if end >= oldest]
        return found

    def _latest(self, low: int, high: int) -> int:
        """The latest of the positions [low, high) of the arrays; 0 without any."""
        return int(self._ends[low:high].max()) if low < high else 0

    def _append(self, text: Seq[int]) -> None:
        by_three, by_two, by_one, previous = self._by_three, self._by_two, self._by_one, self._previous
        first = self._num_indexed + 1
        key = _key(text, first)
        for end in range(first, len(text)):
            previous.append(by_three.get(key, 0))
            by_three[key] = by_two[key >> _BITS] = by_one[key >> 2 * _BITS] = end
            key = (text[end] & _ID) << 2 * _BITS | key >> _BITS
        self._num_indexed = len(text) - 1

    def _merge(self, text: Seq[int]) -> None:
        """Move the tables into the arrays, and drop positions that are not searched any more."""
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
        self._clear_tables()

    def _build(self, text: Seq[int]) -> None:
        """Index all of the text anew."""
        last = len(text) - 1
        self._keys, self._ends = _sorted(text, max(1, last - self._most_tokens), last)
        self._num_indexed = last
        self._clear_tables()

    def _clear_tables(self) -> None:
        self._by_three, self._by_two, self._by_one, self._previous = {}, {}, {}, []


def _key(text: Seq[int], end: int) -> int:
    """The key of a position. Where fewer than three tokens stand before it, zeros take the places of the others."""
    third = text[end - 3] & _ID if end >= _ORDER else 0
    second = text[end - 2] & _ID if end >= _ORDER - 1 else 0
    return (text[end - 1] & _ID) << 2 * _BITS | second << _BITS | third


def _sorted(text: Seq[int], first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Keys of the positions [first, last], ascending, and these positions."""
    ids = np.zeros(last - first + _ORDER, dtype=np.int64)
    known = text[max(0, first - _ORDER) : last]
    ids[len(ids) - len(known) :] = known
    ids &= _ID
    keys = ids[2:] << 2 * _BITS | ids[1:-1] << _BITS | ids[:-2]
    order = keys.argsort(kind="stable")
    return keys[order], (order + first).astype(np.int32)


def _longest(text: Seq[int], ends: Iterable[int]) -> Match | None:
    """The longest occurrence of the text's last tokens that ends at one of `ends`, of several the first; None where
    none has three tokens."""
    size = len(text)
    best, best_end = _ORDER - 1, 0
    last_tokens = text[-MOST_MATCH:]
    for end in ends:
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
