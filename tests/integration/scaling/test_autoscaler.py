"""The autoscaler of a real controller: processes, the deterministic model; load comes and goes."""

from __future__ import annotations

from typing import Any

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.process_tools import ProcessRef
from tests.integration.scaling.test_scaling import endless_streams, settled
from tests.integration.workers.test_processes import FAKE
from tests.support.waiting import LONG_WAIT_S, wait_until

SCALED: dict[str, Any] = {
    **FAKE,
    "mode": "colocated",
    "pools": {"colocated": {"size": 1, "max_size": 2, "max_num_seqs": 4}},
    "autoscaler": {
        "enabled": True,
        "policy": "threshold",
        "interval_s": 0.2,
        "down_after_s": 1.0,
        "threshold": {"waiting": 1},
    },
}


def size(cluster: ProcessCluster) -> int:
    return cluster.state().pools[0].desired


def test_a_worker_is_added_for_load_and_goes_with_it() -> None:
    with ProcessCluster(parse_config(SCALED)) as cluster, Client(cluster.address) as client:
        with endless_streams(cluster.address, 16) as wait_for_all:
            assert wait_until(lambda: size(cluster) == 2 and settled(cluster), timeout_s=LONG_WAIT_S)
            added = ProcessRef.of(cluster.pid("colocated-1"))
            wait_for_all()
        assert wait_until(lambda: size(cluster) == 1 and settled(cluster), timeout_s=LONG_WAIT_S)
        assert not added.is_alive()
        state = client.cluster_state()
        assert state.autoscaler.policy == "threshold"
        assert [(pool.pool, pool.wanted) for pool in state.autoscaler.pools] == [("colocated", 1)]
        assert all(pool.reason and pool.change for pool in state.autoscaler.pools)
    assert cluster.killed == []


def test_a_dry_run_only_says_what_it_would_do() -> None:
    config = parse_config({**SCALED, "autoscaler": {**SCALED["autoscaler"], "dry_run": True}})
    with ProcessCluster(config) as cluster, Client(cluster.address) as client:

        def wanted() -> list[int]:
            return [pool.wanted for pool in client.cluster_state().autoscaler.pools]

        with endless_streams(cluster.address, 16):
            assert wait_until(lambda: wanted() == [2], timeout_s=LONG_WAIT_S)
            assert size(cluster) == 1
    assert cluster.killed == []
