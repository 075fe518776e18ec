"""Bad input of every kind, over HTTP and gRPC, against a whole cluster: each is refused, nothing is computed or held,
and good requests are answered as before.

`python -m tests.acceptance.bad_input --generated 12000` does the same with more of them, `--fields 0` with each value
of each field.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from tests.acceptance.bad_input.fields import configuration, try_all
from tests.acceptance.bad_input.generated import CONFIG, MODEL, answers_well, run
from tests.support.workers import wait_until_workers_idle

NUM_REQUESTS = 1500
NUM_FIELDS = 400
SEED = 20_261_121
NUM_KINDS = 90
"""Fewer would mean that the generator lost some."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    logs = tmp_path_factory.mktemp("logs")
    with ProcessCluster(parse_config(CONFIG), log_dir=logs) as running:
        yield running
    assert running.killed == []
    assert [file.name for file in logs.iterdir() if "Traceback" in file.read_text(errors="replace")] == []


async def num_requests_in(cluster: ProcessCluster) -> int:
    """How many requests the router was ever given. Nothing is queued or running, and no worker holds anything."""
    async with AsyncClient(cluster.address) as client:
        state = await client.cluster_state()
        assert (state.queued_requests, state.running_requests) == (0, 0)
        known = await client.requests(1000)
    assert len(known) < 1000, "there may be more than are listed"
    await wait_until_workers_idle(cluster.workers, cluster.secret)
    return sum(each.stages[0].stage == "tokenize" for each in known)


async def test_all_of_it_is_refused(cluster: ProcessCluster) -> None:
    assert await answers_well(cluster.address, cluster.http_address, MODEL) == []
    assert await num_requests_in(cluster) == 2
    outcomes = await run(cluster.address, cluster.http_address, MODEL, SEED, NUM_REQUESTS)
    assert outcomes.problems == []
    assert outcomes.num_requests == NUM_REQUESTS
    assert len(outcomes.kinds) >= NUM_KINDS
    assert await num_requests_in(cluster) == 2, "bad input reached the router"
    assert await answers_well(cluster.address, cluster.http_address, MODEL) == []


async def test_values_of_fields_get_no_fault_and_end_neither_process_nor_recording(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with ProcessCluster(configuration(tmp_path), log_dir=logs) as running:
        outcomes = await try_all(running, tmp_path, SEED, NUM_FIELDS)
        await wait_until_workers_idle(running.workers, running.secret)
    assert outcomes.problems == []
    assert running.killed == []
    assert [file.name for file in logs.iterdir() if "Traceback" in file.read_text(errors="replace")] == []
