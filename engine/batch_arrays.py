"""One step's batch as numpy arrays, made from a `StepPlan`: without torch, so that it can travel to other ranks.

The flat batch holds the decodes (one token each), then the prefill chunks, in the plan's order. Block tables of
decoding sequences are kept between steps: a row is written again only when its sequence or its blocks changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disagg.engine.plan import ScheduledSequence, StepPlan

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkArrays:
    """Consecutive tokens of one sequence, from position `start`."""

    num_tokens: int
    start: int
    block_table_M: I32
    """Covers the chunk's last token."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowArrays:
    """What a batch has of a cache group with a window, as `BatchArrays` has of the first group. Entries of blocks that
    have left the window are 0."""

    slot_mapping_T: I64
    block_tables_SM: I32
    prefill_tables: tuple[I32, ...]
    """Block table of each prompt chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """Shapes: T tokens, S decoding sequences, M blocks of a table."""

    token_ids_T: I64
    positions_T: I64
    """Position of each token in its sequence."""
    slot_mapping_T: I64
    """block * block_size + offset, where the token's KV goes."""
    block_tables_SM: I32
    """Block tables of the decodes, which are rows [0, S) of the batch; padded with 0."""
    context_lens_S: I32
    """Tokens of the sequence with KV once this step has written its own."""
    prefills: tuple[ChunkArrays, ...]
    """Prompt chunks in the order of the batch, after the decodes."""
    sample_rows: I64 | None
    """Rows whose logits are wanted, ascending; None stands for all rows."""
    windows: tuple[WindowArrays, ...] = ()
    """Arrays of each cache group beside the first."""
    adapter_slots_T: I32 | None = None
    """Slot of the adapter of each row, -1 for the base model; None where no row has one."""
    wants_logits: bool = True
    """Whether logits are wanted of the rows that sample."""
    wants_rows: bool = False
    """Whether those rows are wanted as they are behind the final norm, for pooled requests."""

    @property
    def num_rows(self) -> int:
        """Number of rows that sample."""
        return len(self.token_ids_T if self.sample_rows is None else self.sample_rows)

    @property
    def num_decodes(self) -> int:
        """Number S of decoding sequences."""
        return len(self.context_lens_S)


class BatchBuilder:
    """Makes batches. Owner: the model runner; it keeps block tables between steps."""

    def __init__(
        self, block_size: int, max_model_len: int, num_windows: int = 0, *, has_adapters: bool = False
    ) -> None:
        self._block_size = block_size
        self._has_adapters = has_adapters
        max_blocks = blocks_for_tokens(max_model_len, block_size)
        self._tables = _DecodeTables(max_blocks)
        self._windows = tuple(_DecodeTables(max_blocks) for _ in range(num_windows))

    def arrays(self, plan: StepPlan) -> BatchArrays:
        """The batch of a plan with at least one token. The arrays are the caller's. In place of a decode's token that
        is not known yet (`plan.StepQueue`) stands 0."""
        arrays = self._arrays(plan) if plan.prefills else self._decode_arrays(plan.decodes)
        if not plan.pools:
            return arrays
        return replace(arrays, wants_logits=any(map(_needs_logits, plan.entries)), wants_rows=True)

    def _arrays(self, plan: StepPlan) -> BatchArrays:
        decodes, prefills = plan.decodes, plan.prefills
        positions_S = np.array([entry.start for entry in decodes], dtype=np.int64)
        num_blocks = blocks_for_tokens(int(positions_S.max()) + 1, self._block_size) if decodes else 0
        tables_SM = self._tables.update(_tables_of(decodes), num_blocks)
        tables = [np.array(_needed_blocks(entry, self._block_size), dtype=np.int32) for entry in prefills]
        ranges = [np.arange(entry.start, entry.start + entry.num_tokens, dtype=np.int64) for entry in prefills]
        slots = [self._slots(tables_SM[np.arange(len(decodes)), positions_S // self._block_size], positions_S)]
        for table_M, range_C in zip(tables, ranges, strict=True):
            slots.append(self._slots(table_M[range_C // self._block_size], range_C))
        sample_rows = _sample_rows(plan)
        return BatchArrays(
            token_ids_T=np.array(_token_ids(plan), dtype=np.int64),
            positions_T=np.concatenate((positions_S, *ranges)),
            slot_mapping_T=np.concatenate(slots),
            block_tables_SM=tables_SM,
            context_lens_S=(positions_S + 1).astype(np.int32),
            prefills=tuple(
                ChunkArrays(entry.num_tokens, entry.start, table_M)
                for entry, table_M in zip(prefills, tables, strict=True)
            ),
            sample_rows=None if sample_rows is None else np.array(sample_rows, dtype=np.int64),
            windows=tuple(
                self._window_arrays(group, plan, positions_S, ranges) for group in range(1, 1 + len(self._windows))
            ),
            adapter_slots_T=self._adapter_slots(plan),
        )

    def _adapter_slots(self, plan: StepPlan) -> I32 | None:
        if not self._has_adapters or all(entry.sequence.adapter_slot < 0 for entry in plan.entries):
            return None
        slots = [entry.sequence.adapter_slot for entry in plan.entries]
        return np.repeat(np.array(slots, dtype=np.int32), [entry.num_tokens for entry in plan.entries])

    def _window_arrays(self, group: int, plan: StepPlan, positions_S: I64, ranges: list[I64]) -> WindowArrays:
        num_blocks = blocks_for_tokens(int(positions_S.max()) + 1, self._block_size) if len(positions_S) else 0
        tables_SM = self._windows[group - 1].update(_tables_of(plan.decodes, group), num_blocks)
        tables = [np.array(_needed_blocks(entry, self._block_size, group), dtype=np.int32) for entry in plan.prefills]
        slots = [self._slots(tables_SM[np.arange(len(positions_S)), positions_S // self._block_size], positions_S)]
        for table_M, range_C in zip(tables, ranges, strict=True):
            slots.append(self._slots(table_M[range_C // self._block_size], range_C))
        return WindowArrays(np.concatenate(slots), tables_SM, tuple(tables))

    def _decode_arrays(self, decodes: tuple[ScheduledSequence, ...]) -> BatchArrays:
        """The same without prompts, as most steps are: Python's integers are quicker than small arrays."""
        size = self._block_size
        positions = [entry.start for entry in decodes]
        slots = [
            entry.sequence.block_table[start // size] * size + start % size
            for entry, start in zip(decodes, positions, strict=True)
        ]
        return BatchArrays(
            token_ids_T=np.array([_decoded_id(entry) for entry in decodes], dtype=np.int64),
            positions_T=np.array(positions, dtype=np.int64),
            slot_mapping_T=np.array(slots, dtype=np.int64),
            block_tables_SM=self._tables.update(_tables_of(decodes), max(positions) // size + 1),
            context_lens_S=np.array([start + 1 for start in positions], dtype=np.int32),
            prefills=(),
            sample_rows=None,
            windows=tuple(
                self._window_arrays(group, StepPlan(decodes), np.array(positions, dtype=np.int64), [])
                for group in range(1, 1 + len(self._windows))
            ),
            adapter_slots_T=self._adapter_slots(StepPlan(decodes)) if self._has_adapters else None,
        )

    def _slots(self, block_T: I32, position_T: I64) -> I64:
        return block_T.astype(np.int64) * self._block_size + position_T % self._block_size


class _DecodeTables:
    """Block tables of the decoding rows, as they were at the last step.

    A row is trusted only if a copy of its sequence's table equals the table of now: block tables are lists that the
    block manager changes in place. Comparing lists of the same int objects costs a few nanoseconds a block, converting
    them about fifty.
    """

    def __init__(self, max_blocks: int) -> None:
        self._table_SM = np.zeros((8, max_blocks), dtype=np.int32)
        self._lists: list[list[int]] = []

    def update(self, tables: list[list[int]], num_blocks: int) -> I32:
        """A fresh array [len(tables), num_blocks]."""
        while len(tables) > len(self._table_SM):
            self._table_SM = np.concatenate((self._table_SM, np.zeros_like(self._table_SM)))
        self._lists += [[] for _ in range(len(tables) - len(self._lists))]
        for row, block_table in enumerate(tables):
            if self._lists[row] != block_table:
                self._write(row, block_table)
        return self._table_SM[: len(tables), :num_blocks].copy()

    def _write(self, row: int, block_table: list[int]) -> None:
        count = min(len(block_table), self._table_SM.shape[1])
        self._table_SM[row, :count] = block_table[:count]
        self._table_SM[row, count:] = 0
        self._lists[row] = list(block_table)


def _tables_of(decodes: tuple[ScheduledSequence, ...], group: int = 0) -> list[list[int]]:
    if not group:
        return [entry.sequence.block_table for entry in decodes]
    return [entry.sequence.windows[group - 1].block_table for entry in decodes]


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def _decoded_id(entry: ScheduledSequence) -> int:
    if entry.drafts:
        return entry.drafts[-1]
    token_ids = entry.sequence.token_ids
    return token_ids[entry.start] if entry.start < len(token_ids) else 0


def _needs_logits(entry: ScheduledSequence) -> bool:
    """Whether the logits of an entry are read: for a token, or for a score."""
    pooling = entry.sequence.spec.pooling
    return entry.samples and (pooling is None or pooling.kind == "score")


def _token_ids(plan: StepPlan) -> list[int]:
    ids = [_decoded_id(entry) for entry in plan.decodes]
    for entry in plan.prefills:
        ids += entry.sequence.token_ids[entry.start : entry.start + entry.num_tokens]
    return ids


def _needed_blocks(entry: ScheduledSequence, block_size: int, group: int = 0) -> list[int]:
    return entry.sequence.table_of(group)[: blocks_for_tokens(entry.start + entry.num_tokens, block_size)]


def _sample_rows(plan: StepPlan) -> list[int] | None:
    """Rows whose logits are wanted; None when that is every row."""
    rows = list(range(len(plan.decodes)))
    end = len(rows)
    for entry in plan.prefills:
        end += entry.num_tokens
        if entry.sequence.keeps_rows:
            rows += range(end - entry.num_tokens, end)
        elif entry.samples:
            rows.append(end - 1)
    return None if len(rows) == end else rows
