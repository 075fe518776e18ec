"""Batches that are cancelled, run from the command line, share the cluster among tenants, and go on at another gateway.
Real processes with the deterministic model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts import processes
from disagg.cluster.hosts.processes import ProcessCluster, ProcessLauncher
from disagg.engine.fake_runner import fake_generate
from tests.support.secret import SECRET
from tests.support.waiting import LONG_WAIT_S, wait_until
from tests.support.workers import wait_until_workers_idle

ENDPOINT = "/v1/completions"
KEYS = {"a": "key-of-tenant-a-0001", "b": "key-of-tenant-b-0002"}
LONG = 3000


def line(number: int, num_tokens: int) -> bytes:
    body = {"model": "fake", "prompt": prompt_of(number), "max_tokens": num_tokens, "temperature": 0}
    body |= {"ignore_eos": True}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": ENDPOINT, "body": body}).encode()


def prompt_of(number: int) -> list[int]:
    return list(range(number % 20, number % 20 + 20))


def content_of(num_lines: int, num_tokens: int) -> bytes:
    return b"\n".join(line(number, num_tokens) for number in range(num_lines))


def config(folder: Path, **gateway: Any) -> dict[str, Any]:
    keys = folder / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(yaml.safe_dump([{"tenant": tenant, "key": key} for tenant, key in KEYS.items()]))
    batches = {"folder": str(folder / "batches"), "max_running": 8, "lease_s": 2}
    return {
        "model": {"path": "fake", "max_model_len": 4096},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "http_port": 0, "api_keys": str(keys), "batches": batches, **gateway},
        "pools": {name: {"num_blocks": 4096, "max_num_seqs": 32} for name in ("prefill", "decode")},
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "new_secret", lambda network: SECRET)  # so that the test may audit the workers
        with ProcessCluster(parse_config(config(tmp_path_factory.mktemp("batches")))) as running:
            yield running
            asyncio.run(wait_until_workers_idle(running.workers, running.secret))
    assert running.killed == []


def http_of(cluster: ProcessCluster, tenant: str = "a") -> httpx.Client:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.Client(base_url=f"http://{cluster.http_address}", headers=headers, timeout=60.0)


def begin(http: httpx.Client, content: bytes) -> str:
    """The URL of a new batch."""
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
    given = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return f"/v1/batches/{http.post('/v1/batches', json=given).json()['id']}"


def num_done(http: httpx.Client, url: str) -> int:
    return int(http.get(url).json()["request_counts"]["completed"])


def texts_in(http: httpx.Client, file_id: str) -> dict[str, str]:
    """By `custom_id`, of which none may be there twice."""
    rows = [json.loads(row) for row in http.get(f"/v1/files/{file_id}/content").text.splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(found) == len(rows)
    return found


def expected(http: httpx.Client, num_lines: int, num_tokens: int) -> dict[str, str]:
    texts = []
    for number in range(min(20, num_lines)):
        ids = {"model": "fake", "tokens": fake_generate(prompt_of(number), num_tokens)}
        texts.append(http.post("/detokenize", json=ids).json()["prompt"])
    return {f"n{number}": texts[number % 20] for number in range(num_lines)}


def test_a_batch_that_is_cancelled_keeps_its_answers_and_leaves_nothing_running(cluster: ProcessCluster) -> None:
    with http_of(cluster) as http:
        content = line(0, 5) + b"\n" + b"\n".join(line(number, LONG) for number in range(1, 40))
        url = begin(http, content)
        assert wait_until(lambda: num_done(http, url) >= 1, LONG_WAIT_S)
        assert http.post(f"{url}/cancel").json()["status"] in ("cancelling", "cancelled")
        assert wait_until(lambda: http.get(url).json()["status"] == "cancelled", LONG_WAIT_S)
        ended = http.get(url).json()
        counts = ended["request_counts"]
        assert (counts["total"], counts["failed"], ended["error_file_id"]) == (40, 0, None)
        answers = texts_in(http, ended["output_file_id"])
        assert len(answers) == counts["completed"] < 40
        assert answers["n0"] == expected(http, 1, 5)["n0"]
        assert ended["cancelled_at"] >= ended["created_at"]
        assert http.post(f"{url}/cancel").json()["status"] == "cancelled"
        assert http.post("/v1/batches/batch_none/cancel").status_code == 404
    asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))


def test_the_batch_of_a_second_tenant_runs_beside_that_of_the_first(cluster: ProcessCluster) -> None:
    with http_of(cluster, "a") as first, http_of(cluster, "b") as second:
        long = begin(first, content_of(400, LONG))
        assert wait_until(lambda: first.get(long).json()["status"] == "in_progress", LONG_WAIT_S)
        short = begin(second, content_of(20, 8))
        assert wait_until(lambda: second.get(short).json()["status"] == "completed", LONG_WAIT_S)
        assert texts_in(second, second.get(short).json()["output_file_id"]) == expected(second, 20, 8)
        assert first.post(f"{long}/cancel").json()["status"] == "cancelling"  # it still runs
        assert wait_until(lambda: first.get(long).json()["status"] == "cancelled", LONG_WAIT_S)


def test_the_command_runs_a_file(cluster: ProcessCluster, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(content_of(30, 6) + b"\n" + line(30, 6).replace(b'"temperature": 0', b'"temperature": -1'))
    command = [sys.executable, "-m", "disagg.cli", "batch", "run", str(file), "--address", cluster.http_address]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "DISAGG_API_KEY": KEYS["a"]}
    )
    assert done.returncode == 1, done.stderr  # a line has an error
    rows = [json.loads(row) for row in (tmp_path / "in.jsonl.out.jsonl").read_text().splitlines()]
    with http_of(cluster) as http:
        found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
        assert found == expected(http, 30, 6)
    (wrong,) = (tmp_path / "in.jsonl.out.jsonl.errors").read_text().splitlines()
    assert (json.loads(wrong)["custom_id"], json.loads(wrong)["response"]["status_code"]) == ("n30", 400)


def test_another_gateway_of_the_folder_goes_on_when_the_first_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clusters on one folder: names of their gateways are the same. The one that is killed does not come back."""
    given = parse_config(config(tmp_path))
    with ProcessCluster(given) as killed, ProcessCluster(given) as other:
        with http_of(killed) as http:
            url = begin(http, content_of(300, 12))
            assert wait_until(lambda: num_done(http, url) > 0, LONG_WAIT_S)
        first_owner = owner(tmp_path)
        monkeypatch.setattr(ProcessLauncher, "start_gateway", lambda *arguments: None)
        pid = killed.pid("gateway")
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not Path(f"/proc/{pid}").exists(), LONG_WAIT_S)
        with http_of(other) as http:
            assert num_done(http, url) < 300
            assert wait_until(lambda: http.get(url).json()["status"] == "completed", LONG_WAIT_S)
            ended = http.get(url).json()
            assert ended["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
            assert texts_in(http, ended["output_file_id"]) == expected(http, 300, 12)
        last_owner = owner(tmp_path)
    pids = [name.split("/")[1] for name in (first_owner, last_owner)]
    assert pids[0] == str(pid)
    assert pids[1] != pids[0]


def owner(folder: Path) -> str:
    """Which life of a gateway had the only batch last."""
    with closing(sqlite3.connect(folder / "batches" / "batches.sqlite")) as database:
        ((name,),) = database.execute("SELECT owner FROM batches").fetchall()
    return str(name)
