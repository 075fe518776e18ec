"""A cluster whose pools go when nothing comes, and are back for the next request: real processes."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.fake_runner import fake_generate
from disagg.proto.errors import UnavailableError
from tests.integration.scaling.test_scaling import settled
from tests.integration.workers.test_processes import FAKE, PROMPT
from tests.support.waiting import LONG_WAIT_S, wait_until

POOL = {"size": 1, "min_size": 0, "max_size": 1}
EMPTIED: dict[str, Any] = {
    **FAKE,
    "pools": {"prefill": POOL, "decode": POOL},
    "autoscaler": {"enabled": True, "interval_s": 0.2, "zero_after_s": 3.0},
}


def is_empty(cluster: ProcessCluster) -> bool:
    state = cluster.state()
    return state.is_settled and not state.workers and all(pool.desired == 0 for pool in state.pools)


def test_pools_are_emptied_and_the_next_request_brings_them_back() -> None:
    with ProcessCluster(parse_config(EMPTIED)) as cluster, Client(cluster.address, start_s=LONG_WAIT_S) as client:
        first = [ProcessRef.of(cluster.pid(name)) for name in ("prefill-0", "decode-0")]
        assert wait_until(lambda: is_empty(cluster), LONG_WAIT_S)
        assert [process for process in first if process.is_alive()] == []
        with Client(cluster.address, start_s=0) as impatient, pytest.raises(UnavailableError) as refused:
            impatient.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert refused.value.code == "no_worker_yet"
        deltas = client.stream(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert [token for delta in deltas for token in delta.token_ids] == fake_generate(PROMPT, 8)
        assert wait_until(lambda: is_empty(cluster), LONG_WAIT_S)  # and again
        answer = client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == fake_generate(PROMPT, 8)
        assert wait_until(lambda: settled(cluster), LONG_WAIT_S)
    assert cluster.killed == []
