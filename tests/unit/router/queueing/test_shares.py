"""Parts of tenants: an event costs the same however many are known, and what is over is forgotten."""

from __future__ import annotations

import random

import pytest

from disagg.router.api import TenantLimits
from disagg.router.config import RouterConfig
from disagg.router.queueing import shares
from disagg.router.queueing.shares import DEMAND_S, NUM_GRAINS, Part, SharedResource
from disagg.router.queueing.tenants import FORGET_S, Tenants

SHARED = TenantLimits(is_sole=False)
NUM_KNOWN = 10_000


def new_tenants(num_places: int = 64) -> Tenants:
    return Tenants(RouterConfig(), lambda: num_places, lambda: (1 << 20, 0))


def ask_once(tenants: Tenants, name: str, now: float, limits: TenantLimits = SHARED) -> None:
    """A request that is placed, if it may be, and ends."""
    tenant = tenants.get(name, limits, now)
    tenants.charge(tenant, 100, None, now)
    tenants.entered(tenant, 160, now)
    if tenants.may_run(name) and tenants.may_have(tenant, 160):
        tenants.started(tenant, 160)
        tenants.stopped(tenant, 160, now)
    tenants.left(tenant, 160)


@pytest.mark.parametrize("num_places", [64, 100_000])
def test_an_event_looks_at_few_tenants_however_many_are_known(num_places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Part] = []
    update = SharedResource._set

    def counted(resource: SharedResource, part: Part) -> None:
        looked_at.append(part)
        update(resource, part)

    monkeypatch.setattr(SharedResource, "_set", counted)
    tenants, most = new_tenants(num_places), 0
    for number in range(NUM_KNOWN):
        looked_at.clear()
        ask_once(tenants, f"t{number}", number * 1e-4)
        most = max(most, len(looked_at))
    assert most <= 2 * (NUM_GRAINS + shares.MAX_SHIFTS) + 8  # As a tenant begins to ask, of places and of KV.
    before = len(looked_at)
    looked_at.clear()
    for number in range(300):  # Those that ask already.
        ask_once(tenants, f"t{number % 100}", 2.0)
    assert len(looked_at) == 0 <= before
    assert tenants.check_integrity() == []


def test_tenants_are_forgotten_once_nothing_of_them_is_left() -> None:
    tenants = new_tenants()
    limited = TenantLimits(is_sole=False, tokens_per_minute=60)
    for number in range(1000):
        ask_once(tenants, f"t{number}", 0.0)
    runs = tenants.get("runs", SHARED, 0.0)
    tenants.entered(runs, 16, 0.0)
    tenants.started(runs, 16)
    owes = tenants.get("owes", limited, 0.0)
    tenants.charge(owes, 60 * 30, None, 0.0)  # Of which half an hour is needed.
    for step in range(1000):
        ask_once(tenants, "caller", FORGET_S + step)
    assert set(tenants._tenants) == {"caller", "runs", "owes"}
    assert tenants.get("owes", limited, FORGET_S + 1000) is owes
    assert tenants.in_flight() == {"runs": (0, 1)}
    assert tenants.check_integrity() == []


def test_parts_by_weight_and_demand() -> None:
    places = SharedResource(lambda: 64, 0.9)
    heavy, light, modest = Part(3.0), Part(1.0), Part(4.0, most=5)
    for part, amount in ((heavy, 100), (light, 100), (modest, 40)):
        places.asks(part, amount, 0.0, is_shared=True)
    assert [places.guaranteed(part) for part in (heavy, light, modest)] == [24, 8, 5]
    for part, amount in ((light, 100), (modest, 40)):
        places.no_longer_asks(part, amount)
    for now in (DEMAND_S, 2 * DEMAND_S):
        places.note_time(now)
    assert [places.guaranteed(part) for part in (heavy, light, modest)] == [57, 0, 0]
    places.set_limits(heavy, 3.0, 10)
    assert places.guaranteed(heavy) == 10


def test_guarantees_are_those_of_a_computation_from_all_tenants() -> None:
    """With tenants that come and go and a total that changes."""
    draw, total = random.Random(1), [640]
    resource = SharedResource(lambda: total[0], 0.9)
    parts = [Part(draw.choice([0.5, 1.0, 2.0]), draw.choice([None, None, 7])) for _ in range(200)]
    asked: list[tuple[Part, int]] = []
    now = 0.0
    for _ in range(3000):
        now += draw.expovariate(3.0)
        resource.note_time(now)
        if asked and draw.random() < 0.5:
            part, amount = asked.pop(draw.randrange(len(asked)))
            resource.no_longer_asks(part, amount)
        else:
            asked.append((draw.choice(parts[: draw.choice([3, 200])]), draw.randint(1, 90)))
            resource.asks(*asked[-1], now, is_shared=True)
        if draw.random() < 0.02:
            total[0] = draw.choice([16, 640, 4096])
        asking = [part for part in parts if part.is_asking]
        weights, grain = sum(part.weight for part in asking), max(1, total[0] // NUM_GRAINS)
        for part in draw.sample(parts, 5):
            expected = 0
            if part.is_asking:
                most = int(total[0] * min(part.weight / weights, 0.9)) // grain * grain
                expected = min(most, max(part.peak, part.earlier_peak), most if part.most is None else part.most)
            assert resource.guaranteed(part) == expected
        assert resource.check_integrity(parts) == []
