"""Checksums of KV where it is: in a device's memory by a kernel, of which 16 bytes come to the host.

The digest is the same function for tensors of a CPU, so that one end of a pair may have its buffers there; slower there
than xxh3, which pairs of CPU workers use.
"""

from __future__ import annotations

from disagg.engine.kv_transfer.transport import Checksum
from disagg.engine.plan import Buffer
from disagg.kernels.dispatch import digest_sums


def digest(payload: Buffer, checksum: Checksum) -> int:
    """Digest of a flat uint8 tensor on any device. Waits for the current stream, and so for what fills the tensor on
    it."""
    return checksum.of_sums(digest_sums(payload, checksum.seed).tolist(), payload.nbytes)


def checksum_of(payload: Buffer, checksum: Checksum) -> int:
    """The digest of what is on a GPU; of a buffer in host memory its checksum."""
    return digest(payload, checksum) if getattr(payload, "is_cuda", False) else checksum(payload)
