"""Files and batches over HTTP, with the deterministic model: a batch whose gateway is killed, and who sees it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import yaml

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from tests.integration.scaling.test_scaling import replaced
from tests.support.waiting import LONG_WAIT_S, wait_until

NUM_LINES = 300
NUM_PROMPTS = 30
NUM_TOKENS = 12
ENDPOINT = "/v1/completions"
KEY, OTHER_KEY, LIMITED_KEY = "k" * 32, "o" * 32, "l" * 32

KEYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("a", KEY, {}),
    ("a", LIMITED_KEY, {"models": ["other"]}),
    ("b", OTHER_KEY, {}),
)


def prompt_of(number: int) -> list[int]:
    return list(range(number % NUM_PROMPTS, number % NUM_PROMPTS + 20))


def line(number: int) -> bytes:
    body = {"model": "fake", "prompt": prompt_of(number), "max_tokens": NUM_TOKENS, "temperature": 0}
    if number == 7:
        body["temperature"] = -1
    body |= {"ignore_eos": True}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": ENDPOINT, "body": body}).encode()


def config(folder: Path) -> dict[str, Any]:
    keys = folder / "keys.yaml"
    keys.write_text(yaml.safe_dump([{"tenant": tenant, "key": key, **more} for tenant, key, more in KEYS]))
    keys.chmod(0o600)
    batches = {"folder": str(folder / "batches"), "max_running": 8}
    return {
        "model": {"path": "fake", "max_model_len": 512},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "api_keys": str(keys), "batches": batches},
        "pools": {name: {"num_blocks": 1024, "max_num_seqs": 16} for name in ("prefill", "decode")},
    }


def test_each_line_is_answered_once_though_the_gateway_is_killed(tmp_path: Path) -> None:
    with ProcessCluster(parse_config(config(tmp_path))) as cluster:
        http = httpx.Client(
            base_url=f"http://{cluster.http_address}", headers={"authorization": f"Bearer {KEY}"}, timeout=60.0
        )
        content = b"\n".join(line(number) for number in range(NUM_LINES))
        uploaded = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
        assert (uploaded["bytes"], uploaded["filename"]) == (len(content), "in.jsonl")
        given = {"input_file_id": uploaded["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = http.post("/v1/batches", json={**given, "metadata": {"of": "a test"}}).json()
        url = f"/v1/batches/{batch['id']}"

        def num_done() -> int:
            counts: dict[str, int] = http.get(url).json()["request_counts"]
            return counts["completed"] + counts["failed"]

        assert wait_until(lambda: num_done() > 0, LONG_WAIT_S)
        pid = cluster.pid("gateway")
        os.kill(pid, signal.SIGKILL)
        first_owner = owner(tmp_path)
        assert replaced(cluster, "gateway", pid, LONG_WAIT_S)
        http.base_url = httpx.URL(f"http://{cluster.http_address}")
        assert wait_until(lambda: http.get(url).json()["status"] == "completed", LONG_WAIT_S)

        assert owner(tmp_path) != first_owner  # the killed gateway had not ended it
        ended = http.get(url).json()
        assert ended["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES - 1, "failed": 1}
        assert ended["metadata"] == {"of": "a test"}
        answers = contents(http, ended["output_file_id"])
        assert [answer["custom_id"] for answer in answers] == [f"n{i}" for i in range(NUM_LINES) if i != 7]
        texts: dict[int, str] = {}
        for number in range(NUM_PROMPTS):
            ids = {"model": "fake", "tokens": fake_generate(prompt_of(number), NUM_TOKENS)}
            texts[number] = http.post("/detokenize", json=ids).json()["prompt"]
        found = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
        assert found == {f"n{number}": texts[number % NUM_PROMPTS] for number in range(NUM_LINES) if number != 7}
        (wrong,) = contents(http, ended["error_file_id"])
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("n7", 400)
        assert wrong["response"]["body"]["error"]["param"] == "temperature"

        other = {"authorization": f"Bearer {OTHER_KEY}"}
        for path in (url, f"/v1/files/{uploaded['id']}", f"/v1/files/{ended['output_file_id']}/content"):
            assert http.get(path, headers=other).status_code == 404
        assert http.get("/v1/batches", headers=other).json()["data"] == []
        assert http.get("/v1/files", headers=other).json()["data"] == []
        assert http.post("/v1/batches", json=given, headers=other).json()["error"]["param"] == "input_file_id"
        assert len(http.get("/v1/files").json()["data"]) == 3
        refused_for_another_key(http, line(0))
        assert http.delete(f"/v1/files/{uploaded['id']}").json()["deleted"]
        assert http.get(f"/v1/files/{uploaded['id']}").status_code == 404
        http.close()
    assert cluster.killed == []


def refused_for_another_key(http: httpx.Client, content: bytes) -> None:
    """A key that is not for the model cannot use it by a batch, though another key of its tenant could."""
    limited = {"authorization": f"Bearer {LIMITED_KEY}"}
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}, headers=limited)
    given = {"input_file_id": file.json()["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    url = f"/v1/batches/{http.post('/v1/batches', json=given, headers=limited).json()['id']}"
    assert wait_until(lambda: http.get(url, headers=limited).json()["status"] == "completed", LONG_WAIT_S)
    (refused,) = contents(http, http.get(url).json()["error_file_id"])
    asked = http.post(ENDPOINT, json=json.loads(content)["body"], headers=limited)
    assert (refused["response"]["status_code"], asked.status_code) == (403, 403)
    assert refused["response"]["body"] == asked.json()


def contents(http: httpx.Client, file_id: str) -> list[Any]:
    return [json.loads(row) for row in http.get(f"/v1/files/{file_id}/content").text.splitlines()]


def owner(folder: Path) -> str:
    """Which life of the gateway had the only batch last."""
    with closing(sqlite3.connect(folder / "batches" / "batches.sqlite")) as database:
        ((name,),) = database.execute("SELECT owner FROM batches").fetchall()
    return str(name)
