"""Messages between rank 0 of a worker and its followers, one frame each, and the conversion of a batch to `Step`. Pure.

Commands with a `call` are answered by exactly one `Done`, in any order; the others are not answered. Commands for the
engine (`EngineCommand`) are carried out one after the other, in the order sent, on the follower's engine thread; those
for the transport (`TransportCommand`) on its own threads, those of a pair in the order sent; `FreeBuffer` at once. A
failure caused by the peer is answered by a `Done` that is not ok; a failure of the follower itself ends it, and with it
the worker.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from disagg.engine.batch_arrays import I32, I64, BatchArrays, ChunkArrays, WindowArrays
from disagg.proto.messages import Adapter, BufferSize, Message, ParallelShape


class Join(Message, frozen=True, kw_only=True, tag=True):
    """A follower's first frame, once its model is loaded. The stream was authenticated before."""

    rank: int
    pid: int
    fingerprint: str
    num_blocks: int
    """KV blocks that it has room for; all ranks use the smallest number."""


class Begin(Message, frozen=True, kw_only=True, tag=True):
    """The answer to `Join`: what the ranks agreed on."""

    num_blocks: int
    collective_address: str
    """host:port of the store in which the ranks meet."""


class Capture(Message, frozen=True, kw_only=True, tag=True):
    """Capture the decode step of `num_seqs` rows, as all ranks do now; done when that is computed, not ok where it
    could not be captured. Exchanges are part of it, so no rank may replay what another computes in another way."""

    call: int
    num_seqs: int


class DropCaptures(Message, frozen=True, kw_only=True, tag=True):
    """Compute every step op by op from now on: a rank could not capture one."""


class WindowStep(Message, frozen=True, kw_only=True):
    """What a `Step` has of a cache group with a window."""

    slot_mapping: bytes
    """Cache slot of each token, int64."""
    decode_tables: bytes
    table_lens: bytes
    """As in `Step`, and of the same width."""
    prefill_tables: tuple[bytes, ...]
    """Block table of each chunk, int32."""


class ReadAdapter(Message, frozen=True, kw_only=True, tag=True):
    """Read an adapter, on a thread beside the engine's, and keep it for `PutAdapter`. Not ok where it cannot be used:
    the error begins with the fault and a colon."""

    call: int
    adapter: Adapter


class PutAdapter(Message, frozen=True, kw_only=True, tag=True):
    """Write an adapter that was read into a slot, between two steps."""

    slot: int
    fingerprint: str


class Step(Message, frozen=True, kw_only=True, tag=True):
    """Compute a batch. Arrays are little-endian bytes, as in `model.batch.Batch`."""

    token_ids: bytes
    """int64, all tokens of the batch."""
    positions: bytes
    """Position of each token in its sequence, int64."""
    slot_mapping: bytes
    """Cache slot of each token, int64."""
    num_decodes: int
    decode_tables: bytes
    """int32, of each row the blocks up to the last one that is not 0, row by row. With one long sequence among short
    ones, rows as wide as the widest would be more than a frame may have."""
    table_lens: bytes
    """int32 [num_decodes], how many these are."""
    table_width: int
    """Columns of the table, which 0 fills up."""
    context_lens: bytes
    """Tokens of each decoding sequence with KV after this step, int32 [num_decodes]."""
    prefills: tuple[tuple[int, int, bytes], ...]
    """(number of tokens, start, int32 block table) of each chunk, in the order of the batch."""
    sample_rows: bytes | None
    """int64 rows whose logits are wanted; None for all rows."""
    windows: tuple[WindowStep, ...] = ()
    """Of each cache group beside the first."""
    adapter_slots: bytes | None = None
    """int32, slot of the adapter of each token, -1 for the base model; None where no token has one."""
    wants_logits: bool = True
    wants_rows: bool = False
    """As of `BatchArrays`."""


class Mark(Message, frozen=True, kw_only=True, tag=True):
    """Answer once the commands of the engine before this one are carried out."""

    call: int


class StateBuffers(Message, frozen=True, kw_only=True, tag=True):
    """Answer with the sizes of this rank's large buffers: `Done.buffers`."""

    call: int


class _CopyPart(Message, frozen=True, kw_only=True):
    """Fields of both copies between cache and staging."""

    call: int
    buffer: int
    """Number of the staging buffer; each rank makes its part at first use."""
    buffer_bytes: int
    """Size of the buffer, all ranks' parts together."""
    block_table: bytes
    """Block table of the sequence, int32."""
    start: int
    end: int
    peer: ParallelShape
    """Ranks of the other worker."""
    group: int = 0
    """Number of the cache group."""


class GatherPart(_CopyPart, frozen=True, kw_only=True, tag=True):
    """Copy this rank's slices of tokens [start, end) into its part of a staging buffer; `Done.checksums` has one for
    each of its slices."""


class ScatterPart(_CopyPart, frozen=True, kw_only=True, tag=True):
    """Copy this rank's part of a staging buffer into the blocks of tokens [start, end)."""


class ClearBuffer(Message, frozen=True, kw_only=True, tag=True):
    """Fill this rank's part of a staging buffer with zeros."""

    buffer: int
    buffer_bytes: int
    """Size of the buffer, all ranks' parts together."""


class FreeBuffer(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0 has freed a staging buffer; its number will not be used again."""

    buffer: int


class OpenPair(Message, frozen=True, kw_only=True, tag=True):
    """Form this rank's channels of a pair; done when all stand."""

    call: int
    pair_name: str
    side: Literal["sender", "receiver"]
    peer: ParallelShape
    """Ranks of the other worker."""
    transport: str
    store_address: str
    """Address of D's rendezvous. For each slice the two ranks meet under `<pair_name>/<sender rank>-<receiver
    rank>`."""


class SendPart(Message, frozen=True, kw_only=True, tag=True):
    """Send this rank's slices from a staging buffer."""

    call: int
    pair_name: str
    buffer: int
    buffer_bytes: int
    """Size of the buffer, all ranks' parts together. This rank's is made here where the gather into it was refused: the
    peer waits for its bytes."""
    group: int
    """Number of the cache group, which says how many elements (a head of a layer) each slice has."""
    element_bytes: int
    """Bytes of each element."""


class ReceivePart(Message, frozen=True, kw_only=True, tag=True):
    """Receive this rank's slices into a staging buffer; `Done.checksums` has one for each."""

    call: int
    pair_name: str
    buffer: int
    buffer_bytes: int
    """Size of the buffer, all ranks' parts together."""
    group: int
    """Number of the cache group."""
    element_bytes: int
    """Bytes of each element."""


class ClosePair(Message, frozen=True, kw_only=True, tag=True):
    """Close this rank's channels of a pair; what is under way is answered not ok, before this is."""

    call: int
    pair_name: str


class Posted(Message, frozen=True, kw_only=True, tag=True):
    """Follower -> rank 0: the receives of this command are posted, so the peer may send."""

    call: int


class Done(Message, frozen=True, kw_only=True, tag=True):
    """Follower -> rank 0: the answer to one command."""

    call: int
    ok: bool
    error: str = ""
    checksums: tuple[int, ...] = ()
    buffers: tuple[BufferSize, ...] = ()


class Failed(Message, frozen=True, kw_only=True, tag=True):
    """Follower -> rank 0: it cannot go on and ends; so must the worker."""

    error: str


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """End in an orderly way."""


EngineCommand = (
    Step | Mark | StateBuffers | PutAdapter | Capture | DropCaptures | GatherPart | ScatterPart | ClearBuffer
)
TransportCommand = OpenPair | SendPart | ReceivePart | ClosePair
RankCall = Capture | Mark | StateBuffers | ReadAdapter | GatherPart | ScatterPart | TransportCommand
"""Commands that are answered by a `Done`."""
RankCommand = Begin | EngineCommand | ReadAdapter | TransportCommand | FreeBuffer | Stop
Answer = Join | Posted | Done | Failed


# ---------------------------------------------------------------- batches


_I32, _I64 = np.dtype("<i4"), np.dtype("<i8")


def encode_step(arrays: BatchArrays) -> Step:
    """The message to compute a batch."""
    decode_tables, table_lens = _encode_tables(arrays.block_tables_SM)
    return Step(
        token_ids=arrays.token_ids_T.astype(_I64).tobytes(),
        positions=arrays.positions_T.astype(_I64).tobytes(),
        slot_mapping=arrays.slot_mapping_T.astype(_I64).tobytes(),
        num_decodes=arrays.num_decodes,
        decode_tables=decode_tables,
        table_lens=table_lens,
        table_width=arrays.block_tables_SM.shape[1],
        context_lens=arrays.context_lens_S.astype(_I32).tobytes(),
        prefills=tuple(
            (chunk.num_tokens, chunk.start, chunk.block_table_M.astype(_I32).tobytes()) for chunk in arrays.prefills
        ),
        sample_rows=None if arrays.sample_rows is None else arrays.sample_rows.astype(_I64).tobytes(),
        windows=tuple(map(_encode_window, arrays.windows)),
        adapter_slots=None if arrays.adapter_slots_T is None else arrays.adapter_slots_T.astype(_I32).tobytes(),
        wants_logits=arrays.wants_logits,
        wants_rows=arrays.wants_rows,
    )


def _encode_tables(tables_SM: I32) -> tuple[bytes, bytes]:
    """`Step.decode_tables` and `Step.table_lens`."""
    lens_S = _used_columns(tables_SM)
    blocks = tables_SM[_first_columns(lens_S, tables_SM.shape[1])]
    return blocks.astype(_I32).tobytes(), lens_S.astype(_I32).tobytes()


def _encode_window(window: WindowArrays) -> WindowStep:
    decode_tables, table_lens = _encode_tables(window.block_tables_SM)
    return WindowStep(
        slot_mapping=window.slot_mapping_T.astype(_I64).tobytes(),
        decode_tables=decode_tables,
        table_lens=table_lens,
        prefill_tables=tuple(table_M.astype(_I32).tobytes() for table_M in window.prefill_tables),
    )


def decode_step(step: Step) -> BatchArrays:
    """The batch of a `Step`; its arrays are writable and not shared.

    Raises:
        ValueError: an array is not a whole number of elements, or the tables do not have what their rows should.
    """
    return BatchArrays(
        token_ids_T=_i64(step.token_ids),
        positions_T=_i64(step.positions),
        slot_mapping_T=_i64(step.slot_mapping),
        block_tables_SM=_decode_tables(step, step),
        context_lens_S=_i32(step.context_lens),
        prefills=tuple(ChunkArrays(num_tokens, start, _i32(table)) for num_tokens, start, table in step.prefills),
        sample_rows=None if step.sample_rows is None else _i64(step.sample_rows),
        windows=tuple(
            WindowArrays(
                slot_mapping_T=_i64(window.slot_mapping),
                block_tables_SM=_decode_tables(step, window),
                prefill_tables=tuple(map(_i32, window.prefill_tables)),
            )
            for window in step.windows
        ),
        adapter_slots_T=None if step.adapter_slots is None else _i32(step.adapter_slots),
        wants_logits=step.wants_logits,
        wants_rows=step.wants_rows,
    )


def _decode_tables(step: Step, of: Step | WindowStep) -> I32:
    blocks, lens_S = _i32(of.decode_tables), _i32(of.table_lens)
    if len(lens_S) != step.num_decodes or lens_S.sum() != len(blocks) or lens_S.max(initial=0) > step.table_width:
        raise ValueError(f"the tables have {len(blocks)} blocks, and their rows {lens_S.sum()}")
    tables_SM = np.zeros((step.num_decodes, step.table_width), dtype=np.int32)
    tables_SM[_first_columns(lens_S, step.table_width)] = blocks
    return tables_SM


def _used_columns(tables_SM: I32) -> I64:
    """For each row, its columns up to the last one that is not 0."""
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
