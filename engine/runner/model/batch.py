"""One step's batch as the tensors that the decoder reads. All of it crosses to a device as one copy, for which the host
does not wait: from pinned memory that torch hands out, and hands out again once the copy is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.batch_arrays import BatchArrays
from disagg.kernels.attention import AttentionProvider
from disagg.kernels.ops import PlannedPrefills, PrefillChunk, Prefills
from disagg.kernels.prefill_work import ChunkPlace, PrefillWork

_ALIGNMENT = 64
"""Bytes, of each array in the copy: kernels are compiled for pointers that are multiples of 16."""


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """What a batch has of a cache group with a window; as in `Batch`. Entries of blocks that have left it are 0."""

    slot_mapping_T: Tensor
    block_tables_SM: Tensor
    prefills: Prefills | None


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Slots of the adapters of rows, int32, -1 for the base model."""

    slots_T: Tensor
    sampled_R: Tensor
    """Of the rows whose logits are wanted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`BatchArrays` on a device. Shapes: T tokens, S decoding sequences, M blocks of a table."""

    token_ids_T: Tensor
    """Token ids of the batch, int64."""
    positions_T: Tensor
    """Position of each token in its sequence, int64."""
    slot_mapping_T: Tensor
    """Cache slot of each token, int64."""
    num_decodes: int
    """Rows [0, num_decodes) are decodes."""
    block_tables_SM: Tensor
    """Block tables of the decodes, int32, padded with 0."""
    context_lens_S: Tensor
    """Tokens of each decoding sequence with KV after this step, int32."""
    prefills: Prefills | None
    """The rows behind the decodes; None where there are none."""
    sample_rows: Tensor | None
    """Rows whose logits are wanted, int64, ascending; None stands for all rows."""
    windows: tuple[WindowBatch, ...] = ()
    """Of each cache group beside the first."""
    adapters: AdapterRows | None = None
    """None where no row has an adapter."""

    def group(self, number: int) -> Batch | WindowBatch:
        """What the layers of a cache group read: slot mapping, block tables, and prefills."""
        return self.windows[number - 1] if number else self


def to_batch(arrays: BatchArrays, attention: AttentionProvider) -> Batch:
    """The tensors of a batch on the rank's device; on a CPU they share the arrays' memory."""
    parts: list[NDArray[Any]] = [
        arrays.token_ids_T,
        arrays.positions_T,
        arrays.slot_mapping_T,
        arrays.block_tables_SM,
        arrays.context_lens_S,
    ]
    if arrays.sample_rows is not None:
        parts.append(arrays.sample_rows)
    if arrays.adapter_slots_T is not None:
        rows = slice(None) if arrays.sample_rows is None else arrays.sample_rows
        parts += [arrays.adapter_slots_T, arrays.adapter_slots_T[rows]]
    places = _places(arrays)
    works = attention.works(places) if places else {}
    if places:
        parts.append(np.concatenate([chunk.block_table_M for chunk in arrays.prefills]))
    parts.extend(work.numbers for work in works.values())
    for window in arrays.windows:
        parts += [window.slot_mapping_T, window.block_tables_SM]
        if places:
            parts.append(np.concatenate(window.prefill_tables))
    tensors = iter(_on_device(parts, torch.device(attention.spec.device)))
    ids_T, positions_T, slots_T, tables_SM, lens_S = (next(tensors) for _ in range(5))
    sample_rows = None if arrays.sample_rows is None else next(tensors)
    adapters = None if arrays.adapter_slots_T is None else AdapterRows(next(tensors), next(tensors))
    prefills, windows = None, []
    numbers: dict[int | None, Tensor] = {}
    if places:
        tables = next(tensors)
        numbers = {window: next(tensors) for window in works}
        prefills = _prefills(arrays, places, works, numbers, tables)
    for _ in arrays.windows:
        window_slots_T, window_tables_SM = next(tensors), next(tensors)
        others = _prefills(arrays, places, works, numbers, next(tensors)) if places else None
        windows.append(WindowBatch(window_slots_T, window_tables_SM, others))
    return Batch(
        token_ids_T=ids_T,
        positions_T=positions_T,
        slot_mapping_T=slots_T,
        num_decodes=arrays.num_decodes,
        block_tables_SM=tables_SM,
        context_lens_S=lens_S,
        prefills=prefills,
        sample_rows=sample_rows,
        windows=tuple(windows),
        adapters=adapters,
    )


def _prefills(
    arrays: BatchArrays,
    places: Sequence[ChunkPlace],
    works: Mapping[int | None, PrefillWork],
    numbers: Mapping[int | None, Tensor],
    tables: Tensor,
) -> Prefills:
    """The chunks with the block tables of one cache group, which stand one behind the other; those of all groups are of
    the same widths."""
    chunks = tuple(
        PrefillChunk(
            slice(place.row, place.row + place.num_tokens),
            place.start,
            tables[place.table : place.table + len(chunk.block_table_M)],
        )
        for place, chunk in zip(places, arrays.prefills, strict=True)
    )
    return Prefills(chunks, {window: PlannedPrefills(work, numbers[window], tables) for window, work in works.items()})


def _places(arrays: BatchArrays) -> list[ChunkPlace]:
    places: list[ChunkPlace] = []
    row, table = arrays.num_decodes, 0
    for chunk in arrays.prefills:
        places.append(ChunkPlace(row, chunk.num_tokens, chunk.start, table))
        row += chunk.num_tokens
        table += len(chunk.block_table_M)
    return places


def _on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays' tensors; of a CPU, on their memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return copied_at_once(arrays, device)


def copied_at_once(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of the same shapes and dtypes in one piece of memory on the device."""
    starts, nbytes = [], 0
    for array in arrays:
        starts.append(nbytes)
        nbytes += math.ceil(array.nbytes / _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
