"""A folder with a LoRA adapter, in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.
Read without torch, and strictly: what asks for something that is not computed is refused, naming it.

The folder is untrusted: all sizes are bounded before anything is read, and nothing outside of `adapters.folder` is
opened, wherever links point.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from disagg.engine.checkpoint.json_fields import JsonFields, read_json_object
from disagg.engine.checkpoint.weight_headers import TensorEntry, read_header
from disagg.proto.errors import ConfigError

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""What PEFT puts before the name of a module."""

MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS = 100_000
MAX_HEADER_BYTES = 16 << 20
_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
"""Types of tensors, by the format's own names, and the bytes of a number."""

Fault = Literal["missing", "content", "changed"]


class AdapterError(Exception):
    """An adapter that cannot be used: it is not on this host, its content is bad, or it is another than was named."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault: Fault = fault


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The meaning of `adapter_config.json`."""

    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """By which B A is multiplied: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one module."""

    a: TensorEntry
    """[rank, inputs]."""
    b: TensorEntry
    """[outputs, rank]."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What a folder has, but for the numbers."""

    config: AdapterConfig
    pairs: dict[str, Pair]
    """A and B of each module, by its name as PEFT has it, without `PREFIX`."""
    names: dict[str, TensorEntry] = field(repr=False)
    """All tensors by name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(entry.end - entry.start for entry in self.names.values())


def open_adapter(folder: str, path: str, max_rank: int, max_bytes: int) -> AdapterFolder:
    """Read what the adapter in `folder`/`path` is; its tensors come with `read_tensors`.

    Args:
        max_rank: largest rank.
        max_bytes: most bytes of all tensors.

    Raises:
        AdapterError: naming the field or the tensor.
    """
    place = _place(folder, path)
    try:
        config = _config(_file(place, folder, CONFIG, MAX_CONFIG_BYTES), max_rank)
        tensors = _file(place, folder, TENSORS, 8 + MAX_HEADER_BYTES + max_bytes)
        names = read_header(tensors, MAX_HEADER_BYTES)
        _check_places(tensors, names, max_bytes)
        return AdapterFolder(config, _pairs(names, config.rank), names)
    except ConfigError as error:
        raise AdapterError("content", _relative(str(error), folder)) from error
    except OSError as error:
        raise AdapterError("missing", f"{path}: cannot be read: {error.strerror}") from error


def read_tensors(adapter: AdapterFolder) -> Iterator[tuple[str, TensorEntry, bytearray]]:
    """The bytes of each tensor, one after the other, ascending by name.

    Raises:
        AdapterError: the file has become shorter, or cannot be read any more.
    """
    file = next(iter(adapter.names.values())).file
    try:
        with file.open("rb", buffering=0) as stream:
            for name in sorted(adapter.names):
                entry = adapter.names[name]
                data = bytearray(entry.end - entry.start)
                stream.seek(entry.start)
                view = memoryview(data)
                while view:
                    count = stream.readinto(view)
                    if not count:
                        raise AdapterError("content", f"{TENSORS}: cut short at tensor {name}")
                    view = view[count:]
                yield name, entry, data
    except OSError as error:
        raise AdapterError("missing", f"{TENSORS}: cannot be read: {error.strerror}") from error


class Fingerprint:
    """The fingerprint of an adapter, from its configuration and then its tensors, ascending by name."""

    def __init__(self, config: AdapterConfig) -> None:
        meaning = {"r": config.rank, "lora_alpha": config.alpha, "use_rslora": config.rslora}
        self._hash = hashlib.sha256(b"disagg/adapter/1\0" + json.dumps(meaning, sort_keys=True).encode())

    def add(self, name: str, entry: TensorEntry, data: bytearray) -> None:
        """Take in the next tensor."""
        self._hash.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        self._hash.update(data)

    def check(self, wanted: str) -> str:
        """The fingerprint in hex.

        Raises:
            AdapterError: another one is wanted (empty: any).
        """
        found = self._hash.hexdigest()
        if wanted and found != wanted:
            raise AdapterError("changed", f"adapter changed: its fingerprint is {found[:16]}, not {wanted[:16]}")
        return found


def check_config(folder: str, path: str, max_rank: int, max_bytes: int, wanted: str = "") -> tuple[str, int]:
    """The fingerprint and the bytes of an adapter, for a model without modules. Raises `AdapterError`."""
    adapter = open_adapter(folder, path, max_rank, max_bytes)
    fingerprint = Fingerprint(adapter.config)
    for name, entry, data in read_tensors(adapter):
        fingerprint.add(name, entry, data)
    return fingerprint.check(wanted), adapter.num_bytes


# ------------------------------------------------------------ inside


def _place(folder: str, path: str) -> Path:
    """The folder of the adapter, which is within the folder of all, and links within it."""
    relative = Path(path)
    if not path or len(path) > 1024 or "\0" in path or relative.is_absolute() or ".." in relative.parts:
        raise AdapterError("content", f"path: {path!r} is not one inside of adapters.folder")
    try:
        root = Path(folder).resolve(strict=True)
        place = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise AdapterError("missing", f"{path}: there is no such folder here") from error
    if not place.is_relative_to(root) or place == root:
        raise AdapterError("content", f"path: {path!r} leads out of adapters.folder")
    if not place.is_dir():
        raise AdapterError("missing", f"{path}: is no folder")
    return place


def _file(place: Path, folder: str, name: str, max_bytes: int) -> Path:
    try:
        file = (place / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise AdapterError("missing", f"{name}: the file is missing") from error
    if not file.is_relative_to(Path(folder).resolve()):
        raise AdapterError("content", f"{name}: leads out of adapters.folder")
    if not file.is_file():
        raise AdapterError("content", f"{name}: is no file")
    if (size := file.stat().st_size) > max_bytes:
        raise AdapterError("content", f"{name}: {size} bytes are more than {max_bytes}, which an adapter may have here")
    return file


LARGEST: Final = 65504.0
"""Largest number of a tensor and of the scale: that of fp16. Products with larger ones are not finite."""

_MEANINGLESS = (
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "target_modules", "exclude_modules",
    "lora_dropout", "layers_to_transform", "layers_pattern", "auto_mapping", "peft_version", "megatron_core",
    "qalora_group_size", "runtime_config",
)  # fmt: skip
"""Fields that say how an adapter was trained, or repeat what the names of its tensors say."""
_CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga", "mica")
"""Beginnings of values of `init_lora_weights` with which the weights of the base model were changed, too."""


def _config(file: Path, max_rank: int) -> AdapterConfig:
    fields = JsonFields(file, read_json_object(file))
    if (kind := fields.value("peft_type")) != "LORA":
        raise fields.error(f"`peft_type` must be LORA, not {kind!r}")
    rank = fields.integer("r")
    if rank > max_rank:
        raise fields.error(f"`r` is {rank}, more than adapters.max_rank ({max_rank})")
    config = AdapterConfig(rank, fields.number("lora_alpha"), fields.boolean("use_rslora", False))
    if not 0.0 < config.scale <= LARGEST:
        raise fields.error(f"`lora_alpha` makes a scale of {config.scale:g}; it is above 0 and at most {LARGEST:.0f}")
    if (bias := fields.value("bias")) not in (None, "none"):
        raise fields.error(f"`bias` is {bias!r}: biases of adapters are not supported")
    start = fields.value("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise fields.error(f"`init_lora_weights` is {start!r}: the base model was changed, too")
    for name in _MEANINGLESS:
        fields.value(name)
    if unread := fields.unread():
        name, value = next(iter(unread.items()))
        raise fields.error(f"`{name}` is {str(value)[:80]!r}: that is not supported")
    return config


def _check_places(file: Path, names: dict[str, TensorEntry], max_bytes: int) -> None:
    if not names:
        raise ConfigError(f"{file}: there are no tensors")
    if len(names) > MAX_TENSORS:
        raise ConfigError(f"{file}: {len(names)} tensors are more than {MAX_TENSORS}")
    end = 8
    for name, entry in sorted(names.items(), key=lambda item: item[1].start):
        if entry.dtype not in _BYTES:
            raise ConfigError(f"{file}: tensor {name} is {entry.dtype}; adapters are {', '.join(_BYTES)}")
        if entry.start < end or entry.end < entry.start:
            raise ConfigError(f"{file}: tensor {name} lies over another one")
        end = entry.end
    if (total := sum(entry.end - entry.start for entry in names.values())) > max_bytes:
        raise ConfigError(f"{file}: {total} bytes of tensors are more than {max_bytes}")


def _pairs(names: dict[str, TensorEntry], rank: int) -> dict[str, Pair]:
    halves: dict[str, dict[str, tuple[str, TensorEntry]]] = {}
    for name, entry in names.items():
        module, kind = _split(name, entry)
        halves.setdefault(module, {})[kind] = name, entry
    found = {}
    for module, both in halves.items():
        for kind, other in (("A", "B"), ("B", "A")):
            if kind not in both:
                name, entry = both[other]
                raise ConfigError(f"{entry.file}: tensor {name} has no lora_{kind} beside it")
        (a_name, a), (b_name, b) = both["A"], both["B"]
        for name, entry, dim in ((a_name, a, 0), (b_name, b, 1)):
            if len(entry.shape) != 2 or entry.shape[dim] != rank:
                raise ConfigError(
                    f"{entry.file}: tensor {name} has shape {list(entry.shape)}; `r` of {CONFIG} is {rank}"
                )
        found[module] = Pair(a, b)
    return found


def _split(name: str, entry: TensorEntry) -> tuple[str, str]:
    """Module and A or B of a tensor."""
    for kind in "AB":
        suffix = f".lora_{kind}.weight"
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name[len(PREFIX) : -len(suffix)], kind
    what = "DoRA" if "lora_magnitude_vector" in name else "embeddings" if "embedding" in name else "it is no A or B"
    raise ConfigError(f"{entry.file}: tensor {name} maps to nothing ({what})")


def _relative(text: str, folder: str) -> str:
    """Without the host's own folder."""
    for root in (folder, str(Path(folder).resolve())):
        text = text.replace(f"{root}/", "")
    return text
