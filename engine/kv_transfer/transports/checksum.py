"""The checksum of a payload: xxh3-64, seeded with a key that only the cluster's processes know.

It finds a wrong, torn or reused buffer, and bytes that another process put into a KV connection: such a process knows
neither the seed nor the sender's checksum, which comes over the control stream. It is no MAC in the cryptographic
sense; what one would cost is in ADR 38.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import xxhash

from disagg.engine.plan import Buffer
from disagg.proto.cluster_secret import ClusterSecret


class Checksum:
    """One way of computing checksums; both ends of a pair need the same `seed`, of 64 bits."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @classmethod
    def of_secret(cls, secret: ClusterSecret) -> Self:
        """That of a cluster's workers."""
        return cls(int.from_bytes(secret.sign("disagg kv checksum")[:8], "little"))

    def __call__(self, payload: Buffer) -> int:
        """Of a flat uint8 numpy array, or of a uint8 tensor, which is copied to the host first if it is on a GPU."""
        host: Any = payload.detach().cpu().numpy() if hasattr(payload, "detach") else payload
        return xxhash.xxh3_64_intdigest(memoryview(host), seed=self.seed)

    def combined(self, checksums: Sequence[int]) -> int:
        """One checksum of a payload that is in several parts, from those of its parts in order; of a single part its
        own."""
        if len(checksums) == 1:
            return checksums[0]
        return xxhash.xxh3_64_intdigest(b"".join(part.to_bytes(8, "little") for part in checksums), seed=self.seed)


UNKEYED = Checksum()
"""Where there is no cluster."""
