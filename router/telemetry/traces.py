"""The traces of requests: each is kept while the request runs, and then among the last N.

Each tenant has a ring of its own. Where there are N in all, the oldest of the tenant with the most is dropped: many
requests of one tenant do not displace those of others.

Owner: `Telemetry`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import chain, islice

from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace

Ring = OrderedDict[RequestId, RequestTrace]
"""Traces, the oldest first. In a plain dict, finding the first entry takes longer the more entries were removed before
it."""


class TraceRing:
    """All traces of one router, by request id.

    Args:
        num_ended: ended requests that are kept, of all tenants together.
    """

    def __init__(self, num_ended: int) -> None:
        self._num_ended = num_ended
        self._running: dict[RequestId, RequestTrace] = {}
        self._tenant_of: dict[RequestId, str] = {}
        self._rings: dict[str, Ring] = {}
        """Ended requests by tenant; no ring is empty."""
        self._by_size: dict[int, dict[str, None]] = {}
        """Tenants by the size of their rings; of one size, the tenant that reached it first is first."""
        self._largest = 0

    def begin(self, trace: RequestTrace) -> None:
        """Keep the trace of a request that was just accepted; its owner fills it."""
        self._running[trace.request_id] = trace

    def end(self, trace: RequestTrace, now: float) -> None:
        """Keep the trace of a request that ended or was refused. The oldest trace is dropped if there are too many."""
        self._running.pop(trace.request_id, None)
        trace.stages["end"] = now
        if trace.request_id in self._tenant_of:
            return
        ring = self._rings.get(trace.tenant)
        if ring is not None and len(ring) == self._num_ended:  # All are of this tenant, and so is the oldest.
            oldest, _ = ring.popitem(last=False)
            del self._tenant_of[oldest]
            self._tenant_of[trace.request_id] = trace.tenant
            ring[trace.request_id] = trace
            return
        self._tenant_of[trace.request_id] = trace.tenant
        self._add(trace)
        if len(self._tenant_of) > self._num_ended:
            self._drop_one()

    def get(self, request_id: RequestId) -> RequestTrace | None:
        """The trace of a running or recent request; None without one."""
        if (running := self._running.get(request_id)) is not None:
            return running
        tenant = self._tenant_of.get(request_id)
        return None if tenant is None else self._rings[tenant][request_id]

    def latest(self, limit: int) -> list[RequestTrace]:
        """At most `limit` traces, the latest arrival first."""
        ended = (islice(reversed(ring.values()), limit) for ring in self._rings.values())
        both = chain(reversed(self._running.values()), *ended)
        return heapq.nlargest(limit, both, key=lambda trace: trace.arrival)

    def _add(self, trace: RequestTrace) -> None:
        ring = self._rings.get(trace.tenant)
        if ring is None:
            ring = self._rings[trace.tenant] = OrderedDict()
        ring[trace.request_id] = trace
        self._resized(trace.tenant, len(ring) - 1, len(ring))

    def _drop_one(self) -> None:
        tenant = next(iter(self._by_size[self._largest]))
        ring = self._rings[tenant]
        oldest, _ = ring.popitem(last=False)
        del self._tenant_of[oldest]
        self._resized(tenant, len(ring) + 1, len(ring))
        if not ring:
            del self._rings[tenant]

    def _resized(self, tenant: str, before: int, after: int) -> None:
        if before:
            same = self._by_size[before]
            del same[tenant]
            if not same:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, {})[tenant] = None
        if after > self._largest or self._largest not in self._by_size:
            self._largest = after
