"""Tensors of a checkpoint as the model has them, read in pieces, any part of them.

    with TensorReader(stored_tensors(entries, weight_format), entries) as reader:
        for place, piece in reader.pieces(name, (range(rows), range(columns))):
            parameter[place].copy_(piece)

A quantized tensor is dequantized in fp32, value = (number - zero) * scale, and rounded once by whoever copies it to the
compute dtype. Of numbers and scales only the words are read that the part needs. Shape letters: those of `Quantized`,
R rows and C columns as the file has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.engine.checkpoint.formats.stored import Entries, Packing, Quantized, StoredTensor, check_part
from disagg.kernels.groups import GROUP, Groups, Offset
from disagg.kernels.mxfp4 import FP4_VALUES, GROUP_BYTES, Mxfp4Weight
from disagg.proto.errors import ConfigError

PIECE_ELEMENTS: Final = 2 << 20
"""Elements of a quantized tensor that are dequantized at a time, some 30 bytes of memory each."""
OPEN_FILES: Final = 3
"""Files that are mapped at a time: a tensor and its scales may be in different ones."""
NO_EXPONENT: Final = 255
"""The byte of E8M0 that stands for no number."""
_OFFSETS: Final[tuple[Offset, ...]] = ("minimum", "zero")
"""Ends of the names of what is added, in a file of scales."""

Part = Sequence[range]
"""The indices of each dimension."""


class TensorReader:
    """Reads tensors of mapped files; a context that closes them.

    Raises:
        ConfigError: from each method, for a file that cannot be read, or a scale that is not finite; names the file
            and the tensor.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], entries: Entries) -> None:
        self._stored = stored
        self._entries = entries
        self._files: dict[Path, tuple[Any, ExitStack]] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._files:
            self._close_oldest()

    def pieces(self, name: str, part: Part) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """The part of a tensor, in pieces, each with its place in the part.

        What is stored as it is comes in one piece, in the file's dtype; others come in fp32.
        """
        stored = self._stored[name]
        if stored.quantized is None:
            yield (), self._read(stored.name, part)
            return
        self._check_declared(stored, stored.quantized)
        *experts, rows, columns = part
        step = max(1, PIECE_ELEMENTS // max(1, len(columns)))
        for place in itertools.product(
            *([slice(index, index + 1) for index in range(len(indices))] for indices in experts),
            [slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step)],
        ):
            wanted = [indices[each] for indices, each in zip((*experts, rows), place, strict=True)]
            yield place, self._dequantized(stored, stored.quantized, (*wanted, columns))

    def check(self) -> None:
        """Read the scales of all quantized tensors, the order of their groups, and the shapes that are stated."""
        for stored in self._stored.values():
            if (quantized := stored.quantized) is not None:
                self._check_declared(stored, quantized)
                *experts, rows, columns = map(range, self._grid(stored, quantized))
                for place in itertools.product(*([range(index, index + 1) for index in each] for each in experts)):
                    groups = torch.arange(len(rows)), torch.arange(len(columns))
                    self._scales(stored, quantized, place, *groups)
                self._groups(stored, quantized, *map(range, self._matrix(stored, quantized)))

    def groups(self, name: str, part: Part) -> Groups | None:
        """The scales from which a part of a matrix was dequantized, whose columns are whole groups; None where its
        numbers have not 4 or 8 bits, or are not of groups of inputs in order."""
        if len(part) != 2 or part[1].start % GROUP or part[1].stop % GROUP:
            return None
        stored = self._stored[name]
        if stored.quantized is None:
            return self._stored_groups(stored, part)
        return self._groups_of(stored, stored.quantized, part)

    def mxfp4_pieces(self, name: str, part: Part) -> Iterator[tuple[tuple[slice, ...], Mxfp4Weight]] | None:
        """The part of a tensor of experts, [experts, in, out], in MXFP4: expert by expert, each with its place in the
        part, outputs in the file's order. None where it is not in MXFP4, or where the part has no whole groups.
        """
        stored = self._stored[name]
        if stored.quantized is None or not stored.quantized.is_fp4 or len(part) != 3:
            return None
        if part[1].start % GROUP or part[1].stop % GROUP:
            return None
        return self._mxfp4_pieces(stored.name, stored.quantized.scale, part)

    def _mxfp4_pieces(self, codes: str, exponents: str, part: Part) -> Iterator[tuple[tuple[slice, ...], Mxfp4Weight]]:
        experts, inputs, outputs = part
        groups = range(inputs.start // GROUP, inputs.stop // GROUP)
        for index, expert in enumerate(experts):
            of_expert = (range(expert, expert + 1), outputs, groups)
            code_LOGB, exponent_LOG = (
                self._read(codes, (*of_expert, range(GROUP_BYTES))),
                self._read(exponents, of_expert),
            )
            if bool((exponent_LOG == NO_EXPONENT).any()):
                raise self._error(exponents, "has a scale that is not finite")
            yield (slice(index, index + 1),), Mxfp4Weight(code_LOGB.flatten(2), exponent_LOG)

    # ------------------------------------------------------------ scales of groups

    def _stored_groups(self, stored: StoredTensor, part: Part) -> Groups | None:
        """Scales that an import wrote beside a dequantized tensor."""
        if f"{stored.name}.scale" not in self._entries:
            return None
        rows, columns = part
        groups = rows, range(columns.start // GROUP, columns.stop // GROUP)
        shape = stored.shape[0], stored.shape[1] // GROUP

        def read(kind: str) -> Tensor:
            check_part(self._entries, f"{stored.name}.{kind}", stored.name, ("F16",), shape)
            return self._read(f"{stored.name}.{kind}", groups)

        for offset in _OFFSETS:
            if f"{stored.name}.{offset}" in self._entries:
                return Groups(read("scale"), read(offset), offset)
        return Groups(read("scale"), None, "none")

    def _groups_of(self, stored: StoredTensor, quantized: Quantized, part: Part) -> Groups | None:
        """Scales of a quantized tensor."""
        outputs_of, inputs_of = reversed(quantized.group) if quantized.is_transposed else quantized.group
        bits = quantized.packing.bits if quantized.packing is not None else 8
        is_in_order = quantized.group_index is None or quantized.index_is_order
        if quantized.is_fp4 or outputs_of != 1 or inputs_of % GROUP or not is_in_order or bits not in (4, 8):
            return None
        is_signed = bits == 8 and quantized.zero is None and quantized.zero_offset == (128 if quantized.packing else 0)
        if bits == 8 and not is_signed:
            return None
        outputs, columns = part
        by_output = torch.arange(outputs.start, outputs.stop)
        by_group = torch.arange(columns.start, columns.stop, GROUP) // inputs_of
        row_groups, column_groups = (by_group, by_output) if quantized.is_transposed else (by_output, by_group)
        grid = len(row_groups), len(column_groups)
        scales = self._scales(stored, quantized, (), row_groups, column_groups).expand(grid)
        zeros = self._zeros(stored, quantized, (), row_groups, column_groups).expand(grid)
        if quantized.is_transposed:
            scales, zeros = scales.t(), zeros.t()
        if not torch.equal(scales.half().float(), scales):
            return None
        return Groups(scales.half(), None, "none") if is_signed else Groups(scales.half(), zeros.half(), "zero")

    # ------------------------------------------------------------ quantized tensors

    def _dequantized(self, stored: StoredTensor, quantized: Quantized, part: Part) -> Tensor:
        *experts, first, second = part
        rows, columns = (second, first) if quantized.is_transposed else (first, second)
        values = self._numbers(stored.name, quantized.packing, experts, rows, columns)
        if quantized.is_fp4:
            table = torch.tensor(FP4_VALUES)
            values = table.index_select(0, values.flatten()).view(values.shape)
        elif values.dtype != torch.float32:
            values = values.to(torch.float32)
        row_groups, column_groups = self._groups(stored, quantized, rows, columns)
        if quantized.zero is not None or quantized.zero_offset:
            values -= self._zeros(stored, quantized, experts, row_groups, column_groups)
        values *= self._scales(stored, quantized, experts, row_groups, column_groups)
        return values.transpose(-1, -2) if quantized.is_transposed else values

    def _numbers(self, name: str, packing: Packing | None, experts: Part, rows: range, columns: range) -> Tensor:
        """The numbers, unpacked: int32, or as the file has them."""
        if packing is None:
            return self._read(name, (*experts, rows, columns))
        if packing.dim == -1:
            words, skipped = _words(columns, packing.per_word)
            found = _unpacked(self._words(name, experts, rows, words), packing)
            return found.narrow(-1, skipped, len(columns))
        words, skipped = _words(rows, packing.per_word)
        found = _unpacked(self._words(name, experts, words, columns), packing)
        return found.narrow(-2, skipped, len(rows))

    def _words(self, name: str, experts: Part, rows: range, words: range) -> Tensor:
        """Words of a packed tensor, whose last dimension may be cut into blocks."""
        shape = self._entries[name].shape
        if len(shape) == len(experts) + 2:
            return self._read(name, (*experts, rows, words))
        blocks, skipped = _words(words, shape[-1])
        read = self._read(name, (*experts, rows, blocks, range(shape[-1])))
        return read.flatten(-2).narrow(-1, skipped, len(words))

    def _groups(self, stored: StoredTensor, quantized: Quantized, rows: range, columns: range) -> tuple[Tensor, Tensor]:
        """The group of each row and of each column."""
        row_groups = torch.arange(rows.start, rows.stop) // quantized.group[0]
        column_groups = torch.arange(columns.start, columns.stop) // quantized.group[1]
        if quantized.group_index is None:
            return row_groups, column_groups
        inputs = rows if quantized.is_transposed else columns
        index = self._read(quantized.group_index, (inputs,)).to(torch.int64)
        num_groups = self._grid(stored, quantized)[-2 if quantized.is_transposed else -1]
        in_order = row_groups if quantized.is_transposed else column_groups
        if int(index.min()) < 0 or int(index.max()) >= num_groups:
            raise self._error(quantized.group_index, f"names groups beyond the {num_groups} of {stored.name}")
        if quantized.index_is_order and not torch.equal(index, in_order):
            raise self._error(quantized.group_index, "has groups out of order, but `desc_act` is false")
        return (index, column_groups) if quantized.is_transposed else (row_groups, index)

    def _scales(
        self, stored: StoredTensor, quantized: Quantized, experts: Part, row_groups: Tensor, column_groups: Tensor
    ) -> Tensor:
        shape = self._grid(stored, quantized)
        scales = self._of_groups(quantized.scale, None, shape, experts, row_groups, column_groups)
        if not bool(torch.isfinite(scales).all()):
            raise self._error(quantized.scale, "has a scale that is not finite")
        return scales

    def _zeros(
        self, stored: StoredTensor, quantized: Quantized, experts: Part, row_groups: Tensor, column_groups: Tensor
    ) -> Tensor:
        if quantized.zero is None:
            return torch.full((1, 1), float(quantized.zero_offset))
        shape = self._grid(stored, quantized)
        zeros = self._of_groups(quantized.zero, quantized.zero_packing, shape, experts, row_groups, column_groups)
        zeros.add_(quantized.zero_offset)
        if quantized.zero_wraps and quantized.zero_packing is not None:
            zeros.remainder_(1 << quantized.zero_packing.bits)
        return zeros

    def _of_groups(
        self,
        name: str,
        packing: Packing | None,
        shape: tuple[int, ...],
        experts: Part,
        row_groups: Tensor,
        column_groups: Tensor,
    ) -> Tensor:
        """The scales or zeros of the groups in fp32, [..., R, C] or what broadcasts to it. `shape`: of those of all
        groups."""
        rows = range(int(row_groups.min()), int(row_groups.max()) + 1)
        columns = range(int(column_groups.min()), int(column_groups.max()) + 1)
        if packing is None and self._entries[name].shape != shape:  # of the whole tensor, without its dimensions
            whole = self._read(name, [range(size) for size in self._entries[name].shape]).reshape(shape)
            found = whole[tuple(slice(each.start, each.stop) for each in (*experts, rows, columns))]
        else:
            found = self._numbers(name, packing, experts, rows, columns)
        if found.dtype == torch.uint8:
            found = found.contiguous().view(torch.float8_e8m0fnu)
        found = found.to(torch.float32)
        return _spread(_spread(found, -1, column_groups - columns.start), -2, row_groups - rows.start)

    def _grid(self, stored: StoredTensor, quantized: Quantized) -> tuple[int, ...]:
        """How many groups there are: of experts, along rows, along columns."""
        experts, (rows, columns) = stored.shape[:-2], self._matrix(stored, quantized)
        return (*experts, -(-rows // quantized.group[0]), -(-columns // quantized.group[1]))

    def _matrix(self, stored: StoredTensor, quantized: Quantized) -> tuple[int, int]:
        """Rows and columns of the file's matrix."""
        first, second = stored.shape[-2:]
        return (second, first) if quantized.is_transposed else (first, second)

    def _check_declared(self, stored: StoredTensor, quantized: Quantized) -> None:
        if (name := quantized.declared_shape) is not None:
            declared = tuple(self._read(name, (range(2),)).tolist())
            if declared != stored.shape:
                raise self._error(name, f"says {list(declared)}, but {stored.name} has {list(stored.shape)}")

    # ------------------------------------------------------------ files

    def _read(self, name: str, part: Part) -> Tensor:
        """A part of a tensor of a file; no more is read."""
        entry = self._entries[name]
        try:
            file = self._opened(entry.file)
            if all(len(indices) == size for indices, size in zip(part, entry.shape, strict=True)):
                whole: Tensor = file.get_tensor(name)
                return whole
            read: Tensor = file.get_slice(name)[tuple(slice(indices.start, indices.stop) for indices in part)]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{entry.file}: cannot be read: {error}") from error
        return read

    def _opened(self, path: Path) -> Any:
        if path not in self._files:
            if len(self._files) == OPEN_FILES:
                self._close_oldest()
            stack = ExitStack()
            self._files[path] = stack.enter_context(safe_open(str(path), framework="pt", device="cpu")), stack
        return self._files[path][0]

    def _close_oldest(self) -> None:
        _, stack = self._files.pop(next(iter(self._files)))
        stack.close()

    def _error(self, name: str, message: str) -> ConfigError:
        return ConfigError(f"{self._entries[name].file}: tensor {name} {message}")


def _words(numbers: range, per_word: int) -> tuple[range, int]:
    """The words that have these numbers, and how many numbers of the first one are others."""
    words = range(numbers.start // per_word, -(-numbers.stop // per_word))
    return words, numbers.start - words.start * per_word


def _unpacked(words: Tensor, packing: Packing) -> Tensor:
    """The numbers of the words, int32, one behind the other along the packed dimension."""
    shifts = torch.tensor([packing.bits * field for field in packing.fields], dtype=torch.int32)
    words = words.to(torch.int32)
    words, shifts = (words.unsqueeze(-1), shifts) if packing.dim == -1 else (words.unsqueeze(-2), shifts.unsqueeze(-1))
    numbers = words >> shifts
    numbers &= (1 << packing.bits) - 1
    return numbers.flatten(packing.dim - 1, packing.dim)


def _spread(values: Tensor, dim: int, groups: Tensor) -> Tensor:
    """`values[groups]` along a dimension; as they are where each group has one element, or there is one group."""
    count = values.shape[dim]
    if count == 1 or (count == len(groups) and bool((groups == torch.arange(count)).all())):
        return values
    return values.index_select(dim, groups)
