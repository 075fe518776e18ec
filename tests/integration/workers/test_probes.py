"""A worker counts as ready once a tiny request went through it: real processes, workers that are broken on purpose."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.core.probes import MAX_TRIES
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.children import LaunchError
from disagg.engine.fake_runner import fake_generate
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE
from disagg.proto.control import ScaleRequest, WorkerRecord
from tests.integration.workers.test_processes import FAKE, PATIENT, PROMPT
from tests.support.metrics import Samples, scrape
from tests.support.waiting import LONG_WAIT_S, wait_until
from tests.support.workers import wait_until_workers_idle

BREAKABLE: dict[str, Any] = {**FAKE, "recovery": {**PATIENT, "failpoints": True}}
FIGURES = re.compile(
    "disagg_(requests|calls|prompt_tokens|output_tokens|engine_prompt_tokens|engine_output_tokens|engine_cached_tokens"
    "|kv_transfers|kv_transfer_bytes|kv_transfer_failures|router_decisions)(_total)?"
)


def answers(client: Client, count: int = 1) -> None:
    for _ in range(count):
        answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == fake_generate(PROMPT, 20)


def record_of(cluster: ProcessCluster, name: str) -> WorkerRecord:
    (record,) = [record for record in cluster.state().workers if record.worker_id == name]
    return record


@pytest.mark.parametrize(
    ("fault", "joins", "why"),
    [
        ("transport.receive=corrupt(worker=decode-1)", "decode", r"the decode worker rejected chunk 0"),
        ("engine.step=raise(worker=prefill-1)", "prefill", r"prefill-1: failed \("),
    ],
)
def test_a_worker_that_listens_and_does_not_work_is_not_used(
    fault: str, joins: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, fault)
    name = f"{joins}-1"
    with ProcessCluster(parse_config(BREAKABLE)) as cluster, Client(cluster.address) as client:
        cluster.control(ScaleRequest(sizes={joins: 2}))
        assert wait_until(lambda: record_of(cluster, name).phase == "failed", LONG_WAIT_S)
        partner = "prefill-0" if joins == "decode" else "decode-0"
        said = rf"{MAX_TRIES} probes of it failed; the last probe with {partner}: .*{why}"
        assert re.match(said, record_of(cluster, name).detail), record_of(cluster, name).detail
        assert [w.detail for w in client.cluster_state().workers if w.worker_id == name] == [
            record_of(cluster, name).detail
        ]
        answers(client, 4)
        cluster.control(ScaleRequest(sizes={joins: 1}))
        assert wait_until(lambda: cluster.state().is_settled, LONG_WAIT_S)
        asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))
    assert cluster.killed == []


def test_a_cluster_whose_workers_do_not_work_together_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "transport.send=corrupt")
    cluster = ProcessCluster(parse_config(BREAKABLE))
    with pytest.raises(LaunchError, match=rf"^prefill-0: {MAX_TRIES} probes of it failed; the last .*rejected chunk 0"):
        cluster.start()


def figures(found: Samples) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What is counted of requests, tokens and transfers and is not zero."""
    return {
        (name, labels): count
        for name, samples in found.items()
        if FIGURES.fullmatch(name)
        for labels, count in samples.items()
        if count
    }


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "elastic"])
async def test_probes_are_in_no_figure_and_in_no_cache(mode: str) -> None:
    sizes = {"colocated": {"colocated": 2}, "elastic": {"workers": 2}}.get(mode, {"prefill": 2, "decode": 2})
    pools = {name: {"size": size} for name, size in sizes.items()}
    cluster = ProcessCluster(parse_config({**FAKE, "gateway": {"port": 0}, "mode": mode, "pools": pools}))
    await asyncio.to_thread(cluster.start)
    try:
        async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=30.0) as http:
            found = await scrape(http, lambda samples: "disagg_engine_step_seconds_count" in samples)
            steps = {dict(labels)["instance"] for labels, n in found["disagg_engine_step_seconds_count"].items() if n}
            assert steps == {info.worker_id for info in cluster.workers}  # each was probed
            assert figures(found) == {}
            with Client(cluster.address) as client:
                state = await asyncio.to_thread(client.cluster_state)
                assert [worker.kv_blocks_cached for worker in state.workers] == [0] * len(cluster.workers)
                assert await asyncio.to_thread(client.requests) == []
        await wait_until_workers_idle(cluster.workers, cluster.secret)
    finally:
        await asyncio.to_thread(cluster.stop)
    assert cluster.killed == []
