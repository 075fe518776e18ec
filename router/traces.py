"""Where requests ran: one `RequestTrace` each, kept while it runs and then in a ring of the last N.

Owner: the router core.
"""

from __future__ import annotations

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

    def end(self, request_id: RequestId, now: float) -> None:
        """The request is over; the oldest ended trace makes room."""
        trace = self._running.pop(request_id)
        trace.stages["end"] = now
        self._ended[request_id] = trace
        if len(self._ended) > self._num_ended:
            del self._ended[next(iter(self._ended))]

    def get(self, request_id: RequestId) -> RequestTrace | None:
        """A running or recent request."""
        return self._running.get(request_id) or self._ended.get(request_id)
