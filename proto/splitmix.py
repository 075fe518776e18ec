"""SplitMix64: numbers that are a function of a state and a counter, with nothing else to carry. Pure.

G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants and output function
as in S. Vigna's public-domain splitmix64.c. Triton kernels have their own (`kernels/triton/sampling.py`).
"""

from __future__ import annotations

from typing import Any

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: Any) -> Any:
    """The output function, a bijection of 64-bit numbers: of one integer, or of each element of an unsigned array."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(state: int, index: int) -> int:
    """Output `index` (from 0) of a SplitMix64 generator that starts with `state`; 64 bits."""
    output: int = mix((state + (index + 1) * GOLDEN) & MASK)
    return output
