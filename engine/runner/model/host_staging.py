"""KV of a device's cache through staging memory of the host, for transports that move host memory.

    gather     cache ──kernel──> piece of device memory ──copy──> pinned host buffer; waits, since it is sent next
    scatter    pinned host buffer ──copy──> piece of device memory ──kernel──> cache, in the order of the stream

The piece is one for both ways: all of it is in the order of the engine's stream. On a CPU the same path copies once
more than needed; it is taken there by tests only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from disagg.engine.config import STAGED_ON_DEVICE, TransportName
from disagg.engine.plan import Buffer


class HostStaging:
    """Owner: the engine thread, but for `new_buffer`, which any thread may call.

    Args:
        device: where the cache is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._piece = torch.empty(0, dtype=torch.uint8, device=device)

    @classmethod
    def of(cls, device: torch.device, transport: TransportName) -> HostStaging | None:
        """What a cache on `device` needs for this transport; None where staging memory is the cache's kind."""
        return None if device.type == "cpu" or transport in STAGED_ON_DEVICE else cls(device)

    def new_buffer(self, nbytes: int) -> Buffer:
        """A flat uint8 numpy array, pinned where the device is a GPU. Contents are undefined."""
        if self._device.type != "cuda":
            return np.empty(nbytes, dtype=np.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def piece(self, nbytes: int) -> Tensor:
        """Flat uint8 memory of the device, of at least so many bytes; the same one each time, if it is large enough."""
        if self._piece.numel() < nbytes:
            self._piece = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._piece

    def to_host(self, buffer: Tensor) -> None:
        """Fill a host buffer with the head of the piece; returns when it is full."""
        buffer.copy_(self._piece[: buffer.numel()], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def to_device(self, buffer: Tensor) -> Tensor:
        """The bytes of a host buffer on the device, when the stream is there; the buffer is read until then."""
        piece = self.piece(buffer.numel())
        piece[: buffer.numel()].copy_(buffer, non_blocking=True)
        return piece
