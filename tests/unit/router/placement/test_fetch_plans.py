"""Plans of fetches against a plain comparison of all ways: the same plans, to the last bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import (
    BlocksSnapshot,
    Load,
    StepSample,
    TierCounts,
    WorkerMetrics,
    WorkerReport,
)
from disagg.router.config import RouterConfig
from disagg.router.placement import fetches
from disagg.router.placement.fetches import WON_BY, WON_BY_MS, Source, step_ms
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.forecast import prefill_ms
from disagg.router.placement.placement import Candidate, Demand, FetchPlan, version_of
from disagg.router.workers.fetch_links import FetchLinks
from disagg.router.workers.prefix_index import TierMatch
from tests.unit.router.placement.test_fetches import HASHES, KEYS, demand_of, fleet_of

NAMES = ("p0", "p1", "p2", "d0", "d1", "d2")


def plan_plainly(
    demand: Demand, candidate: Candidate, tiers: TierMatch | None, sources: Sequence[Source], links: FetchLinks
) -> tuple[FetchPlan | None, tuple[FetchPlan, ...]]:
    """The fetch and the ways of a candidate, each way with all of its parts."""
    worker, cached, num_tokens = candidate.worker, candidate.cached_tokens, demand.num_tokens
    compute_ms, wait_ms = prefill_ms(worker, cached, num_tokens), worker.backlog_ms
    ways = [] if tiers is None else list(fetches._loads(worker, cached, num_tokens, tiers))
    best, best_ms, own_ms = None, compute_ms, wait_ms + compute_ms
    for load in ways:
        if compute_ms - load.prefill_ms > load.ms * WON_BY + WON_BY_MS and load.ms + load.prefill_ms < best_ms:
            best, best_ms = load, load.ms + load.prefill_ms
            own_ms = max(wait_ms, load.ms) + load.prefill_ms
    best_ms = math.inf
    for source in sources if worker.fetches else ():
        if source.tokens > cached and source.worker is not worker:
            before_ms = 2 * (source.step_ms + step_ms(worker)) + source.load_ms
            before_ms += links.setup_ms(source.worker.worker_id, worker.worker_id)
            rest_ms = prefill_ms(worker, source.tokens, num_tokens)
            fetch = fetches._fetch(demand, candidate, source, links, before_ms, rest_ms)
            if own_ms - (max(before_ms, wait_ms) + rest_ms) > before_ms * (WON_BY - 1.0) + WON_BY_MS:
                ways.append(fetch)
            cost_ms = max(wait_ms, fetch.ms) + rest_ms + fetch.delay_ms
            if cost_ms < best_ms and own_ms - cost_ms > fetch.ms * (WON_BY - 1.0) + WON_BY_MS:
                best, best_ms = fetch, cost_ms
    return best, (FetchPlan("compute", cached, 0.0, prefill_ms=compute_ms), *ways) if ways else ()


def random_fleet(draw: random.Random) -> Fleet:
    """Workers with random prefixes, loads, tiers and connections."""
    fleet = fleet_of(*NAMES, tiers=True)
    for name in NAMES:
        worker = fleet.worker(WorkerId(name))
        tiers = {"host": KEYS[: draw.randrange(9)], "disk": KEYS[: draw.randrange(9)]}
        snapshot = BlocksSnapshot(hashes=tuple(HASHES[: draw.randrange(65)]), tiers=tiers)  # type: ignore[arg-type]
        counts = tuple(TierCounts(name=tier, extent_ms=draw.choice((0.1, 5.0, 90.0))) for tier in ("host", "disk"))
        steps = (StepSample(65.0, 128), StepSample(9.0, 16))
        fleet.report(
            WorkerReport(
                worker_id=worker.worker_id,
                incarnation=Incarnation("1"),
                sequence=0,
                load=Load(blocks_total=4096),
                kv_events=(snapshot,),
                metrics=WorkerMetrics(tiers=counts),
                steps=steps,
            ),
            1.0,
        )
        worker.backlog_ms, worker.outstanding_tokens = draw.choice(((0.0, 0), (30.0, 60), (400.0, 800)))
        worker.num_decodes, worker.token_ms = draw.randrange(4), draw.choice((1.0, 20.0))
        share = draw.choice((0.0, 0.5))
        for other in NAMES:
            if draw.random() < share:
                fleet.fetch_links.placed(WorkerId(other), worker.worker_id, 1.0)
    return fleet


@pytest.mark.parametrize("seed", range(20))
def test_plans_are_those_of_a_plain_comparison(seed: int) -> None:
    """Of each candidate with all sources, whether one can win or not."""
    draw = random.Random(seed)
    found = []
    for _ in range(5):
        fleet = random_fleet(draw)
        for _ in range(4):
            demand = demand_of(draw.randint(130, draw.choice((290, 1030))))
            (shortlist,) = fleet.shortlists(demand, HASHES, (), 1.0)
            matched, candidates = fleet.matched(HASHES, 1.0), shortlist.prefills + shortlist.colocated
            version = version_of(fleet.worker(WorkerId("p0")).info)
            least = min((candidate.cached_tokens for candidate in candidates), default=0)
            sources = fleet._sources_of(matched, demand, version, least)
            alone = shortlist.decodes if shortlist.local else []
            for candidate, its_sources in [*((each, sources) for each in candidates), *((each, ()) for each in alone)]:
                expected = plan_plainly(demand, candidate, matched.tiers, its_sources, fleet.fetch_links)
                assert (candidate.fetch, candidate.ways) == expected
                found.append(candidate.fetch)
    assert {None if fetch is None else fetch.kind for fetch in found} >= {None, "peer", "host"}
    assert RouterConfig().pair_setup_ms == fleet.fetch_links.pair_setup_ms
