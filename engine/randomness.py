"""Counter-based randomness: the draw for an output token is a function of (seed, index) only.

A retry, a migration or a hand-over therefore goes on with the same stream, on any machine, with no state to carry.

Draw i of a seed is output i of a SplitMix64 generator (`proto/splitmix.py`) started at the seed's own hash. Hashing the
seed first keeps neighbouring seeds apart: raw SplitMix64 streams are shifted copies of one another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagg.proto.splitmix import GOLDEN, MASK, mix, splitmix64

U64 = NDArray[np.uint64]


def first_outputs(states_N: U64) -> U64:
    """Output 0 of the SplitMix64 generators that start with these states: each word mixed."""
    outputs_N: U64 = mix((states_N + GOLDEN) & MASK)
    return outputs_N


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits. Seeds are taken modulo 2^64; ValueError for a negative index."""
    if index < 0:
        raise ValueError(f"index {index} is negative")
    return (splitmix64(splitmix64(seed & MASK, 0), index) >> 11) * 2.0**-53
