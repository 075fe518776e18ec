"""Computations that are captured once and replayed: what a decode step costs without Python between its ops.

On a CPU the calls of the compiled kernels are recorded (`cpu/calls.py`), on a GPU they are a CUDA graph
(`cuda_graph.py`); `dispatch.capturer` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CaptureError(Exception):
    """The computation cannot be captured; the message says why. It can still be run."""


class Captured(Protocol[T_co]):
    """A computation that can be repeated, from the same input tensors into the same output tensors."""

    def replay(self) -> T_co:
        """Compute again from what the input tensors hold now. The outputs hold the result until the next replay or
        capture of the same capturer: captures share their memory."""
        ...


class Capturer(Protocol):
    """Captures computations that run one at a time: they share the memory of what they compute. Owner: one thread."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Captured[T]]:
        """Run it and record what it did. Returns its result, in the tensors that a replay writes to, and the capture.

        `run` must do the same whenever it is called: read and write the same tensors, through ops that can be captured.
        Its outputs are a tensor, or a tuple of them.

        Raises:
            CaptureError: `run` did what cannot be captured. Some of it may have been computed.
        """
        ...

    def compute(self, run: Callable[[], T], kind: Hashable) -> T:
        """Run it once and return its result, which is valid until the next computation, replay or capture. On a CPU its
        ops are recorded, then executed as one batch, without Python between them.

        Runs of one `kind` take the same ops, in other shapes: only the first of them is checked for ops that cannot be
        captured.

        Raises:
            CaptureError: there is such an op. Nothing was computed.
        """
        ...
