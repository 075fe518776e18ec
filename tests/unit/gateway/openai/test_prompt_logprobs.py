"""Log-probabilities of prompts over HTTP: vLLM's field, and `echo` with `logprobs`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.gateway.guardrails.config import GuardrailOptions, RuleOptions
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.messages import TokenLogprobs
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import Completion, RoutedRequest, TokenBatch
from tests.support.gateway import BOS, FakeRouter, Step
from tests.support.http_app import TestApp, error_of


def of_token(token_id: int, num_top: int) -> TokenLogprobs:
    """The token is the second one of those that are likeliest."""
    return TokenLogprobs(-token_id / 10, (7, token_id)[:num_top], (-0.25, -token_id / 10)[:num_top])


def script(routed: RoutedRequest) -> list[Step]:
    """One token, with what was asked of the prompt."""
    sampling = routed.sampling
    assert sampling.logprobs >= 0
    prompt: tuple[TokenLogprobs, ...] = ()
    if sampling.prompt_logprobs >= 0:
        prompt = tuple(of_token(i, sampling.prompt_logprobs) for i in unpack_token_ids(routed.prompt_token_ids)[1:])
    own = TokenLogprobs(-0.5, (9,) * min(1, sampling.logprobs), (-0.5,) * min(1, sampling.logprobs), prompt)
    return [TokenBatch([9], [own]), Completion("stop", 1, 0)]


@pytest.fixture
def app(model: ServedModel) -> TestApp:
    return TestApp(model, FakeRouter(script))


def text_of(app: TestApp, token_id: int) -> str:
    return app.model.tokenizer.token_bytes(token_id).decode()


def shown(app: TestApp, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text_of(app, token_id)}


async def test_the_field_of_a_completion_is_in_each_choice(app: TestApp) -> None:
    body = (await app.text(prompt=[40, 50, 60], prompt_logprobs=2, n=2)).json()
    expected = [
        None,
        {"50": shown(app, 50, -5.0, 2), "7": shown(app, 7, -0.25, 1)},
        {"60": shown(app, 60, -6.0, 2), "7": shown(app, 7, -0.25, 1)},
    ]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, expected]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    asked = [routed.sampling.prompt_logprobs for routed, _ in app.router.submitted]
    assert asked == [2, -1]  # they share the prompt
    body = (await app.text(prompt=[40, 50], prompt_logprobs=0, logprobs=0)).json()
    assert body["choices"][0]["prompt_logprobs"] == [None, {"50": shown(app, 50, -5.0, None)}]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    assert (await app.text(prompt=[40], prompt_logprobs=0)).json()["choices"][0]["prompt_logprobs"] == [None]


async def test_the_field_of_a_chat_is_in_the_answer(app: TestApp) -> None:
    body = (await app.chat(prompt_logprobs=1)).json()
    ids = unpack_token_ids(app.router.submitted[0][0].prompt_token_ids)
    assert [set(each or ()) for each in body["prompt_logprobs"]] == [set(), *({str(i), "7"} for i in ids[1:])]
    assert "prompt_logprobs" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in (await app.chat(logprobs=True)).json()


async def test_echo_with_logprobs_has_those_of_the_prompt_before_the_answers(app: TestApp) -> None:
    body = (await app.text(prompt=[40, 50], echo=True, logprobs=1, n=2)).json()
    texts = [text_of(app, i) for i in (40, 50, 9)]
    for choice in body["choices"]:
        assert choice["text"] == "".join(texts)
        assert choice["logprobs"] == {
            "tokens": texts,
            "token_logprobs": [None, -5.0, -0.5],
            "top_logprobs": [None, {texts[1]: -5.0, text_of(app, 7): -0.25}, {texts[2]: -0.5}],
            "text_offset": [0, len(texts[0]), len(texts[0]) + len(texts[1])],
        }
        assert "prompt_logprobs" not in choice


async def test_each_prompt_has_its_own(app: TestApp) -> None:
    body = (await app.text(prompt=[[40, 50], [60]], echo=True, logprobs=0, best_of=2)).json()
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [[None, -5.0, -0.5], [None, -0.5]]
    body = (await app.text(prompt="hello", prompt_logprobs=0)).json()
    ids = unpack_token_ids(app.router.submitted[-1][0].prompt_token_ids)
    assert ids[0] == BOS
    assert len(body["choices"][0]["prompt_logprobs"]) == len(ids)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_is_refused(app: TestApp, fields: dict[str, Any], field: str) -> None:
    assert error_of(await app.text(**fields))[:2] == (400, field)


@pytest.mark.parametrize(
    ("fields", "field"), [({"prompt_logprobs": 9}, "prompt_logprobs"), ({"logprobs": 9}, "logprobs")]
)
async def test_so_many_values_are_refused_before_anything_runs(
    app: TestApp, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr("disagg.gateway.requests.validate.MAX_PROMPT_VALUES", 100)
    assert (await app.text(prompt=[40] * 10, echo=field == "logprobs", **fields)).status_code == 200
    refused = await app.text(prompt=[40] * 11, echo=field == "logprobs", **fields)
    assert error_of(refused)[:2] == (400, field)
    assert len(app.router.submitted) == 1


async def test_a_stream_with_prompt_logprobs_cannot_be_resumed(app: TestApp) -> None:
    refused = await app.text(prompt_logprobs=1, headers={"last-event-id": "0"})
    assert error_of(refused)[:2] == (400, "last-event-id")


def guarded(model: ServedModel, answers: Iterator[str], rule: RuleOptions) -> TestApp:
    """Answers of one batch of tokens each, whose likelihood falls from answer to answer, with a guardrail on them."""
    levels = itertools.count(1)

    def scripted(routed: RoutedRequest) -> list[Step]:
        ids, level = model.tokenizer.encode_text(next(answers), special=False), -float(next(levels))
        num_prompt = len(unpack_token_ids(routed.prompt_token_ids))
        prompt = (TokenLogprobs(-3.0),) * (num_prompt - 1 if routed.sampling.prompt_logprobs >= 0 else 0)
        logprobs = [TokenLogprobs(level, (), (), prompt), *[TokenLogprobs(level)] * (len(ids) - 1)]
        return [TokenBatch(ids, logprobs), Completion("length", len(ids), 0)]

    app = TestApp(model, FakeRouter(scripted))
    app.completions.models.generators[0]._guardrails = Guardrails([GuardrailOptions(name="g", rules=(rule,))])
    return app


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}])
async def test_a_guardrail_that_replaces_the_first_token_leaves_those_of_the_prompt(
    model: ServedModel, fields: dict[str, Any]
) -> None:
    rule = RuleOptions(pattern="1", action="replace", replacement="#", applies_to="answers")
    body = (await guarded(model, iter(["1 ab"]), rule).text(prompt=[40, 50], **fields)).json()
    (choice,) = body["choices"]
    assert choice["text"].endswith("# ab")
    if "echo" in fields:
        assert choice["logprobs"]["token_logprobs"][:2] == [None, -3.0]
    else:
        assert [each and each["50"]["logprob"] for each in choice["prompt_logprobs"]] == [None, -3.0]


async def test_a_guardrail_that_lets_no_token_pass_leaves_none(model: ServedModel) -> None:
    rule = RuleOptions(pattern="1", applies_to="answers")
    response = await guarded(model, iter(["1 ab"]), rule).text(prompt=[40, 50], prompt_logprobs=0)
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["prompt_logprobs"]) == ("", "content_filter", None)


async def test_an_answer_without_a_token_that_passed_is_not_the_best(model: ServedModel) -> None:
    rule = RuleOptions(pattern="1", applies_to="answers")
    body = (await guarded(model, iter(["1", "ab"]), rule).text(prompt=[40, 50], best_of=2)).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [("ab", "length")]
