"""`service_tier`, `priority`, `best_of`, `truncate_prompt_tokens` and embeddings over HTTP."""

from __future__ import annotations

import random

import msgspec
import pytest

from disagg.gateway.auth.auth import ANONYMOUS, Caller
from disagg.gateway.calls import Origin
from disagg.gateway.openai.order import read_priority, tier_of
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import Completion, RoutedRequest, TenantLimits, TokenBatch
from tests.acceptance.bad_input.generated_http import Bodies
from tests.support.gateway import BOS, MAX_MODEL_LEN, FakeRouter, Step
from tests.support.http_app import TEXT, TestApp, error_of, events_of


class OneTenant:
    """Lets everybody in as one tenant of several."""

    takes_certificates = False

    def tenants(self) -> tuple[str, ...]:
        return ("t",)

    def __init__(self, max_priority: int | None) -> None:
        self._caller = Caller("t", False, TenantLimits(is_sole=False, max_priority=max_priority))

    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        return self._caller

    def find(self, tenant: str, credential: str | None) -> Caller:
        return self._caller


@pytest.fixture
def app(model: ServedModel) -> TestApp:
    return TestApp(model, FakeRouter([[5], Completion("stop", 1, 0)]))


# ---------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("tier", "priority", "expected"),
    [
        (None, None, 0),
        ("auto", None, 0),
        ("default", None, 0),
        ("flex", None, -1),
        ("priority", None, 1),
        (None, 5, -5),
        ("auto", -1000, 1000),
    ],
)
def test_the_priority_in_the_queue(tier: str | None, priority: int | None, expected: int) -> None:
    assert read_priority(tier, priority) == expected


@pytest.mark.parametrize(
    ("tier", "priority", "field"),
    [
        ("scale", None, "service_tier"),
        ("x" * 1000, None, "service_tier"),
        ("default", 1, "priority"),
        (None, 1001, "priority"),
        (None, -(10**30), "priority"),
    ],
)
def test_what_is_refused(tier: str | None, priority: int | None, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_priority(tier, priority)
    assert caught.value.field == field


def test_the_tier_of_a_priority() -> None:
    assert [tier_of(priority) for priority in (-9, -1, 0, 1, 9)] == ["flex", "flex", "default", "priority", "priority"]


async def test_the_tier_is_said_where_it_is_asked_for(app: TestApp) -> None:
    for tier, said, priority in (("auto", "default", 0), ("flex", "flex", -1), ("priority", "priority", 1)):
        for ask in (app.chat, app.text):
            assert (await ask(service_tier=tier)).json()["service_tier"] == said
            assert app.router.submitted[-1][0].priority == priority
        events = events_of(await app.chat(service_tier=tier, stream=True))[:-1]
        assert {event["service_tier"] for event in events} == {said}
    assert "service_tier" not in (await app.chat(priority=3)).json()
    assert app.router.submitted[-1][0].priority == -3


@pytest.mark.parametrize(("limit", "said", "priority"), [(0, "default", 0), (1, "priority", 1), (None, "priority", 1)])
async def test_a_key_limits_the_tier_that_is_said(
    model: ServedModel, limit: int | None, said: str, priority: int
) -> None:
    app = TestApp(model, FakeRouter([[5]]), OneTenant(limit))
    assert (await app.chat(service_tier="priority")).json()["service_tier"] == said
    assert app.router.submitted[0][0].priority == priority
    assert (await app.chat(service_tier="flex")).json()["service_tier"] == "flex"


async def test_a_line_of_a_batch_stays_behind_interactive_requests(app: TestApp) -> None:
    origin = Origin(request_id=RequestId("line"), caller=ANONYMOUS, max_priority=-1)
    for fields, priority in (({"service_tier": "priority"}, -1), ({"priority": 7}, -7)):
        line = msgspec.json.encode({**TEXT, **fields})
        answer = msgspec.json.decode(await app.completions.line("/v1/completions", line, origin))
        assert app.router.submitted[-1][0].priority == priority
        assert answer.get("service_tier") == ("flex" if "service_tier" in fields else None)


# ---------------------------------------------------------------- the best of several


def drawn(app: TestApp, logprobs: dict[int, list[float]]) -> None:
    """The answers of each prompt in order: one token for each logprob, all of which name the answer."""
    counts: dict[bytes, int] = {}

    def script(routed: RoutedRequest) -> list[Step]:
        assert routed.sampling.logprobs >= 0
        key = bytes(routed.prompt_token_ids)
        index = counts[key] = counts.get(key, -1) + 1
        tokens = [TokenLogprobs(one, (), ()) for one in logprobs[index]]
        ids = app.model.tokenizer.encode_text("abcdefgh"[index], special=False) * len(tokens)
        return [TokenBatch(ids, tokens), Completion("stop", len(ids), 0)]

    app.router.script = script


MADE = {0: [-2.0, -2.0], 1: [-1.0, -1.5, -1.0], 2: [-4.0], 3: [-1.0]}


async def test_the_likeliest_answers_are_shown_and_all_are_counted(app: TestApp) -> None:
    drawn(app, MADE)
    body = (await app.text(best_of=4, n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "d"), (1, "bbb")]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 7
    assert len({routed.sampling.seed for routed, _ in app.router.submitted}) == 4


async def test_of_each_prompt_with_its_text_and_logprobs(app: TestApp) -> None:
    drawn(app, MADE)
    body = (await app.text(prompt=["x", "y"], best_of=3, echo=True)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "xbbb"), (1, "ybbb")]
    drawn(app, MADE)
    (choice,) = (await app.text(best_of=4, logprobs=0)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0]


async def test_equal_ones_are_in_their_order(app: TestApp) -> None:
    drawn(app, {0: [-1.0], 1: [float("-inf")], 2: [-1.0]})
    body = (await app.text(best_of=3, n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "c"]


# ---------------------------------------------------------------- shorter prompts


def prompt_ids(app: TestApp) -> list[int]:
    return unpack_token_ids(app.router.submitted[-1][0].prompt_token_ids)


async def test_the_last_tokens_of_a_prompt_are_kept(app: TestApp) -> None:
    whole = app.model.tokenizer.encode_text("hello world, the cat sat")
    assert whole[0] == BOS
    for most, expected in ((4, [BOS, *whole[-3:]]), (1, whole[-1:]), (100, whole), (-1, whole)):
        response = await app.text(prompt="hello world, the cat sat", truncate_prompt_tokens=most)
        assert response.json()["usage"]["prompt_tokens"] == len(expected)
        assert prompt_ids(app) == expected
    await app.text(prompt=[7, 8, 9, 10], truncate_prompt_tokens=3)
    assert prompt_ids(app) == [8, 9, 10]
    whole_chat = (await app.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    await app.chat(truncate_prompt_tokens=5)
    assert prompt_ids(app) == whole_chat["tokens"][-5:]


async def test_a_prompt_that_is_too_long_is_made_to_fit(app: TestApp) -> None:
    long = "x" * 3 * MAX_MODEL_LEN
    assert error_of(await app.text(prompt=long))[:2] == (400, "prompt")
    assert (await app.text(prompt=long, truncate_prompt_tokens=-1, max_tokens=28)).status_code == 200
    assert len(prompt_ids(app)) == MAX_MODEL_LEN - 28
    assert (await app.text(prompt=[9] * 3 * MAX_MODEL_LEN, truncate_prompt_tokens=-1, max_tokens=8)).status_code == 200
    assert len(prompt_ids(app)) == MAX_MODEL_LEN - 8
    assert (await app.chat(messages=[{"role": "user", "content": long}], truncate_prompt_tokens=-1)).status_code == 200
    assert len(prompt_ids(app)) == MAX_MODEL_LEN - 1
    refused = await app.text(prompt=long, truncate_prompt_tokens=120, max_tokens=9)
    assert error_of(refused)[:2] == (400, "max_tokens")


@pytest.mark.parametrize("most", [0, -2, MAX_MODEL_LEN, 10**30])
async def test_lengths_that_are_refused(app: TestApp, most: int) -> None:
    for ask in (app.chat, app.text):
        assert error_of(await ask(truncate_prompt_tokens=most))[:2] == (400, "truncate_prompt_tokens")


async def test_no_room_for_a_prompt_is_refused(app: TestApp) -> None:
    refused = await app.text(truncate_prompt_tokens=-1, max_tokens=MAX_MODEL_LEN)
    assert refused.status_code == 400


# ---------------------------------------------------------------- wrong values


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_wrong_value_that_is_thrown_at_a_gateway_is_refused(app: TestApp, path: str) -> None:
    bodies = Bodies(app.model.info)
    dice = random.Random(3)
    for name, wrong in bodies.wrong[path].items():
        for value in [wrong(dice) for _ in range(20)]:
            refused = await app.client.post(path, json={**bodies.valid[path], name: value})
            assert refused.status_code in (400, 404), f"{name}: {value!r}"
    assert app.router.submitted == []
