"""KV that a worker gets from another one, as a candidate of a placement: exact times, and when it is not asked for."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import (
    EXTENT_TOKENS,
    BlocksSnapshot,
    FetchFrom,
    Load,
    StepSample,
    TierCounts,
    WorkerMetrics,
    WorkerReport,
)
from disagg.router.config import RouterConfig
from disagg.router.placement import fetches
from disagg.router.placement.fetches import MAX_SOURCES, STEPS_OF_EACH_END, WON_BY, WON_BY_MS, may_fetch, step_ms
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.forecast import prefill_ms
from disagg.router.placement.placement import Candidate, Demand
from disagg.router.placement.policies.baselines import LeastLoaded, Prefix, RoundRobin
from disagg.router.placement.policies.elastic import Elastic
from disagg.router.placement.policies.joint import Joint
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.fetch_links import FAILED_S, MAX_PAIRS, RECENT_S, REFUSED_S, FetchLinks, line
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.worker import Worker
from tests.support.router import worker_info

HASHES = [BlockHash(number.to_bytes(2, "big")) for number in range(1, 65)]
KEYS = tuple(HASHES[7::8])
STEPS = (StepSample(1.0 + 128 * 0.5, 128), StepSample(1.0 + 16 * 0.5, 16))
"""Half a millisecond a token."""
CONFIG = RouterConfig(policy="joint")
P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))
NUM_TOKENS = 640


def fleet_of(*names: str, fetches: bool = True, tiers: bool = False) -> Fleet:
    """Prefill workers p<number> and decode workers d<number>."""
    links, pairs = LinkModel(), Pairs(CONFIG)
    fleet = Fleet(CONFIG, Joint(50.0, links, pairs), links, pairs)
    for name in names:
        info = worker_info(name, calibration=STEPS, num_blocks=4096)
        fleet.up(msgspec.structs.replace(info, fetches=fetches, tiers=("host", "disk") if tiers else ()), 0.0)
    return fleet


def report(fleet: Fleet, worker_id: WorkerId, num_blocks: int, sequence: int = 0, **load: int) -> None:
    snapshot = BlocksSnapshot(hashes=tuple(HASHES[:num_blocks]))
    said = WorkerReport(
        worker_id=worker_id,
        incarnation=Incarnation("1"),
        sequence=sequence,
        load=Load(blocks_total=4096, **load),
        kv_events=(snapshot,),
    )
    fleet.report(said, 1.0)


def demand_of(num_tokens: int = NUM_TOKENS, now: float = 1.0) -> Demand:
    return Demand(num_tokens=num_tokens, most_output_tokens=8, output_tokens=8.0, now=now)


def prefills(fleet: Fleet, demand: Demand | None = None) -> dict[str, Candidate]:
    demand = demand_of() if demand is None else demand
    (shortlist,) = fleet.shortlists(demand, HASHES, (), demand.now)
    return {str(candidate.worker.worker_id): candidate for candidate in shortlist.prefills}


def transfer_ms(fleet: Fleet, source: WorkerId, needy: WorkerId, tokens: int, cached: int = 0) -> float:
    kv_bytes = fleet.worker(needy).kv_layout.bytes_of(tokens, cached)
    return fleet.links.exposed_ms(source, needy, kv_bytes)


def report_host(fleet: Fleet, worker_id: WorkerId, num_blocks: int, num_extents: int, extent_ms: float) -> None:
    """What a worker has in its device cache, and in host memory."""
    snapshot = BlocksSnapshot(hashes=tuple(HASHES[:num_blocks]), tiers={"host": KEYS[:num_extents]})
    metrics = WorkerMetrics(tiers=(TierCounts(name="host", extent_ms=extent_ms),))
    load, incarnation = Load(blocks_total=4096), Incarnation("1")
    fleet.report(
        WorkerReport(
            worker_id=worker_id,
            incarnation=incarnation,
            sequence=0,
            load=load,
            kv_events=(snapshot,),
            metrics=metrics,
        ),
        1.0,
    )


class TestPlan:
    @pytest.mark.parametrize("num_blocks", [0, 8])
    def test_what_a_source_has_in_host_memory_is_loaded_there_first(self, num_blocks: int) -> None:
        fleet = fleet_of("p0", "d0", tiers=True)
        report_host(fleet, D0, num_blocks, 4, 3.0)
        plan = prefills(fleet)["p0"].fetch
        assert plan is not None
        assert (plan.kind, plan.source, plan.tokens) == ("peer", D0, 512)
        without = fleet_of("p0", "d0")
        report(without, D0, 32)
        other = prefills(without)["p0"].fetch
        assert other is not None
        assert plan.ms - other.ms == pytest.approx(3.0 * (4 - num_blocks // 8))

    def test_a_source_whose_host_memory_is_slow_is_not_asked(self) -> None:
        fleet = fleet_of("p0", "d0", tiers=True)
        report_host(fleet, D0, 0, 4, 1000.0)
        assert prefills(fleet)["p0"].fetch is None

    def test_a_fetch_takes_the_time_of_the_link_and_leaves_the_rest_to_compute(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 33)
        candidate = prefills(fleet)["p0"]
        plan = candidate.fetch
        assert plan is not None
        assert (plan.kind, plan.source, plan.tokens) == ("peer", D0, 512)  # 33 blocks are 528 tokens: four extents
        assert plan.kv_bytes == fleet.worker(P0).kv_layout.bytes_of(512)
        assert plan.before_ms == CONFIG.pair_setup_ms
        assert plan.ms == CONFIG.pair_setup_ms + transfer_ms(fleet, D0, P0, 512)
        assert plan.prefill_ms == prefill_ms(fleet.worker(P0), 512, NUM_TOKENS)
        assert [way.kind for way in candidate.ways] == ["compute", "peer"]
        assert candidate.ways[0].prefill_ms == prefill_ms(fleet.worker(P0), 0, NUM_TOKENS)

    def test_a_formed_connection_takes_no_time(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        fleet.place_fetch(prefills(fleet)["p0"], 1.0)
        again = prefills(fleet)["p0"].fetch
        assert again is not None
        assert again.before_ms == 0.0
        later = prefills(fleet, demand_of(now=1.0 + CONFIG.pair_idle_s))["p0"].fetch
        assert later is not None
        assert later.before_ms == CONFIG.pair_setup_ms

    def test_what_the_worker_has_itself_is_not_sent(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, P0, 10)
        report(fleet, D0, 40)
        plan = prefills(fleet)["p0"].fetch
        assert plan is not None
        assert (plan.tokens, plan.kv_bytes) == (512, fleet.worker(P0).kv_layout.bytes_of(512, 160))

    def test_the_last_token_is_always_computed(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 40)
        plan = prefills(fleet, demand_of(512))["p0"].fetch
        assert plan is not None
        assert plan.tokens == 384

    def test_a_source_that_decodes_pays_for_the_copy_and_sends_between_its_steps(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32, num_running=0)
        idle = prefills(fleet)["p0"].fetch
        source = fleet.worker(D0)
        source.num_decodes, source.token_ms = 3, 7.0
        busy = prefills(fleet)["p0"].fetch
        assert idle is not None
        assert busy is not None
        assert idle.delay_ms == 0.0
        assert busy.delay_ms == pytest.approx(3 * busy.kv_bytes * 0.33e-6)
        assert busy.ms == idle.ms + STEPS_OF_EACH_END * 7.0

    def test_a_source_is_held_up_no_longer_than_the_transfer_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        fleet.worker(D0).num_decodes = 3
        monkeypatch.setattr(fleet.fetch_links, "transfer_ms", lambda *_: 0.001)
        plan = prefills(fleet)["p0"].fetch
        assert plan is not None
        assert plan.delay_ms == 3 * 0.001

    def test_a_fetch_that_costs_others_more_than_it_saves_is_not_made(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        for number in range(200):
            fleet.fetch_links.ended(D0, P0, "done", (number % 7 + 1) << 20, 2.0 * (number % 7 + 1), 1.0)
        assert prefills(fleet)["p0"].fetch is not None
        fleet.worker(D0).num_decodes = 10**6
        candidate = prefills(fleet)["p0"]
        assert candidate.ways[1].delay_ms > candidate.ways[0].prefill_ms
        assert candidate.fetch is None

    def test_a_worker_that_computes_receives_between_its_steps(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        idle = prefills(fleet)["p0"].fetch
        needy = fleet.worker(P0)
        needy.outstanding_tokens, needy.backlog_ms = 100, 50.0
        busy = prefills(fleet)["p0"].fetch
        assert idle is not None
        assert busy is not None
        assert busy.ms == idle.ms + STEPS_OF_EACH_END * step_ms(needy)

    def test_a_step_lasts_as_long_as_the_prompt_tokens_that_it_has(self) -> None:
        source = fleet_of("p0").worker(P0)
        assert step_ms(source) == 0.0
        source.outstanding_tokens = 10
        assert step_ms(source) == source.around_ms + 10 * source.prefill_token_ms
        source.outstanding_tokens = 10**6
        assert step_ms(source) == source.around_ms + source.prompt_room * source.prefill_token_ms

    def test_of_the_deepest_those_that_send_soonest_are_compared(self) -> None:
        fleet = fleet_of("p0", "p1", "d0", "d1")
        for worker_id, num_blocks in ((P1, 32), (D0, 32), (D1, 32)):
            report(fleet, worker_id, num_blocks)
        fleet.worker(D0).num_decodes, fleet.worker(D0).token_ms = 1, 30.0
        fleet.worker(P1).num_decodes, fleet.worker(P1).token_ms = 1, 20.0
        candidate = prefills(fleet)["p0"]
        assert [way.source for way in candidate.ways[1:]] == [D1, P1]
        assert len(candidate.ways) == 1 + MAX_SOURCES
        assert candidate.fetch is candidate.ways[1]

    def test_a_deeper_source_that_is_busy_may_lose_to_a_shallower_one(self) -> None:
        fleet = fleet_of("p0", "d0", "d1")
        report(fleet, D0, 32)
        report(fleet, D1, 24)
        fleet.worker(D0).num_decodes, fleet.worker(D0).token_ms = 1, 45.0
        candidate = prefills(fleet)["p0"]
        assert [(way.source, way.tokens) for way in candidate.ways[1:]] == [(D0, 512), (D1, 384)]
        assert candidate.fetch is candidate.ways[2]

    def test_a_fetch_that_the_wait_hides_costs_no_time(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        fleet.worker(P0).backlog_ms = 500.0
        candidate = prefills(fleet)["p0"]
        assert candidate.fetch is not None
        weight = Joint(50.0, fleet.links, fleet.pairs).weigh_prefill(demand_of(), candidate)
        assert (weight.wait_ms, weight.prefill_ms) == (500.0, candidate.fetch.prefill_ms)

    @pytest.mark.parametrize("policy", ["joint", "elastic"])
    def test_a_policy_counts_the_fetch_and_the_delay_of_its_source(self, policy: str) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        fleet.worker(D0).num_decodes = 4
        candidate = prefills(fleet)["p0"]
        plan = candidate.fetch
        assert plan is not None
        assert plan.delay_ms > 0.0
        demand = demand_of()
        weighs = Joint(50.0, fleet.links, fleet.pairs)
        if policy == "elastic":
            weighs = Elastic(50.0, fleet.links, fleet.pairs, "spread")
            demand.tpot_ms = 100.0
        cached = Candidate(candidate.worker, 512, candidate.num_blocks)
        with_fetch, without = weighs.weigh_prefill(demand, candidate), weighs.weigh_prefill(demand, cached)
        assert with_fetch.wait_ms == plan.ms
        assert with_fetch.cost == pytest.approx(without.cost + plan.ms + plan.delay_ms)
        alone, cached_alone = weighs.weigh_colocated(demand, candidate), weighs.weigh_colocated(demand, cached)
        assert alone.cost == pytest.approx(cached_alone.cost + plan.ms + plan.delay_ms)

    def test_own_tiers_are_preferred_unless_the_fetch_wins_clearly(self) -> None:
        fleet = fleet_of("p0", "d0", tiers=True)
        report(fleet, D0, 32)

        def load(sequence: int, extent_ms: float) -> Candidate:
            tier = TierCounts(name="host", extent_ms=extent_ms)
            snapshot = BlocksSnapshot(hashes=(), tiers={"host": KEYS[:4]})
            metrics = WorkerMetrics(tiers=(tier,))
            fleet.report(
                WorkerReport(
                    worker_id=P0,
                    incarnation=Incarnation("1"),
                    sequence=sequence,
                    load=Load(blocks_total=4096),
                    kv_events=(snapshot,),
                    metrics=metrics,
                ),
                1.0,
            )
            return prefills(fleet)["p0"]

        fetch_ms = CONFIG.pair_setup_ms + transfer_ms(fleet, D0, P0, 512)
        least_ms = WON_BY * fetch_ms + WON_BY_MS
        candidate = load(0, (least_ms - 0.1) / 4)
        assert candidate.fetch is not None
        assert candidate.fetch.kind == "host"
        assert [way.kind for way in candidate.ways] == ["compute", "host", "peer"]
        candidate = load(1, (least_ms + 0.1) / 4)
        assert candidate.fetch is not None
        assert candidate.fetch.kind == "peer"


class TestBound:
    """Whether sources are looked up at all. A prefill of `COMPUTE_MS` is compared with what any fetch takes before its
    transfer; what is saved must be more than a tenth of that and 5 ms."""

    COMPUTE_MS = 60.0

    def may(
        self, monkeypatch: pytest.MonkeyPatch, *, wait_ms: float, is_formed: bool = False, step_ms: float = 0.0
    ) -> bool:
        fleet = fleet_of("p0", "d0")
        if is_formed:
            fleet.fetch_links.placed(D0, P0, 1.0)
        worker = fleet.worker(P0)
        worker.backlog_ms, worker.num_decodes, worker.token_ms = wait_ms, int(step_ms > 0.0), step_ms
        monkeypatch.setattr(fetches, "prefill_ms", lambda *_: self.COMPUTE_MS)
        return may_fetch(demand_of(), Candidate(worker, 0, 40), fleet.fetch_links)

    def test_the_figures_of_this_class(self) -> None:
        assert (CONFIG.pair_setup_ms, WON_BY, WON_BY_MS, STEPS_OF_EACH_END) == (50.0, 1.1, 5.0, 2)

    @pytest.mark.parametrize(("wait_ms", "expected"), [(0.0, False), (0.001, True)])
    def test_a_connection_is_waited_for(self, monkeypatch: pytest.MonkeyPatch, wait_ms: float, expected: bool) -> None:
        """Computing is done after 60 ms, a fetch after 50: that is the margin of 10 ms, and not more than it. While
        the prompt waits, the connection is formed."""
        assert self.may(monkeypatch, wait_ms=wait_ms) is expected

    @pytest.mark.parametrize(("step_ms", "expected"), [(24.999, True), (25.001, False), (24.0, True), (26.0, False)])
    def test_steps_of_the_worker_are_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, step_ms: float, expected: bool
    ) -> None:
        """Two steps of 25 ms are as long as forming a connection."""
        assert self.may(monkeypatch, wait_ms=0.0, is_formed=True, step_ms=step_ms) is expected

    @pytest.mark.parametrize(("compute_ms", "expected"), [(5.0, False), (5.001, True)])
    def test_where_nothing_is_waited_for_5_ms_are_left(
        self, monkeypatch: pytest.MonkeyPatch, compute_ms: float, expected: bool
    ) -> None:
        monkeypatch.setattr(self, "COMPUTE_MS", compute_ms)
        assert self.may(monkeypatch, wait_ms=0.0, is_formed=True) is expected

    @pytest.mark.parametrize(("compute_ms", "expected"), [(9.999, False), (10.001, True)])
    def test_a_wait_hides_what_comes_before_the_transfer_but_not_its_margin(
        self, monkeypatch: pytest.MonkeyPatch, compute_ms: float, expected: bool
    ) -> None:
        monkeypatch.setattr(self, "COMPUTE_MS", compute_ms)
        assert self.may(monkeypatch, wait_ms=400.0) is expected

    def test_a_worker_that_takes_part_in_no_fetches_has_no_source(self, monkeypatch: pytest.MonkeyPatch) -> None:
        worker, links = fleet_of("p0", fetches=False).worker(P0), FetchLinks(CONFIG, LinkModel())
        monkeypatch.setattr(fetches, "prefill_ms", lambda *_: 1e6)
        assert not may_fetch(demand_of(), Candidate(worker, 0, 40), links)


class TestSources:
    def fetch(self, fleet: Fleet) -> str | None:
        plan = prefills(fleet)["p0"].fetch
        return None if plan is None else plan.source

    def test_without_workers_that_fetch_nothing_is_compared(self) -> None:
        fleet = fleet_of("p0", "d0", fetches=False)
        report(fleet, D0, 32)
        assert not fleet.has_other_ways
        assert prefills(fleet)["p0"].ways == ()

    def test_a_policy_that_predicts_no_times_makes_no_fetch(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        assert self.fetch(fleet) == D0
        for policy in (LeastLoaded(), Prefix(), RoundRobin()):
            fleet.configure(CONFIG, policy)
            assert not fleet.has_other_ways
            assert self.fetch(fleet) is None
        fleet.configure(CONFIG, Joint(50.0, fleet.links, fleet.pairs))
        assert self.fetch(fleet) == D0

    def test_a_policy_that_predicts_no_times_counts_what_a_worker_loads_itself(self) -> None:
        fleet = fleet_of("p0", "d0", tiers=True)
        report_host(fleet, P0, 0, 4, 1.0)
        fleet.configure(CONFIG, LeastLoaded())
        candidate = prefills(fleet)["p0"]
        assert [way.kind for way in candidate.ways] == ["compute", "host"]
        assert candidate.ready_tokens == 512

    def test_workers_that_do_not_fetch_are_left_alone(self) -> None:
        fleet = fleet_of("d0")
        fleet.up(worker_info("p0", calibration=STEPS, num_blocks=4096), 0.0)
        report(fleet, D0, 32)
        assert fleet.has_other_ways
        assert self.fetch(fleet) is None
        other = fleet_of("p0")
        other.up(worker_info("d0", calibration=STEPS, num_blocks=4096), 0.0)
        report(other, D0, 32)
        assert self.fetch(other) is None

    @pytest.mark.parametrize(("fetches", "is_found"), [(True, True), (False, False)])
    def test_tiers_are_looked_up_beyond_what_all_have_that_could_use_them(self, fetches: bool, is_found: bool) -> None:
        fleet = fleet_of("p0", tiers=True)
        fleet.up(msgspec.structs.replace(worker_info("d0", calibration=STEPS, num_blocks=4096), fetches=fetches), 0.0)
        report_host(fleet, P0, 24, 3, 1.0)
        report(fleet, D0, 24)
        assert fleet.matched(HASHES, 1.0).tiers is None
        report(fleet, D0, 16, 1)
        assert (fleet.matched(HASHES, 1.0).tiers is not None) is is_found

    def test_a_request_for_a_vector_fetches_nothing(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        demand = demand_of()
        (asked,) = fleet.shortlists(demand, HASHES, (), 1.0)
        assert [each.fetch is not None for each in asked.prefills] == [True]
        demand.is_pooled = True
        (pooled,) = fleet.shortlists(demand, HASHES, (), 1.0)
        assert [each.fetch for each in (*pooled.prefills, *pooled.colocated)] == [None]

    def test_what_a_worker_is_only_predicted_to_have_is_not_fetched(self) -> None:
        fleet = fleet_of("p0", "d0")
        fleet.predict(fleet.worker(D0), HASHES, 1.0)
        assert self.fetch(fleet) is None
        report(fleet, D0, 16)
        fleet.predict(fleet.worker(D0), HASHES, 1.0)
        plan = prefills(fleet)["p0"].fetch
        assert plan is not None
        assert plan.tokens == 256

    def test_a_draining_worker_serves_on_and_a_suspected_or_lost_one_does_not(self) -> None:
        fleet = fleet_of("p0", "d0", "d1")
        report(fleet, D0, 32)
        assert self.fetch(fleet) == D0
        fleet.drain(D0)
        assert self.fetch(fleet) == D0
        fleet.suspect(D0)
        assert self.fetch(fleet) is None
        fleet.clear_suspicion(D0)
        assert self.fetch(fleet) == D0
        fleet.lost(D0)
        assert self.fetch(fleet) is None

    def test_a_worker_of_another_layout_is_no_source(self) -> None:
        fleet = fleet_of("p0", "d1")
        info = worker_info("d0", calibration=STEPS, num_blocks=4096)
        (group,) = info.kv_layout.groups
        layout = msgspec.structs.replace(info.kv_layout, groups=(msgspec.structs.replace(group, dtype="other"),))
        fleet.up(msgspec.structs.replace(info, fetches=True, kv_layout=layout), 0.0)
        report(fleet, D0, 32)
        shortlists = fleet.shortlists(demand_of(), HASHES, (), 1.0)
        assert [each.fetch for shortlist in shortlists for each in shortlist.prefills] == [None]

    def test_a_source_that_refused_is_not_asked_for_a_while(self) -> None:
        fleet = fleet_of("p0", "p1", "d0")
        report(fleet, D0, 32)
        fleet.fetch_links.ended(D0, P0, "refused", 0, 0.0, 1.0)
        found = prefills(fleet)
        assert found["p0"].fetch is None
        assert found["p0"].ways[1].ms == math.inf  # not asked
        assert found["p1"].fetch is not None
        assert prefills(fleet, demand_of(now=1.0 + REFUSED_S))["p0"].fetch is not None


class TestDispatch:
    def test_a_fetch_may_take_as_long_as_computing_and_twice_its_predicted_time_and_50_ms(self) -> None:
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        candidate = prefills(fleet)["p0"]
        plan = candidate.fetch
        assert plan is not None
        asked = fleet.place_fetch(candidate, 1.0)
        assert asked is not None
        assert asked.peer == fleet.worker(D0).peer
        assert asked.end_token == 512
        compute_ms = prefill_ms(candidate.worker, 0, NUM_TOKENS) - plan.prefill_ms
        assert asked.timeout_ms == compute_ms > 2 * plan.ms
        candidate.ways = (msgspec.structs.replace(candidate.ways[0], prefill_ms=plan.prefill_ms + 1.0),)
        asked = fleet.place_fetch(candidate, 1.0)
        assert asked is not None
        assert asked.timeout_ms == 2 * plan.ms
        candidate.fetch = msgspec.structs.replace(plan, ms=7.0)
        asked = fleet.place_fetch(candidate, 1.0)
        assert asked is not None
        assert asked.timeout_ms == 50.0

    def test_a_load_is_no_fetch(self) -> None:
        fleet = fleet_of("p0", "d0")
        assert fleet.place_fetch(prefills(fleet)["p0"], 1.0) is None


class TestTrials:
    """A link that was slow, and of which nothing is known for long: d0 has 512 tokens of the prompt."""

    def slow_link(self) -> Fleet:
        """The usual time of an extent is a tenth of a millisecond; the latest fetch of this pair took two seconds."""
        fleet = fleet_of("p0", "d0")
        report(fleet, D0, 32)
        for number in range(200):
            fleet.fetch_links.ended(D1, P1, "done", (number % 7 + 1) << 20, 0.1 * (number % 7 + 1), 1.0)
        fleet.fetch_links.placed(D0, P0, 1.0)
        for _ in range(2):
            fleet.fetch_links.ended(D0, P0, "done", 1 << 20, 2000.0, 1.0)
        assert fleet.fetch_links.usual_ms(D0, P0, 1 << 20, 1.0) < 5.0
        return fleet

    def asked(self, fleet: Fleet, now: float, num_tokens: int = NUM_TOKENS) -> tuple[Candidate, FetchFrom | None]:
        fleet.fetch_links._pairs.used(D0, P0, now)
        candidate = prefills(fleet, demand_of(num_tokens, now))["p0"]
        return candidate, fleet.place_fetch(candidate, now)

    def test_one_extent_is_fetched_once_in_a_while(self) -> None:
        fleet, late = self.slow_link(), 1.1 + RECENT_S
        for now, is_tried in ((late - 0.2, False), (late, True), (late + RECENT_S, False), (1e5, True)):
            candidate, ordered = self.asked(fleet, now)
            assert candidate.fetch is None
            assert candidate.ready_tokens == 0
            assert (candidate.trial is not None, ordered is not None) == (is_tried, is_tried)
            if ordered is not None:
                limit_ms = 0.05 * prefill_ms(candidate.worker, 0, NUM_TOKENS) + WON_BY_MS
                assert (ordered.end_token, ordered.timeout_ms) == (EXTENT_TOKENS, limit_ms)
                assert candidate.asked is candidate.trial

    def test_a_trial_that_was_late_shows_nothing_new(self) -> None:
        fleet, late = self.slow_link(), 1.1 + RECENT_S
        candidate, _ = self.asked(fleet, late)
        assert candidate.trial is not None
        usual_ms = fleet.fetch_links.usual_ms(D0, P0, 1 << 20, late)
        fleet.fetch_links.ended(D0, P0, "late", candidate.trial.kv_bytes, candidate.trial.ms, late)
        assert fleet.fetch_links.usual_ms(D0, P0, 1 << 20, late) == usual_ms
        assert self.asked(fleet, late + 2.0)[0].asked is None

    def test_a_link_that_is_quick_again_is_used_at_once(self) -> None:
        fleet, late = self.slow_link(), 1.1 + RECENT_S
        candidate, _ = self.asked(fleet, late)
        assert candidate.trial is not None
        fleet.fetch_links.ended(D0, P0, "done", candidate.trial.kv_bytes, 0.1, late)
        again, ordered = self.asked(fleet, late + 1.0)
        assert again.fetch is not None
        assert ordered is not None
        assert (again.trial, ordered.end_token) == (None, 512)

    def test_a_link_that_was_not_slow_is_not_tried(self) -> None:
        """The prompt is computed because of its source's sequences."""
        fleet = self.slow_link()
        for _ in range(8):
            fleet.fetch_links.ended(D0, P0, "done", 1 << 20, 0.1, 2.0)
        fleet.worker(D0).num_decodes = 10**6
        assert self.asked(fleet, 2.1 + RECENT_S)[0].asked is None

    def test_a_prompt_whose_part_would_not_do_makes_no_trial(self) -> None:
        """Two steps of the source take longer than a twentieth of its time and 5 ms."""
        fleet, late = self.slow_link(), 1.1 + RECENT_S
        limit_ms = 0.05 * prefill_ms(fleet.worker(P0), 0, NUM_TOKENS) + WON_BY_MS
        source = fleet.worker(D0)
        for token_ms, is_tried in ((limit_ms / 2, False), (limit_ms / 2 - 3.0, True)):
            source.num_decodes, source.token_ms = 1, token_ms
            assert (self.asked(fleet, late)[0].trial is not None) is is_tried


class TestLinks:
    def links(self) -> tuple[FetchLinks, LinkModel]:
        hand_overs = LinkModel()
        return FetchLinks(CONFIG, hand_overs), hand_overs

    def test_before_the_first_fetch_the_times_are_those_of_hand_overs(self) -> None:
        links, hand_overs = self.links()
        for number in range(20):
            hand_overs.observe(D0, P0, (number + 1) << 20, 9.0 * (number + 1))
        assert links.transfer_ms(D0, P0, 8 << 20, 1.0) == hand_overs.exposed_ms(D0, P0, 8 << 20, 1.0)
        for number in range(40):
            links.ended(D0, P0, "done", (number % 7 + 1) << 20, 2.0 * (number % 7 + 1), 1.0)
        assert links.transfer_ms(D0, P0, 8 << 20, 1.0) == pytest.approx(16.0, rel=0.05)
        assert links.transfer_ms(D1, P1, 8 << 20, 1.0) == pytest.approx(16.0, rel=0.05)  # the fleet's fit

    def test_one_that_was_late_counts_with_its_time_and_is_not_asked_at_once(self) -> None:
        links, _ = self.links()
        before = links.transfer_ms(D0, P0, 1 << 20, 1.0)
        links.ended(D0, P0, "late", 1 << 20, 400.0, 1.0)
        assert links.transfer_ms(D0, P0, 1 << 20, 1.0) == math.inf
        assert links.transfer_ms(D0, P0, 1 << 20, 1.0 + REFUSED_S) > 10 * before

    def test_a_link_far_slower_than_usual_is_known_after_one_fetch(self) -> None:
        """Half of a single one counts as latency, two tell it apart; a late one that shows nothing new is ignored."""
        links = FetchLinks(RouterConfig(), LinkModel())
        pair = WorkerId("d0"), WorkerId("p0")
        links.ended(*pair, "done", 1_000_000, 2000.0, 0.0)
        assert links.transfer_ms(*pair, 500_000, 1.0) == pytest.approx(1500.0)
        links.ended(*pair, "late", 500_000, 700.0, 10.0)
        assert links.transfer_ms(*pair, 500_000, 12.0) == pytest.approx(1500.0)
        links.ended(*pair, "done", 250_000, 875.0, 13.0)
        assert links.transfer_ms(*pair, 500_000, 14.0) == pytest.approx(1250.0)
        assert links.transfer_ms(*pair, 500_000, 1e6) == pytest.approx(1250.0)
        links.forget(pair[0])
        assert links.transfer_ms(*pair, 500_000, 14.0) < 250.0

    @pytest.mark.parametrize(
        ("pause_s", "ms", "expected_ms"),
        [
            (RECENT_S, 20.0, 1000.0),  # one among others
            (RECENT_S + 0.1, 20.0, 10.0 + 20.0),  # the only one, half of which counts as latency
            (RECENT_S + 0.1, 870.0, 1248.333),  # nothing new
            (RECENT_S + 0.1, 1751.0, 1542.0),  # a slower one among others
        ],
    )
    def test_what_was_learned_of_a_link_counts_until_something_newer_was(
        self, pause_s: float, ms: float, expected_ms: float
    ) -> None:
        links, at = FetchLinks(RouterConfig(), LinkModel()), 13.0
        pair = WorkerId("d0"), WorkerId("p0")
        links.ended(*pair, "done", 1_000_000, 2000.0, 0.0)
        links.ended(*pair, "done", 250_000, 875.0, at)
        recent = links._recent[pair]
        assert recent.least_ms(500_000) == pytest.approx(1250.0)
        links.ended(*pair, "done", 250_000, ms, at + pause_s)
        assert recent.least_ms(500_000) == pytest.approx(expected_ms)

    @pytest.mark.parametrize(
        ("seen", "expected"),
        [
            ([(100, 30.0), (200, 40.0), (300, 50.0)], (20.0, 0.1)),
            ([(100, 30.0), (200, 40.0), (300, 50.0), (200, 900.0)], (20.0, 0.1)),
            ([(100, 30.0), (100, 40.0), (100, 50.0)], (20.0, 0.2)),
            ([(100, 10.0), (200, 40.0)], (0.0, 0.15)),
            ([(100, 40.0), (200, 10.0)], (25.0, 0.0)),
            ([(0, 40.0)], (40.0, 0.0)),
        ],
    )
    def test_medians_tell_latency_and_rate_apart(
        self, seen: list[tuple[int, float]], expected: tuple[float, float]
    ) -> None:
        assert line(seen) == pytest.approx(expected)

    def test_a_failure_says_nothing_of_the_rate_and_the_connection_is_formed_again(self) -> None:
        links, _ = self.links()
        before = links.transfer_ms(D0, P0, 1 << 20, 1.0)
        links.placed(D0, P0, 1.0)
        assert links.setup_ms(D0, P0) == 0.0
        links.ended(D0, P0, "failed", 1 << 20, 9.0, 1.0)
        assert links.setup_ms(D0, P0) == CONFIG.pair_setup_ms
        assert links.transfer_ms(D0, P0, 1 << 20, 1.0 + FAILED_S) == before

    def test_what_is_remembered_of_refusals_is_bounded(self) -> None:
        links, _ = self.links()
        for number in range(MAX_PAIRS + 1):
            links.ended(WorkerId(f"d{number}"), P0, "refused", 0, 0.0, 1.0)
        assert links.transfer_ms(WorkerId("d0"), P0, 1, 1.0) < math.inf
        assert links.transfer_ms(WorkerId("d1"), P0, 1, 1.0) == math.inf
        links.forget(P0)
        assert links.transfer_ms(WorkerId("d1"), P0, 1, 1.0) < math.inf


@pytest.mark.parametrize("seed", range(20))
def test_a_fetch_is_never_chosen_where_it_is_predicted_to_be_slower(seed: int) -> None:
    """Random prefixes, loads, links and tiers: what is chosen is ready soonest, its source's delay included, or within
    the margin of what is."""
    draw = random.Random(seed)
    fleet = fleet_of("p0", "p1", "p2", "d0", "d1", "d2", tiers=draw.random() < 0.5)
    workers = [fleet.worker(WorkerId(name)) for name in ("p0", "p1", "p2", "d0", "d1", "d2")]
    chosen = 0
    for turn in range(40):
        for worker in workers:
            _change(fleet, worker, turn, draw)
        for source in workers:
            for needy in workers:
                if draw.random() < 0.1:
                    fleet.fetch_links.ended(
                        source.worker_id, needy.worker_id, "done", 1 << 20, draw.choice((0.5, 5.0, 80.0)), 1.0
                    )
        demand = demand_of(draw.randint(130, 1000), now=1.0 + turn)
        for candidate in prefills(fleet, demand).values():
            if not candidate.ways:
                assert candidate.fetch is None
                continue
            wait = candidate.worker.backlog_ms
            compute, *others = (max(wait, way.ms) + way.prefill_ms + way.delay_ms for way in candidate.ways)
            assert compute == wait + prefill_ms(candidate.worker, candidate.cached_tokens, demand.num_tokens)
            plan = candidate.fetch
            if plan is not None and plan.kind == "peer":
                chosen += 1
                cost = max(wait, plan.ms) + plan.prefill_ms + plan.delay_ms
                assert cost + WON_BY_MS <= compute + 1e-6
                peers = [other for way, other in zip(candidate.ways[1:], others, strict=True) if way.kind == "peer"]
                assert cost == min(peers)
                assert plan.source != candidate.worker.worker_id
                assert plan.tokens < demand.num_tokens
    assert chosen > 0


def _change(fleet: Fleet, worker: Worker, turn: int, draw: random.Random) -> None:
    tiers = (TierCounts(name="host", extent_ms=draw.choice((0.5, 20.0))),) if worker.info.tiers else ()
    hosted = KEYS[: draw.randint(0, 8)] if tiers else ()
    snapshot = BlocksSnapshot(hashes=tuple(HASHES[: draw.randint(0, 64)]), tiers={"host": hosted})
    report = WorkerReport(
        worker_id=worker.worker_id,
        incarnation=Incarnation("1"),
        sequence=turn,
        load=Load(blocks_total=4096),
        kv_events=(snapshot,),
        metrics=WorkerMetrics(tiers=tiers),
    )
    fleet.report(report, 1.0)
    worker.backlog_ms = draw.choice((0.0, 0.0, 30.0, 300.0))
    worker.num_decodes, worker.token_ms = draw.choice(((0, 1.0), (4, 20.0)))
