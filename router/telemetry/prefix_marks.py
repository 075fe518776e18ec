"""Which prompts begin alike, in few hashes: those of the blocks that end at fixed places, eight in each doubling. Pure.

Two prompts with an equal mark are equal up to its place; where their next marks differ, they differ before the next
place. So a common prefix is underestimated by an eighth at most, and a prompt of 100,000 tokens has 84 marks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from disagg.proto.ids import BlockHash

MAX_MARKS: Final = 128
"""Most marks of one prompt, which reach up to its block 270,000."""
_PER_DOUBLING: Final = 8


def _places() -> tuple[int, ...]:
    found: list[int] = []
    place = 1
    while len(found) < MAX_MARKS:
        found.append(place)
        place += max(1, (1 << place.bit_length() - 1) // _PER_DOUBLING)
    return tuple(found)


PLACES: Final = _places()
"""Blocks from the beginning of a prompt to the end of each mark: 1, 2, ... 16, 18, 20, ..."""
_INDICES: Final = tuple(place - 1 for place in PLACES)
_GETTERS: Final = tuple(itemgetter(*_INDICES[:num_marks]) for num_marks in range(2, MAX_MARKS + 1))
"""Getters of all marks at once, by their number from two on: twice as fast as one after the other, for each request."""


def marks_in(block_hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
    """The marks of a prompt with these blocks."""
    num_marks = bisect_right(PLACES, len(block_hashes))
    if num_marks < 2:
        return tuple(block_hashes[:num_marks])
    marks: tuple[BlockHash, ...] = _GETTERS[num_marks - 2](block_hashes)
    return marks
