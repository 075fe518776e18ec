"""Prefixes that a worker fetches from others, and those that it sends them, in virtual time.

    engine FetchOrdered ──Fetch──> source: engine Pin, Pinned ──> refused
                                                 └──> an offer on a pair in which the source is P ──> FetchOver

As `decode_worker/fetches.py` and `prefill_worker/served_fetches.py` do, without calls that are lost or wrong. A source
that is gone does not answer: the call fails at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from disagg.engine.commands import Command, FetchOrdered, FetchOver, Pin, Pinned, Release
from disagg.engine.kv_transfer.commands import ReceiveOver
from disagg.engine.kv_transfer.prefixes import MAX_SERVED, held_part, outcome_of
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import FetchOutcome, PeerRef, SequenceSpec
from disagg.simulator.world.surroundings import Surroundings


class FetchingWorker(Protocol):
    """Either end of a fetch."""

    is_dead: bool
    fetches: Fetches

    @property
    def peer_ref(self) -> PeerRef:
        """How others name it."""
        ...

    def post(self, command: Command) -> None:
        """Queue a command for its engine."""
        ...


class Fetches:
    """Owner: the worker. `find` finds another worker, where it is present; `offer` begins the hand-over of a prefix to
    another worker."""

    def __init__(
        self,
        world: Surroundings,
        worker: FetchingWorker,
        find: Callable[[PeerRef], FetchingWorker | None],
        offer: Callable[[PeerRef, SequenceSpec], None],
    ) -> None:
        self._world = world
        self._worker = worker
        self._find = find
        self._offer = offer
        self._ordered: dict[AttemptKey, FetchOrdered] = {}
        self._served: dict[AttemptKey, tuple[FetchOrdered, FetchingWorker]] = {}
        """The orders of other workers that are not over here."""

    def holdings(self) -> dict[str, int]:
        """Counts of what is under way; all zero when idle."""
        return {"ordered_fetches": len(self._ordered), "served_fetches": len(self._served)}

    # ------------------------------------------------------------ the worker that lacks a prefix

    def orders(self, key: AttemptKey) -> bool:
        """Whether a prefix is fetched under this key."""
        return key in self._ordered

    def order(self, order: FetchOrdered) -> None:
        """Call the source."""
        self._ordered[order.key] = order
        self._world.loop.after(self._world.overheads.message_s, self._ask, order)

    def _ask(self, order: FetchOrdered) -> None:
        if self._worker.is_dead or order.key not in self._ordered:
            return
        source = self._find(order.peer)
        if source is None:
            self.over(order.key, "failed", f"{order.peer.worker_id} is gone")
        else:
            source.fetches.serve(order, self._worker)

    def _refused(self, key: AttemptKey, reason: str) -> None:
        if not self._worker.is_dead and key in self._ordered:
            self.over(key, "refused", reason)

    def source_is_gone(self, peer: PeerRef) -> None:
        """A worker died: what it has not offered fails. The end of a pair is told by its receiver."""
        for key in [key for key, order in self._ordered.items() if order.peer == peer]:
            self.over(key, "failed", f"{peer.worker_id} is gone")

    def over(self, key: AttemptKey, outcome: FetchOutcome, detail: str = "") -> None:
        """A fetch is over; nothing of it is held here."""
        del self._ordered[key]
        self._worker.post(FetchOver(key, outcome, detail))

    def received(self, over: ReceiveOver) -> None:
        """The hand-over of a prefix is decided."""
        self.over(over.key, outcome_of(over), "" if over.cause is None else over.cause.detail)

    # ------------------------------------------------------------ the source

    def serves(self, key: AttemptKey) -> bool:
        """Whether another worker fetches a prefix from here under this key."""
        return key in self._served

    def serve(self, order: FetchOrdered, needy: FetchingWorker) -> None:
        """Another worker asks for a prefix."""
        if len(self._served) >= MAX_SERVED:
            self._refuse(order, needy, f"{MAX_SERVED} fetches are served already")
            return
        self._served[order.key] = order, needy
        self._worker.post(Pin(order.spec))

    def pinned(self, event: Pinned) -> None:
        """The engine holds the prefix, or not."""
        order, needy = self._served[event.key]
        num_tokens = event.num_tokens
        if needy.is_dead or num_tokens <= order.from_token:
            self._worker.post(Release(event.key))
            del self._served[event.key]
            self._refuse(order, needy, event.reason or f"of {num_tokens} tokens the caller has {order.from_token}")
            return
        self._offer(needy.peer_ref, held_part(order.spec, num_tokens))

    def sent(self, key: AttemptKey) -> None:
        """The hand-over is over, and the prefix is released."""
        del self._served[key]

    def _refuse(self, order: FetchOrdered, needy: FetchingWorker, reason: str) -> None:
        self._world.loop.after(self._world.overheads.message_s, needy.fetches._refused, order.key, reason)
