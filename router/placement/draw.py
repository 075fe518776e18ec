"""Random draws as a function of a counter, so that the core stays a function of its events.

The mixing function is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
OOPSLA 2014): consecutive counters give independent-looking numbers.
"""

from __future__ import annotations

from collections.abc import Callable

Draw = Callable[[int, int], int]
"""(counter, count) -> an index below count."""

_MASK = (1 << 64) - 1


def mixed(counter: int, count: int) -> int:
    """An index below `count` (at least 1), equally likely each."""
    z = (counter + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return (z ^ (z >> 31)) % count


def in_turn(counter: int, count: int) -> int:
    """Not random at all: counters go round the indices."""
    return counter % count
