"""One pair of workers: the real `Sender` and `Receiver` of a hand-over, with their messages and bytes in virtual time.

    P's engine ──events──> Sender ──messages──> Receiver ──commands──> D's engine
                             └──bytes, in order, over the shared links──┘

The parts of `prefill_worker/link.py` and `decode_worker/link.py` are written again here without sockets and threads:
chunks of a pair travel one after the other, each message takes `Overheads.message_s`. No message is lost, so heartbeats
and leases are left out; a worker that dies closes its pairs, and the attempts that it offered or was offered fail.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from disagg.engine.commands import (
    Add,
    Command,
    End,
    Extend,
    Gather,
    Gathered,
    Held,
    Hold,
    Join,
    Release,
    Reserve,
    Scatter,
    Unhold,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.kv_transfer.commands import (
    CANCELLED,
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
)
from disagg.engine.kv_transfer.pair_half import TransitionError
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.sender import Sender
from disagg.proto.handover import Failure, ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import EndReason, SequenceSpec, WorkerInfo
from disagg.simulator.world.surroundings import Surroundings


class PairedWorker(Protocol):
    """Either end of a pair, as the pair uses it."""

    is_dead: bool

    @property
    def info(self) -> WorkerInfo:
        """The info with which the worker registered."""
        ...

    @property
    def config(self) -> WorkerConfig:
        """The settings of the worker."""
        ...

    def post(self, command: Command) -> None:
        """Queue a command for the worker's engine."""
        ...

    def flush(self) -> None:
        """Send the contents of the worker's outbox."""
        ...


class PrefillEnd(PairedWorker, Protocol):
    """The prefill worker P of a pair."""

    def on_reserved(self, key: AttemptKey) -> None:
        """D has room for the attempt; its prefill begins."""
        ...

    def on_sent_over(self, over: SendOver) -> None:
        """The hand-over of an attempt is decided."""
        ...


class DecodeEnd(PairedWorker, Protocol):
    """The decode worker D of a pair."""

    def on_paired(self, pair: Pair) -> None:
        """A prefill worker formed a pair with this worker."""
        ...

    def on_unpaired(self, pair: Pair) -> None:
        """The prefill worker of the pair died."""
        ...

    def on_offered(self, pair: Pair, spec: SequenceSpec) -> bool:
        """An attempt is offered. Returns False where this worker has it already."""
        ...

    def on_received_over(self, pair: Pair, over: ReceiveOver) -> None:
        """The hand-over of an attempt is decided."""
        ...


class Pair:
    """The connection of one P with one D. Owner: the prefill worker."""

    def __init__(self, world: Surroundings, prefill: PrefillEnd, decode: DecodeEnd) -> None:
        self.prefill = prefill
        self.decode = decode
        self.is_closed = False
        self._world = world
        self._gathers: dict[tuple[AttemptKey, int], int] = {}
        """Bytes of each copy that P's engine has not made yet."""
        self._scatters: set[tuple[AttemptKey, int]] = set()
        self._to_send: deque[SendKv] = deque()
        """The queued payloads; the first one is on its way."""
        now, ours, theirs = world.loop.now, prefill.config, decode.config
        bytes_per_token = prefill.info.kv_layout.bytes_per_token
        self._sender = Sender(
            now,
            bytes_per_token=bytes_per_token,
            max_chunk_bytes=min(ours.transfer.chunk_bytes, theirs.transfer.chunk_bytes),
            credits=theirs.transfer.num_slots,
            num_slots=ours.transfer.num_slots,
            announces_early=ours.transport != "nccl",
        )
        self._receiver = Receiver(
            now,
            bytes_per_token=bytes_per_token,
            max_chunk_bytes=theirs.transfer.chunk_bytes,
            credits=theirs.transfer.num_slots,
            num_slots=theirs.transfer.num_slots,
        )
        decode.on_paired(self)

    def holdings(self) -> dict[str, int]:
        """Counts of what both halves hold; all zero when idle."""
        return {**self._sender.holdings(), **self._receiver.holdings()}

    # ------------------------------------------------------------ P's side

    def offer(self, spec: SequenceSpec, move: int = 0) -> None:
        """Offer an attempt to D: a prompt, or a move of a sequence that decodes on P."""
        try:
            commands = self._sender.offer(spec, self._world.loop.now, move)
        except TransitionError as error:  # a move that was given up a moment ago
            commands = [SendOver(spec.key, "failed", Cause(Failure.OTHER, str(error)), stays=move > 0)]
        self._carry_out_for_sender(commands)

    def cancel_sending(self, key: AttemptKey, cause: Cause = CANCELLED) -> None:
        """Give up sending the attempt."""
        self._carry_out_for_sender(self._sender.cancel(key, cause))

    def on_chunk_planned(self, key: AttemptKey, end: int) -> None:
        """P's engine has planned to compute the tokens before `end`."""
        self._carry_out_for_sender(self._sender.on_chunk_planned(key, end))

    def on_prefill_computed(self, key: AttemptKey, token_id: int) -> None:
        """P's engine computed the prompt."""
        self._carry_out_for_sender(self._sender.on_prefill_computed(key, token_id))

    def on_held(self, event: Held) -> None:
        """P's engine took a running sequence out of the batch."""
        self._carry_out_for_sender(self._sender.on_held(event.key, event.ok, event.token_ids, event.token_id))

    def on_gathered(self, event: Gathered) -> None:
        """P's engine filled a staging slot."""
        nbytes = self._gathers.pop((event.key, event.seq))
        self._carry_out_for_sender(self._sender.on_gathered(event.key, event.seq, event.ok, nbytes, event.checksum))

    def is_gathering(self, key: AttemptKey) -> bool:
        """Whether a copy of P's engine for this attempt is pending."""
        return any(gathering == key for gathering, _ in self._gathers)

    def _to_sender(self, message: ReceiverToSender) -> None:
        if not self.prefill.is_dead:
            self._carry_out_for_sender(self._sender.on_message(message, self._world.loop.now))
            self.prefill.flush()

    def _carry_out_for_sender(self, commands: list[SenderCommand]) -> None:
        for command in commands:
            match command:
                case SendControl(message):
                    self._world.loop.after(self._world.overheads.message_s, self._to_receiver, message)
                case StartPrefill(spec):
                    self.prefill.on_reserved(spec.key)
                    self.prefill.post(Add(spec, hold_after_prefill=True))
                case GatherChunk():
                    self._gathers[command.key, command.seq] = command.nbytes
                    self.prefill.post(Gather(command.key, command.seq, command.start, command.end, None))
                case SendKv():
                    self._to_send.append(command)
                    if len(self._to_send) == 1:
                        self._send_next()
                case ReleaseSequence(key):
                    self.prefill.post(Release(key))
                case HoldSequence(key, num_known):
                    self.prefill.post(Hold(key, num_known))
                case UnholdSequence(key):
                    self.prefill.post(Unhold(key))
                case EndSequence(key, moved, detail):
                    self.prefill.post(End(key, "moved" if moved else "failed", detail))
                case SendOver():
                    self.prefill.on_sent_over(command)
                case ClosePair(cause):
                    raise AssertionError(f"a simulated pair is closed: {cause.detail}")

    # ------------------------------------------------------------ bytes

    def _send_next(self) -> None:
        command = self._to_send[0]
        source, target = self.prefill.info.worker_id, self.decode.info.worker_id
        self._world.network.send(source, target, command.nbytes, self._on_sent)

    def _on_sent(self) -> None:
        if self.is_closed:
            return
        sent = self._to_send.popleft()
        if self._to_send:
            self._send_next()
        self._carry_out_for_sender(self._sender.on_sent(sent.key, sent.seq, True))
        self._carry_out_for_receiver(self._receiver.on_received(sent.key, sent.seq, True, 0))
        self.prefill.flush()
        self.decode.flush()

    # ------------------------------------------------------------ D's side

    def cancel_receiving(self, key: AttemptKey) -> None:
        """The gateway cancelled the attempt."""
        self._carry_out_for_receiver(self._receiver.cancel(key))

    def on_reserved(self, key: AttemptKey, cached_tokens: int) -> None:
        """D's engine counted the blocks."""
        self._carry_out_for_receiver(self._receiver.on_reserved(key, cached_tokens))

    def on_reserve_refused(self, key: AttemptKey, reason: str) -> None:
        """D's engine has no room."""
        self._carry_out_for_receiver(self._receiver.on_reserve_refused(key, reason))

    def on_scattered(self, key: AttemptKey, seq: int, ok: bool) -> None:
        """D's engine copied a chunk into its blocks, or dropped it."""
        self._scatters.discard((key, seq))
        self._carry_out_for_receiver(self._receiver.on_scattered(key, seq, ok))

    def on_ended(self, key: AttemptKey, reason: EndReason) -> None:
        """D's engine ended the sequence by itself."""
        self._carry_out_for_receiver(self._receiver.on_ended(key, reason))

    def is_scattering(self, key: AttemptKey) -> bool:
        """Whether a copy of D's engine for this attempt is pending."""
        return any(scattering == key for scattering, _ in self._scatters)

    def _to_receiver(self, message: SenderToReceiver) -> None:
        if not self.decode.is_dead:
            self._carry_out_for_receiver(self._receiver.on_message(message, self._world.loop.now))
            self.decode.flush()

    def _carry_out_for_receiver(self, commands: list[ReceiverCommand]) -> None:
        for command in commands:
            match command:
                case SendControl(message):
                    self._world.loop.after(self._world.overheads.message_s, self._to_sender, message)
                case ReserveBlocks(spec):
                    if self.decode.on_offered(self, spec):
                        self.decode.post(Reserve(spec))
                    else:
                        self.on_reserve_refused(spec.key, "this attempt is here already")
                case ReceiveKv():
                    """The receive is posted at once; the bytes come in this order."""
                case ScatterChunk():
                    self._scatters.add((command.key, command.seq))
                    self.decode.post(Scatter(command.key, command.seq, command.start, command.end, None))
                case ExtendSequence(key, token_ids):
                    self.decode.post(Extend(key, token_ids))
                case JoinSequence(key, token_id, logprobs):
                    self.decode.post(Join(key, token_id, logprobs))
                case ReleaseSequence(key):
                    self.decode.post(Release(key))
                case ReceiveOver():
                    self.decode.on_received_over(self, command)
                case ClosePair(cause):
                    raise AssertionError(f"a simulated pair is closed: {cause.detail}")

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Close the pair because one of the two died; the other releases what it holds for the pair."""
        if self.is_closed:
            return
        self.is_closed = True
        now = self._world.loop.now
        if not self.prefill.is_dead:
            cause = Cause(Failure.PAIR_LOST, f"{self.decode.info.worker_id} is gone")
            self._carry_out_for_sender(self._sender.close(now, cause))
            self.prefill.flush()
        if not self.decode.is_dead:
            self._carry_out_for_receiver(self._receiver.close(now))
            self.decode.on_unpaired(self)
            self.decode.flush()
