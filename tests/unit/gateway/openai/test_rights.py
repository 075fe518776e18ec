"""What keys with fewer rights may do over HTTP."""

from __future__ import annotations

import pytest

from disagg.gateway.auth.auth import AnonymousAccess, Caller
from disagg.gateway.text.tokenizer import ServedModel
from tests.support.gateway import MODEL_NAME
from tests.support.http_app import TestApp, error_of

PROMPTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
FACTS = ("/v1/models", f"/v1/models/{MODEL_NAME}", "/health", "/version", "/metrics")


def app_of(model: ServedModel, caller: Caller) -> TestApp:
    return TestApp(model, authenticator=AnonymousAccess(caller))


async def test_without_the_scope_of_inference_no_body_is_read(model: ServedModel) -> None:
    app = app_of(model, Caller("a", False, metrics=True, infers=False))
    for path in PROMPTS:
        response = await app.client.post(path, content=b"not JSON")
        assert error_of(response) == (403, None, "permission_denied")
        assert response.json()["error"]["message"] == "this needs a key with the scope inference"
    found = {path: (await app.client.get(path)).status_code for path in FACTS}
    assert found == dict.fromkeys(FACTS, 200) | {"/health": 503}  # there is no worker
    assert (await app.client.get("/none")).status_code == 404


async def test_metrics_need_a_scope(model: ServedModel) -> None:
    response = await app_of(model, Caller("a", False)).client.get("/metrics")
    assert error_of(response) == (403, None, "permission_denied")
    assert response.json()["error"]["message"] == "this needs a key with the scope metrics or admin"


@pytest.mark.parametrize("asked", [MODEL_NAME, "unknown"])
async def test_other_models_of_a_key_are_neither_used_nor_shown(model: ServedModel, asked: str) -> None:
    app = app_of(model, Caller("a", False, models=frozenset({"y", "x"})))
    responses = [
        await app.chat(model=asked),
        await app.chat(model=asked, stream=True),
        await app.text(model=asked, prompt=["a", "b"]),
        await app.client.get(f"/v1/models/{asked}"),
        await app.client.post("/tokenize", json={"model": asked, "prompt": "a"}),
        await app.client.post("/detokenize", json={"model": asked, "tokens": [75]}),
    ]
    for response in responses:
        assert error_of(response) == (403, "model", "permission_denied")
        message = response.json()["error"]["message"]
        assert message == f"model: this key is not for {asked!r}, but for x, y"
    assert (await app.client.post("/tokenize", json={"prompt": "a"})).status_code == 403
    assert (await app.client.get("/v1/models")).json() == {"object": "list", "data": []}
    assert app.router.submitted == []


async def test_a_key_for_the_served_model(model: ServedModel) -> None:
    app = app_of(model, Caller("a", False, models=frozenset({MODEL_NAME})))
    app.router.script = lambda _: [[75]]
    assert (await app.chat()).status_code == (await app.text(prompt=["a", "b"])).status_code == 200
    assert [each["id"] for each in (await app.client.get("/v1/models")).json()["data"]] == [MODEL_NAME]
    assert error_of(await app.chat(model="other")) == (403, "model", "permission_denied")
