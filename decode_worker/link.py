"""The stream and the transport of one `Receiver`: the pair of a decode worker with one incarnation of a prefill worker.

It begins with the hello of the prefill worker's stream. The byte transport is formed beside the stream; a chunk that is
to be received before the transport stands waits for it, and so does every message after it
(`engine/kv_transfer/ordered_sender.py`). The pair is lost with its stream, or when the transport cannot be formed; it
is gone when the transport is closed, too. Owner: the asyncio thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from disagg.decode_worker.service import Outgoing
from disagg.engine.commands import Event
from disagg.engine.io.blocking import open_on_thread
from disagg.engine.kv_transfer.commands import Cause, ReceiveKv, ReceiveOver
from disagg.engine.kv_transfer.ordered_sender import OrderedSender
from disagg.engine.kv_transfer.pair_shell import ReceiverShell
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.transport import PairTransport
from disagg.engine.sharding.kv_routes import PairPlan
from disagg.engine.shell.pair_link import PairLink
from disagg.engine.shell.role import RoleContext
from disagg.proto.handover import CloseWhenIdle, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec, WorkerInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """Calls from a link to its role."""

    on_offered: Callable[[PrefillLink, SequenceSpec, bool], bool]
    """An attempt was offered, or (true) a prefix. If true, its engine events belong to the link until `on_over`; if
    false, this worker has the attempt already, from elsewhere, or did not ask for the prefix."""
    on_over: Callable[[PrefillLink, ReceiveOver], None]
    on_gone: Callable[[PrefillLink], None]
    """Called when the link holds nothing any more, except what the engine still copies."""


class PrefillLink(PairLink):
    """One pair, on the decode side."""

    _shell: ReceiverShell

    def __init__(
        self,
        context: RoleContext,
        peer: WorkerInfo,
        outgoing: Outgoing,
        plan: PairPlan,
        accept: Callable[[], PairTransport],
        callbacks: LinkCallbacks,
        *,
        digests: bool = False,
    ) -> None:
        """`plan`: what the ranks of both workers move; `accept` forms the transport, and blocks; `digests`: see
        `PairWelcome.digests`."""
        super().__init__(context, peer.worker_id)
        config = context.config
        self.peer = peer
        self._outgoing = outgoing
        self._ordered = OrderedSender(context.parts.control_out(outgoing.put))
        self.send = self._ordered.send
        """Writes a message to the control stream, after the receives before it are posted."""
        self._loop_thread = threading.get_ident()
        self.on_message = context.parts.control_in(self._on_message)
        """Takes a control message of the prefill worker."""
        self._callbacks = callbacks
        self._digests = digests
        self._early: list[ReceiveKv] = []
        """Receives that are posted once the transport stands."""
        self._lost = asyncio.Event()
        self._is_forming = True
        half = Receiver(
            context.now(),
            groups=plan.groups,
            max_chunk_bytes=config.transfer.chunk_bytes,
            credits=config.transfer.num_slots,
            num_slots=config.transfer.num_slots,
            digests=digests,
            lease_timeout_s=config.transfer.lease_timeout_s,
            heartbeat_s=config.transfer.heartbeat_s,
            transfer_timeout_s=config.transfer.timeout_s,
        )
        self._shell = ReceiverShell(half, self, peer.shape)
        self._task = asyncio.create_task(self._run(accept), name=f"transport-{peer.worker_id}")
        self._task.add_done_callback(lambda _: callbacks.on_gone(self))

    # ------------------------------------------------------------ start and end

    async def _run(self, accept: Callable[[], PairTransport]) -> None:
        """Form the transport, and close it after the pair is lost."""
        try:
            transport = await open_on_thread(f"accept-{self.peer.worker_id}", accept)
        except Exception as error:
            # Also for a bug here. It costs this pair: its attempts fail, and are placed again.
            is_bug = not isinstance(error, OSError | RuntimeError)
            logger.warning(
                "pair with %s: no byte transport, closing it: %s", self.peer.worker_id, error, exc_info=is_bug
            )
            self._is_forming = False
            self.give_up()
            return
        self._is_forming = False
        if self._digests:
            transport.skip_checksums()
        self._transport = transport
        early, self._early = self._early, []
        for chunk in early:
            self._start_receive(transport, chunk)
        await self._lost.wait()
        await self._close_transport()

    def give_up(self) -> None:
        """End the stream from this side. Idempotent."""
        self._outgoing.close()
        self.on_lost()

    def on_lost(self) -> None:
        """The stream ended: end all attempts; memory that the engine or the transport still use is freed when they are
        done. Idempotent."""
        if self._lost.is_set():
            return
        self._lost.set()
        if self._is_forming:
            self._task.cancel()  # A transport that is formed nevertheless is closed.
        self._shell.close(self._context.now())
        self._ordered.drop()
        early, self._early = self._early, []
        for chunk in early:
            self._shell.on_received(chunk.key, chunk.seq, ok=False, checksum=0)
        self._context.flush()

    async def wait_gone(self) -> None:
        """Wait until a pair that was lost holds nothing any more."""
        await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ inputs

    def _on_message(self, message: SenderToReceiver) -> None:
        self._shell.on_message(message, self._context.now())
        self._context.flush()

    def on_event(self, event: Event) -> None:
        """Pass an event of the engine to the receiver."""
        self._shell.on_event(event)

    def cancel(self, key: AttemptKey) -> None:
        """Cancel an attempt for the gateway; it may not have been offered yet."""
        self._shell.cancel(key)

    def tick(self, now: float) -> None:
        """Check leases and deadlines of the pair; called at every heartbeat."""
        self._shell.tick(now)

    def close_when_idle(self) -> None:
        """Ask the prefill worker to close the pair, unless an attempt uses it by then."""
        self._outgoing.put(CloseWhenIdle())

    # ------------------------------------------------------------ ReceiverIo

    def on_offered(self, spec: SequenceSpec, *, is_prefix: bool) -> bool:
        """Ask the role whether it takes the attempt."""
        self.used_at = self._context.now()
        return self._callbacks.on_offered(self, spec, is_prefix)

    def on_over(self, over: ReceiveOver) -> None:
        """Tell the role that the hand-over of an attempt is decided."""
        self._callbacks.on_over(self, over)

    def on_close_pair(self, cause: Cause) -> None:
        """End the stream, and with it the pair."""
        logger.warning("pair with %s: %s; its attempts fail", self.peer.worker_id, cause.detail)
        self.give_up()

    def receive_kv(self, chunk: ReceiveKv) -> None:
        """Start a receive, or keep it until the transport stands. `ClearToSend`, which follows it, waits for the
        receive."""
        self._ordered.wait_for((chunk.key, chunk.seq))
        if self._transport is None:
            self._early.append(chunk)
        else:
            self._start_receive(self._transport, chunk)

    def _start_receive(self, transport: PairTransport, chunk: ReceiveKv) -> None:
        number = chunk.key, chunk.seq

        def posted() -> None:
            # At once where the transport calls on this thread, as most do: P then waits for no turn of the event loop.
            if threading.get_ident() == self._loop_thread:
                self._ordered.posted(number)
            else:
                self._context.call_soon(self._ordered.posted, number)

        def done(ok: bool, error: str, checksum: int) -> None:
            self._context.call_soon(self._shell.on_received, chunk.key, chunk.seq, ok, checksum)

        of_group = transport.of_group(chunk.group)
        of_group.recv(self._shell.buffer(chunk.slot), chunk.nbytes, done, posted)
