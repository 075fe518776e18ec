"""One step's batch as the tensors that the decoder reads. Everything crosses to the device once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.engine.runner.model.arrays import I32, I64, BatchArrays


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence, from position `start`."""

    rows: slice
    """Where they are in the batch."""
    start: int
    block_table_M: Tensor
    """int32; covers the chunk's last token."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`BatchArrays` on a device. Shapes: T tokens, S decoding sequences, M blocks of a table."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    slot_mapping_T: Tensor
    """int64."""
    num_decodes: int
    """Rows [0, num_decodes) are decodes."""
    block_tables_SM: Tensor
    """int32, padded with 0."""
    context_lens_S: Tensor
    """int32."""
    prefills: tuple[PrefillChunk, ...]
    sample_rows: Tensor | None
    """Rows whose logits are wanted, int64, ascending; None stands for all rows."""


def to_batch(arrays: BatchArrays, device: torch.device) -> Batch:
    """The tensors of a batch; on a CPU they share the arrays' memory."""

    def tensor(array: I32 | I64) -> Tensor:
        return torch.from_numpy(array).to(device)

    chunks: list[PrefillChunk] = []
    row = arrays.num_decodes
    for chunk in arrays.prefills:
        chunks.append(PrefillChunk(slice(row, row + chunk.num_tokens), chunk.start, tensor(chunk.block_table_M)))
        row += chunk.num_tokens
    return Batch(
        token_ids_T=tensor(arrays.token_ids_T),
        positions_T=tensor(arrays.positions_T),
        slot_mapping_T=tensor(arrays.slot_mapping_T),
        num_decodes=arrays.num_decodes,
        block_tables_SM=tensor(arrays.block_tables_SM),
        context_lens_S=tensor(arrays.context_lens_S),
        prefills=tuple(chunks),
        sample_rows=None if arrays.sample_rows is None else tensor(arrays.sample_rows),
    )
