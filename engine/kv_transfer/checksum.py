"""The checksum of a payload: xxh3-64, not against malice but against a wrong, torn or reused buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from disagg.engine.plan import Buffer


def checksum(payload: Buffer) -> int:
    """xxh3-64 of a flat uint8 numpy array, or of a uint8 tensor, which is copied to the host first if it is on a
    GPU."""
    host: Any = payload.detach().cpu().numpy() if hasattr(payload, "detach") else payload
    return xxhash.xxh3_64_intdigest(memoryview(host))


def combined(checksums: Sequence[int]) -> int:
    """One checksum of a payload that is in several parts, from those of its parts in order; of a single part its
    own."""
    if len(checksums) == 1:
        return checksums[0]
    return xxhash.xxh3_64_intdigest(b"".join(part.to_bytes(8, "little") for part in checksums))
