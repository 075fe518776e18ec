"""A cluster with a model of vectors beside one that answers: vectors equal those of transformers, only workers that
compute prompts make them, and nothing is left."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.proto.errors import InvalidRequestError
from tests.support.cluster_state import requests_of, until_counts
from tests.support.metrics import Samples, scrape, value
from tests.support.tiny_models import make_checkpoint
from tests.support.waiting import eventually
from tests.support.workers import wait_until_workers_idle

POOL = {"num_threads": 1, "num_blocks": 256, "cores": "none"}
PROMPTS = [[(7 * i + 3 * k + 1) % 250 for k in range(length)] for i, length in enumerate((1, 15, 40, 200, 33, 7))]


@dataclass(frozen=True)
class Served:
    cluster: ProcessCluster
    expected: np.ndarray[Any, Any]
    """The vectors of `PROMPTS`, by transformers in fp32."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    import transformers

    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("vectors") / "qwen3")
    kinds = ("models.Transformer", "models.Pooling", "models.Normalize")
    modules = [{"type": kind, "path": "1_Pooling" if kind == kinds[1] else ""} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        rows = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in PROMPTS]
    expected = torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()
    models = {
        "vectors": {
            "model": {"path": str(folder), "dtype": "float32"},
            "pools": {"prefill": {**POOL, "token_budget": 64}, "decode": POOL},
        },
        "chat": {"model": {"path": "fake"}, "pools": {"prefill": POOL, "decode": POOL}},
    }
    content = {"gateway": {"port": 0}, "placement": {"local_prefill": "never"}, "models": models}
    with ProcessCluster(parse_config(content)) as cluster:
        yield Served(cluster, expected)
    assert cluster.killed == []


async def is_idle(served: Served) -> None:
    async with AsyncClient(served.cluster.address) as client:
        await until_counts(client, requests_of, (0, 0))
    await wait_until_workers_idle(served.cluster.workers, served.cluster.secret)


def computed_by(samples: Samples, worker: str) -> float:
    """Prompt tokens that a worker computed."""
    found = samples.get("disagg_engine_prompt_tokens_total", {})
    return sum(number for labels, number in found.items() if ("instance", worker) in labels)


async def test_vectors_are_those_of_transformers(served: Served) -> None:
    async with httpx.AsyncClient(base_url=f"http://{served.cluster.http_address}", timeout=60.0) as client:
        body = {"model": "vectors", "input": PROMPTS, "encoding_format": "base64"}
        for _ in range(2):  # the second time behind cached prefixes
            reply = (await client.post("/v1/embeddings", json=body)).raise_for_status().json()
            encoded = [base64.b64decode(each["embedding"]) for each in reply["data"]]
            vectors = np.stack([np.frombuffer(each, dtype="<f4") for each in encoded])
            np.testing.assert_allclose(vectors, served.expected, atol=1e-4)
            assert (vectors * served.expected).sum(axis=1).min() > 0.9999
            assert reply["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
        samples = await scrape(client, lambda found: computed_by(found, "vectors/prefill-0") > 0)
    assert computed_by(samples, "vectors/decode-0") == 0
    assert sum(samples["disagg_engine_output_tokens_total"].values()) == 0
    assert value(samples, "disagg_router_decisions_total", model="vectors", reason="pooled") == 2 * len(PROMPTS)
    await is_idle(served)


async def test_each_model_serves_its_own_apis(served: Served) -> None:
    async with httpx.AsyncClient(base_url=f"http://{served.cluster.http_address}", timeout=60.0) as client:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json={"model": "chat", **chat})).status_code == 200
        for path, body in (
            ("/v1/chat/completions", {"model": "vectors", **chat}),
            ("/v1/embeddings", {"model": "chat", "input": "hi"}),
            ("/v1/rerank", {"model": "chat", "query": "a", "documents": ["b"]}),
        ):
            refused = await client.post(path, json=body)
            assert refused.status_code == 400
            assert "The model does not support" in refused.json()["error"]["message"]
        reply = await client.post("/rerank", json={"model": "vectors", "query": "a", "documents": ["b", "a"]})
        assert [result["index"] for result in reply.json()["results"]] == [1, 0]
    async with AsyncClient(served.cluster.address) as rpc:
        with pytest.raises(InvalidRequestError, match="The model does not support"):
            await rpc.generate("hi", model="vectors", max_tokens=2)
    await is_idle(served)


async def test_a_client_that_leaves_leaves_nothing(served: Served) -> None:
    async with httpx.AsyncClient(base_url=f"http://{served.cluster.http_address}", timeout=60.0) as client:
        prompts = [[k % 250 for k in range(start, start + 200)] for start in range(300)]
        calls = [
            asyncio.create_task(client.post("/v1/embeddings", json={"model": "vectors", "input": prompts}))
            for _ in range(3)
        ]
        async with AsyncClient(served.cluster.address) as state:

            async def some_run() -> bool:
                return requests_of(await state.cluster_state())[1] > 0

            await eventually(some_run, "no text is computed")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await is_idle(served)


def test_the_models_are_listed(served: Served) -> None:
    models = httpx.get(f"http://{served.cluster.http_address}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["vectors", "chat"]
