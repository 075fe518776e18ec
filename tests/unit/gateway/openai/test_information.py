"""What clients ask about models: OpenAI's list, Anthropic's, and lm-eval's tokenizer from afar."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.gateway.auth.auth import AnonymousAccess, Caller
from disagg.gateway.text.tokenizer import ServedModel
from tests.support.gateway import MODEL_NAME, TEMPLATE
from tests.support.http_app import TestApp, error_of

VERSION = {"anthropic-version": "2023-06-01"}
MODEL = {"type": "model", "id": MODEL_NAME, "display_name": MODEL_NAME, "created_at": "2023-11-14T22:13:20Z"}
PAGE = {"data": [MODEL], "first_id": MODEL_NAME, "last_id": MODEL_NAME, "has_more": False}
EMPTY: dict[str, Any] = {"data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", PAGE),
        ("?limit=1", PAGE),
        (f"?after_id={MODEL_NAME}", EMPTY),
        (f"?before_id={MODEL_NAME}", EMPTY),
        (f"?before_id={MODEL_NAME}&after_id={MODEL_NAME}", EMPTY),
    ],
)
async def test_anthropics_clients_get_models_in_their_form(model: ServedModel, query: str, expected: Any) -> None:
    app = TestApp(model)
    assert (await app.client.get(f"/v1/models{query}", headers=VERSION)).json() == expected
    assert (await app.client.get(f"/v1/models/{MODEL_NAME}", headers=VERSION)).json() == MODEL
    assert (await app.client.get("/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/models?limit=0", 400, "invalid_request_error"),
        ("/v1/models?limit=1001", 400, "invalid_request_error"),
        ("/v1/models?after_id=x", 400, "invalid_request_error"),
        ("/v1/models/x", 404, "not_found_error"),
    ],
)
async def test_errors_to_them_have_their_form(model: ServedModel, path: str, status: int, kind: str) -> None:
    reply = await TestApp(model).client.get(path, headers=VERSION)
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
    assert reply.headers["request-id"]


async def test_a_list_has_the_models_of_the_key_only(model: ServedModel) -> None:
    app = TestApp(model, authenticator=AnonymousAccess(Caller("a", False, models=frozenset({"x"}))))
    assert (await app.client.get("/v1/models", headers=VERSION)).json() == EMPTY
    assert (await app.client.get(f"/v1/models/{MODEL_NAME}", headers=VERSION)).status_code == 403
    assert (await app.client.get("/tokenizer_info")).status_code == 403


@pytest.mark.parametrize("query", ["", f"?model={MODEL_NAME}"])
async def test_a_tokenizer_is_used_from_afar(model: ServedModel, query: str) -> None:
    """lm-eval takes the special tokens and the template from here, and has texts tokenized."""
    app = TestApp(model)
    found = (await app.client.get(f"/tokenizer_info{query}")).json()
    assert found == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 128,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": TEMPLATE,
    }
    reply = await app.client.post("/tokenize", json={"prompt": found["eos_token"], "add_special_tokens": False})
    assert reply.json()["tokens"] == [1]
    assert (await app.client.post("/detokenize", json={"tokens": [1]})).status_code == 200


async def test_the_tokenizer_of_no_model(model: ServedModel) -> None:
    reply = await TestApp(model).client.get("/tokenizer_info?model=x")
    assert error_of(reply) == (404, "model", "model_not_found")
