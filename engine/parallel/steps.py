"""A batch as rank 0 tells it to the other ranks, and back. Pure; no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagg.engine.parallel.messages import Step
from disagg.engine.runner.model.arrays import I32, I64, BatchArrays, ChunkArrays

_I32, _I64 = np.dtype("<i4"), np.dtype("<i8")


def encode_step(arrays: BatchArrays) -> Step:
    """The command to compute a batch."""
    tables_SM, lens_S = arrays.block_tables_SM, _used_columns(arrays.block_tables_SM)
    return Step(
        token_ids=arrays.token_ids_T.astype(_I64).tobytes(),
        positions=arrays.positions_T.astype(_I64).tobytes(),
        slot_mapping=arrays.slot_mapping_T.astype(_I64).tobytes(),
        num_decodes=arrays.num_decodes,
        decode_tables=tables_SM[_first_columns(lens_S, tables_SM.shape[1])].astype(_I32).tobytes(),
        table_lens=lens_S.astype(_I32).tobytes(),
        table_width=tables_SM.shape[1],
        context_lens=arrays.context_lens_S.astype(_I32).tobytes(),
        prefills=tuple(
            (chunk.num_tokens, chunk.start, chunk.block_table_M.astype(_I32).tobytes()) for chunk in arrays.prefills
        ),
        sample_rows=None if arrays.sample_rows is None else arrays.sample_rows.astype(_I64).tobytes(),
    )


def decode_step(step: Step) -> BatchArrays:
    """The batch of an command; its arrays are writable and nobody else's.

    Raises:
        ValueError: an array is not a whole number of elements, or the tables do not have what their rows should.
    """
    blocks, lens_S = _i32(step.decode_tables), _i32(step.table_lens)
    if len(lens_S) != step.num_decodes or lens_S.sum() != len(blocks) or lens_S.max(initial=0) > step.table_width:
        raise ValueError(f"the tables have {len(blocks)} blocks, and their rows {lens_S.sum()}")
    tables_SM = np.zeros((step.num_decodes, step.table_width), dtype=np.int32)
    tables_SM[_first_columns(lens_S, step.table_width)] = blocks
    return BatchArrays(
        token_ids_T=_i64(step.token_ids),
        positions_T=_i64(step.positions),
        slot_mapping_T=_i64(step.slot_mapping),
        block_tables_SM=tables_SM,
        context_lens_S=_i32(step.context_lens),
        prefills=tuple(ChunkArrays(num_tokens, start, _i32(table)) for num_tokens, start, table in step.prefills),
        sample_rows=None if step.sample_rows is None else _i64(step.sample_rows),
    )


def _used_columns(tables_SM: I32) -> I64:
    """Of each row the columns up to the last one that is not 0."""
    is_used_SM = tables_SM[:, ::-1] != 0
    if not is_used_SM.size:
        return np.zeros(len(tables_SM), dtype=np.int64)
    return np.where(is_used_SM.any(axis=1), tables_SM.shape[1] - is_used_SM.argmax(axis=1), 0)


def _first_columns(lens_S: I32 | I64, width: int) -> NDArray[np.bool_]:
    """The mask of the first columns of each row."""
    mask: NDArray[np.bool_] = np.arange(width) < lens_S[:, None]
    return mask


def _i32(data: bytes) -> I32:
    return np.frombuffer(data, dtype=_I32).astype(np.int32)


def _i64(data: bytes) -> I64:
    return np.frombuffer(data, dtype=_I64).astype(np.int64)
