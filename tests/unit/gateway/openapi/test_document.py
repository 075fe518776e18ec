"""The document of the API: complete, true to the structs that parse, and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from disagg import __version__
from disagg.gateway.auth.auth import Caller, RefusedError
from disagg.gateway.openapi import fields, operations
from disagg.gateway.openapi.document import make_document
from disagg.gateway.openapi.operation import Operation
from disagg.gateway.openapi.shapes import Shapes
from disagg.gateway.openapi.web_page import web_page
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.control import AdapterList, ControlReply, ControlRequest
from disagg.router.api import Completion
from tests.support.gateway import MODEL_NAME, FakeRouter
from tests.support.http_app import TestApp
from tests.support.pooled_models import HIDDEN_SIZE, load, write_embedder

OPERATIONS = [each for each in vars(operations).values() if isinstance(each, Operation)]
DOCUMENT = make_document(OPERATIONS, fields.body_shapes(), "1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
GENERATION_BODIES = ("ChatBody", "CompletionBody", "ResponsesBody", "MessagesBody")


class OneKey:
    """An `Authenticator` that knows one key."""

    takes_certificates = False

    def tenants(self) -> tuple[str, ...]:
        return ("tenant",)

    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        if authorization != "Bearer secret":
            raise RefusedError("unknown")
        return Caller("tenant", False)

    def find(self, tenant: str, credential: str | None) -> Caller:
        return Caller("tenant", False)


class Inner(msgspec.Struct):
    """An inner struct."""

    raw: msgspec.Raw = msgspec.Raw(b"null")


class Outer(msgspec.Struct):
    """An outer struct."""

    inner: list[Inner] | None = None
    raw: msgspec.Raw = msgspec.Raw(b"null")
    name: str | None = None


def test_raw_fields_are_shown_as_they_are_finally_read() -> None:
    shapes = Shapes({(Outer, "raw"): dict[str, int] | None, (Inner, "raw"): bool}, {Outer: ("name",)}, {Inner: "Part"})
    [_], found = msgspec.json.schema_components([shapes.of(Outer)], ref_template="{name}")
    assert found["Outer"]["required"] == ["name"]
    assert found["Outer"]["properties"]["name"] == {"type": "string"}
    assert found["Outer"]["properties"]["raw"] == {
        "anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}],
        "default": None,
    }
    assert found["Outer"]["properties"]["inner"] == {
        "anyOf": [{"type": "array", "items": {"$ref": "Part"}}, {"type": "null"}],
        "default": None,
    }
    assert found["Part"]["properties"]["raw"] == {"type": "boolean", "default": None}


def test_a_struct_that_occurs_twice_is_one_object() -> None:
    shapes = Shapes({}, {})
    assert shapes.of(list[Inner]).__args__[0] is shapes.of(Inner)


@pytest.mark.parametrize("body", [each.body for each in OPERATIONS if each.body is not None])
def test_every_field_of_a_body_has_a_type(body: type) -> None:
    """A field that is added as raw JSON needs its type in the table."""
    shape = fields.body_shapes().of(body)
    _, found = msgspec.json.schema_components([shape], ref_template="{name}")
    untyped = [
        (name, field)
        for name, schema in found.items()
        for field, shown in schema["properties"].items()
        if shown.keys() <= {"default", "description"}
    ]
    assert untyped == []


@pytest.mark.parametrize(
    ("body", "field", "right", "wrong"),
    [
        ("ChatBody", "functions", [None, []], [[{"name": "f"}]]),
        ("ChatBody", "skip_special_tokens", [None, True], [False]),
        ("ChatBody", "tool_choice", [None, "auto", {"type": "function", "function": {"name": "f"}}], ["some", 1]),
        ("ChatBody", "echo", [None, False], [True]),
        ("CompletionBody", "suffix", [None, ""], ["end"]),
        ("ResponsesBody", "include", [None, [], ["reasoning.encrypted_content"]], [["all"]]),
        ("ResponsesBody", "metadata", [None, {"a": "b"}], [{"a": 1}]),
        ("MessagesBody", "speed", [None, "standard"], ["fast"]),
        ("MessagesBody", "max_tokens", [1], [None, 1 << 64]),
        ("CountTokensBody", "max_tokens", [None, 1], ["1"]),
        *((body, "speculation", [None, "auto", "off"], ["on", True]) for body in GENERATION_BODIES),
        ("BatchBody", "endpoint", ["/v1/responses"], ["/v1/messages", None]),
    ],
)
def test_values_of_fields(body: str, field: str, right: list[Any], wrong: list[Any]) -> None:
    schema = {**SCHEMAS[body]["properties"][field], "components": DOCUMENT["components"]}
    valid = Draft202012Validator(schema).is_valid
    assert [value for value in right if not valid(value)] == []
    assert [value for value in wrong if valid(value)] == []


async def has_no_adapters(request: ControlRequest) -> ControlReply:
    return AdapterList(adapters=())


@pytest.mark.parametrize(
    ("operation", "body"),
    [(each, body) for each in OPERATIONS for body in each.examples.values()],
    ids=lambda value: value.name if isinstance(value, Operation) else "",
)
async def test_examples_are_allowed_and_answered(
    model: ServedModel, operation: Operation, body: Any, tmp_path: Path
) -> None:
    assert operation.body is not None
    schema = {"$ref": f"#/components/schemas/{operation.body.__name__}", "components": DOCUMENT["components"]}
    Draft202012Validator(schema).validate(body)
    app = TestApp(model, control=has_no_adapters)
    if operation.tag == "vectors":
        app = TestApp(load(write_embedder(tmp_path)), FakeRouter([Completion("stop", 0, 0, bytes(4 * HIDDEN_SIZE))]))
    answer = await app.client.post(operation.url, json={**body, "model": MODEL_NAME})
    fits = "This model's maximum context length" not in answer.text  # the template of tools is longer than the model's
    assert answer.status_code == (200 if fits else 400), answer.text
    assert fits or "tools" in body


def test_bodies_name_what_must_be_set() -> None:
    required = {name: schema.get("required") for name, schema in SCHEMAS.items() if name.endswith("Body")}
    assert required == {
        "BatchBody": ["input_file_id", "endpoint", "completion_window"],
        "ChatBody": ["model", "messages"],
        "CompletionBody": ["model", "prompt"],
        "CountTokensBody": ["model", "messages"],
        "DetokenizeBody": ["tokens"],
        "EmbeddingBody": ["input"],
        "ErrorBody": ["error"],
        "LoadAdapterBody": ["lora_name", "lora_path"],
        "MessagesBody": ["model", "messages", "max_tokens"],
        "RerankBody": ["query", "documents"],
        "ResponsesBody": ["model", "input"],
        "ScoreBody": ["text_1", "text_2"],
        "TokenizeBody": [],
        "UnloadAdapterBody": ["lora_name"],
    }


def test_every_operation_is_in_the_document() -> None:
    shown = {(method.upper(), url) for url, methods in DOCUMENT["paths"].items() for method in methods}
    assert shown == {(each.method, each.url) for each in OPERATIONS}
    assert len({each.name for each in OPERATIONS}) == len(shown)
    assert (operations.MODEL.url, operations.MODEL.path_parameters) == ("/v1/models/{model}", ("model",))


def test_every_reference_leads_to_an_object() -> None:
    text = json.dumps(DOCUMENT)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= SCHEMAS.keys()
    assert SCHEMAS.keys() - named == set()


def test_a_stream_names_its_events_and_errors_of_messages_are_anthropics() -> None:
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    kinds = [{"$ref": f"#/components/schemas/{name}"} for name in ("ChatCompletionChunk", "ErrorBody")]
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    event = chat["200"]["content"]["text/event-stream"]["schema"]
    assert event["properties"]["data"] == {"anyOf": [chunk, {"const": "[DONE]"}]}
    error = DOCUMENT["paths"]["/v1/messages"]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/AnthropicError"}


def test_only_open_operations_need_no_key() -> None:
    shown = {url for url, methods in DOCUMENT["paths"].items() for each in methods.values() if each["security"] == []}
    assert shown == {"/livez", "/readyz"}


async def test_the_document_describes_what_is_served(model: ServedModel) -> None:
    app = TestApp(model)
    document = (await app.client.get("/openapi.json")).json()
    assert (document["openapi"], document["info"]["version"]) == ("3.1.0", __version__)
    assert sum(map(len, document["paths"].values())) == len(app.app.served)
    assert "/v1/batches" not in document["paths"]  # this gateway has none
    assert {"/openapi.json", "/docs", "/v1/usage", "/v1/responses"} <= document["paths"].keys()


async def test_the_page_lists_every_operation_without_scripts(model: ServedModel) -> None:
    app = TestApp(model)
    answer = await app.client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert [each.url for each, _ in app.app.served if f"{each.method} {each.url}</code>" not in answer.text] == []
    assert "<script" not in answer.text
    assert "://" not in answer.text


def test_the_page_escapes_what_it_shows() -> None:
    odd = Operation(method="GET", path="/<b>", name="odd", tag="odd", summary="<i> & co", answer=int)
    page = web_page(make_document([odd], Shapes({}, {}), "<1>"))
    assert "<b>" not in page
    assert "<i>" not in page
    assert "<h1>disagg &lt;1&gt;</h1>" in page


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_a_key_is_needed_as_for_the_models(model: ServedModel, path: str) -> None:
    app = TestApp(model, authenticator=OneKey())
    assert [(await app.client.get(each)).status_code for each in (path, "/v1/models")] == [401, 401]
    assert (await app.client.get(path, headers={"authorization": "Bearer secret"})).status_code == 200
