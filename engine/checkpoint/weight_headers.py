"""The weight files of a checkpoint folder, and the tensors that their headers name; read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from disagg.engine.checkpoint.json_fields import read_json_object
from disagg.proto.errors import ConfigError

GROUPS_FILE: Final = "groups.safetensors"
"""File beside the weights of a checkpoint that was dequantized at import: from it weights get back into fewer bits. Of
each such tensor NAME [out, in] it has `NAME.scale` [out, in / 32] in fp16, and `NAME.minimum` or `NAME.zero` where
there are any. It changes nothing of what a model computes."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_WIDTHS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
"""Bytes of a number, by the format's own names of types."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a safetensors header names it."""

    file: Path
    dtype: str
    """The format's own name: F32, BF16, F16, ..."""
    shape: tuple[int, ...]
    start: int
    """Position of the first byte in the file."""
    end: int
    """Position behind the last byte."""


def weight_files(folder: str | Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, sorted: model.safetensors, or the shards of its index.

    Raises:
        ConfigError: there are none, or the index is broken or names a file that is missing.
    """
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise ConfigError(f"{folder}: there is no model.safetensors and no {index.name}; weights must be safetensors")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: `weight_map` is missing or empty")
    names = set(weight_map.values())
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ConfigError(f"{index}: `weight_map` must name files of this folder")
    files = tuple(folder / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: the shard is missing; {index.name} names it")
    return files


def weight_file_times(folder: str | Path) -> tuple[tuple[str, int, int], ...]:
    """(name, size, time of the last change) of each weight file: other contents have others. Raises as `weight_files`
    does."""
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(folder))


def read_headers(folder: str | Path) -> dict[str, TensorEntry]:
    """The tensors of all weight files of a checkpoint.

    Raises:
        ConfigError: as `weight_files` and `read_header`; or two files have a tensor of one name.
    """
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(folder):
        header = read_header(file)
        for name in header:
            if name in entries:
                raise ConfigError(f"{file}: tensor {name} is in {entries[name].file.name}, too")
        entries |= header
    return entries


def read_group_headers(folder: str | Path) -> dict[str, TensorEntry]:
    """The tensors of the file of scales of a checkpoint; none where there is no such file. Raises as `read_header`
    does."""
    file = Path(folder) / GROUPS_FILE
    return read_header(file) if file.is_file() else {}


def read_header(file: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; checks that the file is as long as its header says.

    Raises:
        ConfigError: not a safetensors file, or cut short.
    """
    raw = header_bytes(file, max_header_bytes)
    entries: dict[str, TensorEntry] = {}
    name, first = "", 8 + len(raw)
    try:
        for name, entry in json.loads(raw).items():
            if name != "__metadata__":
                start, end = (first + int(entry["data_offsets"][edge]) for edge in (0, 1))
                entries[name] = TensorEntry(file, str(entry["dtype"]), tuple(map(int, entry["shape"])), start, end)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{file}: broken safetensors header, at tensor {name!r}") from error
    for name, entry in entries.items():
        width = _WIDTHS.get(entry.dtype)
        num_bytes = entry.end - entry.start
        if min(entry.shape, default=0) < 0 or (width is not None and num_bytes != width * math.prod(entry.shape)):
            raise ConfigError(
                f"{file}: tensor {name} of {entry.dtype} has shape {list(entry.shape)} and {num_bytes} bytes"
            )
    expected_bytes = max((entry.end for entry in entries.values()), default=first)
    if (found_bytes := file.stat().st_size) < expected_bytes:
        raise ConfigError(f"{file}: cut short: {found_bytes} bytes of {expected_bytes}")
    return entries


def header_bytes(file: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """The JSON header of a safetensors file, not parsed. Raises `ConfigError`: not such a file, or cut short."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= max_header_bytes:
            raise ConfigError(f"{file}: not a safetensors file")
        header = stream.read(length)
    if len(header) < length:
        raise ConfigError(f"{file}: cut short within its header")
    return header


def write_safetensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    data: Iterable[bytes | memoryview],
    dtype: Literal["BF16", "F16"] = "BF16",
) -> None:
    """Write a file of tensors whose bytes come one after the other, in the order of `shapes`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for piece in data:
            stream.write(piece)
    assert file.stat().st_size == 8 + len(raw) + end, "the data has the size that the header says"
