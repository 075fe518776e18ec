"""Where requests ran: one `RequestTrace` each, kept while it runs and then in a ring of the last N.

Owner: the router's journal.
"""

from __future__ import annotations

import heapq
from itertools import chain, islice

from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace


class TraceRing:
    """See the module docstring."""

    def __init__(self, num_ended: int) -> None:
        self._num_ended = num_ended
        self._running: dict[RequestId, RequestTrace] = {}
        self._ended: dict[RequestId, RequestTrace] = {}

    def begin(self, trace: RequestTrace) -> None:
        """Keep the trace of a request that was just taken in; its owner fills it in."""
        self._running[trace.request_id] = trace

    def end(self, trace: RequestTrace, now: float) -> None:
        """The request is over, or never began; the oldest ended trace makes room."""
        self._running.pop(trace.request_id, None)
        trace.stages["end"] = now
        self._ended[trace.request_id] = trace
        if len(self._ended) > self._num_ended:
            del self._ended[next(iter(self._ended))]

    def get(self, request_id: RequestId) -> RequestTrace | None:
        """A running or recent request."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def latest(self, limit: int) -> list[RequestTrace]:
        """At most `limit` of them, the latest arrival first."""
        both = chain(reversed(self._running.values()), islice(reversed(self._ended.values()), limit))
        return heapq.nlargest(limit, both, key=lambda trace: trace.arrival)
