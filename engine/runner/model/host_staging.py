"""KV of a device's cache through staging memory of the host, for transports that move host memory.

    gather     engine's stream   cache ──kernel──> piece of device memory ──kernel──> its digest
               copy stream       piece, digest ──copies──> pinned host memory; an event behind them is the answer
    scatter    engine's stream   pinned host buffer ──copy──> piece ──kernels──> digest, cache; an event is the answer

The host waits for nothing: steps go on while a piece is copied out. A piece is filled again when it was copied out, or
behind that, by the order of streams and events. There are as many as it takes that a step need not wait for the copies
of the step before, at most `MAX_PIECES`; scatters have one. On a CPU the same path copies once more than needed; it is
taken there by tests only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from disagg.engine.config import STAGED_ON_DEVICE, TransportName
from disagg.engine.kv_transfer.transport import Checksum
from disagg.engine.kv_transfer.transports.digest import checksum_of
from disagg.engine.plan import Buffer, Copying
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.kv_digests import DigestSums

_cuda: Any = torch.cuda
"""Untyped: torch's stubs lack types for streams."""

MAX_PIECES = 8
"""Maximum number of pieces. At 64 MiB each, they hold the 4096 tokens of a whole step of an 8B model."""


class HostStaging:
    """Owner: the engine thread, but for `new_buffer`, which any thread may call.

    Args:
        device: where the cache is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arriving = torch.empty(0, dtype=torch.uint8, device=device)
        self._leaving: deque[Piece] = deque()
        """The one that was filled first is the first, and is copied out first."""
        self._max_pieces = MAX_PIECES
        self._copies: Any = None if device.type == "cpu" else _cuda.Stream(device)

    @classmethod
    def of(cls, device: torch.device, transport: TransportName) -> HostStaging | None:
        """What a cache on `device` needs for this transport; None where staging memory is the cache's kind."""
        return None if device.type == "cpu" or transport in STAGED_ON_DEVICE else cls(device)

    def new_buffer(self, nbytes: int) -> Buffer:
        """A flat uint8 numpy array, pinned where the device is a GPU. Contents are undefined."""
        if self._device.type != "cuda":
            return np.empty(nbytes, dtype=np.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def piece(self, nbytes: int) -> Piece:
        """A piece of at least so many bytes, to be filled on the engine's stream, and copied out by `to_host`."""
        is_short = not self._leaving or not self._leaving[0].is_free
        if is_short and len(self._leaving) < self._max_pieces:
            try:
                self._leaving.appendleft(Piece(self._device, nbytes))
            except torch.OutOfMemoryError:
                if not self._leaving:
                    raise
                self._max_pieces = len(self._leaving)  # copies are waited for, on the device, instead
        self._leaving.rotate(-1)
        piece = self._leaving[-1]
        piece.reserve(nbytes, None if self._copies is None else _cuda.current_stream(self._device))
        return piece

    def to_host(self, piece: Piece, buffer: Tensor, sums: DigestSums | None) -> tuple[Mark, DigestSums | None]:
        """Queue the copy of the head of a piece into a host buffer, behind what fills it, and that of its digests;
        (what is behind both, the digests' sums in host memory)."""
        if self._copies is None:
            buffer.copy_(piece.memory[: buffer.numel()])
            return Mark(pinned=False), sums
        filled, current = _cuda.Event(), _cuda.current_stream(self._device)
        filled.record(current)
        self._copies.wait_event(filled)
        with _cuda.stream(self._copies):
            buffer.copy_(piece.memory[: buffer.numel()], non_blocking=True)
            on_host = None if sums is None else sums.to_host()
            read = Mark(pinned=True, blocking=True)
            read.set()
        piece.read = read
        return read, on_host

    def to_device(self, buffer: Tensor) -> Tensor:
        """The bytes of a host buffer on the device, when the stream is there; the buffer is read until then."""
        nbytes = buffer.numel()
        if self._arriving.numel() < nbytes:
            self._arriving = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        arriving = self._arriving[:nbytes]
        arriving.copy_(buffer, non_blocking=True)
        return arriving


class Piece:
    """Flat uint8 memory of the device, the same each time if it is large enough."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.read: Mark | None = None
        """Behind the last copy out of it."""

    @property
    def is_free(self) -> bool:
        """Whether nothing reads it."""
        return self.read is None or self.read.is_done()

    def reserve(self, nbytes: int, stream: Any) -> None:
        """Have at least so many bytes, which what follows on `stream` may overwrite."""
        if self.memory.numel() < nbytes:
            if self.read is not None:
                self.read.wait()  # it would be given back, and handed out again for the engine's stream
            self.memory = self.memory.new_empty(0)  # both need not fit
            self.memory = self.memory.new_empty(nbytes)
        elif self.read is not None and not self.read.is_done():
            self.read.hold_up(stream)


class GatheredPart(Copying):
    """One rank's slices on their way into a staging buffer.

    Args:
        slices: the bytes of each, where they arrive; kept until it is over.
        sums: of their digests, in the host's memory; None where the host computes the checksums.
        mark: behind all of it.
        device: of the cache.
    """

    def __init__(
        self,
        slices: Sequence[Tensor],
        sums: DigestSums | None,
        mark: Mark,
        checksum: Checksum,
        device: torch.device,
    ) -> None:
        self._slices = slices
        self._sums = sums
        self._mark = mark
        self._checksum = checksum
        self._device = device

    @override
    def is_done(self) -> bool:
        return self._mark.is_done()

    @override
    def wait(self) -> None:
        """On any thread: one without a context would make one on the first device of the process."""
        if self._device.type == "cuda":
            _cuda.set_device(self._device)
        self._mark.wait()

    def checksums(self) -> list[int]:
        """Checksum of each slice."""
        if self._sums is None:
            return [checksum_of(each, self._checksum) for each in self._slices]
        return self._sums.digests(self._checksum)

    @override
    def checksum(self) -> int:
        return self._checksum.combined(self.checksums())
