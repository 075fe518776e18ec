"""Counter-based randomness: the draw for an output token is a function of (seed, index) only.

A retry, a migration or a hand-over therefore goes on with the same stream, on any machine, with no state to carry.

Draw i of a seed is output i of SplitMix64 (G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014; constants and output function as in S. Vigna's public-domain splitmix64.c) started at the
seed's own hash. Hashing the seed first keeps neighbouring seeds apart: raw SplitMix64 streams are shifted copies of
one another.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """The output function of SplitMix64: a bijection of 64-bit numbers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def splitmix64(state: int, index: int) -> int:
    """Output `index` (from 0) of a SplitMix64 generator that starts with `state`; 64 bits."""
    return _mix((state + (index + 1) * _GOLDEN) & _MASK)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits. Seeds are taken modulo 2^64; ValueError for a negative index."""
    if index < 0:
        raise ValueError(f"index {index} is negative")
    return (splitmix64(splitmix64(seed & _MASK, 0), index) >> 11) * 2.0**-53
