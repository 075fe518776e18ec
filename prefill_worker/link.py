"""The stream and the transport of one `Sender`: the pair of a prefill worker with one incarnation of a decode worker.

    connecting   control stream, hello, then the byte transport; attempts wait, at most until their deadline
    open         the sender decides; its `SenderShell` has its commands carried out here (`SenderIo`)
    closed       every attempt was reported; the role makes a new link for the next attempt
    gone         stream, transport and task have ended, too

Owner: the asyncio thread. The engine answers through `on_*`, the transport through `RoleContext.call_soon`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from typing_extensions import override

from disagg.engine.commands import Ended, Event, Release
from disagg.engine.io.blocking import call_on_thread, open_on_thread
from disagg.engine.kv_transfer.commands import (
    CANCELLED,
    DEADLINE,
    Cause,
    SendKv,
    SendOutcome,
    SendOver,
    ended_on_prefill,
)
from disagg.engine.kv_transfer.pair_shell import SenderShell
from disagg.engine.kv_transfer.sender import Sender
from disagg.engine.kv_transfer.transport import Checksum, PairTransport
from disagg.engine.parallel.transport import PairEnd, form_pair
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.shell.pair_link import PairLink
from disagg.engine.shell.role import RoleContext
from disagg.prefill_worker.service import PairError, PairStream
from disagg.proto.handover import CloseWhenIdle, Failure, PairWelcome, ReceiverToSender
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import PeerRef, SequenceSpec

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 20.0


class _Waiting(NamedTuple):
    """An attempt that waits for the pair to be formed."""

    spec: SequenceSpec
    deadline: float | None
    since: float
    timeout_s: float | None
    """Seconds that it may wait for the pair; None for as long as the pair takes."""
    move: int = 0
    """Number of the move of a running sequence; 0 for a prompt."""
    is_prefix: bool = False
    """Whether it is a prefix that the other worker fetches."""

    def is_too_long(self, now: float) -> bool:
        return self.timeout_s is not None and now - self.since >= self.timeout_s

    def is_expired(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def spec_now(self, now: float) -> SequenceSpec:
        """The spec with its remaining timeout and the progress towards its targets."""
        spec, targets = self.spec, self.spec.targets
        if self.deadline is not None:
            spec = msgspec.structs.replace(spec, timeout_s=self.deadline - now)
        if targets is not None:
            spec = msgspec.structs.replace(spec, targets=targets.after(now - self.since))
        return spec


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """Calls from a link to its role."""

    on_reserved: Callable[[AttemptKey], None]
    """The decode worker has room for the attempt, and its prefill begins."""
    on_over: Callable[[SendOver], None]
    """Called once for each offered attempt, when its hand-over is decided."""
    on_closed: Callable[[DecodeLink], None]
    """Called when the link takes no more attempts. Idempotent."""
    on_gone: Callable[[DecodeLink], None]
    """Called when the link holds nothing any more, except what the engine still copies."""


class DecodeLink(PairLink):
    """One pair, on the prefill side."""

    _shell: SenderShell | None

    def __init__(self, context: RoleContext, peer: PeerRef, callbacks: LinkCallbacks) -> None:
        super().__init__(context, peer.worker_id)
        self.peer = peer
        self._callbacks = callbacks
        self._waiting: dict[AttemptKey, _Waiting] = {}
        self._stream = PairStream(peer, context.cluster_secret)
        self.send = context.parts.control_out(self._stream.send)
        """Writes a message to the control stream."""
        self._take = context.parts.control_in(self._on_message)
        self._task: asyncio.Task[None] | None = None
        self._is_shutting_down = False
        self._is_retired = False

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        """Form the pair in the background."""
        self._task = asyncio.create_task(self._run(), name=f"pair-{self.peer.worker_id}")
        self._task.add_done_callback(lambda _: self._callbacks.on_gone(self))

    def retire(self, why: str) -> None:
        """Close an idle pair in the background; the role makes a new link when it needs one."""
        idle_s = self._context.now() - self.used_at
        logger.info("pair with %s: idle for %.0f s, closing it: %s", self.peer.worker_id, idle_s, why)
        self._is_retired = True
        self._callbacks.on_closed(self)
        if self._shell is not None:
            self._stream.abandon()  # a cancelled reader would keep call and socket until garbage collection
        elif self._task is not None and not self._is_shutting_down:
            self._task.cancel()

    async def close(self) -> None:
        """Abort all attempts and close the pair; returns when its task has ended."""
        if self._task is None:
            return
        if not self._is_shutting_down:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        peer_id, cause = self.peer.worker_id, Cause(Failure.PAIR_CLOSED, "the link was closed")
        try:
            welcome = await self._stream.open(self._context.info, CONNECT_TIMEOUT_S, digests=self._context.digests)
            await self._open(welcome)
            async for message in self._stream.messages():
                self._take(message)
            cause = self._lost("it ended the control stream")
        except (PairError, OSError, RuntimeError, ValueError) as error:
            cause = self._lost(str(error))
            if not self._is_retired:
                logger.warning("%s; its attempts fail, the next one forms a new pair", cause.detail)
        except Exception:
            # A bug here. It costs this pair: its attempts fail, and are placed again.
            cause = self._lost("internal error in worker")
            logger.exception("pair with %s: internal error in worker; closing the pair, its attempts fail", peer_id)
        finally:
            self._is_shutting_down = True
            await self._shut_down(cause)

    def _lost(self, why: str) -> Cause:
        return Cause(Failure.PAIR_LOST, f"pair with {self.peer.worker_id}: {why}")

    async def _open(self, welcome: PairWelcome) -> None:
        config, layout = self._context.config, self._context.info.kv_layout
        connect = self._context.parts.make_connector(welcome.transport, config.host, self._context.cluster_secret)
        end = PairEnd(
            plan=plan_pair(layout, self._context.info.shape, welcome.shape),
            side="sender",
            pair_name=welcome.pair_name,
            transport=welcome.transport,
            store_address=welcome.store_address,
            checksum=Checksum.of_secret(self._context.cluster_secret),
        )
        self._transport = await self._formed(
            lambda: form_pair(end, lambda name: connect(name, end.store_address), self._context.followers)
        )
        now = self._context.now()
        half = Sender(
            now,
            groups=end.plan.groups,
            max_chunk_bytes=min(config.transfer.chunk_bytes, welcome.max_chunk_bytes),
            credits=welcome.credits,
            num_slots=config.transfer.num_slots,
            announces_early=welcome.transport != "nccl",  # whose receives keep the GPU busy from when they are posted
            lease_timeout_s=config.transfer.lease_timeout_s,
            heartbeat_s=config.transfer.heartbeat_s,
            transfer_timeout_s=config.transfer.timeout_s,
        )
        self._shell = SenderShell(half, self, welcome.shape, digests=welcome.digests)
        logger.info("pair with %s: formed over %s", self.peer.worker_id, self._transport.name)
        self._expire_waiting(now)
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            self.offer(each.spec_now(now), None, each.move, is_prefix=each.is_prefix)
        self._context.flush()

    async def _formed(self, form: Callable[[], PairTransport]) -> PairTransport:
        """The byte transport, unless D ends the stream first: `form` would wait for D as long as a set-up may take."""
        forming = asyncio.create_task(open_on_thread(f"connect-{self.peer.worker_id}", form))
        leaving = asyncio.create_task(self._stream.ended())
        try:
            await asyncio.wait((forming, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not forming.done():
                raise PairError("it ended the control stream while the pair was formed")
            return forming.result()
        except BaseException:
            forming.cancel()
            await asyncio.wait((forming,))
            if not forming.cancelled() and forming.exception() is None:
                await call_on_thread(f"close-{self.peer.worker_id}", forming.result().close)
            raise
        finally:
            leaving.cancel()
            await asyncio.wait((leaving,))

    async def _shut_down(self, cause: Cause) -> None:
        self._callbacks.on_closed(self)
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            self._give_up_waiting(each, "refused", cause)
        if self._shell is not None:
            self._shell.close(self._context.now(), cause)
        self._context.flush()
        await self._stream.close()
        await self._close_transport()

    # ------------------------------------------------------------ inputs

    def _on_message(self, message: ReceiverToSender) -> None:
        assert self._shell is not None
        if isinstance(message, CloseWhenIdle):
            if self.is_idle:
                self.retire("the decode worker has too many")
            return
        self._shell.on_message(message, self._context.now())
        self._context.flush()

    def offer(
        self, spec: SequenceSpec, pair_timeout_s: float | None, move: int = 0, *, is_prefix: bool = False
    ) -> None:
        """Offer an attempt to the decode worker, now or when the pair is formed; if that takes longer than
        `pair_timeout_s` the attempt is refused, while the pair is still being formed. `move`: the number of the move of
        a sequence that decodes here; 0 for a prompt. `is_prefix`: it is a prefix that the other worker fetches, which
        the engine holds and which is released in any case."""
        self.used_at = now = self._context.now()
        if self._shell is None:
            deadline = None if spec.timeout_s is None else now + spec.timeout_s
            self._waiting[spec.key] = _Waiting(spec, deadline, now, pair_timeout_s, move, is_prefix)
            return
        self._shell.offer(spec, now, move, is_prefix=is_prefix)

    def cancel(self, key: AttemptKey, cause: Cause = CANCELLED) -> None:
        """Abort an attempt; unknown ones are ignored."""
        if (waiting := self._waiting.pop(key, None)) is not None:
            self._give_up_waiting(waiting, "cancelled", cause)
        elif self._shell is not None:
            self._shell.cancel(key, cause)

    def on_event(self, event: Event) -> None:
        """Pass an event of the engine to the sender. An attempt that waits for the pair can only end."""
        if self._shell is not None:
            self._shell.on_event(event)
        elif isinstance(event, Ended):
            self.cancel(event.key, ended_on_prefill(event.reason))

    def tick(self, now: float) -> None:
        """Check leases and deadlines of the pair; called at every heartbeat."""
        self._expire_waiting(now)
        if self._shell is not None:
            self._shell.tick(now)

    def _expire_waiting(self, now: float) -> None:
        for key in [key for key, waiting in self._waiting.items() if waiting.is_expired(now)]:
            self.cancel(key, DEADLINE)
        for key in [key for key, waiting in self._waiting.items() if waiting.is_too_long(now)]:
            waiting = self._waiting.pop(key)
            cause = self._lost(f"not formed after {now - waiting.since:.1f} s")
            self._give_up_waiting(waiting, "refused", cause)

    def _give_up_waiting(self, waiting: _Waiting, outcome: SendOutcome, cause: Cause) -> None:
        key = waiting.spec.key
        if waiting.is_prefix:
            self.post(Release(key))
        self._callbacks.on_over(SendOver(key, outcome, cause, stays=waiting.move > 0))

    @override
    def holdings(self) -> dict[str, int]:
        return {**super().holdings(), "waiting_for_pair": len(self._waiting)}

    # ------------------------------------------------------------ SenderIo

    def send_kv(self, chunk: SendKv) -> None:
        """Send a chunk over the transport."""
        transport, shell = self._transport, self._shell
        assert transport is not None
        assert shell is not None

        def done(ok: bool, error: str) -> None:
            self._context.call_soon(shell.on_sent, chunk.key, chunk.seq, ok)

        transport.of_group(chunk.group).send(shell.buffer(chunk.slot), chunk.nbytes, done)

    def on_reserved(self, key: AttemptKey) -> None:
        """Tell the role that the decode worker has room for the attempt."""
        self._callbacks.on_reserved(key)

    def on_over(self, over: SendOver) -> None:
        """Tell the role that the hand-over of an attempt is decided."""
        self._callbacks.on_over(over)

    def on_close_pair(self, cause: Cause) -> None:
        """End the control stream; the task of the link closes the transport."""
        logger.warning(
            "pair with %s: %s; its attempts fail, the next one forms a new pair", self.peer.worker_id, cause.detail
        )
        self._callbacks.on_closed(self)
        self._stream.abandon()
