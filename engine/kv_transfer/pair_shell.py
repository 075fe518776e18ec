"""Carries out the commands of a pair's half. Workers, the simulator and tests have a `PairIo` of their own under it.

    engine events, control messages, answers of the transport ──> PairShell ──> half
    half ──> commands ──> PairShell ──> PairIo: control stream, transport, engine, notices to the role

The shell translates commands into those of the engine, brings the engine's answers back to the half, keeps the memory
of the staging slots, and knows which copies the engine has not made yet. Sockets, tasks, deadlines and virtual time
belong to the `PairIo`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import override

from disagg.engine.commands import (
    Add,
    ChunkPlanned,
    Command,
    End,
    Ended,
    Event,
    Extend,
    Gather,
    Gathered,
    Held,
    Hold,
    Join,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
    Unhold,
)
from disagg.engine.kv_transfer.commands import (
    CANCELLED,
    PAIR_CLOSED,
    Cause,
    ClosePair,
    EndSequence,
    ExtendSequence,
    GatherChunk,
    HoldSequence,
    JoinSequence,
    ReceiveKv,
    ReceiveOver,
    ReceiverCommand,
    ReleaseSequence,
    ReserveBlocks,
    ScatterChunk,
    SendControl,
    SenderCommand,
    SendKv,
    SendOver,
    StartPrefill,
    UnholdSequence,
    ended_on_prefill,
)
from disagg.engine.kv_transfer.pair_half import PairHalf, TransitionError
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.sender import Sender
from disagg.engine.plan import Buffer
from disagg.proto.handover import Failure, ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import ONE_RANK, ParallelShape, SequenceSpec

HERE_ALREADY = "this attempt is here already"


class PairIo(Protocol):
    """What both halves of a pair need of the process that runs them."""

    def send(self, message: Any) -> None:
        """Write a message to the control stream, after all before it."""
        ...

    def post(self, command: Command) -> None:
        """Queue a command for the engine. Its events come back by `PairShell.on_event`."""
        ...

    def new_staging(self, nbytes: int) -> Buffer:
        """Memory for a staging slot; a slice of it is memory of the same kind."""
        ...

    def on_close_pair(self, cause: Cause) -> None:
        """The half closed the pair: end the control stream and close the transport."""
        ...


class SenderIo(PairIo, Protocol):
    """The prefill worker around a `Sender`."""

    def send_kv(self, chunk: SendKv) -> None:
        """Send the first bytes of the slot's buffer. Answer: `SenderShell.on_sent`."""
        ...

    def on_reserved(self, key: AttemptKey) -> None:
        """The decode worker has room for the attempt, and its prefill begins."""
        ...

    def on_over(self, over: SendOver) -> None:
        """The hand-over of an attempt is decided; called once for each offered attempt."""
        ...


class ReceiverIo(PairIo, Protocol):
    """The decode worker around a `Receiver`."""

    def receive_kv(self, chunk: ReceiveKv) -> None:
        """Receive into the slot's buffer. Answer: `ReceiverShell.on_received`."""
        ...

    def on_offered(self, spec: SequenceSpec, *, is_prefix: bool) -> bool:
        """An attempt, or a prefix, was offered. Returns False where this worker has it already, or did not ask for
        it."""
        ...

    def on_over(self, over: ReceiveOver) -> None:
        """The hand-over of an attempt is decided; called once for each attempt whose offer was taken."""
        ...


M = TypeVar("M")
C = TypeVar("C")


class PairShell(ABC, Generic[M, C]):
    """The shell around one half. It passes inputs on and carries out the commands before it returns.

    Args:
        half: the half.
        io: what carries out the commands that are not bookkeeping.
        peer: ranks of the other worker, for the engine's copies.
    """

    half: PairHalf[Any, M, C]

    def __init__(self, half: PairHalf[Any, M, C], io: PairIo, peer: ParallelShape) -> None:
        self.half = half
        self._new_staging = io.new_staging
        self._peer = peer
        self._buffers: dict[int, Buffer] = {}
        self._copies: dict[tuple[AttemptKey, int], int] = {}
        """(attempt, chunk) -> bytes that the engine still copies into or out of a staging slot."""

    @property
    def num_copies(self) -> int:
        """Copies that the engine has not made yet."""
        return len(self._copies)

    def is_copying(self, key: AttemptKey) -> bool:
        """Whether the engine still copies a chunk of this attempt."""
        return any(copying == key for copying, _ in self._copies)

    def buffer(self, slot: int) -> Buffer:
        """The memory of a staging slot, allocated at its first use."""
        buffer = self._buffers.get(slot)
        if buffer is None:
            buffer = self._buffers[slot] = self._new_staging(self.half.max_chunk_bytes)
        return buffer

    def free_buffers(self) -> None:
        """Drop the memory of the staging slots; the transport is closed. A pending copy has its own reference."""
        self._buffers.clear()

    def on_message(self, message: M, now: float) -> None:
        """A control message of the peer arrived."""
        self._carry_out(self.half.on_message(message, now))

    def tick(self, now: float) -> None:
        """Let time pass; see `PairHalf.tick`."""
        self._carry_out(self.half.tick(now))

    def close(self, now: float, cause: Cause = PAIR_CLOSED) -> None:
        """End all attempts, because the control stream ended or the peer is gone. Idempotent."""
        self._carry_out(self.half.close(now, cause))

    @abstractmethod
    def on_event(self, event: Event) -> bool:
        """Pass an event of the engine to the half. Returns whether the half takes events of this kind."""

    @abstractmethod
    def _carry_out(self, commands: Sequence[C | SendControl | ClosePair]) -> None:
        """Carry out commands of the half in their order."""


class SenderShell(PairShell[ReceiverToSender, SenderCommand]):
    """The shell around a `Sender`; `io` is the prefill worker. `digests`: whether the checksums of gathered chunks are
    digests of the device."""

    half: Sender

    def __init__(self, half: Sender, io: SenderIo, peer: ParallelShape = ONE_RANK, *, digests: bool = False) -> None:
        super().__init__(half, io, peer)
        self._io = io
        self._digests = digests

    def offer(self, spec: SequenceSpec, now: float, move: int = 0, *, is_prefix: bool = False) -> None:
        """Offer an attempt; see `Sender.offer`. One of which something is still here is reported as failed."""
        commands: Sequence[SenderCommand]
        try:
            commands = self.half.offer(spec, now, move, is_prefix=is_prefix)
        except TransitionError as error:  # a gateway that uses a key again, or a move that was given up a moment ago
            over = SendOver(spec.key, "failed", Cause(Failure.OTHER, str(error)), stays=move > 0)
            commands = [ReleaseSequence(spec.key), over] if is_prefix else [over]
        self._carry_out(commands)

    def cancel(self, key: AttemptKey, cause: Cause = CANCELLED) -> None:
        """Give up an attempt; unknown ones are ignored."""
        self._carry_out(self.half.cancel(key, cause))

    def on_sent(self, key: AttemptKey, seq: int, ok: bool) -> None:
        """The transport is done with the slot of a `SendKv`."""
        self._carry_out(self.half.on_sent(key, seq, ok))

    @override
    def on_event(self, event: Event) -> bool:
        half = self.half
        commands: Sequence[SenderCommand]
        match event:
            case ChunkPlanned():
                commands = half.on_chunk_planned(event.key, event.end)
            case Gathered(key, seq, ok, checksum, most_tokens):
                commands = half.on_gathered(key, seq, ok, self._copies.pop((key, seq)), checksum, most_tokens)
            case PrefillComputed():
                commands = half.on_prefill_computed(event.key, event.token_id, event.logprobs)
            case Held():
                commands = half.on_held(event.key, event.ok, event.token_ids, event.token_id, event.logprobs)
            case Ended():
                commands = half.cancel(event.key, ended_on_prefill(event.reason))
            case _:
                return False
        self._carry_out(commands)
        return True

    @override
    def _carry_out(self, commands: Sequence[SenderCommand]) -> None:
        io = self._io
        for command in commands:
            match command:
                case SendControl(message):
                    io.send(message)
                case GatherChunk(key, seq, start, end, slot, nbytes, group):
                    self._copies[key, seq] = nbytes
                    out = self.buffer(slot)[:nbytes]
                    io.post(Gather(key, seq, start, end, out, self._peer, digests=self._digests, group=group))
                case SendKv():
                    io.send_kv(command)
                case StartPrefill(spec):
                    io.on_reserved(spec.key)
                    io.post(Add(spec, hold_after_prefill=True))
                case ReleaseSequence(key):
                    io.post(Release(key))
                case HoldSequence(key, num_known):
                    io.post(Hold(key, num_known))
                case UnholdSequence(key):
                    io.post(Unhold(key))
                case EndSequence(key, moved, detail):
                    io.post(End(key, "moved" if moved else "failed", detail))
                case SendOver():
                    io.on_over(command)
                case ClosePair(cause):
                    io.on_close_pair(cause)


class ReceiverShell(PairShell[SenderToReceiver, ReceiverCommand]):
    """The shell around a `Receiver`; `io` is the decode worker."""

    half: Receiver

    def __init__(self, half: Receiver, io: ReceiverIo, peer: ParallelShape = ONE_RANK) -> None:
        super().__init__(half, io, peer)
        self._io = io

    def cancel(self, key: AttemptKey) -> None:
        """Cancel an attempt for the gateway; it may not have been offered yet."""
        self._carry_out(self.half.cancel(key))

    def on_received(self, key: AttemptKey, seq: int, ok: bool, checksum: int) -> None:
        """The transport is done with the slot of a `ReceiveKv`."""
        self._carry_out(self.half.on_received(key, seq, ok, checksum))

    @override
    def on_event(self, event: Event) -> bool:
        half = self.half
        commands: Sequence[ReceiverCommand]
        match event:
            case Scattered(key, seq, ok, intact):
                self._copies.pop((key, seq), None)
                commands = half.on_scattered(key, seq, ok, intact)
            case Reserved():
                commands = half.on_reserved(event.key, event.cached_tokens)
            case ReserveRefused():
                commands = half.on_reserve_refused(event.key, event.reason)
            case Ended():
                commands = half.on_ended(event.key, event.reason)
            case _:
                return False
        self._carry_out(commands)
        return True

    @override
    def _carry_out(self, commands: Sequence[ReceiverCommand]) -> None:
        io = self._io
        for command in commands:
            match command:
                case SendControl(message):
                    io.send(message)
                case ReceiveKv():
                    io.receive_kv(command)
                case ScatterChunk(key, seq, start, end, slot, nbytes, digest, group):
                    self._copies[key, seq] = nbytes
                    data = self.buffer(slot)[:nbytes]
                    io.post(Scatter(key, seq, start, end, data, self._peer, digest=digest, group=group))
                case ReserveBlocks(spec, is_prefix):
                    if io.on_offered(spec, is_prefix=is_prefix):
                        io.post(Reserve(spec, is_prefix))
                    else:
                        self._carry_out(self.half.on_reserve_refused(spec.key, HERE_ALREADY))
                case ExtendSequence(key, token_ids):
                    io.post(Extend(key, token_ids))
                case JoinSequence(key, token_id, logprobs):
                    io.post(Join(key, token_id, logprobs))
                case ReleaseSequence(key):
                    io.post(Release(key))
                case ReceiveOver():
                    io.on_over(command)
                case ClosePair(cause):
                    io.on_close_pair(cause)
