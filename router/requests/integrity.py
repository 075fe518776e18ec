"""Whether the parts of the router core tell the same story. For tests, and for whoever looks for a fault. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

from disagg.proto.ids import RequestId
from disagg.router.placement.fleet import Fleet
from disagg.router.requests.record import RequestRecord
from disagg.router.states import RequestState


def problems(
    requests: Mapping[RequestId, RequestRecord],
    waiting: Container[RequestId],
    fleet: Fleet,
    tenants: Mapping[str, tuple[int, int]],
) -> list[str]:
    """What does not fit together; empty when all is well.

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
            found.append(f"tenant {name!r} is said to have {num_waiting} waiting and {num_running} running")
    owed = set()
    for request_id, record in requests.items():
        is_queued = record.state is RequestState.QUEUED
        if is_queued != (request_id in waiting) or is_queued != (record.attempt is None):
            found.append(f"{request_id} is {record.state.value}, which its queue entry or attempt denies")
        if record.attempt is not None:
            owed |= {(worker_id, record.attempt.key) for worker_id in record.attempt.live}
    if owed != set(fleet.assignments.entries()):
        found.append("books and attempts differ")
    return found
