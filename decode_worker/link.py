"""The shell around one `Receiver`: the pair of this decode worker with one life of a prefill worker.

It begins when the prefill worker's stream said hello. The byte transport is formed beside the stream; a chunk that is
to be received before the transport stands waits for it, and so does all that is said after it (`clearance.py`). The
pair is lost with its stream, or when the transport cannot be formed; it is gone when the transport is closed, too.
Owner: the asyncio thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from disagg.decode_worker.clearance import Clearance
from disagg.decode_worker.service import Outgoing
from disagg.engine.commands import Join, Release, Reserve, Scatter
from disagg.engine.io.blocking import call_on_thread, open_on_thread
from disagg.engine.kv_transfer.effects import (
    ClosePair,
    JoinSequence,
    ReceiveBytes,
    ReceiveOver,
    ReceiverEffect,
    ReleaseSequence,
    ReserveBlocks,
    ScatterChunk,
    Send,
)
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.transports.transport import PairTransport
from disagg.engine.plan import Buffer
from disagg.engine.sharding.kv_routes import PairPlan
from disagg.engine.shell.role import RoleContext
from disagg.proto.handover import CloseWhenIdle, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec, WorkerInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """What a link tells the role."""

    on_offered: Callable[[PrefillLink, SequenceSpec], bool]
    """An attempt reached this worker. If true, its engine events belong to the link until `on_over`; if not, it has
    another owner here."""
    on_over: Callable[[PrefillLink, ReceiveOver], None]
    on_gone: Callable[[PrefillLink], None]
    """Nothing of the link is left but what the engine still copies."""


class PrefillLink:
    """One pair, from the decode side."""

    def __init__(
        self,
        context: RoleContext,
        sender: WorkerInfo,
        outgoing: Outgoing,
        plan: PairPlan,
        accept: Callable[[], PairTransport],
        callbacks: LinkCallbacks,
    ) -> None:
        """`plan` says what the ranks of both workers move; `accept` forms the transport, and blocks."""
        config = context.config
        self.sender = sender
        self._context = context
        self._outgoing = outgoing
        self._clearance = Clearance(context.failpoints.sending(outgoing.put))
        self._loop_thread = threading.get_ident()
        self.on_message = context.failpoints.receiving(self._on_message)
        """Takes a control message of the prefill worker."""
        self._callbacks = callbacks
        self._buffers: dict[int, Buffer] = {}
        self._scatters: set[tuple[AttemptKey, int]] = set()
        self._early: list[ReceiveBytes] = []
        self._transport: PairTransport | None = None
        self._lost = asyncio.Event()
        self._is_forming = True
        self.used_at = context.now()
        """When the last attempt was offered, or the pair was begun."""
        self._receiver = Receiver(
            context.now(),
            bytes_per_token=plan.bytes_per_token,
            max_chunk_bytes=config.chunk_bytes,
            credits=config.num_staging_slots,
            num_slots=config.num_staging_slots,
            lease_timeout_s=config.lease_timeout_s,
            heartbeat_s=config.heartbeat_s,
            transfer_timeout_s=config.transfer_timeout_s,
        )
        self._task = asyncio.create_task(self._run(accept), name=f"transport-{sender.worker_id}")
        self._task.add_done_callback(lambda _: callbacks.on_gone(self))

    # ------------------------------------------------------------ life

    async def _run(self, accept: Callable[[], PairTransport]) -> None:
        """Form the transport, and close it when the pair is lost."""
        try:
            transport = await open_on_thread(f"accept-{self.sender.worker_id}", accept)
        except Exception as error:
            # Also a fault of ours. The pair is the barrier: its attempts fail, and are placed anew.
            is_ours = not isinstance(error, OSError | RuntimeError)
            logger.warning("no transport to %s: %s", self.sender.worker_id, error, exc_info=is_ours)
            self._is_forming = False
            self.give_up()
            return
        self._is_forming = False
        self._transport = transport
        early, self._early = self._early, []
        for effect in early:
            self._start_receive(transport, effect)
        await self._lost.wait()
        await call_on_thread(f"close-{self.sender.worker_id}", transport.close)
        self._buffers.clear()  # now: to the garbage collector they weigh nothing, and a copy under way has its own hold

    def give_up(self) -> None:
        """End the stream from this side. Idempotent."""
        self._outgoing.close()
        self.on_lost()

    def on_lost(self) -> None:
        """The stream ended: nothing of the pair lives on, but what the engine or the transport still touches.
        Idempotent."""
        if self._lost.is_set():
            return
        self._lost.set()
        if self._is_forming:
            self._task.cancel()  # The peer will not come, or not for this stream; whatever comes is closed.
        self._carry_out(self._receiver.close(self._context.now()))
        self._clearance.drop()
        early, self._early = self._early, []
        for effect in early:
            self._on_received(effect, False, 0)
        self._context.flush()

    async def wait_gone(self) -> None:
        """Until nothing of a pair that was lost is left."""
        await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ inputs

    def _on_message(self, message: SenderToReceiver) -> None:
        self._carry_out(self._receiver.on_message(message, self._context.now()))
        self._context.flush()

    def on_reserved(self, key: AttemptKey, cached_tokens: int) -> None:
        """The engine counted the blocks."""
        self._carry_out(self._receiver.on_reserved(key, cached_tokens))

    def on_reserve_refused(self, key: AttemptKey, reason: str) -> None:
        """The engine has no room."""
        self._carry_out(self._receiver.on_reserve_refused(key, reason))

    def on_scattered(self, key: AttemptKey, seq: int, ok: bool) -> None:
        """The engine copied a chunk into its blocks, or dropped it."""
        self._scatters.discard((key, seq))
        self._carry_out(self._receiver.on_scattered(key, seq, ok))

    def on_ended(self, key: AttemptKey, reason: str) -> None:
        """The engine ended the sequence by itself."""
        self._carry_out(self._receiver.on_ended(key, reason))

    def cancel(self, key: AttemptKey) -> None:
        """The gateway gave the attempt up; it may not have been offered yet."""
        self._carry_out(self._receiver.cancel(key))

    def tick(self, now: float) -> None:
        """Called every heartbeat."""
        self._carry_out(self._receiver.tick(now))

    def is_scattering(self, key: AttemptKey) -> bool:
        """Whether the engine still owes `on_scattered` for this attempt."""
        return any(scattering == key for scattering, _ in self._scatters)

    def holdings(self) -> dict[str, int]:
        """Counts of what the pair holds; zero when idle."""
        return self._receiver.holdings()

    # ------------------------------------------------------------ effects

    def _carry_out(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self._clearance.say(message)  # type: ignore[arg-type]  # A receiver says what receivers say.
                case ReserveBlocks(spec):
                    self._reserve(spec)
                case ReceiveBytes():
                    self._receive(effect)
                case ScatterChunk():
                    self._scatters.add((effect.key, effect.seq))
                    data = self._buffer(effect.slot)[: effect.nbytes]
                    self._context.post(Scatter(effect.key, effect.seq, effect.start, effect.end, data, self.sender.tp))
                case JoinSequence(key, token_id, logprobs):
                    self._context.post(Join(key, token_id, logprobs))
                case ReleaseSequence(key):
                    self._context.post(Release(key))
                case ReceiveOver():
                    self._callbacks.on_over(self, effect)
                case ClosePair(reason):
                    logger.warning("closing the pair with %s: %s", self.sender.worker_id, reason)
                    self.give_up()

    @property
    def is_idle(self) -> bool:
        """Whether no attempt uses the pair. Its prefill worker may know of one that is on its way."""
        return not self._scatters and not any(self.holdings().values())

    def ask_to_close(self) -> None:
        """Have the prefill worker close the pair, unless it is about to use it."""
        self._outgoing.put(CloseWhenIdle())

    def _reserve(self, spec: SequenceSpec) -> None:
        self.used_at = self._context.now()
        if self._callbacks.on_offered(self, spec):
            self._context.post(Reserve(spec))
        else:
            self.on_reserve_refused(spec.key, "this attempt is here already")

    def _receive(self, effect: ReceiveBytes) -> None:
        """Start a receive, or keep it until the transport stands. `ClearToSend`, which comes next, waits for it."""
        self._clearance.wait_for((effect.key, effect.seq))
        if self._transport is None:
            self._early.append(effect)
        else:
            self._start_receive(self._transport, effect)

    def _start_receive(self, transport: PairTransport, effect: ReceiveBytes) -> None:
        chunk = effect.key, effect.seq

        def posted() -> None:
            if threading.get_ident() == self._loop_thread:  # by most transports, and P need not wait for a turn
                self._clearance.posted(chunk)
            else:
                self._context.call_soon(self._clearance.posted, chunk)

        def done(ok: bool, error: str, checksum: int) -> None:
            self._context.call_soon(self._on_received, effect, ok, checksum)

        transport.recv(self._buffer(effect.slot), effect.nbytes, done, posted)

    def _on_received(self, effect: ReceiveBytes, ok: bool, checksum: int) -> None:
        self._carry_out(self._receiver.on_received(effect.key, effect.seq, ok, checksum))

    def _buffer(self, slot: int) -> Buffer:
        """The memory of a slot, allocated at its first use."""
        if slot not in self._buffers:
            self._buffers[slot] = self._context.new_staging(self._context.config.chunk_bytes)
        return self._buffers[slot]
