"""`/v1/embeddings`, `/rerank` and `/score` over HTTP, with a router that gives vectors."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from disagg.gateway.auth.auth import AnonymousAccess, Caller
from disagg.gateway.calls import MAX_VECTORS
from disagg.gateway.openai import vectors as vectors_module
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import OverloadedError
from disagg.proto.messages import Pooling
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import Completion, RoutedRequest, TenantLimits
from tests.support.gateway import BOS, MODEL_NAME, FakeRouter, Step, Wait
from tests.support.http_app import NOW, TestApp, error_of
from tests.support.pooled_models import HIDDEN_SIZE, POOLING, TRANSFORMER, load, write_embedder, write_reranker


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load(write_embedder(tmp_path_factory.mktemp("embedder")))


@pytest.fixture(scope="module")
def mean_embedder(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load(write_embedder(tmp_path_factory.mktemp("mean"), "mean_tokens"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load(write_reranker(tmp_path_factory.mktemp("reranker"), max_position_embeddings=512))


def vector_of(request: RoutedRequest) -> tuple[float, ...]:
    """Of a text: ones at the places of its first ids, so that cosines are simple; of a pair a score by its length."""
    assert request.pooling is not None
    if request.pooling.kind == "score":
        return (1.0 / request.num_prompt_tokens,)
    ids = unpack_token_ids(request.prompt_token_ids)
    numbers = [float(place in {token_id % 8 for token_id in ids}) for place in range(request.pooling.dimensions or 8)]
    return tuple(numbers)


def computed(request: RoutedRequest) -> Iterable[Step]:
    numbers = vector_of(request)
    return [Completion("stop", 0, 1, struct.pack(f"<{len(numbers)}f", *numbers))]


def app_of(model: ServedModel, **changes: Any) -> TestApp:
    return TestApp(model, FakeRouter(computed), **changes)


async def post(app: TestApp, path: str, **body: Any) -> Any:
    return await app.client.post(path, json={"model": MODEL_NAME, **body})


def ids_of(app: TestApp) -> list[tuple[int, ...]]:
    return [tuple(unpack_token_ids(request.prompt_token_ids)) for request, _ in app.router.submitted]


# ---------------------------------------------------------------- embeddings


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([4, 5], [(4, 5)]),
        ([[4, 5], [6]], [(4, 5), (6,)]),
        (["!", "!!"], [(BOS, 4), (BOS, 4, 4)]),
        ("!", [(BOS, 4)]),
    ],
)
async def test_texts_and_ids_have_vectors(embedder: ServedModel, given: Any, ids: list[tuple[int, ...]]) -> None:
    app = app_of(embedder)
    reply = await post(app, "/v1/embeddings", input=given)
    assert ids_of(app) == ids
    num_tokens = sum(map(len, ids))
    assert reply.json() == {
        "id": "embd-r0",
        "object": "list",
        "created": int(NOW),
        "model": MODEL_NAME,
        "data": [
            {"object": "embedding", "index": number, "embedding": list(vector_of(request))}
            for number, (request, _) in enumerate(app.router.submitted)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
    }
    assert {request.pooling for request, _ in app.router.submitted} == {Pooling(kind="last")}
    assert {request.sampling.max_tokens for request, _ in app.router.submitted} == {1}


async def test_base64_are_the_numbers_in_fp32(embedder: ServedModel) -> None:
    reply = await post(app_of(embedder), "/v1/embeddings", input=[1, 2, 3], encoding_format="base64")
    encoded = reply.json()["data"][0]["embedding"]
    assert struct.unpack("<8f", base64.b64decode(encoded)) == (0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


async def test_fewer_dimensions(embedder: ServedModel, mean_embedder: ServedModel) -> None:
    app = app_of(embedder)
    reply = await post(app, "/v1/embeddings", input=[1], dimensions=3)
    assert reply.json()["data"][0]["embedding"] == [0.0, 1.0, 0.0]
    assert app.router.submitted[0][0].pooling == Pooling(kind="last", dimensions=3)
    status, field, _ = error_of(await post(app, "/v1/embeddings", input=[1], dimensions=9))
    assert (status, field) == (400, "dimensions")
    other = app_of(mean_embedder)
    assert (await post(other, "/v1/embeddings", input=[1], dimensions=8)).status_code == 200
    reply = await post(other, "/v1/embeddings", input=[1], dimensions=4)
    assert "does not support other dimensions than its own 8" in reply.json()["error"]["message"]


async def test_a_mean_has_no_prefix_to_share(embedder: ServedModel, mean_embedder: ServedModel) -> None:
    for model, num_hashes in ((embedder, 2), (mean_embedder, 0)):
        app = app_of(model)
        await post(app, "/v1/embeddings", input=[*range(40)])
        (request, _) = app.router.submitted[0]
        assert len(request.block_hashes) == num_hashes
        assert bool(request.root_hash) == bool(num_hashes)


async def test_a_prompt_as_long_as_the_model_fits_and_a_longer_one_may_be_cut(embedder: ServedModel) -> None:
    app = app_of(embedder)
    assert (await post(app, "/v1/embeddings", input=[5] * 128)).status_code == 200
    reply = await post(app, "/v1/embeddings", input=[[6], [5] * 129])
    assert error_of(reply)[:2] == (400, "input[1]")
    reply = await post(app, "/v1/embeddings", input=[5] * 129, truncate_prompt_tokens=-1)
    assert reply.json()["usage"]["prompt_tokens"] == 128
    reply = await post(app, "/v1/embeddings", input="!!!!!!", truncate_prompt_tokens=3)
    assert ids_of(app)[-1] == (BOS, 4, 4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": [1, 320]}, "input[1]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
    ],
)
async def test_wrong_fields_are_named(embedder: ServedModel, body: dict[str, Any], field: str) -> None:
    app = app_of(embedder)
    assert error_of(await post(app, "/v1/embeddings", **body))[:2] == (400, field)
    assert app.router.submitted == []


async def test_bounds_of_a_call(embedder: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(embedder)
    monkeypatch.setattr(vectors_module, "MAX_TEXTS", 3)
    assert error_of(await post(app, "/v1/embeddings", input=["a"] * 4))[:2] == (400, "input")
    assert error_of(await post(app, "/rerank", query="a", documents=["a"] * 4))[:2] == (400, "documents")
    assert error_of(await post(app, "/score", text_1="a", text_2=["a"] * 4))[:2] == (400, "text_2")
    monkeypatch.setattr(vectors_module, "MAX_NUMBERS", 2 * HIDDEN_SIZE)
    assert (await post(app, "/v1/embeddings", input=["a"] * 2)).status_code == 200
    assert error_of(await post(app, "/v1/embeddings", input=["a"] * 3))[:2] == (400, "input")
    assert (await post(app, "/v1/embeddings", input=["a"] * 3, dimensions=4)).status_code == 200


async def test_a_bounded_number_of_vectors_is_computed_at_a_time(embedder: ServedModel) -> None:
    app = TestApp(embedder, FakeRouter([Wait()]))
    task = asyncio.create_task(post(app, "/v1/embeddings", input=[[1]] * (MAX_VECTORS + 10)))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert all(handle.waiting.is_set() for handle in app.router.handles)
    assert len(app.router.submitted) == MAX_VECTORS
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert all(handle.num_cancels == 1 for handle in app.router.handles)


async def test_one_that_fails_cancels_the_others(embedder: ServedModel) -> None:
    def script(request: RoutedRequest) -> Iterable[Step]:
        return [OverloadedError("no room", 1.0)] if request.num_prompt_tokens == 2 else [Wait()]

    app = TestApp(embedder, FakeRouter(script))
    reply = await post(app, "/v1/embeddings", input=[[1], [1, 2], [1]])
    assert reply.status_code == 429
    assert [handle.num_cancels for handle in app.router.handles] == [1, 1, 1]


async def test_tenants_are_charged_and_what_is_not_computed_is_given_back(embedder: ServedModel) -> None:
    limits = TenantLimits(tokens_per_minute=1000)
    app = app_of(embedder, authenticator=AnonymousAccess(Caller("a", False, limits=limits)))
    assert (await post(app, "/v1/embeddings", input=[[1, 2], [3]])).status_code == 200
    assert [(call.num_answers, call.num_tokens) for call in app.router.admitted] == [(2, 5)]
    assert [request.prepaid_tokens for request, _ in app.router.submitted] == [3, 2]
    app.router.refusal = OverloadedError("no room", 1.0)
    assert (await post(app, "/v1/embeddings", input=[[1, 2], [3]])).status_code == 429
    assert app.router.given_back == [("a", 5, 2)]


@pytest.mark.parametrize(
    ("path", "fields", "harmless"),
    [
        (
            "/v1/embeddings",
            {
                "messages": [{"role": "user", "content": "a"}],
                "add_special_tokens": False,
                "truncation_side": "right",
                "normalize": False,
                "use_activation": False,
                "embed_dtype": "float16",
                "endianness": "big",
            },
            {"normalize": True, "use_activation": True, "embed_dtype": "float32", "endianness": "little"},
        ),
        (
            "/rerank",
            {"use_activation": False, "activation": False, "max_tokens_per_doc": 5, "rank_fields": ["title"]},
            {"use_activation": True, "max_tokens_per_doc": None, "truncation_side": "left"},
        ),
        ("/score", {"truncation_side": "right", "activation": False}, {"activation": True}),
    ],
)
async def test_what_would_change_vectors_and_is_not_supported_is_refused(
    embedder: ServedModel, path: str, fields: dict[str, Any], harmless: dict[str, Any]
) -> None:
    texts: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": "a"},
        "/rerank": {"query": "a", "documents": ["a"]},
    }
    body = texts.get(path, {"text_1": "a", "text_2": "a"})
    app = app_of(embedder)
    for name, value in fields.items():
        assert error_of(await post(app, path, **body, **{name: value}))[:2] == (400, name)
    assert app.router.submitted == []
    assert (await post(app, path, **body, **harmless)).status_code == 200


async def test_vectors_of_a_model_without_a_length_stay_as_they_are(tmp_path: Path) -> None:
    app = app_of(load(write_embedder(tmp_path, modules=[TRANSFORMER, POOLING])))
    assert error_of(await post(app, "/v1/embeddings", input="a", normalize=True))[:2] == (400, "normalize")
    assert (await post(app, "/v1/embeddings", input="a", normalize=False)).status_code == 200


# ---------------------------------------------------------------- which model


@pytest.mark.parametrize(
    ("path", "body", "api"),
    [
        ("/v1/embeddings", {"input": "a"}, "Embeddings"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "Rerank (Score)"),
        ("/score", {"text_1": "a", "text_2": "b"}, "Score"),
    ],
)
async def test_a_model_that_generates_has_none(model: ServedModel, path: str, body: dict[str, Any], api: str) -> None:
    reply = await post(app_of(model), path, **body)
    assert error_of(reply)[:2] == (400, "model")
    assert f"The model does not support {api} API" in reply.json()["error"]["message"]


async def test_a_model_with_vectors_gives_no_answers(embedder: ServedModel, reranker: ServedModel) -> None:
    for model in (embedder, reranker):
        app = app_of(model)
        assert error_of(await app.chat())[:2] == (400, "model")
        assert error_of(await app.text())[:2] == (400, "model")
        assert error_of(await post(app, "/v1/responses", input="a"))[:2] == (400, "model")
    assert error_of(await post(app_of(reranker), "/v1/embeddings", input="a"))[:2] == (400, "model")


async def test_the_model_may_be_left_out_where_there_is_one(embedder: ServedModel) -> None:
    reply = await app_of(embedder).client.post("/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 200
    assert (await post(app_of(embedder), "/v1/embeddings", model="other", input="a")).status_code == 404


# ---------------------------------------------------------------- rerank, score


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_documents_are_ordered_by_cosine(embedder: ServedModel, path: str) -> None:
    """Ids of one byte each, from 4 on: `!` is 4, `"` is 5, `$` is 7."""
    app = app_of(embedder)
    reply = await post(app, path, query="!", documents=['"$', "!", '!"'])
    assert reply.json() == {
        "id": "rerank-r0",
        "model": MODEL_NAME,
        "usage": {"prompt_tokens": 10, "total_tokens": 10},
        "results": [
            {"index": 1, "document": {"text": "!"}, "relevance_score": 1.0},
            {"index": 2, "document": {"text": '!"'}, "relevance_score": pytest.approx(2 / math.sqrt(6))},
            {"index": 0, "document": {"text": '"$'}, "relevance_score": pytest.approx(1 / math.sqrt(6))},
        ],
    }


async def test_the_best_documents_alone_without_their_texts(embedder: ServedModel) -> None:
    documents = [{"text": '"$'}, {"text": "!"}, {"text": "!"}]
    reply = await post(app_of(embedder), "/rerank", query="!", documents=documents, top_n=2, return_documents=False)
    assert reply.json()["results"] == [{"index": 1, "relevance_score": 1.0}, {"index": 2, "relevance_score": 1.0}]


async def test_a_reranker_reads_query_and_document_together(reranker: ServedModel) -> None:
    app = app_of(reranker)
    reply = await post(app, "/rerank", query="a", documents=["bb", "b"], instruction="x")
    first, second = (request for request, _ in app.router.submitted)
    assert first.pooling == Pooling(kind="score", score_ids=(9, 10))
    assert first.num_prompt_tokens == second.num_prompt_tokens + 1
    assert "<Instruct>: x\n<Query>: a\n<Document>: bb" in reranker.tokenizer.decode(ids_of(app)[0])
    assert [result["index"] for result in reply.json()["results"]] == [1, 0]
    assert reply.json()["results"][0]["relevance_score"] == pytest.approx(1 / second.num_prompt_tokens)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_pairs_have_scores(embedder: ServedModel, path: str) -> None:
    app = app_of(embedder)
    reply = await post(app, path, text_1="!", text_2=["!", '"'])
    assert reply.json() == {
        "id": "score-r0",
        "object": "list",
        "created": int(NOW),
        "model": MODEL_NAME,
        "data": [
            {"index": 0, "object": "score", "score": pytest.approx(1.0)},
            {"index": 1, "object": "score", "score": pytest.approx(0.5)},
        ],
        "usage": {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0},
    }
    reply = await post(app, path, text_1=["!", '"'], text_2=["!", '"'])
    assert [each["score"] for each in reply.json()["data"]] == [pytest.approx(1.0)] * 2


def test_scores_of_many_long_vectors_leave_time_to_others() -> None:
    numbers = [[float(k % 7 + i) for k in range(64)] for i in range(5)]
    pairs = ((0, 1), (0, 2), (3, 3), (3, 4))
    wanted = vectors_module.Wanted(prompts=(), names=(), pairs=pairs)
    work = vectors_module.scores_of(wanted, [struct.pack("<64f", *each) for each in [*numbers[:4], [0.0] * 64]])
    pieces = 0
    try:
        while True:
            next(work)
            pieces += 1
    except StopIteration as end:
        scores = end.value
    assert pieces == 5 + len(pairs)  # one for each vector and each pair
    expected = [
        sum(a * b for a, b in zip(numbers[i], numbers[j], strict=True))
        / math.hypot(*numbers[i])
        / math.hypot(*numbers[j])
        for i, j in pairs[:2]
    ]
    assert scores[:2] == pytest.approx(expected, rel=1e-12)
    assert scores[2:] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a", "a" * 129]}, "documents[1]"),
        ("/rerank", {"query": "a" * 129, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/score", {"text_1": ["a", ""], "text_2": ["a", "a"]}, "text_1[1]"),
    ],
)
async def test_wrong_pairs_are_named(embedder: ServedModel, path: str, body: dict[str, Any], field: str) -> None:
    app = app_of(embedder)
    assert error_of(await post(app, path, **body))[:2] == (400, field)
    assert [request.prompt_token_ids for request, _ in app.router.submitted if not request.num_prompt_tokens] == []


async def test_a_rerankers_prompt_is_not_cut(reranker: ServedModel) -> None:
    app = app_of(reranker)
    reply = await post(app, "/rerank", query="a", documents=["b"], truncate_prompt_tokens=20)
    assert error_of(reply)[:2] == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("length", [400, 3000])  # fewer than twice the tokens that fit, and more
async def test_a_pair_that_is_too_long_is_named_by_its_second_text(reranker: ServedModel, length: int) -> None:
    app, text = app_of(reranker), "a" * length
    for path, body, field in (
        ("/rerank", {"query": "a", "documents": ["b", text]}, "documents[1]"),
        ("/score", {"text_1": "a", "text_2": ["b", text]}, "text_2[1]"),
        ("/score", {"text_1": text, "text_2": "b"}, "text_2"),
    ):
        reply = await post(app, path, **body)
        assert error_of(reply) == (400, field, "context_length_exceeded")
        assert "maximum context length is 512 tokens." in reply.json()["error"]["message"]
