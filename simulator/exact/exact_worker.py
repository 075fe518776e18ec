"""A worker whose engine core is the real one: its messages, over the turns of `exact_engine.py`.

    dispatch ──> prefill role: a pair's Sender, offers first            ──> engine core ──> outbox ──> gateway
             ──> decode role: taken over by a pair's Receiver, or whole ──┘

Real here: engine core (scheduler, block manager, prefix cache, preemption, swap), outbox, pacing, pending prompts, step
sampler, both halves of the hand-over. Written again without threads and sockets: the engine's turn, the routing of the
two roles (`prefill_worker/role.py`, `decode_worker/role.py`) and the report stream.

Left out: counters for `/metrics`, deadlines of attempts that wait for a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from disagg.engine.commands import (
    Add,
    Ended,
    Event,
    Export,
    Exported,
    FetchEnded,
    FetchGivenUp,
    FetchOrdered,
    FetchPrefix,
    Gathered,
    Held,
    Joined,
    Pinned,
    PrefillComputed,
    Release,
    Reserved,
    ReserveRefused,
    Scattered,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.core.fetching import is_fetch_key
from disagg.engine.kv_transfer.commands import DEADLINE, ReceiveOver, SendOver, ended_on_prefill
from disagg.proto.handover import Failure
from disagg.proto.ids import AttemptKey, GatewayId
from disagg.proto.messages import (
    Cancel,
    CancelMigration,
    Connect,
    Dispatch,
    GatewayToWorker,
    HandedOver,
    Migrate,
    PeerRef,
    SequenceSpec,
    StepSample,
)
from disagg.simulator.exact.exact_engine import ExactEngine
from disagg.simulator.exact.fetches import Fetches
from disagg.simulator.exact.hand_over import Pair
from disagg.simulator.exact.tier_folder import Files
from disagg.simulator.exact.timed_runner import TimedRunner
from disagg.simulator.world.surroundings import Surroundings


@dataclass(slots=True)
class _Sending:
    """An attempt that is offered or sent to a decode worker."""

    pair: Pair
    gateway_id: GatewayId
    dispatched_at: float
    alloc_wait_s: float = 0.0
    is_over: bool = False
    """Whether the hand-over is decided; then only a copy may be pending."""
    is_move: bool = False
    """Whether the attempt decodes on this worker; then the decode role has it, too."""
    has_ended: bool = False
    """Whether the end of the attempt was reported."""


class ExactWorker(ExactEngine):
    """A worker that can be either end of pairs. Owner: the simulated cluster."""

    def __init__(
        self,
        world: Surroundings,
        config: WorkerConfig,
        runner: TimedRunner,
        calibration: tuple[StepSample, ...],
        incarnation: str,
        jump_s: float,
        files: Files,
    ) -> None:
        super().__init__(world, config, runner, calibration, incarnation, jump_s, files)
        self._pairs: dict[PeerRef, Pair] = {}
        """The pairs that this worker formed as P, by decode worker."""
        self._sending: dict[AttemptKey, _Sending] = {}
        self._migrations: dict[AttemptKey, Migrate] = {}
        """Moves whose sequence the engine has not described yet."""
        self._incoming: dict[Pair, None] = {}
        """The pairs that others formed with this worker as D."""
        self._receiving: dict[AttemptKey, Pair] = {}
        """Attempts (as D) whose hand-over is under way, or whose bytes the engine still copies."""
        self._under_way: set[AttemptKey] = set()
        """Attempts (as D) whose hand-over is under way."""
        self._gateway_of: dict[AttemptKey, GatewayId] = {}
        """The gateway of each attempt (as D), from its offer or dispatch to its end."""
        self._served_on: dict[AttemptKey, Pair] = {}
        """The pair of each prefix that is sent to a worker that fetches it."""
        self.fetches = Fetches(world, self, self._worker_of, self._offer_prefix)

    @property
    def peer_ref(self) -> PeerRef:
        """How other workers name it."""
        info = self.info
        return PeerRef(worker_id=info.worker_id, incarnation=info.incarnation, address=info.address)

    def pairs(self) -> list[Pair]:
        """The pairs that this worker formed as P."""
        return list(self._pairs.values())

    def forget_pair(self, peer: PeerRef) -> None:
        """Drop the pair with a decode worker that died."""
        if (pair := self._pairs.pop(peer, None)) is not None:
            pair.close()

    def audit(self) -> tuple[dict[str, int], list[str]]:
        """Counts of what is held (all zero when idle), and inconsistencies."""
        counts, problems = self.core.audit()
        held = {"attempts": len(self._sending) + len(self._gateway_of), "receiving": len(self._receiving)}
        held |= {**self.fetches.holdings(), "sent_prefixes": len(self._served_on)}
        for pair in self._pairs.values():
            for name, count in pair.holdings().items():
                if name != "tombstones":  # they fade
                    held[name] = held.get(name, 0) + count
        return {**counts, **held}, problems

    # ------------------------------------------------------------ messages of the gateway

    def receive(self, message: GatewayToWorker) -> None:
        """Handle a dispatch, a cancel, or a pair to form."""
        if self.is_dead:
            return
        match message:
            case Dispatch():
                self._dispatch(message)
            case Cancel():
                self._cancel(AttemptKey(message.request_id, message.attempt))
            case Connect():
                self._pair_with(message.decode_peer)
            case Migrate():
                key = AttemptKey(message.request_id, message.attempt)
                self._migrations[key] = message
                self.post(Export(key))
            case CancelMigration():
                key = AttemptKey(message.request_id, message.attempt)
                gateway_id = self._gateway_of.get(key)
                if self._migrations.pop(key, None) is not None and gateway_id is not None:
                    self._outbox.migration_failed(gateway_id, key, "cancelled", refused=False)
                elif (sending := self._sending.get(key)) is not None:
                    sending.pair.sender.cancel(key)
        self.flush()

    def _dispatch(self, dispatch: Dispatch) -> None:
        spec, peer = dispatch.spec, dispatch.decode_peer
        if ("decode" if peer is None else "prefill") not in self.config.roles:
            self._outbox.end(spec.gateway_id, spec.key, "refused", f"{self.config.worker_id} cannot run this dispatch")
            return
        self._pending_prompts.dispatched(spec.key, spec.num_known_tokens)
        if dispatch.fetch is not None and self.config.fetch:
            self.post(FetchPrefix(spec, dispatch.fetch))
        if peer is None:
            self._gateway_of[spec.key] = spec.gateway_id
            self.post(Add(spec))
            return
        is_new = peer not in self._pairs
        pair = self._pair_with(peer)
        if pair is None:
            reason = f"pair lost: {peer.worker_id} is gone"
            self._outbox.end(spec.gateway_id, spec.key, "refused", reason, in_transfer=True)
            return
        self._sending[spec.key] = _Sending(pair, spec.gateway_id, self._loop.now)
        if is_new and self._world.overheads.pair_s:
            self._loop.after(self._world.overheads.pair_s, self._offer, pair, spec)
        else:
            pair.offer(spec)

    def _on_exported(self, event: Exported) -> None:
        message = self._migrations.pop(event.key, None)
        if message is None or not event.gateway_id:
            return
        pair = None if event.spec is None else self._pair_with(message.decode_peer)
        if event.spec is None or pair is None or event.key in self._sending:
            self._outbox.migration_failed(event.gateway_id, event.key, "it cannot move now", refused=False)
            return
        self._sending[event.key] = _Sending(pair, event.gateway_id, self._loop.now, is_move=True)
        pair.offer(event.spec, message.number)

    def _offer(self, pair: Pair, spec: SequenceSpec) -> None:
        if not self.is_dead and not pair.is_closed and spec.key in self._sending:
            pair.offer(spec)
            self.flush()

    def _offer_prefix(self, peer: PeerRef, spec: SequenceSpec) -> None:
        pair = self._pair_with(peer)
        assert pair is not None, "the worker that fetches is here"
        self._served_on[spec.key] = pair
        pair.offer(spec, is_prefix=True)

    def _worker_of(self, peer: PeerRef) -> ExactWorker | None:
        other = self._world.find_worker(peer)
        return other if isinstance(other, ExactWorker) else None

    def _pair_with(self, peer: PeerRef) -> Pair | None:
        pair = self._pairs.get(peer)
        if pair is None:
            other = self._worker_of(peer)
            if other is None:
                return None
            pair = self._pairs[peer] = Pair(self._world, self, other)
        return pair

    def _cancel(self, key: AttemptKey) -> None:
        self._migrations.pop(key, None)
        if (sending := self._sending.get(key)) is not None:
            sending.pair.sender.cancel(key)
        if (pair := self._receiving.get(key)) is not None:
            pair.receiver.cancel(key)
        elif key in self._gateway_of:
            self.post(Release(key))
        elif "decode" in self.config.roles:
            for each in self._incoming:  # its offer may be on its way
                each.receiver.cancel(key)
        self._gateway_of.pop(key, None)

    # ------------------------------------------------------------ events of the engine

    @override
    def _on_event(self, event: Event) -> None:
        match event:
            case Exported():
                self._on_exported(event)
            case FetchOrdered():
                self.fetches.order(event)
            case FetchEnded():
                self._outbox.fetched(event.gateway_id, event.message)
            case FetchGivenUp():
                self._give_up_fetch(event.key)
            case Pinned():
                self.fetches.pinned(event)
            case _:
                self._on_sequence_event(event)

    def _on_sequence_event(self, event: Event) -> None:
        if (pair := self._served_on.get(event.key)) is not None:
            self._on_served_event(pair, event)
            return
        if self.fetches.orders(event.key) or is_fetch_key(event.key):
            self._on_prefix_event(event)
            return
        sending = self._sending.get(event.key)
        if sending is not None:
            self._on_prefill_event(sending, event)
        if (sending is None or sending.is_move) and (event.key in self._gateway_of or event.key in self._receiving):
            self._on_decode_event(event)

    # ------------------------------------------------------------ prefixes that are fetched

    def _give_up_fetch(self, key: AttemptKey) -> None:
        if (pair := self._receiving.get(key)) is not None:
            pair.receiver.cancel(key)
        elif self.fetches.orders(key):
            self.fetches.over(key, "late")

    def _on_served_event(self, pair: Pair, event: Event) -> None:
        if isinstance(event, Ended):
            pair.sender.cancel(event.key, DEADLINE if event.reason == "deadline" else ended_on_prefill(event.reason))
        else:
            pair.sender.on_event(event)
        self._forget_if_served(event.key)

    def _on_prefix_event(self, event: Event) -> None:
        if (pair := self._receiving.get(event.key)) is not None:
            pair.receiver.on_event(event)
            if isinstance(event, Scattered):
                self._forget_if_received(event.key)

    def _forget_if_served(self, key: AttemptKey) -> None:
        pair = self._served_on.get(key)
        if pair is not None and not self.fetches.serves(key) and not pair.sender.is_copying(key):
            del self._served_on[key]

    @override
    def _owns(self, key: AttemptKey) -> bool:
        return (
            key in self._sending
            or key in self._gateway_of
            or key in self._receiving
            or key in self._served_on
            or self.fetches.orders(key)
        )

    # ------------------------------------------------------------ the prefill role

    def _on_prefill_event(self, sending: _Sending, event: Event) -> None:
        key = event.key
        match event:
            case PrefillComputed():
                self._outbox.prefill_done(
                    event.gateway_id,
                    key,
                    event.cached_tokens,
                    alloc_wait_s=sending.alloc_wait_s,
                    queue_s=event.queue_s,
                )
            case Ended():
                sending.has_ended = True
                if not sending.is_move:
                    outbox = self._outbox
                    outbox.end(event.gateway_id, key, event.reason, event.detail, event.cached_tokens, event.queue_s)
            case _:
                """Nothing for the gateway."""
        if not sending.pair.sender.on_event(event) and not sending.is_move:  # else the decode role handles the event
            raise AssertionError(f"a prefill worker got {event}")
        if isinstance(event, Gathered):
            self._forget_if_sent(key)

    def on_reserved(self, key: AttemptKey) -> None:
        """Note the time since the dispatch as the attempt's wait for blocks on D."""
        sending = self._sending.get(key)
        if sending is None:  # a prefix
            return
        sending.alloc_wait_s = self._loop.now - sending.dispatched_at

    def on_sent_over(self, over: SendOver) -> None:
        """Tell the gateway the end of an attempt that was refused, failed or past its deadline."""
        if self.fetches.serves(over.key):
            self.fetches.sent(over.key)
            self._forget_if_served(over.key)
            return
        sending = self._sending[over.key]
        sending.is_over = True
        cause = over.cause
        if sending.is_move:
            if cause is not None and over.stays and not sending.has_ended:
                refused = over.outcome == "refused"
                self._outbox.migration_failed(sending.gateway_id, over.key, cause.detail, refused=refused)
        elif cause is not None and cause.failure is Failure.DEADLINE:
            self._outbox.end(sending.gateway_id, over.key, "deadline", cause.detail)
        elif cause is not None and (over.outcome == "refused" or over.outcome == "failed"):
            is_pair = over.outcome == "failed"  # else D has no room
            self._outbox.end(sending.gateway_id, over.key, over.outcome, cause.detail, in_transfer=is_pair)
        self._forget_if_sent(over.key)

    def _forget_if_sent(self, key: AttemptKey) -> None:
        sending = self._sending.get(key)
        if sending is not None and sending.is_over and not sending.pair.sender.is_copying(key):
            del self._sending[key]

    # ------------------------------------------------------------ the decode role

    def _on_decode_event(self, event: Event) -> None:
        key = event.key
        pair = self._receiving.get(key)
        match event:
            case PrefillComputed():
                self._outbox.prefill_done(event.gateway_id, key, event.cached_tokens, queue_s=event.queue_s)
            case Ended():
                if (gateway_id := self._gateway_of.pop(key, None)) is not None:
                    self._outbox.end(gateway_id, key, event.reason, event.detail, event.cached_tokens, event.queue_s)
            case Reserved() | ReserveRefused() | Scattered():
                """It came too late where the attempt has no pair any more."""
            case Held() | Gathered():
                """The prefill role, which moves the sequence, handles this event."""
            case Joined():
                """The hand-over was committed when the join was requested."""
            case _:
                raise AssertionError(f"a decode worker got {event}")
        if pair is not None:
            pair.receiver.on_event(event)
            if isinstance(event, Scattered):
                self._forget_if_received(key)

    def on_paired(self, pair: Pair) -> None:
        """Add the pair to those through which attempts may be offered."""
        self._incoming[pair] = None

    def on_unpaired(self, pair: Pair) -> None:
        """Remove a pair through which no more attempts are offered."""
        self._incoming.pop(pair, None)

    def on_offered(self, pair: Pair, spec: SequenceSpec, *, is_prefix: bool) -> bool:
        """Take the attempt, or the prefix. Returns False where this worker has it already, in either role, or does not
        fetch the prefix."""
        if is_prefix:
            is_wanted = self.fetches.orders(spec.key) and spec.key not in self._receiving
            if is_wanted:
                self._under_way.add(spec.key)
                self._receiving[spec.key] = pair
            return is_wanted
        if self._owns(spec.key):
            return False
        self._under_way.add(spec.key)
        self._receiving[spec.key] = pair
        self._gateway_of[spec.key] = spec.gateway_id
        return True

    def on_received_over(self, pair: Pair, over: ReceiveOver) -> None:
        """Send the gateway `HandedOver` for a committed attempt; forget any other one."""
        key = over.key
        if self._receiving.get(key) is not pair:
            return
        if self.fetches.orders(key):
            self.fetches.received(over)
        elif over.outcome == "committed":
            if (gateway_id := self._gateway_of.get(key)) is not None:
                began_at = self._loop.now if over.began_at is None else over.began_at
                message = HandedOver(
                    request_id=key.request_id,
                    attempt=key.attempt,
                    kv_bytes=over.kv_bytes,
                    cached_tokens=over.cached_tokens,
                    transport=self.config.transport,
                    transfer_s=self._loop.now - began_at,
                )
                self._outbox.handed_over(gateway_id, message)
        else:
            self._gateway_of.pop(key, None)
        self._under_way.discard(key)
        self._forget_if_received(key)

    def _forget_if_received(self, key: AttemptKey) -> None:
        pair = self._receiving.get(key)
        if pair is not None and key not in self._under_way and not pair.receiver.is_copying(key):
            del self._receiving[key]
