"""What a half of the hand-over has its worker do: frozen data, which `pair_shell.py` carries out in the order given.

Order matters in three places. Commands for the engine (all but `SendControl`, `SendKv`, `ReceiveKv`, the reports and
`ClosePair`) go into one queue, so that a release runs after everything that was queued before it.
`SendKv` and `ReceiveKv` go to the transport in order. `ReceiveKv` is started before the `SendControl(ClearToSend)` that
follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from disagg.proto.handover import Failure, ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import EndReason, SequenceSpec, TokenLogprobs

SendOutcome = Literal["handed_over", "refused", "failed", "cancelled"]
ReceiveOutcome = Literal["committed", "aborted"]


class Cause(NamedTuple):
    """Why an attempt or a pair ended."""

    failure: Failure
    """Kind of the failure, for programs."""
    detail: str
    """Description of the failure, for people."""


CANCELLED = Cause(Failure.CANCELLED, "cancelled")
DEADLINE = Cause(Failure.DEADLINE, "the deadline passed")
PAIR_CLOSED = Cause(Failure.PAIR_CLOSED, "the pair was closed")
STUCK = Cause(Failure.STUCK, "the peer sends heartbeats, but not what is due")
KV_GONE = Cause(Failure.KV_GONE, "its KV is gone on the prefill worker")
BLOCKS_GONE = Cause(Failure.BLOCKS_GONE, "its blocks are gone on the decode worker")


def ended_on_prefill(reason: EndReason) -> Cause:
    """Why an attempt ends whose sequence P's engine ended."""
    return Cause(Failure.ENDED, f"ended on the prefill worker: {reason}")


@dataclass(frozen=True, slots=True)
class SendControl:
    """Write this message to the pair's control stream."""

    message: SenderToReceiver | ReceiverToSender


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """P: run the prompt and hold it afterwards; D has room for it."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class HoldSequence:
    """P: take a running sequence out of the batch; D has the ids of its first `num_known` tokens, and most of their KV.
    Answer: `Sender.on_held`."""

    key: AttemptKey
    num_known: int


@dataclass(frozen=True, slots=True)
class UnholdSequence:
    """P: a running sequence stays here, and decodes on if it was held. No answer."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class EndSequence:
    """P: a running sequence is over here. `moved`: D goes on with it; else it is unknown whether D does. No answer."""

    key: AttemptKey
    moved: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GatherChunk:
    """P: copy the KV of tokens [start, end) of a cache group, `nbytes` bytes, into staging slot `slot`. Answer:
    `Sender.on_gathered`."""

    key: AttemptKey
    seq: int
    start: int
    end: int
    slot: int
    nbytes: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class SendKv:
    """P: send the first `nbytes` bytes of slot `slot`, which are of a cache group. Answer: `Sender.on_sent`."""

    key: AttemptKey
    seq: int
    slot: int
    nbytes: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """D: lock the cached prefix and count the blocks. Answer: `Receiver.on_reserved` or `on_reserve_refused`."""

    spec: SequenceSpec
    is_prefix: bool = False
    """Whether it is a prefix that D fetches."""


@dataclass(frozen=True, slots=True)
class ReceiveKv:
    """D: receive `nbytes` bytes of a cache group into slot `slot`. Answer: `Receiver.on_received`."""

    key: AttemptKey
    seq: int
    slot: int
    nbytes: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class ScatterChunk:
    """D: copy slot `slot` into the blocks of tokens [start, end) of a cache group. Answer: `Receiver.on_scattered`."""

    key: AttemptKey
    seq: int
    start: int
    end: int
    slot: int
    nbytes: int
    digest: int | None = None
    """What D's device must find of it; None where that is not asked."""
    group: int = 0


@dataclass(frozen=True, slots=True)
class ExtendSequence:
    """D: append tokens to the reserved sequence, and allocate its blocks. No answer."""

    key: AttemptKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinSequence:
    """D: all KV is in place; append `token_id`, which P sampled, and decode on. No answer is needed."""

    key: AttemptKey
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ReleaseSequence:
    """Drop the sequence and its blocks, in whatever state it is. Idempotent. No answer."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SendOver:
    """P: the hand-over of this attempt is decided; exactly once per offered attempt. Slots that bytes under way need
    may be held a little longer, and the sequence until its last gather."""

    key: AttemptKey
    outcome: SendOutcome
    cause: Cause | None = None
    """Reason of the end; None if it was handed over."""
    kv_bytes: int = 0
    """Bytes of KV announced to D."""
    cached_tokens: int = 0
    """Leading tokens that D had."""
    stays: bool = False
    """Whether it is a running sequence that goes on here."""


@dataclass(frozen=True, slots=True)
class ReceiveOver:
    """D: the hand-over of this attempt is decided; exactly once per `ReserveBlocks`. Committed: the engine owns the
    sequence now. Slots that bytes under way need may be held a little longer."""

    key: AttemptKey
    outcome: ReceiveOutcome
    cause: Cause | None = None
    """Reason of the end; None if it was committed."""
    kv_bytes: int = 0
    """Bytes of KV that landed."""
    cached_tokens: int = 0
    """Leading tokens that D had."""
    began_at: float | None = field(default=None, compare=False)
    """When the first chunk was announced; None where there was none."""


@dataclass(frozen=True, slots=True)
class ClosePair:
    """Destroy the pair: end the control stream and close the transport. The half is closed already and holds only the
    slots that the transport or the engine may still touch; their answers free them."""

    cause: Cause


SenderCommand = (
    SendControl
    | StartPrefill
    | GatherChunk
    | SendKv
    | ReleaseSequence
    | HoldSequence
    | UnholdSequence
    | EndSequence
    | SendOver
    | ClosePair
)
ReceiverCommand = (
    SendControl
    | ReserveBlocks
    | ReceiveKv
    | ScatterChunk
    | ExtendSequence
    | JoinSequence
    | ReleaseSequence
    | ReceiveOver
    | ClosePair
)
