"""What workers keep in tiers, as routers know it, and what that is worth in a placement."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import (
    BlocksSnapshot,
    KvEvent,
    Load,
    StepSample,
    TierCounts,
    TierName,
    TierRemoved,
    TierStored,
    WorkerMetrics,
    WorkerReport,
)
from disagg.router.config import RouterConfig
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.forecast import prefill_ms
from disagg.router.placement.placement import Candidate, Demand, FetchPlan
from disagg.router.placement.policies.joint import Joint
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.prefix_index import PrefixIndex
from disagg.router.workers.tier_index import TierIndex
from tests.support.router import worker_info

HASHES = [BlockHash(bytes([number]) * 2) for number in range(40)]
KEYS = tuple(HASHES[7::8])
TIERS: tuple[TierName, ...] = ("host", "disk")
STEPS = (StepSample(1.0 + 128 * 0.5, 128), StepSample(1.0 + 16 * 0.5, 16))
"""Half a millisecond a token."""


def report(
    worker_id: str, sequence: int, *events: KvEvent, tiers: tuple[TierCounts, ...] = (), incarnation: str = "1"
) -> WorkerReport:
    return WorkerReport(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        sequence=sequence,
        load=Load(blocks_total=64),
        kv_events=events,
        metrics=WorkerMetrics(tiers=tiers),
    )


def snapshot(**tiers: tuple[BlockHash, ...]) -> BlocksSnapshot:
    return BlocksSnapshot(hashes=(), tiers=tiers)  # type: ignore[arg-type]  # the names of tiers


class TestIndex:
    def tokens(self, index: TierIndex, tier: TierName) -> int:
        match = index.find(HASHES)
        assert index.check_integrity() == []
        return 0 if match is None else 128 * match.extents_of(1)[tier == "disk"]

    def test_events_of_each_tier_are_its_own(self) -> None:
        index = TierIndex()
        index.add_worker(WorkerId("p0"), Incarnation("1"), has_tiers=True)
        index.apply(report("p0", 0, snapshot(disk=KEYS[:3])))
        index.apply(report("p0", 1, TierStored(tier="host", hashes=KEYS[:4])))
        assert (self.tokens(index, "host"), self.tokens(index, "disk")) == (512, 384)
        index.apply(report("p0", 2, TierRemoved(tier="disk", hashes=KEYS[1:3])))
        assert (self.tokens(index, "host"), self.tokens(index, "disk")) == (512, 128)

    def test_a_gap_drops_what_was_known(self) -> None:
        index = TierIndex()
        index.add_worker(WorkerId("p0"), Incarnation("1"), has_tiers=True)
        index.apply(report("p0", 0, snapshot(disk=KEYS)))
        index.apply(report("p0", 2))
        assert self.tokens(index, "disk") == 0
        index.apply(report("p0", 3, snapshot(disk=KEYS[:1])))
        assert self.tokens(index, "disk") == 128

    def test_another_incarnation_begins_with_nothing(self) -> None:
        index = TierIndex()
        index.add_worker(WorkerId("p0"), Incarnation("1"), has_tiers=True)
        index.apply(report("p0", 0, snapshot(disk=KEYS)))
        index.add_worker(WorkerId("p0"), Incarnation("2"), has_tiers=True)
        assert self.tokens(index, "disk") == 0

    def test_workers_with_tiers_are_known_by_their_bits(self) -> None:
        index = TierIndex()
        index.add_worker(WorkerId("p0"), Incarnation("1"), has_tiers=False)
        assert (index.is_used, index.workers) == (False, 0)
        index.add_worker(WorkerId("p1"), Incarnation("1"), has_tiers=True)
        assert (index.is_used, index.workers) == (True, 2)
        index.add_worker(WorkerId("p1"), Incarnation("2"), has_tiers=False)
        assert (index.is_used, index.workers) == (False, 0)
        index.add_worker(WorkerId("p0"), Incarnation("2"), has_tiers=True)
        index.remove_worker(WorkerId("p0"))
        assert (index.is_used, index.workers) == (False, 0)

    def test_only_what_is_beyond_a_prefix_is_found(self) -> None:
        index = TierIndex()
        for number, tiers in enumerate(({"host": KEYS[:2]}, {"host": KEYS[:3], "disk": KEYS[:4]})):
            index.add_worker(WorkerId(f"p{number}"), Incarnation("1"), has_tiers=True)
            index.apply(report(f"p{number}", 0, snapshot(**tiers)))
        for beyond, ends in (
            (0, [(2, 0b1), (3, 0b100), (4, 0b1000)]),
            (15, [(2, 0b1), (3, 0b100), (4, 0b1000)]),
            (16, [(3, 0b100), (4, 0b1000)]),
            (24, [(4, 0b1000)]),
        ):
            match = index.find(HASHES, beyond)
            assert match is not None
            assert match.ends == ends
            assert match.extents_of(0b100) == (3 if beyond < 24 else 0, 4)
            assert match.holders() == sum(tiers for _, tiers in ends)
        assert index.find(HASHES, 32) is None
        assert index.find(HASHES[:16], 16) is None


@pytest.mark.parametrize("seed", range(10))
def test_tiers_are_found_as_in_an_index_of_each(seed: int) -> None:
    """With workers that come, go and report, and any workers left out."""
    draw = random.Random(seed)
    index, plain = TierIndex(), {tier: PrefixIndex() for tier in TIERS}
    sequences: dict[str, int] = {}
    for turn in range(60):
        name = f"p{draw.randrange(12)}"
        if name not in sequences or draw.random() < 0.2:
            sequences.pop(name, None)
            index.remove_worker(WorkerId(name))
            for each in plain.values():
                each.remove_worker(WorkerId(name))
            if draw.random() < 0.9:
                sequences[name] = 0
                index.add_worker(WorkerId(name), Incarnation("1"), has_tiers=True)
                for each in plain.values():
                    each.add_worker(WorkerId(name), Incarnation("1"))
        if name in sequences:
            tiers: dict[TierName, tuple[BlockHash, ...]] = {tier: KEYS[: draw.randrange(6)] for tier in TIERS}
            index.apply(report(name, sequences[name], BlocksSnapshot(hashes=(), tiers=tiers)))
            for tier, each in plain.items():
                each.apply(report(name, sequences[name], BlocksSnapshot(hashes=tiers[tier])))
            sequences[name] += 1
        beyond = draw.randrange(41)
        match, expected = index.find(HASHES, beyond), {t: each.find(KEYS, beyond // 8) for t, each in plain.items()}
        assert (match is None) == (not any(each.ends for each in expected.values()))
        if match is None:
            continue
        among = {worker_id for worker_id in sequences if draw.random() < 0.8}
        bits = {worker_id: plain["host"].bit(WorkerId(worker_id)) for worker_id in sequences}
        for worker_id, bit in bits.items():
            numbers = tuple(expected[tier].blocks_of(bit) for tier in TIERS)
            assert match.extents_of(bit * bit) == numbers, worker_id
            assert bool(match.holders() & 3 * bit * bit) == any(numbers)
        for tier in TIERS:
            limit, more_than = draw.randint(1, 4), draw.randrange(3)
            hosts, workers = sum(bits[each] ** 2 for each in among), sum(bits[each] for each in among)
            best = match.best(tier, limit, hosts, turn % 16, more_than)
            assert best == expected[tier].best(limit, workers, turn % 16, more_than)
    assert index.check_integrity() == []


def fleet_of(num_workers: int) -> tuple[Fleet, Joint]:
    """Colocated workers with tiers."""
    config, links, pairs = RouterConfig(policy="joint"), LinkModel(), Pairs(RouterConfig())
    policy = Joint(50.0, links, pairs)
    fleet = Fleet(config, policy, links, pairs)
    for number in range(num_workers):
        info = worker_info(f"c{number}", calibration=STEPS, num_blocks=64)
        fleet.up(msgspec.structs.replace(info, tiers=("host", "disk")), 0.0)
    return fleet, policy


def candidates(fleet: Fleet, num_tokens: int = 640) -> dict[str, Candidate]:
    demand = Demand(num_tokens=num_tokens, most_output_tokens=8, output_tokens=8.0)
    (shortlist,) = fleet.shortlists(demand, HASHES, (), 1.0)
    return {str(candidate.worker.worker_id): candidate for candidate in shortlist.colocated}


def tiers(host_ms: float, disk_ms: float) -> tuple[TierCounts, ...]:
    return TierCounts(name="host", extent_ms=host_ms), TierCounts(name="disk", extent_ms=disk_ms)


class TestPlacement:
    def test_a_load_counts_as_its_time_and_what_is_left_to_compute(self) -> None:
        fleet, policy = fleet_of(1)
        fleet.report(report("c0", 0, snapshot(host=KEYS[:2], disk=KEYS[:4]), tiers=tiers(1.0, 4.0)), 1.0)
        candidate = candidates(fleet)["c0"]
        left_ms = prefill_ms(candidate.worker, 512, 640)
        assert candidate.fetch == FetchPlan("disk", 512, 2 * 1.0 + 2 * 4.0, prefill_ms=left_ms)
        demand = Demand(num_tokens=640, most_output_tokens=8, output_tokens=8.0)
        weight = policy.weigh_colocated(demand, candidate)
        assert weight.wait_ms == 10.0
        cached = policy.weigh_colocated(demand, Candidate(candidate.worker, 512, candidate.num_blocks))
        assert weight.prefill_ms == cached.prefill_ms
        assert weight.cost == pytest.approx(cached.cost + 10.0)

    def test_a_load_waits_for_those_before_it(self) -> None:
        fleet, _ = fleet_of(1)
        busy = (
            TierCounts(name="host", extent_ms=1.0, queue_ms=3.0),
            TierCounts(name="disk", extent_ms=4.0, queue_ms=20.0),
        )
        fleet.report(report("c0", 0, snapshot(host=KEYS[:2], disk=KEYS[:4]), tiers=busy), 1.0)
        assert [way.ms for way in candidates(fleet)["c0"].ways] == [0.0, 2 * 1.0 + 3.0, 2 * 1.0 + 3.0 + 2 * 4.0 + 20.0]

    def test_a_slow_tier_is_not_counted_on(self) -> None:
        fleet, _ = fleet_of(1)
        fleet.report(report("c0", 0, snapshot(host=KEYS[:2], disk=KEYS[:4]), tiers=tiers(1.0, 400.0)), 1.0)
        candidate = candidates(fleet)["c0"]
        assert [(way.kind, way.tokens, way.ms) for way in candidate.ways] == [
            ("compute", 0, 0.0),
            ("host", 256, 2.0),
            ("disk", 512, 2.0 + 2 * 400.0),
        ]
        assert candidate.fetch is candidate.ways[1]

    def test_a_load_must_win_by_some_milliseconds(self) -> None:
        fleet, _ = fleet_of(1)
        worker = fleet.worker(WorkerId("c0"))
        most_ms = (prefill_ms(worker, 0, 640) - prefill_ms(worker, 128, 640) - 5.0) / 1.1
        fleet.report(report("c0", 0, snapshot(host=KEYS[:1]), tiers=tiers(most_ms + 0.1, 1.0)), 1.0)
        assert candidates(fleet)["c0"].fetch is None
        fleet.report(report("c0", 1, tiers=tiers(most_ms - 0.1, 1.0)), 1.0)
        assert candidates(fleet)["c0"].fetch is not None

    def test_a_tier_of_which_nothing_was_told_is_not_counted_on(self) -> None:
        fleet, _ = fleet_of(1)
        fleet.report(report("c0", 0, snapshot(disk=KEYS)), 1.0)
        assert candidates(fleet)["c0"].fetch is None
        off = TierCounts(name="disk", extent_ms=0.0, off_reason="Input/output error")
        fleet.report(report("c0", 1, tiers=(off,)), 1.0)
        assert fleet.worker(WorkerId("c0")).extent_ms.get("disk", math.inf) == math.inf

    def test_who_has_it_is_a_candidate_and_is_chosen(self) -> None:
        fleet, policy = fleet_of(9)
        fleet.report(report("c8", 0, snapshot(disk=KEYS[:4]), tiers=tiers(1.0, 1.0)), 1.0)
        found = candidates(fleet)
        demand = Demand(num_tokens=640, most_output_tokens=8, output_tokens=8.0)
        costs = {name: policy.weigh_colocated(demand, candidate).cost for name, candidate in found.items()}
        assert min(costs, key=lambda name: costs[name]) == "c8"
        assert fleet.check_integrity() == []
