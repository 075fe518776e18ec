"""What a call is charged before it is tokenized, and what is given back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import Caller
from disagg.gateway.requests.request import Call, GenerationInput, IdsPrompt, Prompt, TextPrompt
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import LimitError, OverloadedError
from disagg.proto.ids import RequestId
from disagg.router.api import CallDemand, RoutedRequest, TenantLimits
from tests.support.calls import answer
from tests.support.gateway import FINGERPRINT, MAX_MODEL_LEN, MODEL_NAME, FakeHandle, FakeRouter, limits_of
from tests.support.http_app import CHAT, TEXT, TestApp, error_of

LIMITS = TenantLimits(tokens_per_minute=1000)
CALLER = Caller("a", False, LIMITS)


class Keyed:
    """Implements `Authenticator`: all are one tenant."""

    takes_certificates = False

    def tenants(self) -> tuple[str, ...]:
        return (CALLER.tenant,)

    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        return CALLER

    def find(self, tenant: str, credential: str | None) -> Caller:
        return CALLER


class Refusing(FakeRouter):
    """Takes two requests."""

    def submit(self, request: RoutedRequest, arrival: float) -> FakeHandle:
        if len(self.handles) == 2:
            raise OverloadedError("full", 1.0)
        return super().submit(request, arrival)


async def run(model: ServedModel, router: FakeRouter, caller: Caller, prompt: Prompt, n: int = 1) -> None:
    ids = (RequestId(f"r{number}") for number in itertools.count())
    generator = Generator(
        model,
        router,
        limits_of(model),
        FINGERPRINT,
        clock=lambda: 1.0,
        mint_seed=lambda: 7,
        mint_id=lambda: next(ids),
    )
    given = GenerationInput(model=MODEL_NAME, prompt=prompt, n=n, max_tokens=10)
    async for _ in answer(generator, given, Call(request_id=RequestId("first"), caller=caller)):
        pass


def demand(num_answers: int, num_tokens: int) -> CallDemand:
    return CallDemand(tenant="a", limits=LIMITS, num_answers=num_answers, num_tokens=num_tokens)


async def test_a_call_is_charged_once_for_all_answers(model: ServedModel) -> None:
    router = FakeRouter()
    await run(model, router, CALLER, IdsPrompt((5, 6, 7)), n=4)
    assert router.admitted == [demand(4, 4 * 13)]
    assert [(one.tenant, one.limits, one.prepaid_tokens) for one, _ in router.submitted] == [("a", LIMITS, 13)] * 4
    assert router.given_back == []


async def test_what_was_not_submitted_is_given_back(model: ServedModel) -> None:
    router = Refusing()
    with pytest.raises(OverloadedError):
        await run(model, router, CALLER, TextPrompt("hi"), n=5)
    assert (router.admitted, router.given_back) == ([demand(5, 5 * 11)], [("a", 3 * 11, 3)])


async def test_a_refused_call_is_neither_tokenized_nor_submitted(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = FakeRouter()
    router.limit = LimitError("a", "requests_per_minute", "too many", 2.5)
    monkeypatch.setattr(model.tokenizer, "encode_text", pytest.fail)
    with pytest.raises(LimitError):
        await run(model, router, CALLER, TextPrompt("hi"))
    assert (router.submitted, router.given_back) == ([], [])


async def test_nothing_is_charged_where_there_are_no_limits(model: ServedModel) -> None:
    router = FakeRouter()
    await run(model, router, Caller("", True), TextPrompt("hi"), n=2)
    assert router.admitted == []
    assert [one.prepaid_tokens for one, _ in router.submitted] == [None, None]


async def test_several_prompts_are_charged_together(model: ServedModel) -> None:
    app = TestApp(model, FakeRouter(), Keyed())
    response = await app.text(prompt=["hi", "ho", "he"], n=2, max_tokens=10)
    assert response.status_code == 200
    assert app.router.admitted == [demand(6, 6 * 11)]
    assert [one.prepaid_tokens for one, _ in app.router.submitted] == [11] * 6
    assert app.router.given_back == []


async def test_several_prompts_are_refused_together(model: ServedModel) -> None:
    router = FakeRouter()
    router.limit = LimitError("a", "requests_per_minute", "too many", 2.5)
    app = TestApp(model, router, Keyed())
    response = await app.text(prompt=["hi", "ho"], n=2)
    assert error_of(response) == (429, None, "rate_limit_exceeded")
    assert response.headers["retry-after-ms"] == "2500"
    assert response.json()["error"]["message"] == "requests_per_minute: too many; try again in 2.5 s"
    assert (router.submitted, router.given_back) == ([], [])


@pytest.mark.parametrize("num_tokens", [-(10**30), -1, 0, MAX_MODEL_LEN, 2**63, 2**64, 10**30])
@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        ("/v1/completions", "max_tokens", TEXT),
        ("/v1/completions", "max_tokens", {**TEXT, "prompt": ["hi", "ho"]}),
        ("/v1/completions", "max_tokens", {**TEXT, "truncate_prompt_tokens": -1}),
        ("/v1/chat/completions", "max_tokens", CHAT),
        ("/v1/chat/completions", "max_completion_tokens", CHAT),
        ("/v1/responses", "max_output_tokens", {"model": MODEL_NAME, "input": "hi"}),
        ("/v1/messages", "max_tokens", CHAT),
    ],
)
async def test_nothing_is_charged_for_more_tokens_than_there_can_be(
    model: ServedModel, path: str, field: str, given: dict[str, Any], num_tokens: int
) -> None:
    """The charge is computed before the prompt is tokenized, and goes into the recording of the router's events."""
    app = TestApp(model, FakeRouter(), Keyed())
    response = await app.client.post(path, json={**given, field: num_tokens})
    assert response.status_code == 400
    is_long = MAX_MODEL_LEN <= num_tokens < 1 << 63
    start = "This model's maximum context length is 128 tokens. " if is_long else f"{field}: "
    assert response.json()["error"]["message"].startswith(start)
    assert app.router.admitted == []


@pytest.mark.parametrize(("prompt", "n", "num_tokens"), [("hello", 10, 1010), (["hello"] * 5, 2, 1010)])
async def test_answers_that_are_together_more_than_a_minute_has_are_not_tried_again(
    model: ServedModel, prompt: Any, n: int, num_tokens: int
) -> None:
    """The tokens of a text are not known when its call is admitted. Each answer alone fits; all of them never do."""
    app = TestApp(model, FakeRouter(), Keyed())
    response = await app.text(prompt=prompt, n=n, max_tokens=99)
    assert (response.status_code, response.headers.get("x-should-retry")) == (429, "false")
    assert "retry-after-ms" not in response.headers
    assert response.json()["error"]["message"] == (
        f"tokens_per_minute: tenant a asks for {num_tokens} tokens at once, and may have 1000 a minute; set a smaller "
        "max_tokens"
    )
    refunded = sum(given_back[2] for given_back in app.router.given_back)
    assert len(app.router.submitted) + refunded == 10


async def test_answers_of_exactly_a_minute(model: ServedModel) -> None:
    app = TestApp(model, FakeRouter(), Keyed())
    assert (await app.text(prompt="hello", n=10, max_tokens=98)).status_code == 200
