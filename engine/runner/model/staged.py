"""Numbers of a step on their way to the device, without a wait.

They are written into one of two pieces of pinned host memory and cross as one copy on the current stream. The host
waits only if it is two steps ahead, until the memory that it is about to overwrite was read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_cuda: Any = torch.cuda
"""Untyped: torch's stubs lack types for events."""


class Staged:
    """Memory of one layout on the device and twice on the host. Owner: the model runner. On a CPU, for tests, it
    copies plainly.

    Args:
        nbytes: of each piece.
        split: the arrays of a piece, views of a flat uint8 tensor.
    """

    def __init__(self, nbytes: int, device: torch.device, split: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.on_device = split(self._memory)
        """The arrays, always at the same place."""
        pinned = device.type == "cuda"
        self._pieces = tuple(_HostPiece(nbytes, split, pinned=pinned) for _ in range(2))
        self._turn = 0

    def to_write(self) -> tuple[NDArray[Any], ...]:
        """The arrays on the host, free to be overwritten; they hold what was sent the time before last."""
        self._turn ^= 1
        piece = self._pieces[self._turn]
        piece.read.wait()
        return piece.arrays

    def send(self, used: int | None = None) -> None:
        """Queue the copy of the first `used` bytes of what was written, by default of all."""
        piece = self._pieces[self._turn]
        self._memory[:used].copy_(piece.memory[:used], non_blocking=True)
        piece.read.set()


class _HostPiece:
    def __init__(self, nbytes: int, split: Callable[[Tensor], tuple[Tensor, ...]], *, pinned: bool) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.arrays = tuple(view.numpy() for view in split(self.memory))
        self.read = Mark(pinned=pinned)
        """Behind the copy of it."""


class Mark:
    """A place in the current stream that the host can wait for. Without pinned memory there is nothing to wait for."""

    def __init__(self, *, pinned: bool) -> None:
        self._event: Any = _cuda.Event() if pinned else None

    def set(self) -> None:
        """Behind all that is queued by now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until what was queued before it is done; not at all before it was ever set."""
        if self._event is not None:
            self._event.synchronize()
