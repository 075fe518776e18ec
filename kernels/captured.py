"""What a captured computation is, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CaptureError(Exception):
    """The computation cannot be captured; the message says why. It can still be run."""


class Captured(Protocol[T_co]):
    """A computation that can be made again, from the same input tensors into the same output tensors."""

    def replay(self) -> T_co:
        """Compute again from what the input tensors hold now. The outputs hold the result until the next replay or
        capture of the same capturer: captures share their memory."""
        ...


class Capturer(Protocol):
    """Captures computations that run one at a time: they share the memory of what they compute. Owner: one thread."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Captured[T]]:
        """Run it and keep what it did; its result, which is what a replay gives, and the capture.

        `run` must do the same whenever it is called: read and write the same tensors, through ops that can be captured.
        Its outputs are a tensor, or a tuple of them.

        Raises:
            CaptureError: `run` did what cannot be captured. Some of it may have been computed.
        """
        ...
