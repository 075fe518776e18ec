"""The cluster as an operator sees it: a picture of the router core, made when somebody asks.

Costs time that grows with the number of requests in flight; the core does nothing for it in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from disagg.router.api import STAGES, ClusterView
from disagg.router.placement.fleet import Fleet
from disagg.router.requests.record import RequestRecord
from disagg.router.states import AttemptState
from disagg.router.telemetry.telemetry import Telemetry

_STAGE_OF = {
    AttemptState.PREFILLING: "prefill",
    AttemptState.TRANSFERRING: "transfer",
    AttemptState.DECODING: "decode",
    AttemptState.SUSPENDED: "decode",
}


def cluster_view(
    fleet: Fleet, records: Iterable[RequestRecord], telemetry: Telemetry, events: Mapping[str, int], now: float
) -> ClusterView:
    """The picture. `records` are the requests in flight; `events` is what went wrong or was dropped, by name."""
    stages = Counter(stage_of(record) for record in records)
    num_queued = stages["queued"]
    return ClusterView(
        workers=fleet.views(now),
        num_queued=num_queued,
        num_running=stages.total() - num_queued,
        stages={stage: stages[stage] for stage in STAGES},
        rates=telemetry.rates(now),
        slos=telemetry.slos(now),
        stats=telemetry.stats,
        counters=fleet.counts.totals(),
        events=dict(events),
    )


def stage_of(record: RequestRecord) -> str:
    """What a request in flight waits for, one of `STAGES`."""
    return "queued" if record.attempt is None else _STAGE_OF[record.attempt.state]
