"""Calls of the compiled kernels, and their recording.

A C function takes one struct of arguments (`calls.h`). `Kernel` packs it, calls the function, and, where the thread is
recording, keeps both: a `CapturedProgram` (`kernels/cpu/program.py`) makes the same calls again without Python, or,
where the recording only wrote them down, for the first time. What a kernel writes comes from `new_output`: outside a
recording an ordinary tensor, within one a piece of a `Pool`, which later calls of the same recording use again once
nothing in Python refers to it. Made in order, each call then finds what it finds when all is computed as it is
recorded.

Shapes of memory: a pool has buffers of a power of two bytes. All recordings of a pool use the same buffers: only one of
them can be replayed at a time, and what it leaves is good until the next.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Bytes: of a cache line, and of the widest vectors."""

DONE = -1
"""What a function returns that found nothing invalid."""


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
        """Where the function is."""

    def __call__(self, *values: float) -> None:
        """Call it, unless a recording only writes calls down; what the pointers point to must live until it is called,
        or, in a recording, as long as its tape.

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
        """What the function found invalid."""
        return IndexError(self._invalid.format(index))


def is_noting() -> bool:
    """Whether this thread's calls are only written down, so that outputs hold nothing yet."""
    return _thread.recording is not None and not _thread.recording.makes_calls


def new_output(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor for a kernel to write: contiguous, its contents undefined."""
    recording = _thread.recording
    return torch.empty(shape, dtype=dtype) if recording is None else recording.new_output(shape, dtype)


class Pool:
    """The memory of recordings, which share it. It lives as long as a tape that points into it."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[NDArray[np.uint8]]] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return sum(size * len(buffers) for size, buffers in self._buffers.items())

    def free_buffers(self) -> dict[int, list[NDArray[np.uint8]]]:
        """By size: all buffers are free for a new recording."""
        return {size: list(reversed(buffers)) for size, buffers in self._buffers.items()}

    def new_buffer(self, size: int) -> NDArray[np.uint8]:
        """A further one."""
        memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        first = -memory.ctypes.data % ALIGNMENT
        buffer = memory[first : first + size]
        self._buffers.setdefault(size, []).append(buffer)
        return buffer


class Recording:
    """The calls of kernels that this thread makes in a `with` block, in order; not those of other threads.

    `makes_calls=False`: they are only written down, and outputs hold nothing before a tape has made them.
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
        """See the function; a buffer is free again when the last tensor that looks at it is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = max(ALIGNMENT, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else self._pool.new_buffer(size)
        part = buffer[:nbytes]  # an array of its own: the tensor's memory refers to it, and to nothing else
        weakref.finalize(part, free.append, buffer).atexit = False
        return torch.from_numpy(part).view(dtype).view(shape)
