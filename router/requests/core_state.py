"""The state that the parts of the router core share: what is in flight, where, for whom, and what was counted.

    RouterCore ──makes──> CoreState <── Attempts, Waiting, Migrations, Endings

`requests` is changed by the core, which adds, and by `Endings`, which removes; the parts read it. All other fields are
objects that keep themselves consistent. The fields are never replaced, so the parts may hold those that they use.

Owner: the router core.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from disagg.proto.ids import RequestId
from disagg.router.placement.fleet import Fleet
from disagg.router.queueing.tenants import Tenants
from disagg.router.requests.record import RequestRecord
from disagg.router.requests.timers import Timers
from disagg.router.telemetry.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreState:
    """Requests, workers, tenants, timers, and the counts of one router."""

    fleet: Fleet
    """The workers."""
    tenants: Tenants
    telemetry: Telemetry
    requests: dict[RequestId, RequestRecord] = field(default_factory=dict)
    """The requests that have not ended."""
    timers: Timers = field(default_factory=Timers)
    """Deadlines of requests, and the ends of pauses and of waits."""
    counters: Counter[str] = field(default_factory=Counter)
    """Counts of failures and dropped messages, by name: stale_attempt, wrong_worker, refused, worker_lost, ..."""
