"""A file of tensors that is mapped: each lies as it is, on a boundary of 64 bytes.

    tensors | index (JSON) | MAGIC, length and XXH3-128 of the index

The index names each tensor, and has a hash of them all and the key of the content. A file that is cut short, altered,
of another program, or made for another key is detected by that. Hashes are against accidents, not against forgery.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
import xxhash
from torch import Tensor

from disagg.kernels.cpu.memory import ALIGNMENT, map_file

MAGIC = b"disagg tensors 1"
_END = struct.Struct("<16sQ16s")
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int8)}


class UnusableFileError(Exception):
    """The file is not what `write_tensors` writes for the key; the message says why."""


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    nbytes: int
    """Size of all tensors with their padding."""
    xxh3_128: str
    tensors: dict[str, _Tensor]


def write_tensors(stream: BinaryIO, key: str, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors of bfloat16, float32, uint8 or int8 to an empty file. OSError as of any writing."""
    content, offset, places = xxhash.xxh3_128(), 0, dict[str, _Tensor]()
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        places[name] = _Tensor(str(tensor.dtype), tuple(tensor.shape), offset)
        for piece in (data, bytes(-len(data) % ALIGNMENT)):
            stream.write(piece)
            content.update(piece)
            offset += len(piece)
    index = msgspec.json.encode(_Index(key=key, nbytes=offset, xxh3_128=content.hexdigest(), tensors=places))
    stream.write(index)
    stream.write(_END.pack(MAGIC, len(index), xxhash.xxh3_128_digest(index)))


def map_tensors(file: Path, key: str) -> dict[str, Tensor]:
    """The tensors of a file, mapped read-only. Everything is read once, to compare its hash.

    Raises:
        UnusableFileError: not such a file, or written for another key.
        OSError: the file cannot be read.
    """
    with file.open("rb", buffering=0) as stream:
        index = _read_index(stream.fileno())
        if index.key != key:
            raise UnusableFileError("it was written for something else")
        if not index.nbytes:
            raise UnusableFileError("it has no tensors")
        whole = map_file(stream.fileno(), index.nbytes)
    if xxhash.xxh3_128_hexdigest(whole.numpy().data) != index.xxh3_128:
        raise UnusableFileError("its tensors have changed")
    return {name: _view(whole, place) for name, place in index.tensors.items()}


def _read_index(file_descriptor: int) -> _Index:
    size = os.fstat(file_descriptor).st_size
    if size < _END.size:
        raise UnusableFileError("it is cut short")
    magic, length, digest = _END.unpack(os.pread(file_descriptor, _END.size, size - _END.size))
    if magic != MAGIC or length > size - _END.size:
        raise UnusableFileError("it is cut short, or of another kind")
    raw = os.pread(file_descriptor, length, size - _END.size - length)
    if xxhash.xxh3_128_digest(raw) != digest:
        raise UnusableFileError("its index has changed")
    try:
        index = msgspec.json.decode(raw, type=_Index)
    except msgspec.DecodeError as error:
        raise UnusableFileError(f"its index cannot be read: {error}") from error
    if index.nbytes + length + _END.size != size:
        raise UnusableFileError(f"it has {size} bytes, not those of its index")
    return index


def _view(whole: Tensor, place: _Tensor) -> Tensor:
    dtype = _DTYPES.get(place.dtype)
    if dtype is None or place.offset % ALIGNMENT:
        raise UnusableFileError(f"its index is wrong: {place}")
    end = place.offset + math.prod(place.shape) * dtype.itemsize
    if min(0, place.offset, *place.shape) < 0 or end > whole.numel():
        raise UnusableFileError(f"its index is wrong: {place}")
    return whole[place.offset : end].view(dtype).view(place.shape)
