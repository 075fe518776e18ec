"""Views of the router core, made on demand: the cluster for operators, and whether all parts are consistent.

The cost grows with the number of requests in flight; between two views they cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping

from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import WorkerMetrics
from disagg.router.api import STAGES, BackgroundView, ClusterView, WorkerView
from disagg.router.placement.fleet import Fleet
from disagg.router.requests.record import RequestRecord
from disagg.router.states import AttemptState, RequestState
from disagg.router.telemetry.telemetry import Telemetry
from disagg.step_times.pace import note_of_target

_STAGE_OF = {
    AttemptState.PREFILLING: "prefill",
    AttemptState.TRANSFERRING: "transfer",
    AttemptState.DECODING: "decode",
}


def cluster_view(
    fleet: Fleet, records: Iterable[RequestRecord], telemetry: Telemetry, events: Mapping[str, int], now: float
) -> ClusterView:
    """The present state of the cluster. `records` are the requests in flight; `events` counts failures and dropped
    messages, by name."""
    records = list(records)
    stages = Counter(stage_of(record) for record in records)
    num_queued = stages["queued"]
    return ClusterView(
        workers=fleet.views(now),
        num_queued=num_queued,
        num_running=stages.total() - num_queued,
        background=_background(records),
        stages={stage: stages[stage] for stage in STAGES},
        rates=telemetry.rates(now),
        slos=telemetry.slos(now),
        stats=telemetry.stats,
        counters=fleet.counts.totals(),
        restarts=fleet.counts.restarts(),
        events=dict(events),
    )


def notes_on(
    workers: Iterable[WorkerView], counters: Mapping[WorkerId, WorkerMetrics], tpot_slo_s: float | None
) -> tuple[str, ...]:
    """Notes for operators on the configured TPOT target, and on tiers of KV that are off."""
    workers = list(workers)
    steps = {
        worker.info.worker_id: worker.steps
        for worker in workers
        if worker.steps is not None and "decode" in worker.info.roles
    }
    note = note_of_target(None if tpot_slo_s is None else 1e3 * tpot_slo_s, steps)
    tiers = [
        f"{worker.info.worker_id}: its {tier.name} tier of KV is "
        f"{'only read' if tier.extent_ms else 'off'}: {tier.off_reason}"
        for worker in workers
        if (metrics := counters.get(worker.info.worker_id)) is not None
        for tier in metrics.tiers
        if tier.off_reason
    ]
    return (*((note,) if note else ()), *tiers)


def _background(records: Iterable[RequestRecord]) -> BackgroundView:
    stages: Counter[str] = Counter()
    num_tokens = 0
    for record in records:
        if record.trace.is_background and (stage := stage_of(record)) in ("queued", "prefill"):
            stages[stage] += 1
            num_tokens += record.trace.num_prompt_tokens
    return BackgroundView(stages["queued"], stages["prefill"], num_tokens)


def stage_of(record: RequestRecord) -> str:
    """The stage of a request in flight, one of `STAGES`."""
    return "queued" if record.attempt is None else _STAGE_OF[record.attempt.state]


def integrity_problems(
    requests: Mapping[RequestId, RequestRecord],
    waiting: Container[RequestId],
    fleet: Fleet,
    tenants: Mapping[str, tuple[int, int]],
) -> list[str]:
    """Inconsistencies; empty when all is well.

    Args:
        requests: those that have not ended.
        waiting: which of them wait.
        fleet: the workers.
        tenants: how many of each tenant wait, and run.
    """
    found = fleet.check_integrity()
    counts = Counter((record.tenant.name, record.attempt is None) for record in requests.values())
    for name, (num_waiting, num_running) in tenants.items():
        if (num_waiting, num_running) != (counts[name, True], counts[name, False]):
            found.append(f"tenant {name!r} is counted with {num_waiting} waiting and {num_running} running")
    owed = set()
    for request_id, record in requests.items():
        is_queued = record.state is RequestState.QUEUED
        if is_queued != (request_id in waiting) or is_queued != (record.attempt is None):
            found.append(f"{request_id} is {record.state.value}, which contradicts its queue entry or attempt")
        if record.attempt is not None:
            owed |= {(worker_id, record.attempt.key) for worker_id in record.attempt.live}
    if owed != set(fleet.assignments.entries()):
        found.append("assignments and attempts differ")
    return found
