"""Streams over HTTP that are continued by `Last-Event-ID`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx
import pytest

from disagg.gateway.openai.resume import Events, Position, read_position, rest_after
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId
from disagg.router.api import Completion
from tests.support.http_app import TestApp

TEXTS = ["hello", " there", " 🙂", " the", " cat"]
BEGIN = {"last-event-id": "0"}


@pytest.fixture
def app(model: ServedModel) -> TestApp:
    app = TestApp(model)
    batches = [model.tokenizer.encode_text(text, special=False) for text in TEXTS]
    app.router.script = lambda routed: [*batches, Completion("stop", sum(map(len, batches)), 0)]
    return app


def texts_by_id(response: httpx.Response) -> list[tuple[str, str]]:
    """(id, text) of each event that has an id."""
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.split("\n\n"):
        lines = event.split("\n")
        if lines[0].startswith("id: "):
            (choice,) = json.loads(lines[1].removeprefix("data: "))["choices"]
            found.append((lines[0].removeprefix("id: "), choice.get("text", choice.get("delta", {}).get("content"))))
    return found


def body_of(response: httpx.Response) -> list[Any]:
    return [line for line in response.text.split("\n") if line.startswith("data: ")]


@pytest.mark.parametrize("way", ["chat", "text"])
async def test_a_stream_continues_after_any_event(app: TestApp, way: str) -> None:
    ask = getattr(app, way)
    whole = await ask(stream=True, headers=BEGIN, stream_options={"include_usage": True})
    events = texts_by_id(whole)
    assert [text for _, text in events] == TEXTS
    for i, (event_id, _) in enumerate(events):
        rest = await ask(stream=True, headers={"last-event-id": event_id}, stream_options={"include_usage": True})
        assert texts_by_id(rest) == events[i + 1 :]
        usage = json.loads(body_of(rest)[-2].removeprefix("data: "))["usage"]
        assert usage == json.loads(body_of(whole)[-2].removeprefix("data: "))["usage"]
    seeds = {routed.sampling.seed for routed, _ in app.router.submitted}
    assert seeds == {7}


async def test_a_break_within_a_later_batch(app: TestApp, model: ServedModel) -> None:
    """Tokens come in other batches the second time."""
    tokens = model.tokenizer.encode_text("".join(TEXTS), special=False)
    events = texts_by_id(await app.text(stream=True, headers=BEGIN))
    app.router.script = lambda routed: [tokens, Completion("stop", len(tokens), 0)]
    (last,) = texts_by_id(await app.text(stream=True, headers={"last-event-id": events[1][0]}))
    assert last[1] == "".join(TEXTS[2:])


async def test_events_have_ids_only_where_they_are_asked_for(app: TestApp) -> None:
    for headers in (None, {"x-request-id": "mine"}, {"last-event-id": ""}):
        assert "id: " not in (await app.text(stream=True, headers=headers)).text


async def test_the_seed_of_the_stream_is_used(app: TestApp) -> None:
    (event_id, _), *_ = texts_by_id(await app.text(stream=True, headers=BEGIN, seed=255))
    assert event_id.startswith("ff.")
    await app.text(stream=True, headers={"last-event-id": event_id})
    assert [routed.sampling.seed for routed, _ in app.router.submitted] == [255, 255]


@pytest.mark.parametrize(
    ("event_id", "fields"),
    [
        ("x", {}),
        ("7.1", {}),
        ("7.1.1.1", {}),
        ("7.-1.1", {}),
        ("7.1234567890.1", {}),
        ("7.99.5", {}),
        ("7.1.99", {}),
        ("7.1.5", {"seed": 8}),
        ("7.1.5", {"n": 2}),
        ("0", {"n": 2}),
        ("0", {"logprobs": 1}),
        ("7.1.5", {"stream": False}),
        ("7.1.5", {"prompt": ["a", "b"]}),
    ],
)
async def test_ids_that_continue_nothing_are_refused(app: TestApp, event_id: str, fields: dict[str, Any]) -> None:
    response = await app.text(headers={"last-event-id": event_id}, **{"stream": True, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "last-event-id"


def test_an_event_id_names_the_version_of_the_model() -> None:
    position = Position(seed=10)
    first = Delta(0, (5, 6), "ab", model_version="00000000000000ab")
    assert position.add(first) == b"id: a.2.2.00000000000000ab\n"
    assert position.add(Delta(2, (7,), "c")) == b"id: a.3.3.00000000000000ab\n"
    assert read_position("a.3.3.00000000000000ab", None) == position
    with pytest.raises(InvalidRequestError):
        read_position("a.3.3.ab", None)


@pytest.mark.parametrize(("num_tokens", "num_chars", "num_had"), [(999_999_999, 1, 0), (3, 5, 3), (4, 7, 3), (2, 0, 0)])
async def test_tokens_of_an_event_whose_text_goes_out_are_not_left_out(
    num_tokens: int, num_chars: int, num_had: int
) -> None:
    """Whatever a client says of them: what is left out is not counted."""

    async def answer() -> Events:
        yield Delta(0, (1, 2, 3), "hello")
        yield Delta(3, (4, 5), "there")
        yield Finish(RequestId("r"), "stop", 1, 0, 5)

    noted: list[int] = []
    with suppress(InvalidRequestError):  # the answer has fewer tokens
        async for _ in rest_after(answer(), Position(7, num_tokens, num_chars), noted.append):
            pass
    assert noted[-1] == num_had
