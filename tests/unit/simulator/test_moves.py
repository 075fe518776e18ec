"""Sequences that move in virtual time: a worker that is removed is empty long before its answers are."""

from __future__ import annotations

import pytest

from disagg.loadtests.workload.workload import RandomWorkload
from disagg.proto.ids import WorkerId
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from tests.support.simulation import asked, cluster_spec, planned


def run(migrations: int, **pools: int) -> tuple[float, dict[str, int]]:
    """Removes the first worker after a second, with answers of ten seconds; when it drained last, and the moves."""
    router = RouterConfig(migrations=migrations, policy="least_loaded")
    spec = cluster_spec(router=router, **pools)  # type: ignore[arg-type]
    requests = planned(RandomWorkload(isl=100, osl=600), rate_per_s=20, num_requests=20)
    cluster = SimulatedCluster(spec, requests)
    cluster.advance(1.5)
    (name,) = [name for name in pools if name in ("colocated", "workers", "decode")]
    cluster.remove_worker(WorkerId(f"{name}-0"))
    result = cluster.run()
    assert result.problems == []
    assert [record.status for record in result.records] == ["ok"] * 20
    assert {len(record.token_times_s) for record in result.records} == {600}
    last_s = max((sample.time_s for sample in result.samples if sample.num_draining), default=0.0)
    return last_s, dict(cluster.gateway.core.view(cluster.loop.now).stats.migrations)


@pytest.mark.parametrize("pools", [{"workers": 2}, {"colocated": 2}, {"prefill": 1, "decode": 2}])
def test_a_removed_worker_is_empty_at_once(pools: dict[str, int]) -> None:
    with_moves, moves = run(4, **pools)
    without, none = run(0, **pools)
    assert none == {}
    assert moves == {"moved": 10}
    assert with_moves <= 3.0
    assert without >= 8.0


def preemptions(migrations: int) -> int:
    """Long answers on one worker and short ones on the other, whose blocks suffice for both kinds together."""
    router = RouterConfig(migrations=migrations, policy="round_robin", decode_reserve_tokens=0, watermark=0)
    spec = cluster_spec(
        colocated=2, router=router, num_blocks=60, decode_reserve_tokens=0, watermark=0.0, swap_bytes=1 << 24
    )
    lengths = [400 if number % 2 == 0 else 20 for number in range(8)]
    requests = asked(*((0.1 * number, 60, length) for number, length in enumerate(lengths)))
    cluster = SimulatedCluster(spec, requests)
    result = cluster.run()
    assert result.problems == []
    assert [len(record.token_times_s) for record in result.records] == lengths
    return cluster.num_preemptions


def test_a_sequence_moves_instead_of_being_preempted() -> None:
    assert preemptions(0) >= 1
    assert preemptions(4) == 0
