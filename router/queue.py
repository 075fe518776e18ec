"""The one deep queue: requests that wait for a worker, most urgent first.

Order: higher priority; then requests that already had an attempt (their client is waiting in the middle of an answer,
or was refused by no fault of its own); then the earlier deadline, none being the latest; then arrival.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.proto.ids import RequestId


class Urgency(NamedTuple):
    """Sorts requests; the smallest is placed first."""

    negated_priority: int
    is_first_attempt: bool
    deadline: float
    arrival_order: int

    @classmethod
    def of(cls, priority: int, deadline: float | None, arrival_order: int, *, is_first_attempt: bool) -> Urgency:
        """The urgency of a request. `arrival_order` is unique."""
        return cls(-priority, is_first_attempt, math.inf if deadline is None else deadline, arrival_order)


@dataclass(slots=True)
class RequestQueue:
    """A sorted list. It holds about a thousand entries, where moving memory costs less than keeping a tree."""

    _order: list[tuple[Urgency, RequestId]] = field(default_factory=list)
    _urgency: dict[RequestId, Urgency] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._urgency

    def __iter__(self) -> Iterator[RequestId]:
        """A copy in order: entries may be removed meanwhile."""
        return iter([request_id for _, request_id in self._order])

    def push(self, request_id: RequestId, urgency: Urgency) -> None:
        """Add a request that is not in the queue."""
        assert request_id not in self._urgency, f"{request_id} is queued already"
        self._urgency[request_id] = urgency
        bisect.insort(self._order, (urgency, request_id))

    def remove(self, request_id: RequestId) -> None:
        """Take out a request that is in the queue."""
        entry = (self._urgency.pop(request_id), request_id)
        position = bisect.bisect_left(self._order, entry)
        assert self._order[position] == entry, "the order and the map of urgencies differ"
        del self._order[position]
