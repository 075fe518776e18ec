"""Prefixes that this worker fetches: the call to the worker that has one, and what becomes of it.

    engine FetchOrdered ──call──> refused, or an error: over
                            └── granted ──> the source offers the prefix on a pair ──> committed or given up: over

Each order ends with one `FetchOver`, behind everything that the hand-over posted to the engine. An order that nobody
waits for any more (`FetchGivenUp`) ends at once, or with its hand-over where that has begun. Owner: the asyncio thread.
"""

from __future__ import annotations

import asyncio
import logging

from disagg.decode_worker.service import FetchChannel, FetchError
from disagg.engine.commands import FetchOrdered, FetchOver
from disagg.engine.shell.role import RoleContext
from disagg.proto.handover import Fetch, FetchRefused
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import FetchOutcome, PeerRef

logger = logging.getLogger(__name__)


class Fetches:
    """Owner: the decode role of a worker that fetches."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._calls: dict[AttemptKey, asyncio.Task[None]] = {}
        """The call of each order that is not over, also when it was answered."""
        self._channels: dict[PeerRef, FetchChannel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def order(self, order: FetchOrdered) -> None:
        """Call the source."""
        self._calls[order.key] = asyncio.create_task(self._ask(order), name=f"fetch-{order.key.request_id}")

    def over(self, key: AttemptKey, outcome: FetchOutcome, detail: str = "") -> None:
        """An order is over; nothing of it is held here."""
        self._calls.pop(key).cancel()
        self._context.post(FetchOver(key, outcome, detail))

    def tick(self, now: float) -> None:
        """Close channels that were not used for long."""
        idle_s = self._context.config.pair_idle_s
        for peer in [peer for peer, channel in self._channels.items() if now - channel.used_at >= idle_s]:
            self._drop(peer)

    async def stop(self) -> None:
        """End all calls and channels."""
        for key in list(self._calls):
            self.over(key, "failed", "this worker stops")
        for peer in list(self._channels):
            self._drop(peer)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _ask(self, order: FetchOrdered) -> None:
        info, peer = self._context.info, order.peer
        fetch = Fetch(
            spec=order.spec,
            from_token=order.from_token,
            needy=PeerRef(worker_id=info.worker_id, incarnation=info.incarnation, address=info.address),
            source_incarnation=peer.incarnation,
            fingerprint=info.fingerprint,
            kv_layout=info.kv_layout,
        )
        try:
            answer = await self._channel_to(peer).ask(fetch, order.spec.timeout_s)
        except FetchError as error:
            if error.is_late:
                self.over(order.key, "late", str(error))
                return
            self._drop(peer)
            logger.warning("%s: no answer from %s: %s; its prompt is computed", order.key, peer.worker_id, error)
            self.over(order.key, "failed", str(error))
        else:
            if isinstance(answer, FetchRefused):
                logger.debug("%s refused %s: %s", peer.worker_id, order.key, answer.reason)
                self.over(order.key, "refused", answer.reason)

    def _channel_to(self, peer: PeerRef) -> FetchChannel:
        channel = self._channels.get(peer)
        if channel is None:
            most = self._context.config.transfer.max_pairs
            if len(self._channels) >= most:
                self._drop(min(self._channels, key=lambda each: self._channels[each].used_at))
            channel = self._channels[peer] = FetchChannel(peer, self._context.cluster_secret)
        channel.used_at = self._context.now()
        return channel

    def _drop(self, peer: PeerRef) -> None:
        if (channel := self._channels.pop(peer, None)) is not None:
            closing = asyncio.create_task(channel.close(), name=f"close-{peer.worker_id}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
