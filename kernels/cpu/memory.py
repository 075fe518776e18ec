"""Memory for tensors that are read completely at every step: on huge pages where the system gives them. Or a file's,
which the processes of a host have in common.

A core that reads weights one after the other meets a new 4 KiB page every 80 ns, and waits for its address again and
again; on pages of 2 MiB the same reads are a fifth to a third faster. Tensors are laid one behind the other, in the
order in which they are asked for: what a GEMM prefetches beyond its weight is the beginning of the next.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
"""Bytes that are taken from the system at a time; the unused part costs address space only."""
ALIGNMENT = 64
AT_ONCE_BYTES = 64 << 20
"""Bytes that `populate` touches before it returns; the rest follows."""
_REST: Final = 10.0
"""Pause after a page, as a multiple of the time that the page took."""
_PAIRS = {1: torch.int16, 2: torch.int32, 4: torch.int64}
"""Bytes of a number -> the dtype that holds a pair of such numbers."""
_MADV_POPULATE_WRITE = 23
"""The advice of `madvise` since Linux 5.14 that gives pages as a write would, and keeps their contents."""


class HugePages:
    """Hands out memory that is never taken back; a chunk goes back to the system with the last tensor in it. Any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a contiguous CPU tensor on a boundary of 64 bytes, filled with zeros."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._rest.numel() < nbytes:
                self._rest = _chunk(max(CHUNK_BYTES, nbytes))
            part, self._rest = self._rest[:nbytes], self._rest[nbytes + -nbytes % ALIGNMENT :]
        return part.view(dtype).view(*shape)

    def drop_rest(self) -> None:
        """Hand out no more of the newest chunk, so that it goes back to the system with its tensors."""
        with self._lock:
            self._rest = torch.empty(0, dtype=torch.uint8)


def copy_pairs(target: Tensor, source: Tensor) -> Tensor:
    """`target.copy_(source)`, of one shape and dtype. Pairs of numbers that lie together in both, as in packed weights,
    are copied as one each, which is five times as fast."""
    pair = _PAIRS.get(source.dtype.itemsize)
    if pair is not None and source.shape[-1] == 2 and source.stride(-1) == target.stride(-1) == 1:
        target.view(pair).squeeze(-1).copy_(source.view(pair).squeeze(-1))
    else:
        target.copy_(source)
    return target


def populate(tensor: Tensor, sleep: Callable[[float], None] = time.sleep) -> None:
    """Have the system give a CPU tensor of `HugePages` its pages before they are used: a first use costs ten times a
    copy, and two seconds a GiB on a virtual machine whose host has the memory elsewhere meanwhile. What is beyond
    `AT_ONCE_BYTES` follows on a thread that waits ten times as long after each page as the page took, and ends with the
    last page or with the memory; the contents stay what they are, so the tensor may be used. Where the system cannot do
    that the tensor is written here, and has to be zeros.
    """
    if not tensor.nbytes:
        return
    first, end = tensor.data_ptr() & -PAGE_BYTES, tensor.data_ptr() + tensor.nbytes
    begun = min(end, first + AT_ONCE_BYTES)
    if not _populate(range(first, begun, PAGE_BYTES), end):
        tensor.zero_()
    elif begun < end:
        memory, pages = weakref.ref(tensor.untyped_storage()), range(begun, end, PAGE_BYTES)
        threading.Thread(
            target=_populate_slowly, args=(memory, pages, end, sleep), name="populate", daemon=True
        ).start()


def _populate_slowly(
    memory: weakref.ref[torch.UntypedStorage], pages: range, end: int, sleep: Callable[[float], None]
) -> None:
    """At the priority of the rest: whoever waits for the lock of the interpreter, or of the address space, would wait
    for seconds where a thread of a lower one holds it and finds no core."""
    for page in pages:
        used, began_s = memory(), time.monotonic()
        if used is None or not _populate(range(page, page + 1), end):
            return
        del used
        sleep(_REST * (time.monotonic() - began_s))


def _populate(pages: range, end: int) -> bool:
    """Populate page after page, so that no other thread waits long for the lock of the address space. Returns whether
    the system can do it."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return all(madvise(page, min(PAGE_BYTES, end - page), _MADV_POPULATE_WRITE) == 0 for page in pages)


def map_file(file_descriptor: int, nbytes: int) -> Tensor:
    """The first bytes of a file as a flat uint8 tensor, the same memory in every process that maps it. Read-only: a
    write to the tensor would end the process, and so would shortening the file. The descriptor can be closed.

    Raises:
        OSError, ValueError: the file cannot be mapped, or is shorter.
    """
    memory = mmap.mmap(file_descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    _advise_huge_pages(memory)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _chunk(nbytes: int) -> Tensor:
    memory = mmap.mmap(-1, nbytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE_BYTES
    return whole[first : first + nbytes]


def _advise_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.info("huge pages are not available, weights and KV are on 4 KiB pages (slower): %s", error)
