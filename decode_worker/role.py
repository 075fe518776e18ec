"""The decode role: takes sequences over from prefill workers, or runs them alone (local prefill, colocated mode), and
streams.

    hand-over   Offer -> engine Reserve -> chunks scattered -> Commit -> engine Join -> tokens
    alone       dispatch without a decode worker -> engine Add -> tokens

    prefix      engine FetchOrdered -> call to its source (`fetches.py`) -> Offer -> engine Reserve -> chunks scattered
                -> Commit -> engine Release, FetchOver

Workers that only compute prompts have this role where they fetch prefixes, and take no dispatches by it.

It hosts the rendezvous of the byte transport. Tokens reach the gateway through the worker's outbox; the role adds the
hand-over and the end.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from disagg.decode_worker.fetches import Fetches
from disagg.decode_worker.link import LinkCallbacks, PrefillLink
from disagg.decode_worker.service import Outgoing, Pair, TransferService
from disagg.engine.commands import (
    Add,
    Ended,
    Event,
    FetchGivenUp,
    FetchOrdered,
    Joined,
    PrefillComputed,
    Release,
    Scattered,
)
from disagg.engine.kv_transfer.commands import ReceiveOver
from disagg.engine.kv_transfer.prefixes import outcome_of
from disagg.engine.kv_transfer.transport import Checksum, Rendezvous
from disagg.engine.parallel.transport import PairEnd, form_pair
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.shell.pair_link import LinkTable, surplus_links, total_holdings
from disagg.engine.shell.role import RoleContext
from disagg.proto.handover import PairHello, PairRefused, PairWelcome
from disagg.proto.ids import AttemptKey, GatewayId
from disagg.proto.messages import Dispatch, HandedOver, Migrate, PeerRef, RoleName, SequenceSpec, TransferCount

logger = logging.getLogger(__name__)


class DecodeRole:
    """Owner of the links to prefill workers. Asyncio thread only."""

    name: RoleName = "decode"

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._links: set[PrefillLink] = set()
        self._link_of = LinkTable[PrefillLink]()
        self._gateway_of: dict[AttemptKey, GatewayId] = {}
        """Gateway of every attempt of this role, from offer or dispatch to its end."""
        self._fetches = Fetches(context) if context.config.fetch else None
        """What this worker fetches; None where it does not."""
        self._rendezvous: Rendezvous | None = None

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Open the rendezvous of the byte transport."""
        context = self._context
        self._rendezvous = context.parts.make_rendezvous(
            context.config.transport, context.config.host, context.cluster_secret
        )

    async def stop(self) -> None:
        """Close all links, and the rendezvous, which ends every wait there for a peer."""
        if self._fetches is not None:
            await self._fetches.stop()
        rendezvous, self._rendezvous = self._rendezvous, None
        links = list(self._links)
        for link in links:
            link.give_up()
        if rendezvous is not None:
            rendezvous.close()
        await asyncio.gather(*(link.wait_gone() for link in links))

    def handlers(self) -> list[object]:
        """The service that prefill workers connect to."""
        return [TransferService(self._accept).handler()]

    def _accept(self, hello: PairHello, outgoing: Outgoing) -> tuple[PairWelcome, Pair] | PairRefused:
        if self._rendezvous is None:
            return PairRefused(reason="the decode worker is starting or stopping")
        if reason := self._why_not(hello):
            logger.warning("pair with %s: refused: %s", hello.info.worker_id, reason)
            return PairRefused(reason=reason)
        context, rendezvous = self._context, self._rendezvous
        info, config = context.info, context.config
        plan = plan_pair(info.kv_layout, hello.info.shape, info.shape)
        pair_name = f"{hello.info.incarnation}-{info.incarnation}-{uuid.uuid4().hex[:8]}"
        callbacks = LinkCallbacks(self._on_offered, self._on_over, self._links.discard)
        end = PairEnd(
            plan=plan,
            side="receiver",
            pair_name=pair_name,
            transport=config.transport,
            store_address=rendezvous.address,
            checksum=Checksum.of_secret(context.cluster_secret),
        )
        link = PrefillLink(
            context,
            hello.info,
            outgoing,
            plan,
            lambda: form_pair(end, rendezvous.accept, context.followers),
            callbacks,
            digests=hello.digests and context.digests,
        )
        self._make_room()
        self._links.add(link)
        welcome = PairWelcome(
            incarnation=info.incarnation,
            pair_name=pair_name,
            transport=config.transport,
            store_address=rendezvous.address,
            shape=info.shape,
            credits=config.transfer.num_slots,
            max_chunk_bytes=config.transfer.chunk_bytes,
            digests=hello.digests and context.digests,
        )
        return welcome, link

    def _make_room(self) -> None:
        """Ask for idle pairs to be closed, the least recently used first, to make room for one more."""
        most = self._context.config.transfer.max_pairs
        for link in surplus_links(self._links, most):
            idle_s = self._context.now() - link.used_at
            logger.info(
                "pair with %s: idle for %.0f s, having it closed: this worker keeps %d",
                link.peer.worker_id,
                idle_s,
                most,
            )
            link.close_when_idle()

    def _why_not(self, hello: PairHello) -> str:
        """Reason why this pair must not be formed; empty if it may be."""
        ours, theirs = self._context.info, hello.info
        if hello.receiver_incarnation != ours.incarnation:
            return f"{ours.worker_id} is incarnation {ours.incarnation}, not {hello.receiver_incarnation}"
        if theirs.fingerprint != ours.fingerprint:
            return f"model fingerprints differ: {theirs.fingerprint} and {ours.fingerprint}"
        if theirs.kv_layout != ours.kv_layout:
            return f"KV layouts differ: {theirs.kv_layout.unlike(ours.kv_layout)}"
        try:
            plan_pair(ours.kv_layout, theirs.shape, ours.shape)
        except ValueError as error:
            return str(error)
        return ""

    # ------------------------------------------------------------ dispatches

    def takes(self, dispatch: Dispatch) -> bool:
        """Whether the dispatch names no decode worker, so that this worker runs it alone, and wants an answer."""
        is_alone = dispatch.decode_peer is None and dispatch.spec.pooling is None
        return is_alone and "decode" in self._context.config.roles

    def dispatch(self, dispatch: Dispatch) -> None:
        """Run an attempt alone, prompt and answer."""
        spec = dispatch.spec
        if spec.key in self._gateway_of:
            logger.warning("dropped a second dispatch of %s by gateway %s", spec.key, spec.gateway_id)
            return
        self._gateway_of[spec.key] = spec.gateway_id
        self._context.post(Add(spec))

    def fetch(self, order: FetchOrdered) -> None:
        """Get the KV of a prefix from another worker."""
        assert self._fetches is not None, "the engine orders no fetch of a worker that does not fetch"
        self._fetches.order(order)

    def connect(self, peer: PeerRef) -> None:
        """Nothing to do: prefill workers connect to it."""

    def migrate(self, message: Migrate, gateway_id: GatewayId) -> None:
        """Nothing to do: the prefill role sends."""

    def cancel_migration(self, key: AttemptKey, gateway_id: GatewayId) -> None:
        """Nothing to do: the prefill role moves attempts."""

    def cancel(self, key: AttemptKey) -> None:
        """Cancel an attempt. If it is unknown its offer may still be on its way, so every link remembers the cancel."""
        if (link := self._link_of.get(key)) is not None:
            link.cancel(key)
        elif key in self._gateway_of:
            self._context.post(Release(key))
        elif "decode" in self._context.config.roles:
            for each in self._links:
                each.cancel(key)
        self._gateway_of.pop(key, None)

    # ------------------------------------------------------------ engine events

    def owns(self, key: AttemptKey) -> bool:
        """Whether the attempt is here, if only for data that is still being copied."""
        return key in self._gateway_of or key in self._link_of or self._fetches_key(key)

    def _fetches_key(self, key: AttemptKey) -> bool:
        return self._fetches is not None and key in self._fetches

    def on_event(self, event: Event) -> None:
        """Pass an event to its link, and to the gateway if it concerns the gateway."""
        link = self._link_of.get(event.key)
        match event:
            case PrefillComputed():
                outbox = self._context.outbox
                outbox.prefill_done(event.gateway_id, event.key, event.cached_tokens, queue_s=event.queue_s)
            case Ended():
                if (gateway_id := self._gateway_of.pop(event.key, None)) is not None:
                    self._context.outbox.end(
                        gateway_id,
                        event.key,
                        event.reason,
                        event.detail,
                        event.cached_tokens,
                        event.queue_s,
                        drafted_tokens=event.num_drafted,
                        accepted_tokens=event.num_accepted,
                    )
            case FetchGivenUp():
                self._give_up_fetch(event.key)
            case Joined():
                """The hand-over was committed when the receiver ordered the join."""
            case _ if link is None:
                logger.debug("%s came too late", event)
            case _:
                """Nothing for the gateway. A link ignores the events of the prefill role, which moves attempts."""
        if link is not None:
            link.on_event(event)
            if isinstance(event, Scattered):
                self._link_of.copied(event.key)

    # ------------------------------------------------------------ links

    def _give_up_fetch(self, key: AttemptKey) -> None:
        """Nobody waits for it. What came of it stays in the cache."""
        if (link := self._link_of.get(key)) is not None:
            link.cancel(key)
        elif self._fetches is not None and key in self._fetches:
            self._fetches.over(key, "late")

    def _on_offered(self, link: PrefillLink, spec: SequenceSpec, is_prefix: bool) -> bool:
        if is_prefix:
            is_wanted = self._fetches_key(spec.key) and spec.key not in self._link_of
            if is_wanted:
                self._link_of.add(spec.key, link)
            return is_wanted
        if self.owns(spec.key):
            logger.warning("pair with %s: refused %s, which this worker has already", link.peer.worker_id, spec.key)
            return False
        self._link_of.add(spec.key, link)
        self._gateway_of[spec.key] = spec.gateway_id
        return True

    def _on_over(self, link: PrefillLink, over: ReceiveOver) -> None:
        key = over.key
        if self._link_of.get(key) is not link:
            return  # `_on_offered` returned false for it.
        if self._fetches is not None and key in self._fetches:
            self._fetches.over(key, outcome_of(over), "" if over.cause is None else over.cause.detail)
            self._link_of.decided(key)
            return
        gateway_id = self._gateway_of.get(key)
        if over.outcome == "committed":
            if gateway_id is not None:
                message = HandedOver(
                    request_id=key.request_id,
                    attempt=key.attempt,
                    kv_bytes=over.kv_bytes,
                    cached_tokens=over.cached_tokens,
                    transport=link.transport_name,
                    transfer_s=0.0 if over.began_at is None else self._context.now() - over.began_at,
                )
                self._context.outbox.handed_over(gateway_id, message)
        else:
            self._gateway_of.pop(key, None)
        self._link_of.decided(key)

    # ------------------------------------------------------------ the rest

    @property
    def num_served_fetches(self) -> int:
        """0: the prefill role serves them."""
        return 0

    def transfers(self) -> list[TransferCount]:
        """Empty: the sending side counts transfers."""
        return []

    def tick(self, now: float) -> None:
        """Heartbeats, leases and deadlines of all pairs."""
        for link in list(self._links):
            link.tick(now)
        if self._fetches is not None:
            self._fetches.tick(now)

    def keys_of_gateway(self, gateway_id: str) -> list[AttemptKey]:
        """Keys of the live attempts of one gateway."""
        return [key for key, owner in self._gateway_of.items() if owner == gateway_id]

    def holdings(self) -> dict[str, int]:
        """Number of attempts, and of the resources that the pairs hold for them."""
        num_fetches = 0 if self._fetches is None else len(self._fetches)
        own = {"decode_attempts": len(self._gateway_of), "ordered_fetches": num_fetches}
        return total_holdings(own, self._links)
