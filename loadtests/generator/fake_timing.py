"""What the fake server does and when: a function of its settings, the prompt and the clock, so that a test knows it.

FakeTiming.of(prompt) -> first token after `ttft_s`, then one every `tpot_s`;   release_s: how a stall shifts a time
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

FAKE_VOCAB_SIZE = 49_152
"""As large as SmolLM2's, so that requests have their usual size."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class FakeTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies and faults of the fake server."""

    ttft_s: Seconds = 0.05
    """From a request's arrival to its first token."""
    tpot_s: Seconds = 0.01
    """Between two tokens."""
    spread: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Each request's two latencies are scaled by a factor of its own in [1 - spread, 1 + spread]."""
    stall_at_s: Seconds = 0.0
    """When the stall begins, counted from the first request."""
    stall_s: Seconds = 0.0
    """How long no stream gets anything. What falls into the stall comes at its end."""
    refuse_every: Count | None = None
    """Every so many requests one is refused: RESOURCE_EXHAUSTED."""
    fail_every: Count | None = None
    """Every so many requests one ends halfway: UNAVAILABLE. One that is also to be refused is refused."""

    def of(self, prompt: Sequence[int]) -> tuple[float, float]:
        """TTFT and TPOT of one request, in seconds."""
        factor = 1 + self.spread * (2 * _checksum(prompt) / 2**32 - 1)
        return self.ttft_s * factor, self.tpot_s * factor

    def release_s(self, planned_s: float) -> float:
        """When a message that is planned for a time goes out; both in seconds since the first request."""
        stall_end_s = self.stall_at_s + self.stall_s
        return stall_end_s if self.stall_at_s <= planned_s < stall_end_s else planned_s

    def is_refused(self, number: int) -> bool:
        """Whether the `number`-th request, from 1, is refused."""
        return self.refuse_every is not None and number % self.refuse_every == 0

    def is_failed(self, number: int) -> bool:
        """Whether the `number`-th request, from 1, ends halfway."""
        return self.fail_every is not None and number % self.fail_every == 0


def fake_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The output tokens: different for every prompt, the same for equal ones."""
    first = _checksum(prompt)
    return [(first + index) % FAKE_VOCAB_SIZE for index in range(num_tokens)]


def _checksum(prompt: Sequence[int]) -> int:
    """CRC-32 of the ids, in [0, 2^32)."""
    return zlib.crc32(struct.pack(f"<{len(prompt)}I", *prompt))
