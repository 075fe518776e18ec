"""What rank 0 tells the other ranks of its worker, and what they answer. Frames on one stream for each follower.

Commands with a `call` are answered by exactly one `Done`, in any order; the others are not answered. Commands of the
engine (`Step`, `GatherPart`, `ScatterPart`, `ClearBuffer`) are carried out one after the other, in the order sent, on
the follower's engine thread; those of the transport (`OpenPair`, `SendPart`, `ReceivePart`, `ClosePair`) on its own
threads, each pair's in the order sent; `FreeBuffer` at once. What a follower cannot do for its peer's fault is a `Done`
that is not ok; what it cannot do for a fault of its own ends it, and with it the worker.
"""

from __future__ import annotations

from typing import Literal

from disagg.proto.messages import Message


class Join(Message, frozen=True, kw_only=True, tag=True):
    """A follower's first frame, once its model is loaded. The stream was authenticated before."""

    rank: int
    pid: int
    fingerprint: str
    num_blocks: int
    """KV blocks that it has room for; all ranks use the least."""


class Begin(Message, frozen=True, kw_only=True, tag=True):
    """The answer to `Join`: what the ranks agreed on."""

    num_blocks: int
    collective_address: str
    """host:port of the store in which the ranks meet."""


class Step(Message, frozen=True, kw_only=True, tag=True):
    """Compute a batch. Arrays are little-endian bytes, as in `model.batch.Batch`."""

    token_ids: bytes
    """int64, all tokens of the batch."""
    positions: bytes
    """int64."""
    slot_mapping: bytes
    """int64."""
    num_decodes: int
    decode_tables: bytes
    """int32, of each row the blocks up to the last one that is not 0, row by row. With one long sequence among short
    ones, rows as wide as the widest would be more than a frame may have."""
    table_lens: bytes
    """int32 [num_decodes], how many these are."""
    table_width: int
    """Columns of the table, which 0 fills up."""
    context_lens: bytes
    """int32 [num_decodes]."""
    prefills: tuple[tuple[int, int, bytes], ...]
    """(number of tokens, start, int32 block table) of each chunk, in the order of the batch."""
    sample_rows: bytes | None
    """int64 rows whose logits are wanted; None for all rows."""


class _CopyPart(Message, frozen=True, kw_only=True):
    """What both copies between cache and staging say."""

    call: int
    buffer: int
    """Number of the staging buffer; each rank makes its part at first use."""
    buffer_bytes: int
    """Size of the part."""
    block_table: bytes
    """int32."""
    start: int
    end: int
    peer_tp: int


class GatherPart(_CopyPart, frozen=True, kw_only=True, tag=True):
    """Copy this rank's heads of tokens [start, end) into its part of a staging buffer; `Done.checksums` has one for
    each of its slices."""


class ScatterPart(_CopyPart, frozen=True, kw_only=True, tag=True):
    """Copy this rank's part of a staging buffer into the blocks of tokens [start, end)."""


class ClearBuffer(Message, frozen=True, kw_only=True, tag=True):
    """Fill this rank's part of a staging buffer with zeros."""

    buffer: int
    buffer_bytes: int


class FreeBuffer(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0 has let go of a staging buffer; its number will not be used again."""

    buffer: int


class OpenPair(Message, frozen=True, kw_only=True, tag=True):
    """Form this rank's channels of a pair; done when all stand."""

    call: int
    pair_name: str
    side: Literal["sender", "receiver"]
    peer_tp: int
    transport: str
    host: str
    store_address: str
    """Of D's rendezvous. For each slice the two ranks meet under `<pair_name>/<sender rank>-<receiver rank>`."""


class SendPart(Message, frozen=True, kw_only=True, tag=True):
    """Send this rank's slices of `num_tokens` tokens from a staging buffer."""

    call: int
    pair_name: str
    buffer: int
    num_tokens: int


class ReceivePart(Message, frozen=True, kw_only=True, tag=True):
    """Receive this rank's slices of `num_tokens` tokens into a staging buffer; `Done.checksums` has one for each."""

    call: int
    pair_name: str
    buffer: int
    buffer_bytes: int
    num_tokens: int


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


class Failed(Message, frozen=True, kw_only=True, tag=True):
    """Follower -> rank 0: it cannot go on and ends; so must the worker."""

    error: str


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """End in an orderly way."""


EngineCommand = Step | GatherPart | ScatterPart | ClearBuffer
TransportCommand = OpenPair | SendPart | ReceivePart | ClosePair
RankCall = GatherPart | ScatterPart | TransportCommand
"""Commands that are answered."""
RankCommand = Begin | EngineCommand | TransportCommand | FreeBuffer | Stop
Answer = Join | Posted | Done | Failed
