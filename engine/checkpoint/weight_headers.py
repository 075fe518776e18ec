"""The weight files of a checkpoint folder, and the tensors that the header of each names; read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from disagg.engine.checkpoint.json_fields import read_json_object
from disagg.proto.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a safetensors header names it."""

    dtype: str
    """The format's own name: F32, BF16, F16, ..."""
    shape: tuple[int, ...]


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


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; checks that the file is as long as its header says.

    Raises:
        ConfigError: not a safetensors file, or cut short.
    """
    raw = header_bytes(file)
    entries: dict[str, TensorEntry] = {}
    name, end = "", 0
    try:
        for name, entry in json.loads(raw).items():
            if name != "__metadata__":
                entries[name] = TensorEntry(str(entry["dtype"]), tuple(map(int, entry["shape"])))
                end = max(end, int(entry["data_offsets"][1]))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{file}: broken safetensors header, at tensor {name!r}") from error
    expected_bytes = 8 + len(raw) + end
    if (found_bytes := file.stat().st_size) < expected_bytes:
        raise ConfigError(f"{file}: cut short: {found_bytes} bytes of {expected_bytes}")
    return entries


def header_bytes(file: Path) -> bytes:
    """The JSON header of a safetensors file, not parsed. Raises `ConfigError`: not such a file, or cut short."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
            raise ConfigError(f"{file}: not a safetensors file")
        header = stream.read(length)
    if len(header) < length:
        raise ConfigError(f"{file}: cut short within its header")
    return header
