"""JSON bodies: types of known fields, and everything that is no JSON."""

from __future__ import annotations

import re

import msgspec
import pytest

from disagg.gateway.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    TokenizeBody,
    decode,
)
from disagg.gateway.other_apis.messages.schema import MessagesBody
from disagg.gateway.other_apis.responses.schema import ResponsesBody
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import InvalidRequestError
from tests.support.http_app import CHAT as CHAT_BODY
from tests.support.http_app import TEXT as TEXT_BODY
from tests.support.http_app import TestApp

CHAT = msgspec.json.Decoder(ChatBody)
TEXT = msgspec.json.Decoder(CompletionBody)


def field_of(raw: bytes, decoder: msgspec.json.Decoder[ChatBody] = CHAT) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        decode(raw, decoder)
    field = caught.value.field
    return field, caught.value.message.removeprefix(f"{field}: ")


def test_unknown_fields_are_ignored_and_null_is_absent() -> None:
    body = decode(b'{"messages": [{"role": "user", "name": "x"}], "top_p": null, "lora_path": {"a": []}}', CHAT)
    assert body == ChatBody(messages=[Message(role="user", name="x")])


def test_an_integer_is_a_number() -> None:
    assert decode(b'{"messages": [], "temperature": 1}', CHAT).temperature == 1.0


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (b'{"messages": [], "n": "2"}', "n", "expected `int | null`, got `str`"),
        (b'{"messages": [], "n": true}', "n", "expected `int | null`, got `bool`"),
        (b'{"messages": [], "max_tokens": 1.5}', "max_tokens", "expected `int | null`, got `float`"),
        (b'{"messages": [], "logprobs": 1}', "logprobs", "expected `bool | null`, got `int`"),
        (b'{"messages": [], "stop": ["a", 1]}', "stop[1]", "expected `str`, got `int`"),
        (b'{"messages": [], "temperature": 1e999}', "temperature", "number out of range"),
        (b'{"messages": [], "stream_options": {"include_usage": 1}}', "stream_options.include_usage", ""),
        (b'{"messages": [{"role": "user"}, {"content": "x"}]}', "messages[1].role", "must be set"),
        (b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}', "messages[0].content[0].type", "must be set"),
        (b"{}", "messages", "must be set"),
        (b"[]", "body", "expected `object`, got `array`"),
    ],
)
def test_a_wrong_value_names_its_field(raw: bytes, field: str, message: str) -> None:
    found = field_of(raw)
    assert found[0] == field
    assert found[1].startswith(message)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"response_format": {}}, "response_format.type"),
        ("/v1/chat/completions", {"response_format": {"type": 1}}, "response_format.type"),
        ("/v1/chat/completions", {"response_format": 1}, "response_format"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": 1}}},
            "response_format.json_schema.name",
        ),
        ("/v1/chat/completions", {"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ("/v1/chat/completions", {"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ("/v1/chat/completions", {"logit_bias": {"1": "a"}}, "logit_bias"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("/v1/chat/completions", {"tools": {}}, "tools"),
        ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("/v1/responses", {"text": {"format": {"type": 1}}}, "text.format.type"),
        ("/v1/responses", {"tools": [{"type": "function", "name": 1}]}, "tools[0].name"),
        ("/v1/responses", {"tool_choice": {"type": 1}}, "tool_choice.type"),
        ("/v1/messages", {"tools": [{"name": 1}]}, "tools[0].name"),
        ("/v1/messages", {"thinking": {"budget_tokens": 1}}, "thinking.type"),
        ("/v1/messages", {"output_config": {"format": {"type": 1}}}, "output_config.format.type"),
    ],
)
async def test_what_is_wrong_within_a_field_is_named(
    model: ServedModel, path: str, fields: dict[str, object], param: str
) -> None:
    body = {**CHAT_BODY, "input": "hi", "max_tokens": 1, **fields}
    reply = await TestApp(model).client.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{param}: ")
    assert reply.json()["error"].get("param", param) == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b'{"messages": NaN}',
        b'{"messages": [], "seed": Infinity}',
        b'{"messages": [], "cache_salt": "\\ud800"}',
        b'{"messages": [], "cache_salt": "\xed\xa0\x80"}',
        b'{"messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": []} x',
    ],
)
def test_what_is_no_json_is_the_clients_mistake(raw: bytes) -> None:
    assert field_of(raw)[0] == "body"


def test_a_huge_integer_is_taken_or_refused_with_its_field() -> None:
    assert decode(b'{"messages": [], "seed": 99999999999999999999999}', CHAT).seed == 99999999999999999999999
    assert field_of(b'{"messages": [], "seed": ' + b"9" * 5000 + b"}")[0] == "seed"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(b'"a"', "a"), (b'["a", "b"]', ["a", "b"]), (b"[1, 2]", [1, 2]), (b"[[1], [2, 3]]", [[1], [2, 3]])],
)
def test_prompts_have_four_forms(prompt: bytes, expected: object) -> None:
    assert decode(b'{"prompt": %b}' % prompt, TEXT).prompt == expected


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody, MessagesBody, TokenizeBody, DetokenizeBody])
def test_each_integer_of_a_body_has_64_bits(kind: type[msgspec.Struct]) -> None:
    """What is computed with it, recorded or sent on has no more. The seed may have 64 without a sign."""
    forms = {field.name: str(field.type) for field in msgspec.structs.fields(kind) if field.name != "seed"}
    found = [(name, "list[" in form) for name, form in forms.items() if re.search(r"\bint\b", form)]
    assert found or kind is TokenizeBody
    for value in (1 << 63, 1 << 64, 10**30, -(1 << 63) - 1):
        for name, is_list in found:
            body: dict[str, object] = {"messages": [], "tokens": [], name: [value] if is_list else value}
            if kind is CompletionBody:
                body.setdefault("prompt", "x")
            with pytest.raises(msgspec.ValidationError, match="Expected `int` "):
                msgspec.convert(body, kind)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000])
@pytest.mark.parametrize(
    ("path", "field", "form"),
    [
        ("/v1/chat/completions", "skip_special_tokens", '"skip_special_tokens": @'),
        ("/v1/chat/completions", "use_beam_search", '"use_beam_search": @'),
        ("/v1/completions", "suffix", '"suffix": @'),
        ("/v1/responses", "background", '"background": @'),
        ("/v1/messages", "speed", '"speed": @'),
        (
            "/v1/chat/completions",
            "tools[0].function.parameters",
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": @}}}]',
        ),
        ("/v1/messages", "tools[0].input_schema", '"tools": [{"name": "f", "input_schema": {"a": @}}]'),
        (
            "/v1/responses",
            "tools[0].parameters",
            '"tools": [{"type": "function", "name": "f", "parameters": {"a": @}}]',
        ),
    ],
)
async def test_a_number_that_is_out_of_range_names_its_field(
    model: ServedModel, path: str, field: str, form: str, number: str
) -> None:
    base = {**CHAT_BODY, "input": "hi"} if path != "/v1/completions" else TEXT_BODY
    raw = msgspec.json.encode({**base, "max_tokens": 2})[:-1] + f", {form.replace('@', number)}}}".encode()
    response = await TestApp(model).client.post(path, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: ")
