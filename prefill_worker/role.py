"""The prefill role: takes dispatches that name a decode worker, computes their prompts, hands their KV over.

    dispatch -> link to D (made on demand, or ahead of time by `Connect`) -> Offer -> Reserved -> engine Add
             -> KV chunks as they are computed -> token 0 to the gateway, Commit to D -> CommitAck -> engine Release

It is also the sending side of sequences that move while they decode (`Migrate`), which the decode role of the same
worker has; so workers that only decode have this role, too, and take no dispatches by it.

    migrate  -> engine Export -> link to D -> Offer -> Reserved -> KV chunks -> engine Hold -> the last chunk, Commit
             -> CommitAck -> engine End, which the decode role reports

It is the source of prefixes that other workers fetch, too (`served_fetches.py`), whichever roles they have:

    Fetch    -> engine Pin -> Pinned -> link to the other worker -> Offer -> Reserved -> KV chunks, Commit -> CommitAck
             -> engine Release

The protocol is the pure `Sender` of each link; the role routes attempts and engine events to the links.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from disagg.engine.commands import Ended, Event, Export, Exported, FetchOrdered, Gathered, Pinned, PrefillComputed
from disagg.engine.config import kv_stays_private
from disagg.engine.kv_transfer.commands import DEADLINE, Cause, SendOutcome, SendOver, ended_on_prefill
from disagg.engine.shell.pair_link import LinkTable, surplus_links, total_holdings
from disagg.engine.shell.role import RoleContext
from disagg.prefill_worker.link import DecodeLink, LinkCallbacks
from disagg.prefill_worker.served_fetches import ServedFetches
from disagg.prefill_worker.service import FetchService
from disagg.proto.handover import Failure
from disagg.proto.ids import AttemptKey, GatewayId, WorkerId, is_probe
from disagg.proto.messages import Dispatch, Migrate, PeerRef, RoleName, SequenceSpec, TransferCount

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempt:
    """An attempt that has not ended."""

    gateway_id: GatewayId
    dispatched_at: float
    alloc_wait_s: float = 0.0
    """Time from the dispatch until the decode worker had reserved blocks, in seconds."""
    is_move: bool = False
    """Whether the attempt decodes here and moves away: the decode role has it, too."""
    has_ended: bool = False
    """Whether the engine ended the attempt, which the decode role reports."""


@dataclass(slots=True)
class _Transfers:
    """Totals of the transfers to one decode worker."""

    num_transfers: int = 0
    num_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def note(self, over: SendOver) -> None:
        """Count a hand-over whose outcome is decided."""
        if over.cause is None:
            self.num_transfers += 1
            self.num_bytes += over.kv_bytes
        elif _is_fault_of_pair(over.outcome, over.cause) and over.cause.failure is not Failure.DEADLINE:
            self.failures[over.cause.failure] += 1


def _is_fault_of_pair(outcome: SendOutcome, cause: Cause) -> bool:
    """Whether the pair is at fault: not if D had no room, or the attempt was cancelled."""
    return outcome == "failed" or cause.failure is Failure.PAIR_LOST


class PrefillRole:
    """Owner of the links to decode workers. Asyncio thread only."""

    name: RoleName = "prefill"

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._links: dict[PeerRef, DecodeLink] = {}
        """Links that take attempts, now or once they are formed."""
        self._all_links: set[DecodeLink] = set()
        """All links, including those that are being closed."""
        self._warm: set[PeerRef] = set()
        """Peers whose pairs were formed ahead of time, by `Connect`; these pairs are not closed for being idle."""
        self._link_of = LinkTable[DecodeLink]()
        self._attempts: dict[AttemptKey, _Attempt] = {}
        """Attempts that have not ended."""
        self._migrations: dict[AttemptKey, Migrate] = {}
        """Moves whose sequence the engine has not described yet."""
        self._served = ServedFetches(context, self._offer_prefix) if context.config.fetch else None
        """What other workers fetch from here; None where they do not."""
        self.num_served_fetches = 0
        """Fetches for which KV was given, since the start."""
        self._transfers: dict[tuple[WorkerId, str], _Transfers] = {}
        """Totals of transfers by decode worker and transport."""

    async def start(self) -> None:
        """Load what the transport needs, because that may hold the event loop for seconds. Links are made later, when
        decode workers are named. Raises as `make_connector` does."""
        config = self._context.config
        self._context.parts.make_connector(config.transport, config.host, self._context.cluster_secret)

    async def stop(self) -> None:
        """Close all links, and wait for their ends."""
        if self._served is not None:
            self._served.stop()
        await asyncio.gather(*(link.close() for link in list(self._all_links)))

    def handlers(self) -> list[object]:
        """The call by which other workers fetch prefixes, where they do; else this role serves gateways only."""
        return [] if self._served is None else [FetchService(self._served.serve).handler()]

    def fetch(self, order: FetchOrdered) -> None:
        """Nothing to do: the decode role receives."""

    def _offer_prefix(self, peer: PeerRef, spec: SequenceSpec) -> None:
        link = self._link_to(peer)
        self._link_of.add(spec.key, link)
        link.offer(spec, None, is_prefix=True)

    def _serves(self, key: AttemptKey) -> bool:
        return self._served is not None and key in self._served

    def connect(self, peer: PeerRef) -> None:
        """Form the pair with a decode worker, unless it exists, or this worker has as many pairs as it keeps."""
        if peer in self._links or len(self._links) < self._context.config.transfer.max_pairs:
            self._warm.add(peer)
            self._link_to(peer)

    def _link_to(self, peer: PeerRef) -> DecodeLink:
        link = self._links.get(peer)
        if link is None:
            self._make_room()
            callbacks = LinkCallbacks(
                self._on_reserved,
                lambda over: self._attempt_over(over, peer.worker_id),
                self._link_closed,
                self._all_links.discard,
            )
            link = self._links[peer] = DecodeLink(self._context, peer, callbacks)
            self._all_links.add(link)
            link.start()
        return link

    def _make_room(self) -> None:
        """Close the least recently used idle pairs to make room for one more. If all are in use the limit is exceeded
        for a while."""
        most = self._context.config.transfer.max_pairs
        for link in surplus_links(self._links.values(), most):
            link.retire(f"this worker keeps {most}")

    def takes(self, dispatch: Dispatch) -> bool:
        """Whether the dispatch wants an answer and names a decode worker."""
        if dispatch.spec.pooling is not None:
            return False
        return dispatch.decode_peer is not None and "prefill" in self._context.config.roles

    def dispatch(self, dispatch: Dispatch) -> None:
        """Offer the attempt to its decode worker."""
        assert dispatch.decode_peer is not None
        spec = dispatch.spec
        if spec.key in self._link_of:
            logger.warning("dropped a second dispatch of %s by gateway %s", spec.key, spec.gateway_id)
            return
        if not spec.num_known_tokens:  # a decode worker would close the pair for such an offer
            self._context.outbox.end(spec.gateway_id, spec.key, "failed", "the prompt is empty")
            return
        link = self._link_to(dispatch.decode_peer)
        self._link_of.add(spec.key, link)
        self._attempts[spec.key] = _Attempt(spec.gateway_id, self._context.now())
        link.offer(spec, dispatch.pair_timeout_s)

    def migrate(self, message: Migrate, gateway_id: GatewayId) -> None:
        """Move an attempt of the decode role to another worker."""
        key = AttemptKey(message.request_id, message.attempt)
        if not kv_stays_private(self._context.config):
            detail = "network.plaintext_kv: KV would leave this machine unencrypted"
            self._context.outbox.migration_failed(gateway_id, key, detail, refused=False)
        elif self.owns(key):
            self._context.outbox.migration_failed(gateway_id, key, "another move is not over", refused=False)
        else:
            self._migrations[key] = message
            self._context.post(Export(key))

    def _on_exported(self, event: Exported) -> None:
        message = self._migrations.pop(event.key, None)
        if message is None:
            return  # it was cancelled
        if event.spec is None:
            if event.gateway_id:
                detail = "the sequence does not decode now"
                self._context.outbox.migration_failed(event.gateway_id, event.key, detail, refused=False)
            return
        link = self._link_to(message.decode_peer)
        self._link_of.add(event.key, link)
        self._attempts[event.key] = _Attempt(event.gateway_id, self._context.now(), is_move=True)
        link.offer(event.spec, message.pair_timeout_s, message.number)

    def cancel(self, key: AttemptKey) -> None:
        """Abort an attempt, or its move. Unknown ones have ended already, because a cancel cannot overtake its dispatch
        on one session."""
        self._migrations.pop(key, None)
        if (link := self._link_of.get(key)) is not None:
            link.cancel(key)

    def cancel_migration(self, key: AttemptKey, gateway_id: GatewayId) -> None:
        """Keep an attempt here, if its move is not committed yet."""
        if self._migrations.pop(key, None) is not None:
            self._context.outbox.migration_failed(gateway_id, key, "cancelled", refused=False)
        elif (link := self._link_of.get(key)) is not None:
            link.cancel(key)

    def owns(self, key: AttemptKey) -> bool:
        """Whether a link holds the attempt, or will; a buffer that is still being filled counts."""
        return key in self._link_of or key in self._migrations or self._serves(key)

    def on_event(self, event: Event) -> None:
        """Pass an event to its link, and to the gateway if it concerns the gateway."""
        if isinstance(event, Exported):
            self._on_exported(event)
            return
        if isinstance(event, Pinned):
            if self._served is not None:
                self._served.on_pinned(event)
            return
        link = self._link_of.get(event.key)
        if link is None:
            return  # a move that the engine has not answered yet
        match event:
            case PrefillComputed():
                self._on_computed(event)
            case Ended() if self._serves(event.key):
                link.cancel(event.key, DEADLINE if event.reason == "deadline" else ended_on_prefill(event.reason))
                return
            case Ended():
                self._on_ended(event)
            case _:
                """Nothing for the gateway. A link ignores the events of the decode role, which has moves, too."""
        link.on_event(event)
        if isinstance(event, Gathered):
            self._link_of.copied(event.key)

    def tick(self, now: float) -> None:
        """Heartbeats, leases and deadlines of all pairs."""
        for link in list(self._all_links):
            link.tick(now)
        idle_s = self._context.config.pair_idle_s
        for link in list(self._links.values()):
            if now - link.used_at >= idle_s and link.peer not in self._warm and link.is_idle:
                link.retire("no attempt used it")

    def keys_of_gateway(self, gateway_id: str) -> list[AttemptKey]:
        """Keys of the live attempts of one gateway."""
        return [key for key, attempt in self._attempts.items() if attempt.gateway_id == gateway_id]

    def holdings(self) -> dict[str, int]:
        """Number of attempts, and of the resources that the pairs hold for them."""
        own = {
            "prefill_attempts": len(self._attempts),
            "migrations": len(self._migrations),
            "served_fetches": 0 if self._served is None else len(self._served),
        }
        return total_holdings(own, self._all_links)

    def transfers(self) -> list[TransferCount]:
        """Totals of the transfers to each decode worker since the start, over all of its incarnations."""
        return [
            TransferCount(
                decode_worker=worker_id,
                transport=transport,
                num_transfers=sent.num_transfers,
                num_bytes=sent.num_bytes,
                failures=dict(sent.failures),
            )
            for (worker_id, transport), sent in self._transfers.items()
        ]

    def _on_reserved(self, key: AttemptKey) -> None:
        attempt = self._attempts[key]
        attempt.alloc_wait_s = self._context.now() - attempt.dispatched_at

    def _on_computed(self, event: PrefillComputed) -> None:
        attempt = self._attempts.get(event.key)
        self._context.outbox.prefill_done(
            event.gateway_id,
            event.key,
            event.cached_tokens,
            alloc_wait_s=0.0 if attempt is None else attempt.alloc_wait_s,
            queue_s=event.queue_s,
        )

    def _on_ended(self, event: Ended) -> None:
        attempt = self._attempts.get(event.key)
        if attempt is not None and attempt.is_move:
            attempt.has_ended = True
        else:
            outbox = self._context.outbox
            outbox.end(event.gateway_id, event.key, event.reason, event.detail, event.cached_tokens, event.queue_s)

    def _attempt_over(self, over: SendOver, decode_worker: WorkerId) -> None:
        if self._served is not None and over.key in self._served:
            self._served_over(self._served, over, decode_worker)
            return
        attempt = self._attempts.pop(over.key)
        gateway_id = attempt.gateway_id
        link = self._link_of.get(over.key)
        transport = self._context.config.transport if link is None else link.transport_name
        if not is_probe(gateway_id):
            self._transfers.setdefault((decode_worker, transport), _Transfers()).note(over)
        match over.outcome, over.cause:
            case _, None:
                pass
            case outcome, cause if attempt.is_move:
                if over.stays and not attempt.has_ended:  # else the decode role reports its end
                    refused = outcome == "refused"
                    self._context.outbox.migration_failed(gateway_id, over.key, cause.detail, refused=refused)
            case _, cause if cause.failure is Failure.DEADLINE:
                self._context.outbox.end(gateway_id, over.key, "deadline", cause.detail)
            case ("refused" | "failed") as outcome, cause:
                is_pair = _is_fault_of_pair(outcome, cause)
                self._context.outbox.end(gateway_id, over.key, outcome, cause.detail, in_transfer=is_pair)
            case _:
                """Cancelled by the gateway, or ended by the engine, whose own end was sent on."""
        self._link_of.decided(over.key)

    def _served_over(self, served: ServedFetches, over: SendOver, worker_id: WorkerId) -> None:
        link = self._link_of.get(over.key)
        transport = self._context.config.transport if link is None else link.transport_name
        self._transfers.setdefault((worker_id, transport), _Transfers()).note(over)
        self.num_served_fetches += over.cause is None
        served.over(over.key)
        self._link_of.decided(over.key)

    def _link_closed(self, link: DecodeLink) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._warm.discard(link.peer)
