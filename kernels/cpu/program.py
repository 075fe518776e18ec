"""Recorded calls of the compiled kernels, made again by one call that gives the GIL away."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disagg.kernels.captured import CaptureError
from disagg.kernels.cpu.calls import DONE, Pool, Recording

T = TypeVar("T")


class CapturedProgram(Generic[T]):
    """See `Captured`. It keeps the pool and `run`, whose tensors its calls point into."""

    def __init__(
        self, library: ctypes.CDLL, recording: Recording, pool: Pool, run: Callable[[], T], outputs: T
    ) -> None:
        self._function = library["disagg_replay"]
        self._function.restype, self._function.argtypes = ctypes.c_int64, [ctypes.c_char_p]
        self._kernels = [kernel for kernel, _ in recording.calls]
        self._structs = [args for _, args in recording.calls]
        words = [word for kernel, args in recording.calls for word in (kernel.address, _address(args))]
        self._calls = (ctypes.c_void_p * len(words))(*words)
        self._invalid = ctypes.c_int64(DONE)
        self._args = struct.pack(
            "@PqP", ctypes.addressof(self._calls), len(self._kernels), ctypes.addressof(self._invalid)
        )
        self._pool, self._run, self._outputs = pool, run, outputs

    def replay(self) -> T:
        """See `Captured.replay`.

        Raises:
            IndexError: as the ops; the calls behind the one that failed were not made.
        """
        failed = self._function(self._args)
        if failed != DONE:
            raise self._kernels[failed].error(self._invalid.value)
        return self._outputs


class ProgramCapturer:
    """See `Capturer`: records the calls of `library`'s kernels. Whatever else computes raises CaptureError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pool = Pool()
        self._checked: set[Hashable] = set()

    @property
    def nbytes(self) -> int:
        """Memory that the captures share."""
        return self._pool.nbytes

    def capture(self, run: Callable[[], T]) -> tuple[T, CapturedProgram[T]]:
        """See `Capturer.capture`."""
        with Recording(self._pool) as recording, _OnlyViews():  # type: ignore[no-untyped-call]
            outputs = run()
        return outputs, CapturedProgram(self._library, recording, self._pool, run, outputs)

    def compute(self, run: Callable[[], T], kind: Hashable) -> T:
        """See `Capturer.compute`: all calls are written down, then made by one call."""
        check = nullcontext() if kind in self._checked else _OnlyViews()  # type: ignore[no-untyped-call]
        with Recording(self._pool, makes_calls=False) as recording, check:
            outputs = run()
        self._checked.add(kind)
        return CapturedProgram(self._library, recording, self._pool, run, outputs).replay()


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every op of torch that is more than another look at the same memory: a tape would not make it again."""


def _only_views(
    mode: _OnlyViews, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if not (isinstance(func, torch._ops.OpOverload) and func.is_view):
        raise CaptureError(f"{func} is not one of the C++ kernels")
    return func(*args, **(kwargs or {}))


# Not in the class's body: there torch wraps it, and the first call imports torch.compile: 1.4 s and 135 MB for nothing.
_OnlyViews.__torch_dispatch__ = _only_views  # type: ignore[method-assign, assignment]


def _address(struct_of_args: bytes) -> int:
    address = ctypes.cast(ctypes.c_char_p(struct_of_args), ctypes.c_void_p).value
    assert address is not None
    return address
