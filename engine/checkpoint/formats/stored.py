"""How a tensor of the model lies in the files of a checkpoint. Pure.

    value = (number - zero) * scale

The numbers of a quantized tensor are one tensor of the files, its scales and zeros others, one for each group of
numbers. `Quantized` says which, and how they are laid out; the formats (fp8.py, gptq.py, ...) make it from the headers
alone, and check there that everything has the shape and type that it must have. All sizes in it are those of the file's
layout: some formats store [in, out], and are transposed when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from disagg.engine.checkpoint.weight_headers import TensorEntry
from disagg.proto.errors import ConfigError

Entries = Mapping[str, TensorEntry]
"""Tensors of all files of a checkpoint by name."""

SCALE_TYPES = ("F32", "F16", "BF16")
WORD_BITS = {"I32": 32, "U8": 8}


@dataclass(frozen=True, slots=True)
class Packing:
    """Unsigned numbers of a few bits in the words of an integer tensor."""

    bits: int
    dim: Literal[-2, -1]
    """Dimension along which a word has several numbers."""
    fields: tuple[int, ...]
    """For each number of a word, which of its fields has it, counted from the lowest bits."""

    @property
    def per_word(self) -> int:
        """Numbers in a word."""
        return len(self.fields)


def in_order(bits: int, dim: Literal[-2, -1], word_bits: int = 32) -> Packing:
    """The packing whose first number has the lowest bits."""
    return Packing(bits, dim, tuple(range(word_bits // bits)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Numbers, scales and zeros of a tensor. Rows and columns are those of the file, [rows, columns] or [experts, rows,
    columns]."""

    scale: str
    group: tuple[int, int]
    """Rows and columns of the numbers that have one scale in common; the last group of a dimension may be smaller."""
    packing: Packing | None = None
    """None: each number is an element of the file's tensor."""
    is_fp4: bool = False
    """The numbers are codes of E2M1 floats (OCP Microscaling), not integers."""
    scale_is_exponent: bool = False
    """A scale is the exponent of a power of two, in a byte (E8M0)."""
    zero: str | None = None
    """One for each scale; None: `zero_offset` is the zero of all."""
    zero_packing: Packing | None = None
    zero_offset: int = 0
    """Added to each zero."""
    zero_wraps: bool = False
    """The sum is taken modulo the numbers that `zero_packing` has room for."""
    group_index: str | None = None
    """Group of each input channel; None: they lie in order."""
    index_is_order: bool = False
    """`group_index` must not be other than in order."""
    declared_shape: str | None = None
    """A tensor that repeats the shape."""
    is_transposed: bool = False
    """The file has [in, out], the model [out, in], or the reverse."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Tensors of the files beside the numbers."""
        return tuple(
            name for name in (self.scale, self.zero, self.group_index, self.declared_shape) if name is not None
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the model, and the tensors of the files that make it."""

    name: str
    """Name of the file's tensor that has the values or the numbers."""
    entry: TensorEntry
    """Header of that tensor."""
    shape: tuple[int, ...]
    """Shape in the model."""
    quantized: Quantized | None = None
    """None: the values are stored as they are."""


class Scheme(Protocol):
    """The format of a checkpoint's quantized tensors, as `quantization_config` states it."""

    @property
    def ignored(self) -> Ignored:
        """Modules that are not quantized."""
        ...

    def tensor(self, name: str, entries: Entries) -> tuple[str, StoredTensor] | None:
        """The model's tensor whose numbers are the file's tensor `name`, with its name in the model; None if that is
        stored as it is, or belongs to another.

        Raises:
            ConfigError: a part is missing, or has another shape or type; names the file and the tensor.
        """
        ...


class Ignored(Protocol):
    """Modules that a configuration excludes from quantization."""

    def __contains__(self, module: object, /) -> bool: ...


def stored_tensors(entries: Entries, scheme: Scheme | None) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by the names that the model has for them.

    Scales of activations and of the KV cache are left out: both are computed in the compute dtype, so that they have no
    use, and the values of the weights do not depend on them.

    Raises:
        ConfigError: as `Scheme.tensor`; or a tensor is stored twice, or is quantized in a module that
            `quantization_config` excludes.
    """
    if scheme is None:
        return {name: StoredTensor(name, entry, entry.shape) for name, entry in entries.items()}
    stored: dict[str, StoredTensor] = {}
    parts: set[str] = set()
    for name, entry in entries.items():
        if (found := scheme.tensor(name, entries)) is None:
            continue
        own_name, tensor = found
        if own_name in stored or (own_name in entries and own_name != name):
            raise ConfigError(f"{entry.file}: tensor {own_name} is stored twice, once as {name}")
        if module_of(own_name) in scheme.ignored:
            raise ConfigError(
                f"{entry.file}: tensor {name} is quantized, but `quantization_config` excludes {module_of(own_name)}"
            )
        assert tensor.quantized is not None, "what is not quantized is no scheme's"
        stored[own_name] = tensor
        parts |= {name, *tensor.quantized.parts}
    for name, entry in entries.items():
        if name not in parts and not _is_unused(name):
            stored[name] = StoredTensor(name, entry, entry.shape)
    return stored


def module_of(name: str) -> str:
    """The module that a tensor of the model belongs to."""
    return name.removesuffix(".weight")


_UNUSED = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")


def _is_unused(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in _UNUSED or last.endswith("_activation_scale")


# ---------------------------------------------------------------- checks of headers


def part(entries: Entries, name: str, of: str) -> TensorEntry:
    """The header of a tensor that `of` needs.

    Raises:
        ConfigError: there is none.
    """
    if name not in entries:
        raise ConfigError(f"{entries[of].file}: tensor {of} is quantized, but {name} is missing")
    return entries[name]


def check_part(entries: Entries, name: str, of: str, types: Iterable[str], *shapes: tuple[int, ...]) -> TensorEntry:
    """The header of a tensor that `of` needs, which must have one of the types and one of the shapes.

    Raises:
        ConfigError: it is missing, or has others.
    """
    entry = part(entries, name, of)
    check_type(entry, name, types)
    if entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ConfigError(
            f"{entry.file}: tensor {name} has shape {list(entry.shape)}; "
            f"{of} {list(entries[of].shape)} requires {wanted}"
        )
    return entry


def check_type(entry: TensorEntry, name: str, types: Iterable[str]) -> None:
    """Raises `ConfigError` for a tensor of another type."""
    if entry.dtype not in types:
        raise ConfigError(f"{entry.file}: tensor {name} is {entry.dtype}; supported are {', '.join(types)}")


def check_rank(entry: TensorEntry, name: str, *ranks: int) -> None:
    """Raises `ConfigError` for a tensor of another number of dimensions, or without elements."""
    if len(entry.shape) not in ranks or 0 in entry.shape:
        wanted = " or ".join(map(str, ranks))
        raise ConfigError(
            f"{entry.file}: tensor {name} has shape {list(entry.shape)}; it must have {wanted} dimensions"
        )


def check_multiple(entry: TensorEntry, name: str, count: int, size: int, what: str) -> None:
    """Raises `ConfigError` where `count` things are no multiple of `size`."""
    if count % size:
        raise ConfigError(f"{entry.file}: tensor {name} has {count} {what}, no multiple of {size}")
