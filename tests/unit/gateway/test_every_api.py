"""What clients of all APIs find alike: chats, completions, responses and messages, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from disagg.gateway.auth.auth import ANONYMOUS, Caller, RefusedError
from disagg.gateway.http.sites import Sites
from disagg.gateway.text.tokenizer import fake_model
from tests.support.gateway import MODEL_NAME
from tests.support.http_app import TestApp

MAX_MODEL_LEN = 2048
PROMPT_FIELDS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
"""The field of the most tokens of an answer, by path."""


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path == "/v1/completions":
        prompt = {"prompt": text}
    if path == "/v1/responses":
        prompt = {"input": text}
    return {"model": MODEL_NAME, **prompt, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PROMPT_FIELDS)
@pytest.mark.parametrize(
    ("num_chars", "num_asked"), [(MAX_MODEL_LEN, 1), (1500, 800), (1, MAX_MODEL_LEN), (1, 1 << 62)]
)
async def test_a_prompt_and_answer_that_do_not_fit(path: str, stream: bool, num_chars: int, num_asked: int) -> None:
    app = TestApp(fake_model(MODEL_NAME, MAX_MODEL_LEN))
    reply = await app.client.post(
        path, json=body_of(path, "a" * num_chars, stream=stream, **{PROMPT_FIELDS[path]: num_asked})
    )
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


@pytest.mark.parametrize("path", PROMPT_FIELDS)
async def test_the_speculation_of_an_answer_is_that_of_its_body(path: str) -> None:
    app = TestApp(fake_model(MODEL_NAME, MAX_MODEL_LEN))
    for fields in ({}, {"speculation": "auto"}, {"speculation": "off"}):
        reply = await app.client.post(path, json=body_of(path, "a", **{PROMPT_FIELDS[path]: 1}, **fields))
        assert reply.status_code == 200
    assert [routed.speculation for routed, _ in app.router.submitted] == [True, True, False]
    wrong = await app.client.post(path, json=body_of(path, "a", **{PROMPT_FIELDS[path]: 1}, speculation="medusa"))
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "speculation: must be auto or off, not 'medusa'"
    assert len(app.router.submitted) == 3


SITE = "https://chat.example"


class OneKey:
    """An `Authenticator` that knows one key."""

    takes_certificates = False

    def tenants(self) -> tuple[str, ...]:
        return ("",)

    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        if authorization != "Bearer k":
            raise RefusedError("unknown")
        return ANONYMOUS

    def find(self, tenant: str, credential: str | None) -> Caller:
        return ANONYMOUS


def cors_of(reply: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PROMPT_FIELDS)
async def test_a_page_of_an_allowed_site_reads_answers_and_errors(path: str, stream: bool) -> None:
    app = TestApp(fake_model(MODEL_NAME, MAX_MODEL_LEN), sites=Sites(origins=(SITE,)), authenticator=OneKey())
    body = body_of(path, "a", stream=stream, **{PROMPT_FIELDS[path]: 1})
    for key, given, status in (("k", body, 200), ("k", {}, 400), ("x", body, 401)):
        headers = {"origin": SITE, "authorization": f"Bearer {key}"}
        reply = await app.client.post(path, json=given, headers=headers)
        assert (reply.status_code, reply.headers["vary"]) == (status, "Origin")
        assert cors_of(reply).keys() == {"access-control-allow-origin", "access-control-expose-headers"}
        assert reply.headers["access-control-allow-origin"] == SITE
        assert {"x-request-id", "retry-after"} <= set(reply.headers["access-control-expose-headers"].split(", "))
        other = await app.client.post(path, json=given, headers={**headers, "origin": "https://evil.example"})
        assert (other.status_code, cors_of(other)) == (status, {})


ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize(
    ("path", "methods"),
    [*((path, "POST") for path in PROMPT_FIELDS), ("/v1/models", "GET, HEAD"), ("/health", "GET, HEAD")],
)
async def test_a_browser_may_ask_before_it_sends_what_a_page_wants(path: str, methods: str) -> None:
    app = TestApp(fake_model(MODEL_NAME, MAX_MODEL_LEN), sites=Sites(origins=(SITE,)), authenticator=OneKey())
    reply = await app.client.options(path, headers={"origin": SITE, **ASKED})
    assert (reply.status_code, reply.content, reply.headers["vary"]) == (204, b"", "Origin")
    found = cors_of(reply)
    del found["access-control-expose-headers"]
    assert found == {
        "access-control-allow-origin": SITE,
        "access-control-allow-methods": methods,
        "access-control-allow-headers": "authorization,x-stainless-os",
        "access-control-max-age": "7200",
    }


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {"origin": "https://evil.example", **ASKED}, 403),
        ("/v1/completions", {"origin": SITE}, 401),
        ("/v1/nothing", {"origin": SITE, **ASKED}, 404),
    ],
)
async def test_other_preflight_requests_allow_nothing(path: str, headers: dict[str, str], status: int) -> None:
    app = TestApp(fake_model(MODEL_NAME, MAX_MODEL_LEN), sites=Sites(origins=(SITE,)), authenticator=OneKey())
    reply = await app.client.options(path, headers=headers)
    assert (reply.status_code, "access-control-allow-methods" in reply.headers) == (status, False)


async def test_names_of_headers_that_are_none_are_not_sent_back() -> None:
    app = TestApp(fake_model(MODEL_NAME, MAX_MODEL_LEN), sites=Sites(origins=(SITE,)))
    for asked in ("a: b", "a\x01", "a" * 4097, ""):
        headers = {"origin": SITE, **ASKED, "access-control-request-headers": asked}
        reply = await app.client.options("/v1/completions", headers=headers)
        assert (reply.status_code, "access-control-allow-headers" in reply.headers) == (204, False)


@pytest.mark.parametrize(
    ("path", "prefix", "is_chat"),
    [
        ("/v1/chat/completions", "chatcmpl-", True),
        ("/v1/completions", "cmpl-", False),
        ("/v1/responses", "resp_", True),
        ("/v1/messages", "msg_", True),
    ],
)
async def test_a_request_knows_the_id_that_its_client_gets(path: str, prefix: str, is_chat: bool) -> None:
    app = TestApp(fake_model(MODEL_NAME, MAX_MODEL_LEN))
    reply = await app.client.post(path, json=body_of(path, "a", **{PROMPT_FIELDS[path]: 1}))
    (routed, _) = app.router.submitted[0]
    assert (routed.response_id, routed.is_chat) == (f"{prefix}{routed.request_id}", is_chat)
    assert reply.json()["id"] == routed.response_id
