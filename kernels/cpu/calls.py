"""Calls of the compiled kernels, their recording, and their replay without Python.

A C function takes one struct of arguments (`calls.h`). `Kernel` packs it, calls the function, and, where the thread is
recording, keeps both. A `CapturedProgram` makes the same calls again by one call that releases the GIL (or, where the
recording only wrote them down, for the first time). What a kernel writes comes from `new_output`: outside a recording
an ordinary tensor, within one a piece of a `Pool`, which later calls of the same recording use again once nothing in
Python refers to it. Made in order, each call then finds the same inputs as when it was recorded.

A pool has buffers of a power of two bytes. All recordings of a pool use the same buffers: only one of them can be
replayed at a time, and its outputs are valid until the next.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from disagg.kernels.capture import Captured, CaptureError, Capturer

ALIGNMENT = 64
"""Alignment of outputs in bytes: that of a cache line, and of the widest vectors."""

DONE = -1
"""Return value of a function that found nothing invalid."""


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


class Kernel:
    """One function of a library. Stateless; any thread.

    `fields` are the struct's, in the format of Python's `struct` in native mode: `i` int32, `q` int64, `f` float, `P`
    pointer (0 for none). A `ctypes.PyDLL` keeps the GIL for the call, a `ctypes.CDLL` gives it away.
    """

    __slots__ = ("_call", "_invalid", "_pack", "address")

    def __init__(self, library: ctypes.CDLL, name: str, fields: str, invalid: str = "argument {}") -> None:
        """`invalid` is the text of the error, with `{}` for the index that the function returned."""
        function = library[name]
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_char_p]
        self._call = function
        self._pack = struct.Struct(f"@{fields}").pack
        self._invalid = invalid
        self.address = ctypes.cast(function, ctypes.c_void_p).value
        """Address of the function."""

    def __call__(self, *values: float) -> None:
        """Call it, unless a recording only records calls; what the pointers point to must live until it is called,
        or, in a recording, as long as its program.

        Raises:
            IndexError: something was invalid, such as a slot outside the cache; nothing was computed.
        """
        args = self._pack(*values)
        recording = _thread.recording
        if recording is None or recording.makes_calls:
            found = self._call(args)
            if found != DONE:
                raise self.error(found)
        if recording is not None:
            recording.calls.append((self, args))

    def error(self, index: int) -> IndexError:
        """The error for what the function found invalid at `index`."""
        return IndexError(self._invalid.format(index))


def is_deferred() -> bool:
    """Whether this thread's calls are only recorded, so that outputs do not hold results yet."""
    return _thread.recording is not None and not _thread.recording.makes_calls


def new_output(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor for a kernel to write: contiguous, its contents undefined."""
    recording = _thread.recording
    return torch.empty(shape, dtype=dtype) if recording is None else recording.new_output(shape, dtype)


class Pool:
    """Memory that recordings share. It is kept as long as a program that points into it."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[NDArray[np.uint8]]] = {}

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        return sum(size * len(buffers) for size, buffers in self._buffers.items())

    def free_buffers(self) -> dict[int, list[NDArray[np.uint8]]]:
        """All buffers by size; all of them are free for a new recording."""
        return {size: list(reversed(buffers)) for size, buffers in self._buffers.items()}

    def new_buffer(self, size: int) -> NDArray[np.uint8]:
        """Allocate a further buffer of `size` bytes."""
        memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        first = -memory.ctypes.data % ALIGNMENT
        buffer = memory[first : first + size]
        self._buffers.setdefault(size, []).append(buffer)
        return buffer


class Recording:
    """The calls of kernels that this thread makes in a `with` block, in order; not those of other threads.

    `makes_calls=False`: they are only recorded, and outputs hold nothing before a program has made them.
    """

    def __init__(self, pool: Pool, *, makes_calls: bool = True) -> None:
        self.calls: list[tuple[Kernel, bytes]] = []
        self.makes_calls = makes_calls
        self._pool = pool
        self._free = pool.free_buffers()

    def __enter__(self) -> Recording:
        assert _thread.recording is None, "a recording within a recording"
        _thread.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.recording = None

    def new_output(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the pool; its buffer is free again when the last tensor on it is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = max(ALIGNMENT, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else self._pool.new_buffer(size)
        part = buffer[:nbytes]  # an array of its own: the tensor's memory refers to it, and to nothing else
        weakref.finalize(part, free.append, buffer).atexit = False
        return torch.from_numpy(part).view(dtype).view(shape)


T = TypeVar("T")


class CapturedProgram(Captured[T]):
    """Recorded calls of compiled kernels, replayed by one call. It keeps the pool and `run`, whose tensors its calls
    point into."""

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

    @override
    def replay(self) -> T:
        """Invalid input is the IndexError of the op that finds it; the calls behind it were not made."""
        failed = self._function(self._args)
        if failed != DONE:
            raise self._kernels[failed].error(self._invalid.value)
        return self._outputs


class ProgramCapturer(Capturer):
    """Records the calls of `library`'s kernels. Any other computation raises CaptureError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pool = Pool()
        self._checked: set[Hashable] = set()

    @property
    def nbytes(self) -> int:
        """Size of the memory that the captures share, in bytes."""
        return self._pool.nbytes

    @override
    def capture(self, run: Callable[[], T]) -> tuple[T, CapturedProgram[T]]:
        with Recording(self._pool) as recording, _OnlyViews():  # type: ignore[no-untyped-call]
            outputs = run()
        return outputs, CapturedProgram(self._library, recording, self._pool, run, outputs)

    @override
    def compute(self, run: Callable[[], T], kind: Hashable) -> T:
        """All calls are recorded, then made by one call."""
        check = nullcontext() if kind in self._checked else _OnlyViews()  # type: ignore[no-untyped-call]
        with Recording(self._pool, makes_calls=False) as recording, check:
            outputs = run()
        self._checked.add(kind)
        return CapturedProgram(self._library, recording, self._pool, run, outputs).replay()


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every op of torch that is not a view of the same memory: a replay would not compute it."""


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
