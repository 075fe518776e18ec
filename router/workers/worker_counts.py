"""The counters of workers, summed over their incarnations: those of each incarnation begin at 0, but the shown sums
must never fall.

    report of the known incarnation ──> replaces the earlier report of that incarnation
    report of another incarnation   ──> the last report of the earlier one is added to the past

Owner: the fleet.
"""

from __future__ import annotations

import msgspec

from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import TierCounts, TransferCount, WorkerMetrics, WorkerReport


class WorkerCounts:
    """The counters of all workers. An incarnation whose session broke and came back continues its counts."""

    def __init__(self) -> None:
        self._past: dict[WorkerId, WorkerMetrics] = {}
        self._restarts: dict[WorkerId, int] = {}
        self._latest: dict[WorkerId, tuple[Incarnation, WorkerMetrics]] = {}

    def take(self, report: WorkerReport) -> None:
        """Take the report of a present incarnation."""
        if report.metrics is None:
            return
        worker_id = report.worker_id
        incarnation, latest = self._latest.get(worker_id, (report.incarnation, None))
        if latest is not None and incarnation != report.incarnation:
            self._past[worker_id] = add(self._past.get(worker_id, WorkerMetrics()), latest)
            self._restarts[worker_id] += 1
        self._restarts.setdefault(worker_id, 0)
        self._latest[worker_id] = (report.incarnation, report.metrics)

    def restarts(self) -> dict[WorkerId, int]:
        """For each worker by id: the number of times that another incarnation replaced one that had reported."""
        return dict(sorted(self._restarts.items()))

    def totals(self) -> dict[WorkerId, WorkerMetrics]:
        """The sums for every worker that ever reported, by id."""
        return {
            worker_id: add(self._past[worker_id], latest) if worker_id in self._past else latest
            for worker_id, (_, latest) in sorted(self._latest.items())
        }


def add(one: WorkerMetrics, other: WorkerMetrics) -> WorkerMetrics:
    """The sum of the counters of two incarnations; what is no counter is the other's."""
    transfers: dict[tuple[WorkerId, str], TransferCount] = {}
    for count in (*one.transfers, *other.transfers):
        known = transfers.get((count.decode_worker, count.transport))
        transfers[count.decode_worker, count.transport] = count if known is None else _add_transfers(known, count)
    return WorkerMetrics(
        step_seconds=_add_counts(one.step_seconds, other.step_seconds),
        step_seconds_sum=one.step_seconds_sum + other.step_seconds_sum,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        preemptions=one.preemptions + other.preemptions,
        swapped_out_blocks=one.swapped_out_blocks + other.swapped_out_blocks,
        swapped_in_blocks=one.swapped_in_blocks + other.swapped_in_blocks,
        draft_steps=one.draft_steps + other.draft_steps,
        drafted_tokens=one.drafted_tokens + other.drafted_tokens,
        accepted_tokens=one.accepted_tokens + other.accepted_tokens,
        draft_runs=_add_counts(one.draft_runs, other.draft_runs),
        expert_imbalance=other.expert_imbalance,
        transfers=tuple(transfers.values()),
        loaded_tokens=one.loaded_tokens + other.loaded_tokens,
        fetched_tokens=one.fetched_tokens + other.fetched_tokens,
        fetches={
            outcome: one.fetches.get(outcome, 0) + other.fetches.get(outcome, 0)
            for outcome in (*one.fetches, *(outcome for outcome in other.fetches if outcome not in one.fetches))
        },
        served_fetches=one.served_fetches + other.served_fetches,
        dropped_extents=one.dropped_extents + other.dropped_extents,
        tiers=_add_tiers(one.tiers, other.tiers),
    )


def _add_tiers(one: tuple[TierCounts, ...], other: tuple[TierCounts, ...]) -> tuple[TierCounts, ...]:
    """What is held, and whether it is used, is the other's."""
    past = {tier.name: tier for tier in one}
    return tuple([_add_tier(past.get(tier.name, TierCounts(name=tier.name)), tier) for tier in other])


def _add_tier(one: TierCounts, other: TierCounts) -> TierCounts:
    return msgspec.structs.replace(
        other,
        written_extents=one.written_extents + other.written_extents,
        loaded_extents=one.loaded_extents + other.loaded_extents,
        evicted_extents=one.evicted_extents + other.evicted_extents,
        failed_extents=one.failed_extents + other.failed_extents,
    )


def _add_counts(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    if len(one) != len(other):  # of an incarnation without a report so far, or without drafts
        return one or other
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _add_transfers(one: TransferCount, other: TransferCount) -> TransferCount:
    reasons = [*one.failures, *(reason for reason in other.failures if reason not in one.failures)]
    return TransferCount(
        decode_worker=one.decode_worker,
        transport=one.transport,
        num_transfers=one.num_transfers + other.num_transfers,
        num_bytes=one.num_bytes + other.num_bytes,
        failures={reason: one.failures.get(reason, 0) + other.failures.get(reason, 0) for reason in reasons},
    )
