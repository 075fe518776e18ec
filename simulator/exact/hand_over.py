"""One pair of workers: the real `Sender` and `Receiver` of a hand-over, with their messages and bytes in virtual time.

    P's engine ──events──> Sender ──messages──> Receiver ──commands──> D's engine
                             └──bytes, in order, over the shared links──┘

The commands of the halves are carried out as in a worker (`pair_shell.py`), without sockets and threads. Chunks of one
pair travel one after the other, each message takes `Overheads.message_s`. No message is lost: heartbeats and leases are
left out; a worker that dies closes its pairs, and the attempts that it offered or was offered fail.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from disagg.engine.commands import Command
from disagg.engine.config import WorkerConfig
from disagg.engine.kv_transfer.commands import Cause, ReceiveKv, ReceiveOver, SendKv, SendOver
from disagg.engine.kv_transfer.pair_shell import ReceiverShell, SenderShell
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.sender import Sender
from disagg.engine.plan import Buffer
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.proto.handover import Failure, ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import ONE_RANK, SequenceSpec, WorkerInfo
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

    def on_offered(self, pair: Pair, spec: SequenceSpec, *, is_prefix: bool) -> bool:
        """An attempt, or a prefix, is offered. Returns False where this worker has it already, or did not ask for
        it."""
        ...

    def on_received_over(self, pair: Pair, over: ReceiveOver) -> None:
        """The hand-over of an attempt is decided."""
        ...


NO_MEMORY: Buffer = b""
"""The memory of every staging slot: no byte is copied."""


class _End:
    """What both ends of a pair have in common as its `PairIo`."""

    def __init__(self, worker: PairedWorker) -> None:
        self.post = worker.post

    def new_staging(self, nbytes: int) -> Buffer:
        """Return memory that is never read or written."""
        return NO_MEMORY

    def on_close_pair(self, cause: Cause) -> None:
        """Fail: no message is lost, so nothing can break the protocol."""
        raise AssertionError(f"a simulated pair is closed: {cause.detail}")


class _SenderEnd(_End):
    """P's end: the `SenderIo` of the pair's sender."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair.prefill)
        self.send = pair.send_to_receiver
        self.send_kv = pair.send_kv
        self.on_reserved = pair.prefill.on_reserved
        self.on_over = pair.prefill.on_sent_over


class _ReceiverEnd(_End):
    """D's end: the `ReceiverIo` of the pair's receiver."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair.decode)
        self.send = pair.send_to_sender
        self._pair = pair

    def receive_kv(self, chunk: ReceiveKv) -> None:
        """Do nothing: the receive is posted at once, and the bytes come in this order."""

    def on_offered(self, spec: SequenceSpec, *, is_prefix: bool) -> bool:
        """Ask D whether it takes the attempt, or the prefix."""
        return self._pair.decode.on_offered(self._pair, spec, is_prefix=is_prefix)

    def on_over(self, over: ReceiveOver) -> None:
        """Tell D that the hand-over of an attempt is decided."""
        self._pair.decode.on_received_over(self._pair, over)


class Pair:
    """The connection of one P with one D. Owner: the prefill worker."""

    def __init__(self, world: Surroundings, prefill: PrefillEnd, decode: DecodeEnd) -> None:
        self.prefill = prefill
        self.decode = decode
        self.is_closed = False
        self._world = world
        self._to_send: deque[SendKv] = deque()
        """The queued payloads; the first one is on its way."""
        now, ours, theirs = world.loop.now, prefill.config, decode.config
        groups = plan_pair(prefill.info.kv_layout, ONE_RANK, ONE_RANK).groups
        sender = Sender(
            now,
            groups=groups,
            max_chunk_bytes=min(ours.transfer.chunk_bytes, theirs.transfer.chunk_bytes),
            credits=theirs.transfer.num_slots,
            num_slots=ours.transfer.num_slots,
            announces_early=ours.transport != "nccl",
        )
        receiver = Receiver(
            now,
            groups=groups,
            max_chunk_bytes=theirs.transfer.chunk_bytes,
            credits=theirs.transfer.num_slots,
            num_slots=theirs.transfer.num_slots,
        )
        self.sender = SenderShell(sender, _SenderEnd(self))
        self.receiver = ReceiverShell(receiver, _ReceiverEnd(self))
        decode.on_paired(self)

    def holdings(self) -> dict[str, int]:
        """Counts of what both halves hold; all zero when idle."""
        return {**self.sender.half.holdings(), **self.receiver.half.holdings()}

    def offer(self, spec: SequenceSpec, move: int = 0, *, is_prefix: bool = False) -> None:
        """Offer an attempt to D: a prompt, a move of a sequence that decodes on P, or a prefix that D fetches."""
        self.sender.offer(spec, self._world.loop.now, move, is_prefix=is_prefix)

    # ------------------------------------------------------------ messages

    def send_to_receiver(self, message: SenderToReceiver) -> None:
        """Let a control message of P arrive at D after its time on the way."""
        self._world.loop.after(self._world.overheads.message_s, self._to_receiver, message)

    def send_to_sender(self, message: ReceiverToSender) -> None:
        """Let a control message of D arrive at P after its time on the way."""
        self._world.loop.after(self._world.overheads.message_s, self._to_sender, message)

    def _to_sender(self, message: ReceiverToSender) -> None:
        if not self.prefill.is_dead:
            self.sender.on_message(message, self._world.loop.now)
            self.prefill.flush()

    def _to_receiver(self, message: SenderToReceiver) -> None:
        if not self.decode.is_dead:
            self.receiver.on_message(message, self._world.loop.now)
            self.decode.flush()

    # ------------------------------------------------------------ bytes

    def send_kv(self, chunk: SendKv) -> None:
        """Send a payload after those before it."""
        self._to_send.append(chunk)
        if len(self._to_send) == 1:
            self._send_next()

    def _send_next(self) -> None:
        source, target = self.prefill.info.worker_id, self.decode.info.worker_id
        self._world.network.send(source, target, self._to_send[0].nbytes, self._on_sent)

    def _on_sent(self) -> None:
        if self.is_closed:
            return
        sent = self._to_send.popleft()
        if self._to_send:
            self._send_next()
        self.sender.on_sent(sent.key, sent.seq, ok=True)
        self.receiver.on_received(sent.key, sent.seq, ok=True, checksum=0)
        self.prefill.flush()
        self.decode.flush()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Close the pair because one of the two died; the other releases what it holds for the pair."""
        if self.is_closed:
            return
        self.is_closed = True
        now = self._world.loop.now
        if not self.prefill.is_dead:
            self.sender.close(now, Cause(Failure.PAIR_LOST, f"{self.decode.info.worker_id} is gone"))
            self.prefill.flush()
        if not self.decode.is_dead:
            self.receiver.close(now)
            self.decode.on_unpaired(self)
            self.decode.flush()
