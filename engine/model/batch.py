"""One step's batch as the tensors that the decoder reads, made from a `StepPlan`.

The flat batch holds the decodes (one token each), then the prefill chunks, in the plan's order. Everything is laid out
with numpy and crosses to the device once. Block tables of decoding sequences are kept between steps: a row is written
again only when its sequence or its blocks changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.kv_cache import blocks_for_tokens
from disagg.engine.plan import ScheduledSequence, StepPlan


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
    """Shapes: T tokens, S decoding sequences, M blocks of a table."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, from the start of each sequence."""
    slot_mapping_T: Tensor
    """int64: block * block_size + offset, where the token's KV goes."""
    num_decodes: int
    """Rows [0, num_decodes) are decodes."""
    block_tables_SM: Tensor
    """int32, padded with 0."""
    context_lens_S: Tensor
    """int32: tokens of the sequence with KV once this step has written its own."""
    prefills: tuple[PrefillChunk, ...]
    sample_rows: Tensor | None
    """Rows whose logits are wanted, int64, ascending; None stands for all rows."""
    num_samples: int


class BatchBuilder:
    """Makes batches. Owner: the model runner; it keeps block tables between steps."""

    def __init__(self, block_size: int, max_model_len: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = _DecodeTables(blocks_for_tokens(max_model_len, block_size))

    def build(self, plan: StepPlan) -> Batch:
        """The batch of a plan with at least one token."""
        decodes, prefills = plan.decodes, plan.prefills
        positions_D = np.array([entry.start for entry in decodes], dtype=np.int64)
        num_blocks = blocks_for_tokens(int(positions_D.max()) + 1, self._block_size) if decodes else 0
        tables_SM = self._tables.update(decodes, num_blocks)
        tables = [np.array(_needed_blocks(entry, self._block_size), dtype=np.int32) for entry in prefills]
        ranges = [np.arange(entry.start, entry.start + entry.num_tokens, dtype=np.int64) for entry in prefills]
        slots = [self._slots(tables_SM[np.arange(len(decodes)), positions_D // self._block_size], positions_D)]
        for table_M, range_C in zip(tables, ranges, strict=True):
            slots.append(self._slots(table_M[range_C // self._block_size], range_C))
        sample_rows = _sample_rows(plan)
        num_samples = plan.num_tokens if sample_rows is None else len(sample_rows)
        return Batch(
            token_ids_T=self._to_device(np.array(_token_ids(plan), dtype=np.int64)),
            positions_T=self._to_device(np.concatenate((positions_D, *ranges))),
            slot_mapping_T=self._to_device(np.concatenate(slots)),
            num_decodes=len(decodes),
            block_tables_SM=self._to_device(tables_SM),
            context_lens_S=self._to_device((positions_D + 1).astype(np.int32)),
            prefills=self._chunks(plan, tables),
            sample_rows=None if sample_rows is None else self._to_device(np.array(sample_rows, dtype=np.int64)),
            num_samples=num_samples,
        )

    def _slots(self, block_T: NDArray[np.int32], position_T: NDArray[np.int64]) -> NDArray[np.int64]:
        return block_T.astype(np.int64) * self._block_size + position_T % self._block_size

    def _chunks(self, plan: StepPlan, tables: list[NDArray[np.int32]]) -> tuple[PrefillChunk, ...]:
        chunks: list[PrefillChunk] = []
        row = len(plan.decodes)
        for entry, table_M in zip(plan.prefills, tables, strict=True):
            chunks.append(PrefillChunk(slice(row, row + entry.num_tokens), entry.start, self._to_device(table_M)))
            row += entry.num_tokens
        return tuple(chunks)

    def _to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _DecodeTables:
    """Block tables of the decoding rows, as they were at the last step.

    A row is trusted only if a copy of its sequence's table equals the table of now: block tables are lists that the
    block manager changes in place. Comparing lists of the same int objects costs a few nanoseconds a block, converting
    them about fifty.
    """

    def __init__(self, max_blocks: int) -> None:
        self._table_SM = np.zeros((8, max_blocks), dtype=np.int32)
        self._lists: list[list[int]] = []

    def update(self, decodes: tuple[ScheduledSequence, ...], num_blocks: int) -> NDArray[np.int32]:
        """A fresh array [len(decodes), num_blocks]."""
        while len(decodes) > len(self._table_SM):
            self._table_SM = np.concatenate((self._table_SM, np.zeros_like(self._table_SM)))
        self._lists += [[] for _ in range(len(decodes) - len(self._lists))]
        for row, entry in enumerate(decodes):
            if self._lists[row] != entry.sequence.block_table:
                self._write(row, entry.sequence.block_table)
        return self._table_SM[: len(decodes), :num_blocks].copy()

    def _write(self, row: int, block_table: list[int]) -> None:
        count = min(len(block_table), self._table_SM.shape[1])
        self._table_SM[row, :count] = block_table[:count]
        self._table_SM[row, count:] = 0
        self._lists[row] = list(block_table)


def _token_ids(plan: StepPlan) -> list[int]:
    ids = [entry.sequence.token_ids[entry.start] for entry in plan.decodes]
    for entry in plan.prefills:
        ids += entry.sequence.token_ids[entry.start : entry.start + entry.num_tokens]
    return ids


def _needed_blocks(entry: ScheduledSequence, block_size: int) -> list[int]:
    return entry.sequence.block_table[: blocks_for_tokens(entry.start + entry.num_tokens, block_size)]


def _sample_rows(plan: StepPlan) -> list[int] | None:
    """Rows whose logits are wanted; None when that is every row."""
    rows = list(range(len(plan.decodes)))
    end = len(rows)
    for entry in plan.prefills:
        end += entry.num_tokens
        if entry.samples:
            rows.append(end - 1)
    return None if len(rows) == end else rows
