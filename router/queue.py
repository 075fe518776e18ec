"""The one deep queue: requests that wait for a worker, most urgent first.

Order: higher priority; then requests that already had an attempt (their client is waiting in the middle of an answer,
or was refused by no fault of its own); then the time at which the first token is due; then arrival. A request without
a TTFT target is due a fixed horizon after its arrival, so that it waits behind those in a hurry, but not for ever.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.proto.ids import RequestId


class Urgency(NamedTuple):
    """Sorts requests; the smallest is placed first."""

    negated_priority: int
    is_first_attempt: bool
    due: float
    """When the first token should be there."""
    arrival_order: int
    """Unique."""


@dataclass(slots=True)
class RequestQueue:
    """A sorted list. It holds about a thousand entries, where moving memory costs less than keeping a tree."""

    _order: list[tuple[Urgency, RequestId]] = field(default_factory=list)
    _work_ms: list[float] = field(default_factory=list)
    """Beside `_order`: how long the prompt takes."""
    _urgency: dict[RequestId, Urgency] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._urgency

    def __getitem__(self, position: int) -> RequestId:
        """The request at a position; 0 is the most urgent."""
        return self._order[position][1]

    def position(self, urgency: Urgency) -> int:
        """Where a request of that urgency would stand."""
        return bisect.bisect_left(self._order, (urgency,))

    def work_before(self, position: int) -> float:
        """Milliseconds of prefill that the requests before a position take, one after the other."""
        return sum(self._work_ms[:position])

    def set_work(self, request_id: RequestId, work_ms: float) -> None:
        """How long the prompt of a request in the queue keeps those behind it from now on."""
        self._work_ms[bisect.bisect_left(self._order, (self._urgency[request_id],))] = work_ms

    def push(self, request_id: RequestId, urgency: Urgency, work_ms: float) -> None:
        """Add a request that is not in the queue and whose prompt takes so long."""
        assert request_id not in self._urgency, f"{request_id} is queued already"
        self._urgency[request_id] = urgency
        entry = (urgency, request_id)
        position = bisect.bisect_left(self._order, entry)
        self._order.insert(position, entry)
        self._work_ms.insert(position, work_ms)

    def remove(self, request_id: RequestId) -> None:
        """Take out a request that is in the queue."""
        entry = (self._urgency.pop(request_id), request_id)
        position = bisect.bisect_left(self._order, entry)
        assert self._order[position] == entry, "the order and the map of urgencies differ"
        del self._order[position]
        del self._work_ms[position]
