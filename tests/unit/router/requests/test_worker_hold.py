"""Which decode worker is kept for a large request that waits for room, while workers fail."""

from __future__ import annotations

from typing import cast

from disagg.proto.ids import WorkerId
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.placement import Candidate, Demand
from disagg.router.requests.record import RequestRecord
from disagg.router.requests.waiting import WorkerHold


class NamedWorker:
    def __init__(self, name: str) -> None:
        self.worker_id = WorkerId(name)


class SoonestFirst:
    """The part of a fleet that a hold asks: workers from the soonest on, of which none has room."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.left_out: set[str] = set()

    def soonest_decode(self, demand: Demand, output_tokens: float) -> NamedWorker:
        return NamedWorker(next(name for name in self.names if name not in self.left_out))

    def is_excluded(self, worker_id: WorkerId) -> bool:
        return worker_id in self.left_out

    def candidate(self, demand: Demand, worker_id: WorkerId) -> Candidate | None:
        return None


class Waiter:
    urgency = (0, True, 0.0, 0)


def test_the_kept_worker_stays_the_same_until_it_is_left_out() -> None:
    fleet = SoonestFirst("d0", "d1")
    hold = WorkerHold(cast(Fleet, fleet), 0.5)
    large, small = cast(RequestRecord, Waiter()), cast(RequestRecord, Waiter())
    demand = Demand(num_tokens=1000, reserve_tokens=10, most_output_tokens=10)
    hold.keep(large, demand, 64.0)
    assert set(hold.kept_from(small)) == {"d0"}
    fleet.names = ("d1", "d0")  # now the other one has room sooner
    hold.keep(large, demand, 64.0)
    assert set(hold.kept_from(small)) == {"d0"}
    fleet.left_out = {"d0"}
    hold.keep(large, demand, 64.0)
    assert set(hold.kept_from(small)) == {"d1"}
    assert set(hold.kept_from(large)) == set()


def test_nothing_is_kept_once_the_request_waits_no_longer() -> None:
    hold = WorkerHold(cast(Fleet, SoonestFirst("d0")), 0.5)
    large, small = cast(RequestRecord, Waiter()), cast(RequestRecord, Waiter())
    hold.keep(large, Demand(num_tokens=1000, reserve_tokens=10, most_output_tokens=10), 64.0)
    assert not hold.release(small)
    assert hold.release(large)
    assert set(hold.kept_from(small)) == set()
