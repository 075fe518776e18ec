"""Fetches between simulated workers: the real engine cores and hand-overs, whose messages and bytes take time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import EXTENT_TOKENS, PeerRef
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.exact.exact_worker import ExactWorker
from disagg.simulator.world.settings import ClusterSpec, Fault
from disagg.simulator.world.users import UserRequest
from tests.support.simulation import LinearTimes, cluster_spec

PROMPT_TOKENS, BLOCK_TOKENS = 1024, 16
FETCHED = PROMPT_TOKENS - EXTENT_TOKENS
"""At least one token is computed, and what is fetched is whole extents."""
COMPUTING = LinearTimes(base_s=0.010, token_s=0.001)
BYTES_PER_S = 1e8


def _spec(**settings: Any) -> ClusterSpec:
    """Two prefill workers, whose caches hold two prompts, and a decode worker that keeps more than five."""
    spec = cluster_spec(
        prefill=2,
        decode=1,
        fetch=True,
        token_budget=2048,
        times=COMPUTING,
        bandwidth_bytes_per_s=BYTES_PER_S,
        router=RouterConfig(local_prefill="never"),
        **settings,
    )
    prefill, decode = spec.pools
    return replace(spec, pools=[replace(prefill, num_blocks=128), replace(decode, num_blocks=400)])


def _prompts(*chosen: tuple[float, int]) -> list[UserRequest]:
    """Requests (due, number of the prompt), each with an answer of two tokens."""
    return [
        UserRequest(
            OutlinedRequest(
                index=index, due_s=due_s, parts=(PromptPart(PROMPT_TOKENS, ("prompt", number)),), max_tokens=2
            )
        )
        for index, (due_s, number) in enumerate(chosen)
    ]


TURNS = _prompts((0.0, 0), (10.0, 1), (10.0, 2), (20.0, 3), (20.0, 4), (30.0, 0))
"""Prompt 0 is on the decode worker only when it comes again."""


def test_a_prefix_comes_from_the_decode_worker() -> None:
    cluster = SimulatedCluster(_spec(), TURNS)
    result = cluster.run()

    assert result.problems == []
    assert [record.cached_tokens for record in result.records] == [0, 0, 0, 0, 0, FETCHED]
    assert result.fetched_tokens == FETCHED
    # The transfer, a chunk after the other, and the step of the rest.
    transfer_s = FETCHED * 1000 / BYTES_PER_S
    computing_s = COMPUTING.base_s + EXTENT_TOKENS * COMPUTING.token_s
    assert result.records[-1].ttft_s == pytest.approx(transfer_s + computing_s)


def test_workers_that_do_not_fetch_compute() -> None:
    spec = _spec()
    pools = [replace(pool, worker=msgspec.structs.replace(pool.worker, fetch=False)) for pool in spec.pools]
    result = SimulatedCluster(replace(spec, pools=pools), TURNS).run()

    assert result.problems == []
    assert result.records[-1].cached_tokens == 0
    assert result.records[-1].ttft_s == pytest.approx(COMPUTING.base_s + PROMPT_TOKENS * COMPUTING.token_s)


@pytest.mark.parametrize("after_ms", [1, 3, 5, 7, 9, 11, 13, 15, 17])
def test_a_source_that_dies_costs_no_request(after_ms: int) -> None:
    """At any moment from dispatch to last byte; messages take 2 ms, and the source comes back. The prompt was to
    be handed over to it: once that was offered, its end ends the attempt that waits for the fetch."""
    fault = Fault(at_s=30.0 + after_ms / 1e3, worker_id="decode-0", back_after_s=0.5)
    cluster = SimulatedCluster(_spec(faults=[fault], overheads=Overheads(message_s=0.002)), TURNS)
    result = cluster.run()

    assert result.problems == []
    assert [record.status for record in result.records] == ["ok"] * 6
    assert _outcomes(cluster) == ({"failed": 1} if after_ms < 6 else {})


def _outcomes(cluster: SimulatedCluster) -> Counter[str]:
    """Fetches of the prefill workers by outcome."""
    found: Counter[str] = Counter()
    for name in ("prefill-0", "prefill-1"):
        peer = PeerRef(worker_id=WorkerId(name), incarnation=Incarnation(f"{name}.1"), address="")
        worker = cluster.find_worker(peer)
        assert isinstance(worker, ExactWorker)
        found.update(worker.metrics().fetches)
    return found


def test_the_same_run_twice_is_the_same() -> None:
    requests = _prompts(*((0.4 * index, index * 5 % 6) for index in range(40)))

    first, second = (SimulatedCluster(_spec(), requests).run() for _ in range(2))

    assert first.fetched_tokens == second.fetched_tokens > 0
    assert first.records == second.records


def test_the_fast_engine_refuses_fetches() -> None:
    with pytest.raises(ValueError, match=r"^kv_cache.fetch: the fast engine fetches nothing; take the exact one$"):
        _spec(engine="fast")
