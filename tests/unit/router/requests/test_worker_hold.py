"""Which decode worker is kept for a large request that waits for room, while workers fail."""

from __future__ import annotations

from typing import cast

from disagg.proto.ids import WorkerId
from disagg.router.api import TenantLimits
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.placement import Candidate, Demand
from disagg.router.queueing.tenants import Tenant
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
    """The part of a record that a hold asks."""

    urgency = (0, True, 0.0, 0)

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant


def waiter(tenant: Tenant) -> RequestRecord:
    return cast(RequestRecord, Waiter(tenant))


def tenant(name: str = "", used: float = 0.0) -> Tenant:
    found = Tenant(name, TenantLimits(), 0.0)
    found.share.used = used
    return found


def new_hold(fleet: SoonestFirst) -> WorkerHold:
    return WorkerHold(cast(Fleet, fleet), 0.5, lambda share: share.level)


def test_the_kept_worker_stays_the_same_until_it_is_left_out() -> None:
    fleet = SoonestFirst("d0", "d1")
    hold, one = new_hold(fleet), tenant()
    large, small = waiter(one), waiter(one)
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
    hold, one = new_hold(SoonestFirst("d0")), tenant()
    large, small = waiter(one), waiter(one)
    hold.keep(large, Demand(num_tokens=1000, reserve_tokens=10, most_output_tokens=10), 64.0)
    assert not hold.release(small)
    assert hold.release(large)
    assert set(hold.kept_from(small)) == set()


def test_a_worker_is_kept_from_tenants_whose_turn_is_behind() -> None:
    hold = new_hold(SoonestFirst("d0"))
    large = waiter(tenant("a", used=100.0))
    hold.keep(large, Demand(num_tokens=1000, reserve_tokens=10, most_output_tokens=10), 64.0)
    kept = {used: set(hold.kept_from(waiter(tenant("b", used)))) for used in (0.0, 100.0, 101.0)}
    assert kept == {0.0: set(), 100.0: set(), 101.0: {"d0"}}
    large.tenant.share.claimed = 1.0  # One of its requests runs.
    assert set(hold.kept_from(waiter(tenant("b", 101.0)))) == set()
