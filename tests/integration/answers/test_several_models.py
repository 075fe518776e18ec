"""Two tiny models in one cluster, each with a prefill and a decode worker: served by name over both protocols, and what
becomes of one does not concern the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console

from disagg.cli.operations.apply import ApplyOptions, run_apply
from disagg.cli.operations.operate import run_scale
from disagg.client import AsyncClient, Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.proto.control import ControlRefused, ControlState, ScaleRequest, StateRequest
from disagg.proto.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from tests.integration.gateways.test_batches import contents
from tests.integration.scaling.test_scaling import replaced
from tests.support import reference
from tests.support.metrics import read_samples
from tests.support.tiny_models import make_checkpoint
from tests.support.waiting import LONG_WAIT_S, eventually, wait_until
from tests.support.workers import wait_until_workers_idle

NUM_TOKENS = 24
POOL = {"num_threads": 1, "num_blocks": 256, "cores": "none"}
KINDS = {"first": "llama", "second": "qwen3"}
NAMES = {"first": "tiny/llama", "second": "second"}
"""Key -> the name that requests use: given, or the key."""
PROMPTS = {
    key: [[(7 * i + 3 * k + start) % 250 for k in range(20 + 11 * i)] for i in range(4)]
    for start, key in enumerate(KINDS)
}
WAIT_S = 120.0
SHORT = {"prompt": "to be", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Served:
    cluster: ProcessCluster
    content: dict[str, Any]
    """Of the configuration."""
    expected: dict[str, list[list[int]]]
    """Key -> what `transformers` generates, for each prompt."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """The configuration, and what is expected."""
    folder = tmp_path_factory.mktemp("models")
    folders = {key: make_checkpoint(kind, folder / key) for key, kind in KINDS.items()}
    expected = {key: [reference.generate(folders[key], prompt, NUM_TOKENS) for prompt in PROMPTS[key]] for key in KINDS}
    models: dict[str, Any] = {
        key: {"model": {"path": str(folders[key]), "dtype": "float32"}, "pools": {"prefill": POOL, "decode": POOL}}
        for key in KINDS
    }
    models["first"]["model"]["name"] = NAMES["first"]
    gateway = {"port": 0, "batches": {"folder": str(folder / "batches")}}
    return {"gateway": gateway, "placement": {"local_prefill": "never"}, "models": models}, expected


@pytest.fixture(scope="module")
def served(models: tuple[dict[str, Any], dict[str, list[list[int]]]]) -> Iterator[Served]:
    """For tests that start no process."""
    with running(*models) as served:
        yield served


@pytest.fixture
def changing(models: tuple[dict[str, Any], dict[str, list[list[int]]]]) -> Iterator[Served]:
    """A cluster for one test."""
    with running(*models) as served:
        yield served


@contextmanager
def running(content: dict[str, Any], expected: dict[str, list[list[int]]]) -> Iterator[Served]:
    with ProcessCluster(parse_config(content)) as cluster:
        yield Served(cluster, content, expected)
    assert cluster.killed == []


def over_grpc(served: Served, key: str, number: int, name: str = "") -> list[int]:
    """The answer to a prompt of that key, by the model of that name, or that of the key."""
    with Client(served.cluster.address) as client:
        answer = client.generate(
            PROMPTS[key][number], model=name or NAMES[key], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        return list(answer.token_ids)


async def answers(served: Served, key: str) -> bool:
    """Whether the gateway has workers for a model."""
    try:
        await asyncio.to_thread(over_grpc, served, key, 0)
    except UnavailableError:
        return False
    return True


def over_http(served: Served, key: str, number: int) -> str:
    body = {
        "model": NAMES[key],
        "prompt": PROMPTS[key][number],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = httpx.post(f"http://{served.cluster.http_address}/v1/completions", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == NAMES[key]
    return str(response.json()["choices"][0]["text"])


def state_of(served: Served) -> ControlState:
    state = served.cluster.control(StateRequest())
    assert isinstance(state, ControlState)
    return state


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://{served.cluster.http_address}{path}", json=body, timeout=WAIT_S)


async def test_each_answers_by_its_name_with_its_own_tokens_at_the_same_time(served: Served) -> None:
    calls = [(key, number) for number in range(4) for key in KINDS]
    with ThreadPoolExecutor(16) as threads, Client(served.cluster.address) as client:
        loop = asyncio.get_running_loop()
        ids = [loop.run_in_executor(threads, over_grpc, served, *call) for call in calls]
        texts = [loop.run_in_executor(threads, over_http, served, *call) for call in calls]
        assert await asyncio.gather(*ids) == [served.expected[key][number] for key, number in calls]
        expected = [client.detokenize(served.expected[key][number], model=NAMES[key]) for key, number in calls]
        assert await asyncio.gather(*texts) == expected
        assert served.expected["first"] != served.expected["second"]
        places = {(request.prefill_worker, request.decode_worker) for request in client.requests(16)}
    assert places == {("first/prefill-0", "first/decode-0"), ("second/prefill-0", "second/decode-0")}
    await wait_until_workers_idle(served.cluster.workers, served.cluster.secret)


def test_both_protocols_list_both_and_refuse_other_names(served: Served) -> None:
    listed = httpx.get(f"http://{served.cluster.http_address}/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [(name, 2048) for name in NAMES.values()]
    one = httpx.get(f"http://{served.cluster.http_address}/v1/models/second").json()
    assert one["id"] == "second"
    unknown = post(served, "/v1/completions", {"model": "third", "prompt": "x"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    assert "tiny/llama, second" in unknown.json()["error"]["message"]
    missing = post(served, "/tokenize", {"prompt": "x"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
    with Client(served.cluster.address) as client:
        assert [model.name for model in client.models()] == list(NAMES.values())
        with pytest.raises(ModelNotFoundError, match="model"):
            client.generate([1, 2], model="third", max_tokens=1)
        with pytest.raises(InvalidRequestError, match="model: must be set, to one of tiny/llama, second"):
            client.generate([1, 2], max_tokens=1)


def test_status_and_metrics_show_which_model_a_worker_serves(served: Served) -> None:
    workers = ["first/prefill-0", "first/decode-0", "second/prefill-0", "second/decode-0"]
    state = state_of(served)
    assert [pool.name for pool in state.pools] == ["first/prefill", "first/decode", "second/prefill", "second/decode"]
    with Client(served.cluster.address) as client:
        assert [worker.worker_id for worker in client.cluster_state().workers] == workers
    samples = read_samples(httpx.get(f"http://{served.cluster.http_address}/metrics").content)
    of_blocks = {labels["instance"]: labels["model"] for labels in map(dict, samples["disagg_kv_blocks"])}
    assert of_blocks == {worker: NAMES[worker.partition("/")[0]] for worker in workers}
    for name in ("disagg_output_tokens_total", "vllm:generation_tokens_total"):
        label = "model" if name.startswith("disagg") else "model_name"
        assert {dict(labels)[label] for labels in samples[name]} == set(NAMES.values())


def test_lines_of_a_batch_name_a_model_each(served: Served) -> None:
    url = "/v1/completions"
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": name, **SHORT}}
        for name in (*NAMES.values(), "third")
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with httpx.Client(base_url=f"http://{served.cluster.http_address}", timeout=WAIT_S) as http:
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
        given = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        batch = f"/v1/batches/{http.post('/v1/batches', json=given).json()['id']}"
        assert wait_until(lambda: http.get(batch).json()["status"] == "completed", LONG_WAIT_S)
        ended = http.get(batch).json()
        answers = contents(http, ended["output_file_id"])
        found = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
        assert found == {
            name: http.post(url, json={"model": name, **SHORT}).json()["choices"][0]["text"] for name in NAMES.values()
        }
        (unknown,) = contents(http, ended["error_file_id"])
        assert (unknown["custom_id"], unknown["response"]["status_code"]) == ("third", 404)


async def test_what_becomes_of_one_model_does_not_disturb_the_other(changing: Served, tmp_path: Path) -> None:
    """A worker is killed, a pool is resized, another gets a larger KV cache while the first model is resized, a third
    model comes and goes."""
    await a_worker_dies(changing)
    await a_pool_is_resized(changing)
    await a_pool_is_changed(changing, tmp_path / "cluster.yaml")
    await wait_until_workers_idle(changing.cluster.workers, changing.cluster.secret)


async def a_worker_dies(served: Served) -> None:
    """Answers of the other model go on while it is away, and its own come back."""
    cluster = served.cluster
    pid = cluster.pid("first/decode-0")
    before = {info.worker_id: info.incarnation for info in cluster.workers}
    async with AsyncClient(cluster.address) as client:
        stream = client.stream(
            PROMPTS["second"][0], model="second", max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        tokens: list[int] = []
        async for delta in stream:
            if not tokens:
                os.kill(pid, signal.SIGKILL)
            tokens += delta.token_ids
        assert tokens == served.expected["second"][0]
        assert await asyncio.to_thread(over_grpc, served, "second", 1) == served.expected["second"][1]
        health = await asyncio.to_thread(httpx.get, f"http://{cluster.http_address}/readyz")
        assert health.status_code == 200
    assert await asyncio.to_thread(replaced, cluster, "first/decode-0", pid)
    await eventually(lambda: answers(served, "first"), every_s=0.1)  # the gateway, too, has connected to it
    assert await asyncio.to_thread(over_grpc, served, "first", 2) == served.expected["first"][2]
    after = {info.worker_id: info.incarnation for info in cluster.workers}
    assert {name for name in before if before[name] != after[name]} == {"first/decode-0"}


async def a_pool_is_resized(served: Served) -> None:
    cluster, console = served.cluster, Console(quiet=True)
    await asyncio.to_thread(run_scale, cluster.address, {"second/decode": 2}, console, WAIT_S)
    assert [(pool.name, pool.ready) for pool in state_of(served).pools] == [
        ("first/prefill", 1),
        ("first/decode", 1),
        ("second/prefill", 1),
        ("second/decode", 2),
    ]
    assert await asyncio.to_thread(over_grpc, served, "second", 3) == served.expected["second"][3]
    await asyncio.to_thread(run_scale, cluster.address, {"second/decode": 1}, console, WAIT_S)


async def the_other_model_is_resized_meanwhile(served: Served) -> None:
    """While the first new worker of the second model starts."""
    refused = served.cluster.control(ScaleRequest(sizes={"second/decode": 2}))
    assert isinstance(refused, ControlRefused)
    assert refused.message.startswith("generation 2 of the configuration is being applied (second); ")
    state = served.cluster.control(ScaleRequest(sizes={"first/decode": 2}))
    assert isinstance(state, ControlState)
    assert state.rollout is not None
    assert {pool.name: pool.desired for pool in state.pools}["first/decode"] == 2
    await asyncio.to_thread(run_scale, served.cluster.address, {"first/decode": 2}, Console(quiet=True), WAIT_S)


async def a_pool_is_changed(served: Served, file: Path) -> None:
    cluster, console = served.cluster, Console(quiet=True)
    incarnations = {info.worker_id: info.incarnation for info in cluster.workers}
    changed = {**served.content["models"]}
    changed["second"] = {**changed["second"], "pools": {"prefill": POOL, "decode": {**POOL, "num_blocks": 320}}}
    file.write_text(yaml.safe_dump({**served.content, "models": changed}))
    applying = asyncio.create_task(
        asyncio.to_thread(run_apply, cluster.address, file, console, ApplyOptions(wait_s=WAIT_S))
    )
    await eventually(lambda: state_of(served).rollout is not None)
    await the_other_model_is_resized_meanwhile(served)
    await applying
    after = {info.worker_id: info for info in cluster.workers}
    assert [(name, info.num_blocks) for name, info in after.items()] == [
        ("first/prefill-0", 256),
        ("first/decode-0", 256),
        ("first/decode-1", 256),
        ("second/prefill-0", 256),
        ("second/decode-0", 320),
    ]
    kept = {name for name in incarnations if incarnations[name] == after[name].incarnation}
    assert kept == {"first/prefill-0", "first/decode-0", "second/prefill-0"}
    for key in KINDS:
        assert await asyncio.to_thread(over_grpc, served, key, 0) == served.expected[key][0]
    await a_model_comes_and_goes(served, file, {**served.content, "models": changed})


async def a_model_comes_and_goes(served: Served, file: Path, content: dict[str, Any]) -> None:
    """The third has the weights of the first, so its tokens are known. Once `apply` is over it is served, or is not any
    more; the others answer all the time, by the same processes."""
    cluster, console, options = served.cluster, Console(quiet=True), ApplyOptions(wait_s=WAIT_S)
    before = {info.worker_id: info.incarnation for info in cluster.workers}
    third = {**content["models"]["first"], "model": {**content["models"]["first"]["model"], "name": "third"}}
    over = threading.Event()
    loads = [asyncio.create_task(asyncio.to_thread(answer_until, served, key, over)) for key in KINDS]
    try:
        file.write_text(yaml.safe_dump({**content, "models": {**content["models"], "third": third}}))
        await asyncio.to_thread(run_apply, cluster.address, file, console, options)
        assert await asyncio.to_thread(over_grpc, served, "first", 2, name="third") == served.expected["first"][2]
        assert await asyncio.to_thread(names_shown, served) == [{*NAMES.values(), "third"}] * 2
        file.write_text(yaml.safe_dump(content))
        await asyncio.to_thread(run_apply, cluster.address, file, console, options)
        with pytest.raises(ModelNotFoundError):
            await asyncio.to_thread(over_grpc, served, "first", 2, name="third")
        assert await asyncio.to_thread(wait_until, lambda: names_shown(served) == [{*NAMES.values()}] * 2, LONG_WAIT_S)
        assert {info.worker_id: info.incarnation for info in cluster.workers} == before
    finally:
        over.set()
        await asyncio.gather(*loads)
    assert state_of(served).generation == 4


def names_shown(served: Served) -> list[set[str]]:
    """The models that are listed, and those that metrics are of."""
    with httpx.Client(base_url=f"http://{served.cluster.http_address}", timeout=WAIT_S) as http:
        listed = {model["id"] for model in http.get("/v1/models").json()["data"]}
        samples = read_samples(http.get("/metrics").content)
        return [listed, {dict(labels)["model"] for labels in samples["disagg_output_tokens_total"]}]


def answer_until(served: Served, key: str, over: threading.Event) -> None:
    while not over.is_set():
        assert over_grpc(served, key, 0) == served.expected[key][0]
