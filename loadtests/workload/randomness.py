"""The randomness of load tests: a stream of draws that is a function of its key alone.

    stream("lengths", seed, index) -> uniform(), integer(), exponential(), gamma()

The same key gives the same draws on every machine and in every version of Python, so that two runs, or two clusters
that are compared, get the same requests at the same times. Python's `random` is not used: its methods may change
between versions, and a shared generator would make one request's draws depend on how many came before it.

Bits come from SHAKE-128 (FIPS 202) over the key and a counter. Integers are exact. `exponential` and `gamma` use the C
library's logarithm, which may differ in the last of 53 bits between machines; who needs equal numbers rounds them, as
arrivals.py does.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator

_DRAWS_PER_HASH = 64


def _digest(parts: tuple[int | str, ...], num_bytes: int) -> bytes:
    """Bytes of a key; `repr` keeps `1` and `"1"`, and `("a", "b")` and `("ab",)`, apart."""
    return hashlib.shake_128(repr(parts).encode()).digest(num_bytes)


def token_ids(num_tokens: int, vocab_size: int, *key: int | str) -> tuple[int, ...]:
    """Draw `num_tokens` token ids, uniform in [0, vocab_size). A shorter request of the same key is a prefix of a
    longer one."""
    words = struct.unpack(f"<{num_tokens}I", _digest(key, 4 * num_tokens))
    return tuple(word * vocab_size >> 32 for word in words)


class Stream:
    """Stream of successive draws. Owned by one caller; two streams of one key are equal."""

    def __init__(self, *key: int | str) -> None:
        self._key = key
        self._bits = self._generate()

    def _generate(self) -> Iterator[int]:
        counter = 0
        while True:
            yield from struct.unpack(
                f"<{_DRAWS_PER_HASH}Q", _digest((*self._key, "draws", counter), 8 * _DRAWS_PER_HASH)
            )
            counter += 1

    def uniform(self) -> float:
        """Draw a number in [0, 1) with 53 random bits."""
        return (next(self._bits) >> 11) * 2.0**-53

    def integer(self, low: int, high: int) -> int:
        """Draw a whole number in [low, high], both included; uneven by less than (high - low + 1) / 2^64."""
        return low + (next(self._bits) * (high - low + 1) >> 64)

    def exponential(self) -> float:
        """Draw from the exponential distribution with mean 1, by inversion."""
        return -math.log1p(-self.uniform())

    def normal(self) -> float:
        """Draw from the standard normal distribution, by Box and Muller's transform (1958); the second number of the
        pair is not used."""
        radius = math.sqrt(2 * self.exponential())
        return radius * math.cos(2 * math.pi * self.uniform())

    def gamma(self, shape: float) -> float:
        """Draw from the gamma distribution with this shape and scale 1, so with mean `shape`; `shape` > 0.

        G. Marsaglia and W. Tsang, A Simple Method for Generating Gamma Variables, ACM TOMS 26 (2000). Shapes below 1
        are drawn at shape + 1 and multiplied by U^(1/shape), as in section 6 of the paper.
        """
        if shape < 1:
            boost = math.exp(-self.exponential() / shape)
            return self.gamma(shape + 1) * boost
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            x = self.normal()
            v = (1 + c * x) ** 3
            if v > 0 and -self.exponential() < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v
