"""A router core in virtual time, over workers of which some fail a leg of every attempt, fast.

    requests at a steady rate -> RouterCore -> commands -> the workers' answers, each at its time -> RouterCore ...

A worker has no queue of its own: every leg takes its time, however many run beside it. So a worker that fails fast is
always the least loaded one, which is what makes it attract requests.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from disagg.proto.ids import AttemptKey, GatewayId, Incarnation, WorkerId
from disagg.proto.messages import End, HandedOver, PrefillDone, SequenceSpec, StepUpdate, TokenOut
from disagg.router.config import RouterConfig
from disagg.router.requests import events
from disagg.router.requests.router_core import RouterCore
from tests.support.router import (
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)

Leg = Literal["prefill", "transfer", "decode", "pair"]
"""`pair`: the pair is never formed, and P reports that when the attempt has waited for its time limit."""

NUM_TOKENS = 4
"""Of every answer."""
PREFILL_S = 0.020
TRANSFER_S = 0.003
DECODE_S = 0.050
FAULT_S = 0.005
"""After the begin of the leg that fails."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What fails between two moments: a leg of every attempt on one worker, or on one pair where `peer` is named."""

    leg: Leg
    worker_id: str
    peer: str | None = None
    begin: float = 0.0
    end: float = float("inf")
    after_s: float = FAULT_S
    """How long it takes to fail."""

    def hits(self, leg: Leg, now: float, *worker_ids: str) -> bool:
        """Whether this leg, on these workers, fails now."""
        if leg != self.leg or not self.begin <= now < self.end:
            return False
        return self.worker_id in worker_ids and (self.peer is None or self.peer in worker_ids)


@dataclass
class FailingFleet:
    workers: Sequence[str]
    faults: Sequence[Fault]
    config: RouterConfig = field(default_factory=RouterConfig)
    rate: float = 400.0
    """Requests a second."""
    now: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Ends by `stop`, `length`, or the code of the error."""
    dispatches: Counter[str] = field(default_factory=Counter)
    """Attempts by worker, both ends of a pair."""
    placed: list[tuple[float, str]] = field(default_factory=list)
    """When and on whom."""
    first_token_s: dict[str, float] = field(default_factory=dict)
    """From the arrival on."""

    def __post_init__(self) -> None:
        self.core = RouterCore(self.config, GatewayId("g0"))
        self._events: list[tuple[float, int, events.Event]] = []
        self._count = 0
        self._given_up: set[tuple[str, AttemptKey]] = set()
        self._arrival: dict[str, float] = {}
        for name in self.workers:
            self._handle(events.WorkerUp(worker_info(name, max_num_seqs=256, num_blocks=4096, token_budget=8192)))

    def run(self, num_requests: int, check_every: int = 500) -> None:
        """Send so many requests, and let all of them end."""
        begin = self.now
        for number in range(num_requests):
            request = routed_request(f"r{self._count}-{number}", range(1000 * number, 1000 * number + 64))
            arrival = begin + number / self.rate
            self._arrival[request.request_id] = arrival
            self._at(arrival, events.Submit(request, arrival))
        handled = 0
        while self._events or self.core.next_wakeup() is not None:
            due, wakeup = self._events[0][0] if self._events else float("inf"), self.core.next_wakeup()
            if wakeup is not None and wakeup < due:
                self.now = max(self.now, wakeup)
                self._handle(events.Tick())
                continue
            self.now, _, event = heapq.heappop(self._events)
            self._handle(event)
            handled += 1
            if handled % check_every == 0:
                assert self.core.check_integrity() == []
        assert self.core.check_integrity() == []

    # ------------------------------------------------------------ inside

    def _at(self, when: float, event: events.Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def _say(self, when: float, name: str, key: AttemptKey, *updates: StepUpdate) -> None:
        """The worker reports the end, unless it is cancelled before."""
        for update in updates:
            self._at(when, events.FromWorker(WorkerId(name), Incarnation("1"), update))

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.FromWorker) and self._is_given_up(event):
            return
        for command in self.core.handle(event, self.now):
            match command:
                case events.Dispatch(worker_id=worker_id, message=message):
                    peer = message.decode_peer
                    name = None if peer is None else peer.worker_id
                    self._run(worker_id, name, message.spec, message.pair_timeout_s)
                case events.CancelOn(worker_id=worker_id, key=key):
                    self._given_up.add((worker_id, key))
                case events.Emit(request_id=request_id):
                    self.first_token_s.setdefault(request_id, self.now - self._arrival[request_id])
                case events.Finish(completion=completion):
                    self.outcomes[completion.reason] += 1
                case events.Fail(error=error):
                    self.outcomes[error.code] += 1

    def _is_given_up(self, event: events.FromWorker) -> bool:
        update = event.update
        messages: list[TokenOut | PrefillDone | HandedOver | End] = [*update.tokens, *update.prefilled]
        messages += [*update.handed_over, *update.ends]
        keys = {AttemptKey(message.request_id, message.attempt) for message in messages}
        return any((event.worker_id, key) in self._given_up for key in keys)

    def _fault(self, leg: Leg, *worker_ids: str) -> Fault | None:
        return next((fault for fault in self.faults if fault.hits(leg, self.now, *worker_ids)), None)

    def _run(self, first: str, peer: str | None, spec: SequenceSpec, timeout_s: float | None) -> None:
        """All future messages of the workers about the attempt, with their times."""
        used = [name for name in (first, peer) if name is not None]
        self.dispatches.update(used)
        self.placed += [(self.now, name) for name in used]
        key, (request_id, attempt) = spec.key, spec.key
        index, now = len(spec.emitted_token_ids), self.now
        if peer is not None:
            if self._fault("pair", first, peer) is not None:
                assert timeout_s is not None
                refused = end_update(request_id, attempt, "refused", detail="pair with D", in_transfer=True)
                self._say(now + timeout_s, first, key, refused)
                return
            if (fault := self._fault("prefill", first)) is not None:
                self._say(now + fault.after_s, first, key, end_update(request_id, attempt, "failed", detail="prefill"))
                return
            now += PREFILL_S
            self._say(now, first, key, tokens_update(request_id, attempt, index, index))
            self._say(now, first, key, prefilled_update(request_id, attempt))
            if (fault := self._fault("transfer", first, peer)) is not None:
                self._say(now + fault.after_s, first, key, end_update(request_id, attempt, "failed", detail="transfer"))
                return
            now += TRANSFER_S
            self._say(now, peer, key, handed_over_update(request_id, attempt))
            first = peer
        if (fault := self._fault("decode", first)) is not None:
            self._say(now + fault.after_s, first, key, end_update(request_id, attempt, "failed", detail="decode"))
            return
        tokens = tokens_update(request_id, attempt, index, *range(index, NUM_TOKENS))
        self._say(now + DECODE_S, first, key, tokens, end_update(request_id, attempt, "length"))
