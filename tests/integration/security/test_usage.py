"""What keys used, as their clients count it from the answers: both protocols, batches, streams that are continued, a
decode worker and the gateway killed in the middle. Real processes with the deterministic model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from disagg.client import AsyncClient, Client, Finished, Options
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts import processes
from disagg.cluster.hosts.processes import ProcessCluster
from tests.integration.gateways.test_several_gateways import take, until_gone
from tests.integration.scaling.test_scaling import replaced
from tests.support.secret import SECRET
from tests.support.waiting import LONG_WAIT_S, eventually, wait_until
from tests.support.workers import wait_until_workers_idle

KEYS = {"a": "key-of-tenant-a-0001", "b": "key-of-tenant-b-0002", "ops": "key-of-operators-0003"}
NAMES = ("num_requests", "num_failed", "prompt_tokens", "cached_tokens", "completion_tokens")
ROOM = {"num_blocks": 4096, "max_num_seqs": 64}
FIXED = {"model": "fake", "temperature": 0, "ignore_eos": True}
PROMPT = list(range(40))
NUM_STREAMED = 1200
NUM_STREAMS = 6
Sums = Counter[str]


@contextmanager
def running_in(folder: Path) -> Iterator[ProcessCluster]:
    """A cluster that keeps everything in `folder`. At the end nothing is left in it."""
    keys = folder / "keys.yaml"
    entries = [{"tenant": name, "key": key, "admin": name == "ops"} for name, key in KEYS.items()]
    keys.touch(mode=0o600)
    keys.write_text(yaml.safe_dump(entries))
    gateway = {
        "port": 0,
        "http_port": 0,
        "api_keys": str(keys),
        "usage": {"folder": str(folder / "usage"), "wait_ms": 10_000},
        "batches": {"folder": str(folder / "batches"), "max_running": 8},
    }
    config = {
        "model": {"path": "fake", "max_model_len": 4096},
        "transfer": {"transport": "shm"},
        "controller": {"templates": False},
        "gateway": gateway,
        "pools": {"prefill": ROOM, "decode": {"size": 2, **ROOM}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "new_secret", lambda network: SECRET)  # so that the test may audit the workers
        with ProcessCluster(parse_config(config)) as running:
            yield running
            asyncio.run(wait_until_workers_idle(running.workers, running.secret))
    assert running.killed == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with running_in(tmp_path_factory.mktemp("usage")) as running:
        yield running


def http_of(cluster: ProcessCluster, tenant: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.Client(base_url=f"http://{cluster.http_address}", headers=headers, timeout=60.0)


def recorded(cluster: ProcessCluster, tenant: str) -> Sums:
    """What the gateway says, over all days."""
    with http_of(cluster, tenant) as http:
        found = http.get("/v1/usage", params={"days": 2, "key": tenant}).json()
    assert {(row["key"], row["model"], row["object"]) for row in found["data"]} <= {(tenant, "fake", "usage")}
    return Sums({name: sum(row[name] for row in found["data"]) for name in NAMES})


def of_http(usage: dict[str, Any]) -> Sums:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Sums(
        num_requests=1,
        num_failed=0,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        completion_tokens=usage["completion_tokens"],
    )


def of_other(usage: dict[str, Any], cached: int) -> Sums:
    return Sums(
        num_requests=1,
        num_failed=0,
        prompt_tokens=usage["input_tokens"],
        cached_tokens=cached,
        completion_tokens=usage["output_tokens"],
    )


def of_grpc(finished: Finished) -> Sums:
    usage = finished.usage
    return Sums(
        num_requests=1,
        num_failed=0,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def plus(sums: Sums, *more: Sums) -> Sums:
    return Sums({name: sum(each[name] for each in (sums, *more)) for name in NAMES})


def gained(cluster: ProcessCluster, tenant: str, before: Sums) -> Sums:
    after = recorded(cluster, tenant)
    return Sums({name: after[name] - before[name] for name in NAMES})


def test_both_protocols_count_as_their_clients_do(cluster: ProcessCluster) -> None:
    before = {tenant: recorded(cluster, tenant) for tenant in "ab"}
    seen = {tenant: Sums() for tenant in "ab"}
    for tenant, length in (("a", 20), ("b", 35)):
        with http_of(cluster, tenant) as http, Client(cluster.address, api_key=KEYS[tenant]) as client:
            bodies: list[dict[str, Any]] = [
                {"prompt": PROMPT[:length], "max_tokens": 7},
                {"prompt": PROMPT[:length], "max_tokens": 7},  # of which a block is cached now
                {"prompt": PROMPT, "max_tokens": 5, "n": 3},
                {"prompt": [PROMPT, PROMPT[:17]], "max_tokens": 4, "n": 2},
            ]
            for body in bodies:
                answer = http.post("/v1/completions", json={**FIXED, **body}).json()
                seen[tenant] = plus(seen[tenant], of_http(answer["usage"]))
            chat = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 9, "stream": True}
            chat |= {"stream_options": {"include_usage": True}}
            lines = http.post("/v1/chat/completions", json={**FIXED, **chat}).text.splitlines()
            usage = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])["usage"]
            seen[tenant] = plus(seen[tenant], of_http(usage))
            turns = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 9}
            of_message = http.post("/v1/messages", json={**FIXED, **turns}).json()["usage"]
            cached = of_message["cache_read_input_tokens"]
            of_message["input_tokens"] += cached  # there without the cached ones
            seen[tenant] = plus(seen[tenant], of_other(of_message, cached))
            asked = {"input": "a b c", "max_output_tokens": 9, "stream": True}
            lines = http.post("/v1/responses", json={**FIXED, **asked}).text.splitlines()
            usage = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])["response"]["usage"]
            seen[tenant] = plus(seen[tenant], of_other(usage, usage["input_tokens_details"]["cached_tokens"]))
            assert http.post("/v1/completions", json={**FIXED, "prompt": PROMPT, "top_p": 7}).status_code == 400
            whole = client.generate(PROMPT[:length], max_tokens=6, temperature=0.0, ignore_eos=True)
            seen[tenant] = plus(seen[tenant], of_grpc(Finished(whole.reason, whole.usage, whole.request_id)))
            deltas = list(client.stream(PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True))
            assert deltas[-1].finished is not None
            seen[tenant] = plus(seen[tenant], of_grpc(deltas[-1].finished))
            late = http.post(
                "/v1/completions",
                json={**FIXED, "prompt": PROMPT, "max_tokens": 4000},
                headers={"x-request-timeout-ms": "1"},
            )
            assert late.status_code == 408
            seen[tenant] = plus(seen[tenant], Sums(num_requests=1, num_failed=1))
    for tenant, sums in seen.items():
        found = gained(cluster, tenant, before[tenant])
        assert found["num_requests"] == 10
        if found != sums:  # of the one that was late, what was made until then counts, and no client has seen it
            made = Sums({name: found[name] - sums[name] for name in NAMES})
            assert made["prompt_tokens"] == len(PROMPT)
            assert made["completion_tokens"] >= 1
            assert made["num_requests"] == made["num_failed"] == 0
        assert sums["cached_tokens"] > 0


def test_streams_count_once_though_worker_and_gateway_are_killed(tmp_path: Path) -> None:
    with running_in(tmp_path) as cluster:
        asyncio.run(kill_both(cluster))


async def kill_both(cluster: ProcessCluster) -> None:
    """In the middle of streams over gRPC, which their client continues at the next gateway."""
    before = {tenant: await asyncio.to_thread(recorded, cluster, tenant) for tenant in "ab"}
    num_begun = 0

    async def stream(client: AsyncClient, number: int) -> Finished:
        nonlocal num_begun
        finished, length = None, 0
        options: Options = {"max_tokens": NUM_STREAMED, "temperature": 0.0, "ignore_eos": True}
        async for delta in client.stream(PROMPT[number:], timeout_s=60, **options):
            num_begun += not length
            length += len(delta.token_ids)
            finished = delta.finished or finished
        assert finished is not None
        assert length == NUM_STREAMED
        return finished

    killed = cluster.pid("gateway")
    clients = {tenant: AsyncClient(cluster.address, api_key=KEYS[tenant]) for tenant in "ab"}
    async with clients["a"], clients["b"]:
        tasks = [asyncio.create_task(stream(clients["ab"[i % 2]], i)) for i in range(NUM_STREAMS)]
        await eventually(lambda: num_begun == NUM_STREAMS)
        worker = cluster.pid("decode-0")
        os.kill(worker, signal.SIGKILL)
        os.kill(killed, signal.SIGKILL)
        await until_gone(killed)
        assert not any(task.done() for task in tasks)
        ended = await asyncio.gather(*tasks)
    assert await asyncio.to_thread(replaced, cluster, "decode-0", worker, LONG_WAIT_S)
    for index, tenant in enumerate("ab"):
        seen = plus(Sums(), *(of_grpc(one) for one in ended[index::2]))
        found = await asyncio.to_thread(gained, cluster, tenant, before[tenant])
        assert {name: found[name] for name in NAMES if name != "cached_tokens"} == {
            name: seen[name] for name in NAMES if name != "cached_tokens"
        }
        assert found["completion_tokens"] == NUM_STREAMED * NUM_STREAMS / 2


def test_a_stream_that_its_client_leaves_and_continues_counts_once(cluster: ProcessCluster) -> None:
    before = recorded(cluster, "a")
    body = {**FIXED, "prompt": PROMPT[:25], "max_tokens": NUM_STREAMED, "stream": True}
    texts: list[str] = []
    last_id = ""
    with http_of(cluster, "a") as http:
        with http.stream("POST", "/v1/completions", json=body, headers={"last-event-id": "0"}) as response:
            for line in response.iter_lines():
                last_id = take(line, texts) or last_id
                if len(texts) == 20:
                    break
        assert wait_until(lambda: gained(cluster, "a", before)["num_requests"] == 1, LONG_WAIT_S)
        left = gained(cluster, "a", before)
        assert (left["num_failed"], left["prompt_tokens"]) == (0, 25)
        assert 20 <= left["completion_tokens"] < NUM_STREAMED
        with http.stream("POST", "/v1/completions", json=body, headers={"last-event-id": last_id}) as response:
            for line in response.iter_lines():
                take(line, texts)
    found = gained(cluster, "a", before)
    assert (found["num_requests"], found["prompt_tokens"], found["completion_tokens"]) == (1, 25, NUM_STREAMED)


def test_lines_of_a_batch_count_with_their_answers(cluster: ProcessCluster) -> None:
    before = recorded(cluster, "b")
    url = "/v1/completions"
    bodies = [{**FIXED, "prompt": PROMPT[: 10 + number], "max_tokens": 5} for number in range(20)]
    bodies[3]["temperature"] = -1
    named = ({"custom_id": str(number), "method": "POST", "url": url} for number in range(20))
    content = b"\n".join(json.dumps({**name, "body": body}).encode() for name, body in zip(named, bodies, strict=True))
    with http_of(cluster, "b") as http:
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
        given = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        batch = f"/v1/batches/{http.post('/v1/batches', json=given).json()['id']}"
        assert wait_until(lambda: http.get(batch).json()["status"] == "completed", LONG_WAIT_S)
        output = http.get(f"/v1/files/{http.get(batch).json()['output_file_id']}/content").text
    answers = [json.loads(line)["response"]["body"] for line in output.splitlines()]
    assert len(answers) == 19
    expected = plus(Sums(), *(of_http(answer["usage"]) for answer in answers))
    wait_until(lambda: gained(cluster, "b", before) == expected, LONG_WAIT_S)  # lines are written a little later
    assert gained(cluster, "b", before) == expected


def test_a_key_sees_its_own_use_and_an_admin_all(cluster: ProcessCluster) -> None:
    with http_of(cluster, "a") as http:
        assert {row["key"] for row in http.get("/v1/usage").json()["data"]} == {"a"}
        assert http.get("/v1/usage?key=b").status_code == 403
        for query, field in (("days=0", "days"), ("days=3661", "days"), ("days=x", "days"), ("limit=0", "limit")):
            assert http.get(f"/v1/usage?{query}").json()["error"]["param"] == field
        shown = http.get("/metrics", headers={"authorization": f"Bearer {KEYS['ops']}"}).text
    assert "disagg_usage_unwritten_calls 0.0" in shown
    with http_of(cluster, "ops") as http:
        every = http.get("/v1/usage?days=1").json()
        assert {row["key"] for row in every["data"]} == {"a", "b"}
        assert every["first_date"] == every["last_date"] == every["data"][0]["date"]
        assert http.get("/v1/usage?limit=1").json()["has_more"]
    printed = json.loads(usage(cluster, "ops", "--json"))
    assert [(entry["key"], entry["requests"]) for entry in printed["entries"]] == [
        (row["key"], row["num_requests"]) for row in every["data"]
    ]
    table = usage(cluster, "b", "--days", "1")
    assert f"{recorded(cluster, 'b')['completion_tokens']:,}" in table
    assert " b " in table
    assert " a " not in table
    assert "scope admin" in usage(cluster, "b", "--key", "a", status=1)


def usage(cluster: ProcessCluster, tenant: str, *arguments: str, status: int = 0) -> str:
    """What `disagg usage` prints."""
    command = [sys.executable, "-m", "disagg.cli", "usage", "--address", cluster.address, *arguments]
    environment = {**os.environ, "DISAGG_API_KEY": KEYS[tenant], "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    with ProcessCluster(parse_config({"model": {"path": "fake"}, "gateway": {"port": 0, "http_port": 0}})) as cluster:
        found = httpx.get(f"http://{cluster.http_address}/v1/usage")
        assert (found.status_code, found.json()["error"]["code"]) == (503, "no_usage")
