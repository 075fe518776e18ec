"""Counter-based randomness: the draw for an output token is a function of (seed, index) only.

A retry, a migration or a hand-over therefore goes on with the same stream, on any machine, with no state to carry.

Draw i of a seed is output i of a SplitMix64 generator (`proto/splitmix.py`) started at the seed's own hash. Hashing the
seed first keeps neighbouring seeds apart: raw SplitMix64 streams are shifted copies of one another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagg.proto.splitmix import FACTORS, GOLDEN, MASK, SHIFTS, splitmix64

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(GOLDEN)
_FACTORS = tuple(map(np.uint64, FACTORS))
_SHIFTS = tuple(map(np.uint64, SHIFTS))


def first_outputs(states: U64) -> U64:
    """Output 0 of the SplitMix64 generators that start with these states, in an array of their shape."""
    outputs: U64 = states + _GOLDEN
    for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True):
        outputs ^= outputs >> shift
        outputs *= factor
    outputs ^= outputs >> _SHIFTS[2]
    return outputs


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits. Seeds are taken modulo 2^64; ValueError for a negative index."""
    if index < 0:
        raise ValueError(f"index {index} is negative")
    return (splitmix64(splitmix64(seed & MASK, 0), index) >> 11) * 2.0**-53
