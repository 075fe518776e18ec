"""Copies of KV that other workers fetch from here, between the steps for which sequences wait. Pure.

    Gather of a prefix ──nothing runs──> copied at once
                          └── add() ──> waits ──take()──> copied, with the next steps

All sequences of a worker wait for what is copied between two steps. So that is at most `SHARE` of what the step is
predicted to take, or a single copy; and a copy is no longer than `SHARE` of a step that only decodes, or one block.
"""

from __future__ import annotations

from collections import deque

from disagg.engine.commands import Gather

SHARE = 0.04
"""Part of a step by which copies for others may hold it up."""
BYTE_MS = 0.33e-6
"""Milliseconds to copy a byte and take its checksum: 3 GB/s (ADR 92)."""


class Serving:
    """Owner: the engine core.

    Args:
        token_bytes: KV of a token that one rank copies.
        block_size: tokens of a block.
    """

    def __init__(self, token_bytes: int, block_size: int) -> None:
        self._token_ms = token_bytes * BYTE_MS
        self._block_size = block_size
        self._waiting: deque[Gather] = deque()

    def __len__(self) -> int:
        """Copies that wait."""
        return len(self._waiting)

    def add(self, gather: Gather) -> None:
        """A copy that waits for its turn."""
        self._waiting.append(gather)

    def most_tokens(self, step_ms: float) -> int:
        """Tokens of one copy, whole blocks, beside steps of `step_ms` milliseconds."""
        num_blocks = int(SHARE * step_ms / (self._token_ms * self._block_size))
        return max(1, num_blocks) * self._block_size

    def take(self, step_ms: float) -> list[Gather]:
        """What is copied before a step that is predicted to take `step_ms` milliseconds; all where it is infinite."""
        taken: list[Gather] = []
        left_ms = SHARE * step_ms
        while self._waiting:
            gather = self._waiting[0]
            left_ms -= (gather.end - gather.start) * self._token_ms
            if taken and left_ms < 0.0:
                break
            taken.append(self._waiting.popleft())
        return taken
