"""SplitMix64: random numbers as a function of a state and a counter only. Pure.

G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants and output function
as in S. Vigna's public-domain splitmix64.c. Triton kernels have their own (`kernels/triton/sampling.py`).
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def _mix(z: int) -> int:
    """The output function, a bijection of 64-bit numbers."""
    z = ((z ^ (z >> SHIFTS[0])) * FACTORS[0]) & MASK
    z = ((z ^ (z >> SHIFTS[1])) * FACTORS[1]) & MASK
    return z ^ (z >> SHIFTS[2])


def splitmix64(state: int, index: int) -> int:
    """Output `index` (from 0) of a SplitMix64 generator that starts with `state`; 64 bits."""
    return _mix((state + (index + 1) * GOLDEN) & MASK)
