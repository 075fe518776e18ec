"""A batch as rank 0 tells it to the other ranks, and back. Pure; no torch."""

from __future__ import annotations

import numpy as np

from disagg.engine.model.arrays import I32, I64, BatchArrays, ChunkArrays
from disagg.engine.parallel.messages import Step

_I32, _I64 = np.dtype("<i4"), np.dtype("<i8")


def encode_step(arrays: BatchArrays) -> Step:
    """The order to compute a batch."""
    return Step(
        token_ids=arrays.token_ids_T.astype(_I64).tobytes(),
        positions=arrays.positions_T.astype(_I64).tobytes(),
        slot_mapping=arrays.slot_mapping_T.astype(_I64).tobytes(),
        num_decodes=arrays.num_decodes,
        decode_tables=arrays.block_tables_SM.astype(_I32).tobytes(),
        context_lens=arrays.context_lens_S.astype(_I32).tobytes(),
        prefills=tuple(
            (chunk.num_tokens, chunk.start, chunk.block_table_M.astype(_I32).tobytes()) for chunk in arrays.prefills
        ),
        sample_rows=None if arrays.sample_rows is None else arrays.sample_rows.astype(_I64).tobytes(),
    )


def decode_step(step: Step) -> BatchArrays:
    """The batch of an order; its arrays are writable and nobody else's.

    Raises:
        ValueError: an array is not a whole number of elements or rows.
    """
    num_decodes = step.num_decodes
    tables = _i32(step.decode_tables)
    return BatchArrays(
        token_ids_T=_i64(step.token_ids),
        positions_T=_i64(step.positions),
        slot_mapping_T=_i64(step.slot_mapping),
        block_tables_SM=tables.reshape(num_decodes, len(tables) // num_decodes if num_decodes else 0),
        context_lens_S=_i32(step.context_lens),
        prefills=tuple(ChunkArrays(num_tokens, start, _i32(table)) for num_tokens, start, table in step.prefills),
        sample_rows=None if step.sample_rows is None else _i64(step.sample_rows),
    )


def _i32(data: bytes) -> I32:
    return np.frombuffer(data, dtype=_I32).astype(np.int32)


def _i64(data: bytes) -> I64:
    return np.frombuffer(data, dtype=_I64).astype(np.int64)
