"""The commands for operators, and the examples, on a running cluster: two prefill and two decode workers with the
deterministic model. At the end nothing is left in it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg.cli.main import app
from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts import processes
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.program import typed
from disagg.proto.errors import InvalidRequestError, UnavailableError
from tests.support.architecture import REPOSITORY
from tests.support.secret import SECRET
from tests.support.workers import wait_until_workers_idle

CONFIG = {
    "model": {"path": "fake"},
    "transfer": {"transport": "shm"},
    "gateway": {"port": 0, "http_port": 0},
    "placement": {"local_prefill": "never"},
    "pools": {
        "prefill": {"size": 2, "token_budget": 128, "num_blocks": 256},
        "decode": {"size": 2, "num_blocks": 256},
    },
}
PAIRS = [(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)]
SERVERS = {"guard_service.py"}
"""Examples that serve until they are killed: `tests/unit/gateway/guardrails/test_example.py`."""
EXAMPLES = sorted(path.name for path in (REPOSITORY / "examples").glob("*.py") if path.name not in SERVERS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "new_secret", lambda network: SECRET)  # so that the test may audit the workers
        with ProcessCluster(parse_config(CONFIG)) as running:
            yield running
            with Client(running.address) as client:
                state = client.cluster_state()
            assert (state.queued_requests, state.running_requests) == (0, 0)
            asyncio.run(wait_until_workers_idle(running.workers, running.secret))
    assert running.killed == []


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[Client]:
    with Client(cluster.address) as opened:
        yield opened


def disagg(cluster: ProcessCluster, *arguments: str) -> str:
    """The output of a command, which must succeed."""
    environment = {"DISAGG_ADDRESS": cluster.address, "COLUMNS": "200"}
    done = CliRunner().invoke(app, list(arguments), env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


# ---------------------------------------------------------------- probes


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_a_probe_moves_all_kv_of_its_prompt_on_its_pair(client: Client, prefill: str, decode: str) -> None:
    for _ in range(2):  # the second one finds nothing of the first one in a cache
        probe = client.probe(prefill, decode)
        assert probe.kv_bytes == probe.expected_bytes > 0
        assert probe.transport == "shm"
        assert 0 <= probe.exposed_ms < 10_000  # 0 where the hand-over is heard of before the prefill


def test_a_probe_of_what_is_no_pair(client: Client) -> None:
    with pytest.raises(UnavailableError, match=r"^decode-0 and prefill-0 form no pair now$"):
        client.probe("decode-0", "prefill-0")
    with pytest.raises(InvalidRequestError, match=r"there is no worker 'decode-9'") as caught:
        client.probe("prefill-0", "decode-9")
    assert caught.value.field == "decode_worker"


# ---------------------------------------------------------------- commands


def test_status_and_top_show_the_workers(cluster: ProcessCluster) -> None:
    for text in (disagg(cluster, "status"), disagg(cluster, "top", "--once")):
        assert [row[0] for row in rows(text) if row[1:2] == ["ready"] and row[0] != "pool"] == [
            "prefill-0",
            "prefill-1",
            "decode-0",
            "decode-1",
        ]


def test_health_of_the_gateway_of_the_address(cluster: ProcessCluster) -> None:
    assert disagg(cluster, "health") == '200 {"status":"ready"}\n'
    assert disagg(cluster, "health", "--live") == '200 {"status":"alive"}\n'


def test_the_address_of_http_says_where_grpc_is(cluster: ProcessCluster) -> None:
    done = CliRunner().invoke(app, ["generate", "x", "--address", cluster.http_address])
    text = f"{cluster.http_address} speaks HTTP; gRPC is at 127.0.0.1:8470, unless gateway.port says otherwise"
    assert str(done.exception) == text


def test_top_ends_by_itself_where_nobody_watches(cluster: ProcessCluster) -> None:
    assert disagg(cluster, "top").startswith(f"disagg {cluster.address}   prefill 2 of 2   decode 2 of 2")


def test_a_client_watches_the_cluster(client: Client) -> None:
    watch = client.watch(0.1)
    states = [next(watch) for _ in range(3)]
    watch.close()
    assert [len(state.workers) for state in states] == [4] * 3


def test_explain_tells_of_a_request_and_of_the_latest(cluster: ProcessCluster, client: Client) -> None:
    answer = client.generate("tell me where this ran", max_tokens=8, temperature=0.0, ignore_eos=True)
    trace = client.explain(answer.request_id)
    for text in (disagg(cluster, "explain", answer.request_id), disagg(cluster, "explain")):
        found = rows(text)
        assert ["request", answer.request_id] in found
        assert ["ran", "on", trace.prefill_worker, "(prefill)", "->", trace.decode_worker, "(decode)"] in found
        assert ["outcome", "length"] in found
        assert "Why there" in text
        assert "Where the time went" in text
        stages = {row[0] for row in found[found.index(["Where", "the", "time", "went"]) + 2 :]}
        assert {"prefill", "kv_transfer", "decode"} <= stages
    assert json.loads(disagg(cluster, "explain", "--json"))["request_id"] == answer.request_id


def test_the_list_of_requests(cluster: ProcessCluster, client: Client) -> None:
    ids = [client.generate(f"prompt {i}", max_tokens=2, temperature=0.0).request_id for i in range(3)]
    listed = rows(disagg(cluster, "explain", "--list", "--limit", "3"))
    assert [row[0] for row in listed[2:]] == ids[::-1]


def test_an_unknown_request_names_the_next_command(cluster: ProcessCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "disagg.cli", "explain", "nobody", "--address", cluster.address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    interpreter = typed(sys.executable, shutil.which("python"), Path.cwd(), "python")
    assert done.stderr.endswith(f"; next: {interpreter} -m disagg.cli explain --list\n")


def test_trace_export(cluster: ProcessCluster, client: Client, tmp_path: Path) -> None:
    answer = client.generate("export this", max_tokens=4, temperature=0.0, ignore_eos=True)
    file = tmp_path / "trace.json"
    assert disagg(cluster, "trace", "export", str(file), "--limit", "1").startswith("1 request in ")
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} > {answer.request_id}
    assert {"prefill", "decode"} <= {event["name"] for event in events if event["ph"] == "X"}


def test_doctor_probes_every_pair(cluster: ProcessCluster) -> None:
    told = disagg(cluster, "doctor")
    assert "FAIL" not in told
    moved = [row for row in rows(told) if row[:2] == ["ok", "KV"]]
    assert [(row[2], row[4].rstrip(":")) for row in moved] == PAIRS
    assert f"answers at {cluster.http_address}, and is healthy" in told
    assert told.endswith("everything works\n")


def test_without_a_gateway_each_command_says_how_to_start_one() -> None:
    for command in (["status"], ["top"], ["explain"], ["trace", "export", "x.json"], ["generate", "hello"]):
        done = CliRunner().invoke(app, command, env={"DISAGG_ADDRESS": "127.0.0.1:1"})
        assert str(done.exception) == "no gateway answers at 127.0.0.1:1; start one with: disagg up"


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(cluster: ProcessCluster, name: str) -> None:
    environment = {**os.environ, "DISAGG_ADDRESS": cluster.address, "DISAGG_URL": f"http://{cluster.http_address}"}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / name)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    if name == "chat_openai.py" and done.returncode == 1:
        assert done.stderr == "this example needs the openai package: pip install openai\n"
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
