"""What AWQ and GPTQ have in common: a linear layer whose numbers are packed in words, with scales and zeros of groups
of input channels. Pure.

    x.qweight  I32, [in, out] with several numbers a word along one of both
    x.qzeros   I32 [in / group, out / n], n numbers a word
    x.scales   [in / group, out]
"""

from __future__ import annotations

from typing import NamedTuple

from disagg.engine.checkpoint.formats.stored import (
    SCALE_TYPES,
    Entries,
    Packing,
    check_multiple,
    check_part,
    check_rank,
    check_type,
)
from disagg.engine.checkpoint.weight_headers import TensorEntry

_NUMBERS = ".qweight"


class GroupedLayer(NamedTuple):
    """A layer of which numbers, scales and zeros are there and have the shapes that follow from each other."""

    module: str
    entry: TensorEntry
    """Header of its numbers."""
    inputs: int
    outputs: int
    group: int
    """Input channels of a group."""


def grouped_layer(name: str, entries: Entries, packing: Packing, group_size: int | None) -> GroupedLayer | None:
    """The layer whose numbers are the tensor `name`; None if that is another tensor. `group_size`: None for one group
    of all input channels.

    Raises:
        ConfigError: a part is missing, or has another shape or type; names the file and the tensor.
    """
    if not name.endswith(_NUMBERS):
        return None
    entry, module = entries[name], name.removesuffix(_NUMBERS)
    check_type(entry, name, ("I32",))
    check_rank(entry, name, 2)
    per_word = packing.per_word
    inputs, outputs = entry.shape
    inputs, outputs = (inputs, outputs * per_word) if packing.dim == -1 else (inputs * per_word, outputs)
    group = group_size or inputs
    check_multiple(entry, name, inputs, group, "input channels")
    check_multiple(entry, name, outputs, per_word, "output channels")
    check_part(entries, f"{module}.scales", name, SCALE_TYPES, (inputs // group, outputs))
    check_part(entries, f"{module}.qzeros", name, ("I32",), (inputs // group, outputs // per_word))
    return GroupedLayer(module, entry, inputs, outputs, group)
