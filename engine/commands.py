"""Commands from a role to the engine core, and events from the core to the role. Commands cross from the asyncio thread
to the engine thread, events cross back; both are plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from disagg.engine.plan import Buffer, Copying, LoadedAdapter
from disagg.engine.tiers.extents import Extent
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId
from disagg.proto.messages import (
    ONE_RANK,
    EndReason,
    Fetched,
    FetchFrom,
    FetchOutcome,
    ParallelShape,
    PeerRef,
    SequenceSpec,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class Add:
    """Run a sequence here. With `hold_after_prefill`, stop after its first sampled token and keep the KV (prefill
    role)."""

    spec: SequenceSpec
    hold_after_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Reserve:
    """Decode role: lock the cached prefix of a sequence to come and count its blocks. Answer: `Reserved` or
    `ReserveRefused`.

    With `is_prefix` it is the prefix of a `FetchOrdered`, or what its source has of it: it takes no place in the batch,
    its blocks are published as their KV comes in order, and `Release` ends it."""

    spec: SequenceSpec
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """Decode role: the KV of all known tokens is in place; append `token_id` (sampled by P) and decode on. Answer:
    `Joined` (before any token), or `Ended` if the sequence is gone."""

    key: AttemptKey
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Log probabilities of `token_id`, if requested."""


@dataclass(frozen=True, slots=True)
class Release:
    """Drop the sequence and all it holds, in any state, without telling the gateway. Idempotent. No answer."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Gather:
    """Prefill role: copy the KV of tokens [start, end), of one cache group, into `out`. Answer: `Gathered` (`ok` false
    if the sequence is gone), or first `Gathering` where the copy was only begun."""

    key: AttemptKey
    seq: int
    start: int
    end: int
    out: Buffer
    peer: ParallelShape = ONE_RANK
    """Ranks of the worker that it goes to."""
    digests: bool = False
    """Whether the checksum is the device's, see `digest.py`."""
    group: int = 0
    """Number of the cache group."""


@dataclass(frozen=True, slots=True)
class GatherFailed:
    """The device gave this error for a copy that was begun. Answer: `Gathered`, not ok, and `Ended` where the sequence
    is there."""

    key: AttemptKey
    seq: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Scatter:
    """Decode role: allocate blocks of one cache group up to `end` and copy `data` into tokens [start, end). Answer:
    `Scattered`."""

    key: AttemptKey
    seq: int
    start: int
    end: int
    data: Buffer
    peer: ParallelShape = ONE_RANK
    """Ranks of the worker that it came from."""
    digest: int | None = None
    """What the device must find of `data`; None where the transport has compared its checksum."""
    group: int = 0
    """Number of the cache group."""


@dataclass(frozen=True, slots=True)
class Export:
    """Describe a sequence that decodes here, so that it can be offered to another worker. It goes on. Answer:
    `Exported`."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Hold:
    """Take a sequence that decodes out of the batch after its current step, and keep its KV and its place. Answer:
    `Held`."""

    key: AttemptKey
    num_known: int
    """Tokens whose ids the other worker has: those of `Exported`."""


@dataclass(frozen=True, slots=True)
class Unhold:
    """Put a held sequence back into the batch, or revoke a `Hold`. Idempotent. No answer."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Extend:
    """A reserved sequence grew where it came from: append these tokens, and allocate the blocks of all of them. Answer:
    only `Ended`, where that is impossible."""

    key: AttemptKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """End a sequence in any state. Answer: `Ended`, unless it is gone."""

    key: AttemptKey
    reason: EndReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TierWritten:
    """The file of write `number` is there, or could not be written. No answer."""

    number: int
    ok: bool
    ms: float = 0.0
    """Milliseconds that it took."""
    cpu_ms: float = 0.0
    """Milliseconds of a processor among them."""


@dataclass(frozen=True, slots=True)
class TierRead:
    """The file of read `number` is in its buffer and checked, or could not be read. No answer."""

    number: int
    ok: bool
    ms: float = 0.0
    """Milliseconds that it took."""


@dataclass(frozen=True, slots=True)
class TierScanned:
    """What the folder of the disk tier has and was not known to have, in the order of `tiers/found.py`. No answer."""

    extents: tuple[Extent, ...]
    gone: tuple[BlockHash, ...] = ()
    """Extents that it had and has no more."""


@dataclass(frozen=True, slots=True)
class TierFailed:
    """The folder of the disk tier cannot be used. No answer."""

    reason: str
    of_scan: bool = False
    """Whether this is the answer to a scan."""


@dataclass(frozen=True, slots=True)
class TierFull:
    """A file could not be written or deleted, in a folder whose files can be read. No answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class TierForgotten:
    """The files of a tenant are deleted; unless `ok`, some may be left. No answer."""

    tag: bytes
    ok: bool


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """The adapter that was ordered for a slot was read, or could not be. No answer."""

    slot: int
    loaded: LoadedAdapter | None
    reason: EndReason = "refused"
    """The end of sequences that wait for it, where it could not be read."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ForgetTenant:
    """Drop what the cache and tiers have of a tenant and no sequence uses, and delete its files. No answer."""

    tag: bytes


@dataclass(frozen=True, slots=True)
class FetchPrefix:
    """Have another worker send the KV of the first tokens of a sequence whose `Add` follows, unless as much of it is
    here. Answer: `FetchOrdered`, unless it is, or is under way for another sequence."""

    spec: SequenceSpec
    fetch: FetchFrom


@dataclass(frozen=True, slots=True)
class FetchOver:
    """A fetch is over, and its prefix is released; once for each `FetchOrdered`. Answer: `FetchEnded` for each
    sequence that waited for it."""

    key: AttemptKey
    outcome: FetchOutcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """Hold what is cached of the prefix that another worker fetches, until `Release` or its deadline. Answer:
    `Pinned`."""

    spec: SequenceSpec


TierAnswer = TierWritten | TierRead | TierScanned | TierFailed | TierFull | TierForgotten

Command = (
    Add
    | Reserve
    | Join
    | Release
    | Gather
    | GatherFailed
    | Scatter
    | Export
    | Hold
    | Unhold
    | Extend
    | End
    | TierWritten
    | TierRead
    | TierScanned
    | TierFailed
    | TierFull
    | TierForgotten
    | AdapterRead
    | ForgetTenant
    | FetchPrefix
    | FetchOver
    | Pin
)


class TokenSampled(msgspec.Struct, frozen=True):
    """Output token `index` of the request."""

    key: AttemptKey
    gateway_id: GatewayId
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Log probabilities of `token_id`, if requested."""


@dataclass(frozen=True, slots=True)
class ChunkPlanned:
    """The step that begins now computes a held-after-prefill sequence up to token `end`: a `Gather` of tokens before it
    that is posted from now on is carried out when that is done. Where the step fails, it is answered not ok."""

    key: AttemptKey
    end: int


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """A held-after-prefill sequence is computed and sampled its first token; its KV is held until `Release`."""

    key: AttemptKey
    gateway_id: GatewayId
    token_id: int
    cached_tokens: int
    logprobs: TokenLogprobs | None = None
    """Log probabilities of `token_id`, if requested."""
    queue_s: float = field(default=0.0, compare=False)
    """How long the sequence waited for its first step."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The sequence is over and holds nothing here any more."""

    key: AttemptKey
    gateway_id: GatewayId
    reason: EndReason
    detail: str = ""
    cached_tokens: int = 0
    queue_s: float = field(default=0.0, compare=False)
    """How long the sequence waited for its first step; after a join, for the first one since."""
    num_drafted: int = 0
    """Number of drafts that were computed for it here."""
    num_accepted: int = 0
    """Number of them that became output tokens."""
    vector: bytes = field(default=b"", repr=False)
    """Vector of a pooled request whose prompt was computed, in the form of `End.vector` on the wire."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are counted; the KV of the first `cached_tokens` tokens is here already."""

    key: AttemptKey
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReserveRefused:
    """No room now; nothing is held."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The sequence is in the running batch."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Gathered:
    """The copy for chunk `seq` is in the buffer."""

    key: AttemptKey
    seq: int
    ok: bool
    checksum: int = 0
    """Checksum of the copy."""
    most_tokens: int = 0
    """Tokens that the next copy of a prefix for another worker may have; 0 for no limit but a chunk's."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """The copy for chunk `seq` is under way: whoever has it waits for it, on another thread, and gives `Gathered`, or
    the command `GatherFailed`. Nothing of the engine is needed for that, so neither waits for the other."""

    key: AttemptKey
    seq: int
    copying: Copying
    most_tokens: int = 0
    """As in `Gathered`."""


@dataclass(frozen=True, slots=True)
class Scattered:
    """Chunk `seq` is in the cache (`ok`), or its sequence was gone and the data was dropped; the buffer is free
    either way."""

    key: AttemptKey
    seq: int
    ok: bool
    intact: bool = True
    """False: not ok, because the device found another digest."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A sequence that decodes, as of now."""

    key: AttemptKey
    gateway_id: GatewayId
    """Gateway of the sequence; empty if the sequence is gone."""
    spec: SequenceSpec | None
    """Spec with the tokens whose KV is computed: all but the last one, and forced ones before it. None where it does
    not decode here."""


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence is out of the batch; not `ok` where it does not decode any more."""

    key: AttemptKey
    ok: bool
    token_ids: tuple[int, ...] = ()
    """Tokens behind those whose ids the other worker has; the KV of all of them is computed."""
    token_id: int = -1
    """The last token, of which nothing is computed."""
    logprobs: TokenLogprobs | None = None
    """Log probabilities of `token_id`, if requested."""


@dataclass(frozen=True, slots=True)
class FetchOrdered:
    """The KV of a prefix is to be fetched. Answer: `FetchOver`, before which a `Reserve` of it may come."""

    key: AttemptKey
    spec: SequenceSpec
    """The prefix as a sequence of its own. Its timeout is that of the fetch."""
    peer: PeerRef
    """The source."""
    from_token: int
    """The KV of tokens before this one is here."""


@dataclass(frozen=True, slots=True)
class FetchGivenUp:
    """Nobody waits for this fetch any more. `FetchOver` is still to come."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A sequence waits for a fetch no more."""

    key: AttemptKey
    gateway_id: GatewayId
    message: Fetched


@dataclass(frozen=True, slots=True)
class Pinned:
    """The KV of the first `num_tokens` tokens is held; of none, if `reason` says why not."""

    key: AttemptKey
    num_tokens: int
    reason: str = ""


Event = (
    TokenSampled
    | ChunkPlanned
    | PrefillComputed
    | Ended
    | Reserved
    | ReserveRefused
    | Joined
    | Gathered
    | Gathering
    | Scattered
    | Exported
    | Held
    | FetchOrdered
    | FetchGivenUp
    | FetchEnded
    | Pinned
)
