"""The router's queue: requests that wait for a worker, in the order in which they are tried.

    higher priority  >  requests that had an attempt  >  the tenants in turn  >  when the first token is due  >  arrival

Tenants take turns by deficit round robin on tokens. Each has a level: the tokens that its ended answers used, plus the
upper limits of those that run, over its weight. The round of a request is its tenant's level plus the tokens before it
in the tenant's lane, divided by `quantum`. So in each round every tenant has a quantum, expensive requests take several
rounds, and what was claimed and not used is refunded when an answer ends.

Requests that already had an attempt come before these rounds: their tenant was charged for them, and their client has a
part of the answer, or lost an attempt without being its cause. A request without a TTFT target is due a fixed horizon
after its arrival, so that it waits behind more urgent ones, but not for ever. With one tenant the rounds change
nothing.

Deficit round robin: Shreedhar and Varghese, 1995. Levels instead of counters of deficits, and what becomes of them
while a tenant is idle, as in the virtual token counters of Sheng et al., 2024.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from disagg.proto.ids import RequestId

DEFAULT_QUANTUM = 4096


class Urgency(NamedTuple):
    """The sort key of requests of one tenant; the smallest is placed first."""

    negated_priority: int
    is_first_attempt: bool
    due: float
    """When the first token is due."""
    arrival_order: int
    """Number of the request in the order of arrival, without duplicates."""


@dataclass(slots=True, eq=False)
class Share:
    """The tokens that one tenant has used. Changed by the queue only."""

    name: str = ""
    weight: float = 1.0
    used: float = 0.0
    """Tokens of the tenant's ended answers, over its weight."""
    claimed: float = 0.0
    """Upper limit of the tokens of its running answers."""

    @property
    def level(self) -> float:
        """Used and claimed tokens over the weight. Tenants of a lower level come first."""
        return self.used + self.claimed / self.weight


_Key = tuple[int, bool, int, Urgency]


class _Lane:
    """The waiting requests of one tenant: sorted lists, side by side. There are about a thousand entries in all, where
    moving memory costs less than keeping a tree."""

    __slots__ = ("_befores", "_head", "_quantum", "cost", "order", "share", "work_ms")

    def __init__(self, share: Share, quantum: int) -> None:
        self.share = share
        self.order: list[tuple[Urgency, RequestId]] = []
        self.work_ms: list[float] = []
        """Milliseconds of prefill of each prompt."""
        self.cost: list[float] = []
        """Upper limit of the tokens of each request."""
        self._quantum = quantum
        self._befores: list[float] | None = None
        """Tokens of all entries before each entry; None until computed again."""
        self._head: _Key | None = None

    def key(self, index: int) -> _Key:
        """The sort key of an entry among those of all tenants."""
        if self._befores is None:
            self._befores = list(accumulate(self.cost, initial=0.0))
        return self.key_of(self.order[index][0], self._befores[index])

    def key_of(self, urgency: Urgency, tokens_before: float) -> _Key:
        """The sort key of a request behind `tokens_before` tokens of its tenant."""
        round_number = 0
        if urgency.is_first_attempt:
            round_number = math.floor((self.share.level + tokens_before / self.share.weight) / self._quantum)
        return urgency[0], urgency[1], round_number, urgency

    @property
    def head(self) -> _Key:
        """The sort key of the first entry."""
        if self._head is None:
            self._head = self.key(0)
        return self._head

    def changed(self) -> None:
        """Forget what was computed, because the entries or the level changed."""
        self._befores = self._head = None

    def find(self, urgency: Urgency) -> int:
        """The position of that urgency, whether there is an entry or not."""
        return bisect.bisect_left(self.order, (urgency,))

    def num_before(self, key: _Key) -> int:
        """Number of entries before a key."""
        return bisect.bisect_left(range(len(self.order)), key, key=self.key)


class RequestQueue:
    """All waiting requests, a lane for each tenant.

    Args:
        quantum: tokens of a tenant in one round.
        may_run: whether a tenant may have one more request running; requests of other tenants are skipped.
    """

    def __init__(self, quantum: int = DEFAULT_QUANTUM, may_run: Callable[[str], bool] = lambda tenant: True) -> None:
        self._quantum = quantum
        self._may_run = may_run
        self._lane_of: dict[RequestId, tuple[_Lane, Urgency]] = {}
        self._lanes: dict[Share, _Lane] = {}
        """The lanes that have entries, by tenant."""
        self._first: list[tuple[RequestId, float]] = []
        """The merged order as far as it was computed: each request, and the milliseconds of prefill up to and including
        it."""
        self._rest: list[tuple[_Key, int, int, _Lane]] | None = None
        """A heap of the next entry of each lane; None if no order was computed."""
        self._asked: tuple[int, float] | None = None
        """The latest result of `position`, and the milliseconds of prefill before it."""
        self.skipped_a_tenant = False
        """Whether the latest order skipped a tenant that may not have one more request running."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._lane_of

    @property
    def has_turns(self) -> bool:
        """Whether several tenants wait, so that a placement changes the order of the others."""
        return len(self._lanes) > 1

    # ---------------------------------------------------------------- the order

    def look(self) -> None:
        """Compute the order again, because tenants may have become able to run more."""
        self._forget_order()
        self.skipped_a_tenant = False

    def at(self, position: int) -> RequestId | None:
        """The request at a position; 0 is the first to be tried. None behind the last one."""
        if len(self._lanes) == 1:
            (lane,) = self._lanes.values()
            if position < len(lane.order) and self._runs(lane):
                return lane.order[position][1]
            return None
        return self._first[position][0] if self._know(position) else None

    def position(self, urgency: Urgency, share: Share | None = None, num_kept: int = 0) -> int:
        """The position of a new request of that urgency and tenant. `num_kept`: decode places that others leave free
        for its tenant. Before a request that gets one of these, tenants that may not have one more running do not
        count; before any other one they do, so that its position may turn out to be lower, never higher."""
        lanes = self._lanes
        lane = lanes.get(share) if share is not None else next(iter(lanes.values()), None)
        if lane is not None and len(lanes) == 1:
            return lane.find(urgency)
        if not lanes:
            return 0
        if lane is None:
            assert share is not None
            lane = _Lane(Share(share.name, share.weight, self._used_at_start(share), share.claimed), self._quantum)
        index = lane.find(urgency)
        key = lane.key_of(urgency, sum(lane.cost[:index]))
        position, work_ms = index, sum(lane.work_ms[:index])
        for other in lanes.values():
            if other is not lane and other.head < key and (index >= num_kept or self._may_run(other.share.name)):
                count = other.num_before(key)
                position += count
                work_ms += sum(other.work_ms[:count])
        self._asked = (position, work_ms)
        return position

    def work_before(self, position: int) -> float:
        """Milliseconds of prefill that the requests before a position take, one after the other."""
        if not position:
            return 0.0
        if len(self._lanes) == 1:
            (lane,) = self._lanes.values()
            return sum(lane.work_ms[:position])
        if self._asked is not None and self._asked[0] == position:
            return self._asked[1]
        self._know(position - 1)
        return self._first[:position][-1][1] if self._first else 0.0

    def level(self, share: Share) -> float:
        """The level of a tenant that waits or is about to. Of two tenants the one with the lower level comes first."""
        return share.level if share in self._lanes else self._used_at_start(share) + share.claimed / share.weight

    # ---------------------------------------------------------------- changes

    def push(
        self, request_id: RequestId, urgency: Urgency, work_ms: float, share: Share | None = None, cost: float = 0.0
    ) -> None:
        """Add a request that is not in the queue.

        Args:
            request_id: the id of the request.
            urgency: its sort key.
            work_ms: milliseconds of prefill of its prompt.
            share: the share of its tenant; optional if there is only one.
            cost: upper limit of its tokens; 0 if its tenant was charged for it.
        """
        assert request_id not in self._lane_of, f"{request_id} is queued already"
        lane = self._lane_for(share)
        position = lane.find(urgency)
        lane.order.insert(position, (urgency, request_id))
        lane.work_ms.insert(position, work_ms)
        lane.cost.insert(position, cost)
        self._lane_of[request_id] = (lane, urgency)
        self._changed(lane)

    def remove(self, request_id: RequestId) -> None:
        """Take a queued request out of the lane of its tenant."""
        lane, urgency = self._lane_of.pop(request_id)
        position = lane.find(urgency)
        assert lane.order[position][1] == request_id, "the order and the map of urgencies differ"
        del lane.order[position]
        del lane.work_ms[position]
        del lane.cost[position]
        if not lane.order:
            del self._lanes[lane.share]
        self._changed(lane)

    def set_work(self, request_id: RequestId, work_ms: float) -> None:
        """Set the milliseconds of prefill that a queued request counts for those behind it."""
        lane, urgency = self._lane_of[request_id]
        lane.work_ms[lane.find(urgency)] = work_ms
        self._forget_order()

    def charge(self, share: Share, tokens: float) -> None:
        """Charge a placed request to its tenant; `tokens` is its upper limit."""
        share.claimed += tokens
        if self._lanes:
            self._level_changed(share)

    def settle(self, share: Share, charged: float, used: float) -> None:
        """Replace the charge of an ended request by the tokens that it used."""
        share.claimed = max(0.0, share.claimed - charged)
        share.used += used / share.weight
        self._level_changed(share)

    # ---------------------------------------------------------------- inside

    def _lane_for(self, share: Share | None) -> _Lane:
        lane = self._lanes.get(share) if share is not None else next(iter(self._lanes.values()), None)
        if lane is None:
            share = share or Share()
            share.used = self._used_at_start(share)
            lane = self._lanes[share] = _Lane(share, self._quantum)
        return lane

    def _used_at_start(self, share: Share) -> float:
        """The used tokens of a tenant that begins to wait beside others. It gets no credit for time without waiting
        requests, and no debit for what it used while no other tenant waited. It is not put behind others because of
        tokens that they claimed and may not use."""
        if not self._lanes:
            return share.used
        least = max(other.used for other in self._lanes)
        most = max(other.level for other in self._lanes)
        return min(max(share.used, least), most)

    def _runs(self, lane: _Lane) -> bool:
        if self._may_run(lane.share.name):
            return True
        self.skipped_a_tenant = True
        return False

    def _know(self, position: int) -> bool:
        """Compute the order up to a position. Returns whether there is a request at it."""
        if self._rest is None:
            self._rest = [
                (lane.head, number, 0, lane) for number, lane in enumerate(self._lanes.values()) if self._runs(lane)
            ]
            heapq.heapify(self._rest)
        first, rest = self._first, self._rest
        while len(first) <= position and rest:
            _, number, index, lane = rest[0]
            work_ms = lane.work_ms[index] + (first[-1][1] if first else 0.0)
            first.append((lane.order[index][1], work_ms))
            index += 1
            if index < len(lane.order):
                heapq.heapreplace(rest, (lane.key(index), number, index, lane))
            else:
                heapq.heappop(rest)
        return position < len(first)

    def _level_changed(self, share: Share) -> None:
        if self._lanes and (lane := self._lanes.get(share)) is not None:
            self._changed(lane)

    def _changed(self, lane: _Lane) -> None:
        lane.changed()
        self._forget_order()

    def _forget_order(self) -> None:
        self._asked = None
        if self._rest is not None:
            self._rest = None
            self._first = []
