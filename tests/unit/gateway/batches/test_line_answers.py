"""Which errors of a line are its answer, and which are tried again."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from disagg.gateway.auth.auth import AnonymousAccess, ApiKey, ApiKeys, Caller, digest_of
from disagg.gateway.batches.line_answers import LineAnswers
from disagg.gateway.batches.lines import Line
from disagg.gateway.batches.runner import MAX_WAIT_S, Later, LineResult
from disagg.gateway.batches.store import Batch
from disagg.gateway.batches.tries import Tries
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import DisaggError, InvalidRequestError, LimitError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.api import Completion, TenantLimits
from tests.support.gateway import MODEL_NAME, FakeRouter
from tests.support.http_app import TestApp

LINE = Line(custom_id="a", method="POST", url="/v1/completions", body=msgspec.Raw(b"{}"))
UNJUDGED = UnavailableError("the guardrail g gives no verdict", "guardrail_unavailable")
LOST = UnavailableError("the worker is gone", "worker_lost")


def batch_of(tenant: str, credential: str, endpoint: str = "/v1/completions") -> Batch:
    none = (None, None, None)
    return Batch("b", tenant, endpoint, "f", "in_progress", 0.0, 9.0, None, 1, *none, 0, 0, None, credential)


class Completions:
    """Fails so often, then answers."""

    def __init__(self, error: DisaggError, num_failures: int) -> None:
        self.error, self.num_left, self.num_tries = error, num_failures, 0

    async def line(self, endpoint: str, body: bytes, call: Any) -> bytes:
        self.num_tries += 1
        if self.num_tries > self.num_left:
            return b"{}"
        raise self.error


@pytest.mark.parametrize(
    ("error", "num_failures", "status", "num_tries"),
    [
        (InvalidRequestError("top_p", "is wrong"), 1, 400, 1),
        (LOST, 4, 200, 5),
        (LOST, 5, 503, 5),
        (UnavailableError("no worker", "no_decode_worker"), 100, 200, 101),
        (LimitError("t", "tokens_per_minute", "too many", 90.0), 100, 200, 101),
        (LimitError("t", "tokens_per_minute", "more than there can be", None), 1, 429, 1),
        (UNJUDGED, 19, 200, 20),
        (UNJUDGED, 20, 503, 20),
    ],
)
async def test_how_often_a_line_is_tried(error: DisaggError, num_failures: int, status: int, num_tries: int) -> None:
    """Between two tries it has no place, and nothing waits here."""
    completions: Any = Completions(error, num_failures)
    ids = (RequestId(f"r{i}") for i in itertools.count())
    answers = LineAnswers(completions, AnonymousAccess(Caller("", False)), lambda: next(ids))
    tries = Tries()
    found = [await answers(batch_of("", ""), LINE, tries)]
    while isinstance(found[-1], Later):
        found.append(await answers(batch_of("", ""), LINE, tries))
    *waited, result = found
    assert isinstance(result, LineResult)
    assert (result.status, completions.num_tries) == (status, num_tries)
    assert result.use.failed is (status != 200)
    assert all(isinstance(later, Later) and 0.1 <= later.wait_s <= MAX_WAIT_S for later in waited)
    own_fault = error in (LOST, UNJUDGED)
    assert all(isinstance(later, Later) and later.holds_others is not own_fault for later in waited)


def test_a_line_waits_for_what_its_tenant_may_have_running() -> None:
    now, key = 0.0, "first-key-0123456"
    caller = Caller("t", False, TenantLimits(running=3), expires_at=9.0)
    authenticator = ApiKeys([ApiKey(digest_of(key), caller)], wall_clock=lambda: now)
    completions: Any = Completions(LOST, 0)
    answers = LineAnswers(completions, authenticator, lambda: RequestId("r"))
    batch = batch_of("t", authenticator.authenticate(f"Bearer {key}").credential)
    assert answers.most_running(batch) == 3
    now = 9.0
    assert answers.most_running(batch) is None  # its lines end at once


class Calls:
    """Answers each line with the models that its caller may use."""

    async def line(self, endpoint: str, body: bytes, call: Any) -> bytes:
        return msgspec.json.encode(sorted(call.caller.models))


async def test_a_line_has_the_rights_of_the_key_that_ordered_its_batch() -> None:
    """Not those of another key of the tenant, and as they are when the line runs."""
    now, first, second = 0.0, "first-key", "second-key"
    allowed = {first: frozenset({"a"}), second: frozenset({"b"})}
    keys = [ApiKey(digest_of(key), Caller("t", False, models=models)) for key, models in allowed.items()]
    authenticator = ApiKeys(keys, wall_clock=lambda: now)
    calls: Any = Calls()
    answers = LineAnswers(calls, authenticator, lambda: RequestId("r"))
    batches = {key: batch_of("t", authenticator.authenticate(f"Bearer {key}").credential) for key in allowed}

    async def answer(key: str) -> tuple[int, Any]:
        result = await answers(batches[key], LINE, Tries())
        assert isinstance(result, LineResult)
        found = msgspec.json.decode(result.body)
        return result.status, found if result.status == 200 else (found["error"]["code"], found["error"]["message"])

    assert [await answer(key) for key in allowed] == [(200, ["a"]), (200, ["b"])]
    ending, reader = Caller("t", False, expires_at=9.0), Caller("t", False, infers=False)
    authenticator.take(ApiKeys([ApiKey(digest_of(first), ending), ApiKey(digest_of(second), reader)]))
    now = 9.0
    message = "this API key, or the key file's entry of this certificate, has expired"
    assert await answer(first) == (401, ("expired_api_key", message))
    assert await answer(second) == (403, ("permission_denied", "this needs a key with the scope inference"))
    authenticator.take(ApiKeys([ApiKey(digest_of(second), Caller("t", False, models=allowed[second]))]))
    message = "a valid API key is needed, as `authorization: Bearer KEY`"
    assert [await answer(key) for key in allowed] == [(401, ("authentication_error", message)), (200, ["b"])]


@pytest.mark.parametrize(
    ("endpoint", "given"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi", "metadata": {"of": "a test"}}),
    ],
)
async def test_a_line_gets_what_a_request_would(model: ServedModel, endpoint: str, given: dict[str, Any]) -> None:
    """Answers, and errors."""
    fields = {"model": MODEL_NAME, **given}
    wrong = ({"temperature": -1}, {"model": "other"}, {"stop": 5})
    for more, status in (({}, 200), *((each, 400) for each in wrong)):
        app = TestApp(model, FakeRouter([[75], [76], Completion("length", 3, 1)]))
        answers = LineAnswers(app.completions, AnonymousAccess(), lambda: RequestId("r0"))
        asked = await app.client.post(endpoint, json={**fields, **more})
        line = Line(custom_id="a", method="POST", url=endpoint, body=encoded({**fields, **more}))
        result = await answers(batch_of("", "", endpoint), line, Tries())
        assert isinstance(result, LineResult)
        assert result.status == asked.status_code == (404 if more == {"model": "other"} else status)
        assert msgspec.json.decode(result.body) == asked.json()
        assert result.use.failed is (status != 200)
    refused = await answers(
        batch_of("", "", endpoint),
        Line(custom_id="a", method="POST", url=endpoint, body=encoded({**fields, "stream": True})),
        Tries(),
    )
    assert isinstance(refused, LineResult)
    assert (refused.status, msgspec.json.decode(refused.body)["error"]["param"]) == (400, "stream")


def encoded(fields: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(fields))


async def test_a_line_with_which_two_gateways_ended_is_not_run_again(model: ServedModel) -> None:
    completions = Completions(LOST, 0)
    answers = LineAnswers(completions, AnonymousAccess(), lambda: RequestId("r"))  # type: ignore[arg-type]
    first = await answers(batch_of("", ""), LINE, Tries(num_ends=1))
    second = await answers(batch_of("", ""), LINE, Tries(num_ends=2))
    assert isinstance(first, LineResult)
    assert isinstance(second, LineResult)
    assert (first.status, second.status, completions.num_tries) == (200, 500, 1)
    assert b"2 gateways ended while this line ran" in second.body
