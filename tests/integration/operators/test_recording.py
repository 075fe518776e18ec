"""Recordings of a real cluster: what its router decided under load and faults, a router core decides again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disagg.client import Client
from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.gateway.operators.admin_answers import explanation_json
from tests.integration.scaling.test_scaling import NUM_STREAMS, endless_streams, replaced
from tests.integration.workers.test_processes import FAKE, PROMPT
from tests.support.waiting import wait_until


def recording_into(folder: Path) -> ClusterConfig:
    """Two decode workers, and all paths that a request can take."""
    return parse_config(
        {
            **FAKE,
            "gateway": {"port": 0, "record_events": {"folder": str(folder)}},
            "placement": {"local_prefill": "auto"},
            "pools": {"decode": {"size": 2}},
        }
    )


def replay(file: Path, *arguments: str) -> Any:
    """`disagg replay`, in a process whose sets have another order than the gateway's; must be identical."""
    command = [sys.executable, "-m", "disagg.cli", "replay", str(file), *arguments, "--json"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["identical"], found["difference"], found["damage"]) == (True, [], "")
    return found


def busiest_decode_worker(client: Client) -> str:
    """Which one has sequences is for the router to decide; empty where none has."""
    workers = [each for each in client.cluster_state().workers if "decode" in each.roles and each.sequences]
    return max(workers, key=lambda each: each.sequences).worker_id if workers else ""


def wait_for_name(find: Callable[[], str]) -> str:
    assert wait_until(lambda: bool(find()))
    return find()


def moved_request(client: Client) -> str:
    """One of the latest that was answered by a second attempt; empty where there is none."""
    requests = client.requests(1000)
    return next((each.request_id for each in requests if each.attempts > 1 and each.outcome == "length"), "")


def test_a_cluster_under_load_whose_workers_are_killed_replays_to_identical_commands(tmp_path: Path) -> None:
    with (
        ProcessCluster(recording_into(tmp_path / "events")) as cluster,
        endless_streams(cluster.address) as wait_for_all,
        Client(cluster.address) as client,
    ):
        wait_for_all()
        for find in (lambda: "prefill-0", lambda: busiest_decode_worker(client)):
            name = wait_for_name(find)
            pid = cluster.pid(name)
            os.kill(pid, signal.SIGKILL)
            assert replaced(cluster, name, pid)
            wait_for_all()
        moved = moved_request(client)
        assert moved
        seen = explanation_json(client.explain(moved))
    (file,) = (tmp_path / "events").iterdir()
    found = replay(file, "--request", moved)
    assert found["ended"] == "stopped"
    assert found["events"]["WorkerLost"] >= 2
    assert set(found["outcomes"]) == {"length"}
    assert found["outcomes"]["length"] == found["num_requests"] >= 3 * NUM_STREAMS
    moments = found["request"]["moments"]
    placements = [moment["placement"] for moment in moments if "placement" in moment]
    assert len(placements) == seen["attempts"] > 1
    assert [any(text.startswith("dispatch attempt 1 to ") for text in moment["decisions"]) for moment in moments].count(
        True
    ) == 1
    assert moments[-1]["decisions"][-1].startswith("finish: length after 200 tokens")
    # It is explained as the gateway itself explained it; the text is made there, after the router.
    explained = found["request"]["explanation"]
    same = ("request_id", "outcome", "attempts", "chosen", "policy", "prompt_tokens", "completion_tokens", "kv_bytes")
    assert {name: explained[name] for name in same} == {name: seen[name] for name in same}
    assert explained["stages"] == seen["stages"]
    assert placements[-1]["chosen"] == seen["chosen"]


def test_a_killed_gateway_leaves_a_recording_that_replays(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    with ProcessCluster(recording_into(folder)) as cluster:
        with Client(cluster.address) as client:
            client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
        (file,) = folder.iterdir()
        size = file.stat().st_size
        assert wait_until(lambda: file.stat().st_size > size)  # reports come all the time
        pid = cluster.pid("gateway")
        os.kill(pid, signal.SIGKILL)
        assert replaced(cluster, "gateway", pid)
        with Client(cluster.address) as client:
            client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
    (other,) = set(folder.iterdir()) - {file}
    ends = [replay(each) for each in (file, other)]
    assert [(each["ended"], each["outcomes"]) for each in ends] == [(None, {"length": 1}), ("stopped", {"length": 1})]
