"""Digests of KV that a device computes and the host reads later: nothing waits while they are queued. The function is
that of `transports/digest.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.engine.kv_transfer.transport import Checksum
from disagg.kernels.dispatch import digest_sums


@dataclass(frozen=True, slots=True)
class DigestSums:
    """What the digests of several payloads are made of."""

    sums_P2: Tensor
    """int64, of each payload, where the payloads are or in the host's memory."""
    sizes: tuple[int, ...]
    """Bytes of each payload."""
    source_P2: Tensor | None = None
    """Tensor from which `sums_P2` is copied, kept alive until then."""

    @classmethod
    def of(cls, payloads: Sequence[Tensor], checksum: Checksum) -> DigestSums:
        """Digest sums of flat uint8 tensors; on a GPU they are only queued, on the current stream."""
        sums_P2 = torch.stack([digest_sums(payload, checksum.seed) for payload in payloads])
        return cls(sums_P2, tuple(payload.numel() for payload in payloads))

    def to_host(self) -> DigestSums:
        """The same in memory that the host reads, when the current stream is there."""
        if self.sums_P2.device.type == "cpu":
            return self
        on_host = torch.empty(self.sums_P2.shape, dtype=self.sums_P2.dtype, pin_memory=True)
        on_host.copy_(self.sums_P2, non_blocking=True)
        return DigestSums(on_host, self.sizes, self.sums_P2)

    def digests(self, checksum: Checksum) -> list[int]:
        """Digest of each payload."""
        return [checksum.of_sums(sums, size) for sums, size in zip(self.sums_P2.tolist(), self.sizes, strict=True)]
