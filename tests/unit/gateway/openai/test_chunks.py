"""Events of the generator as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.gateway.openai.chunks import (
    AnswerWriter,
    ChatChoices,
    StreamWriter,
    Style,
    TextChoices,
    UsageCount,
    encode_text,
)
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from tests.support.http_app import events_of

HEAD = {"id": "cmpl-r", "created": 5, "model": "m"}


def delta(first_index: int, text: str, *token_ids: int, answer: int = 0) -> Delta:
    return Delta(first_index, token_ids, text, answer_index=answer, num_prompt_tokens=10)


def finish(num_tokens: int, answer: int = 0, cached: int = 0, reason: Any = "length") -> Finish:
    return Finish(RequestId("r"), reason, 10, cached, num_tokens, answer)


def style(model: ServedModel, **changes: Any) -> Style:
    fields: dict[str, Any] = {"call_id": "cmpl-r", "created": 5, "model": "m", "with_logprobs": False}
    return Style(tokenizer=model.tokenizer, **{**fields, **changes})


def text_writer(model: ServedModel, max_tokens: int | None = None, echoes: Any = (), **changes: Any) -> StreamWriter:
    return StreamWriter(style(model, **changes), TextChoices(model.tokenizer), UsageCount(1), max_tokens, echoes)


@pytest.mark.parametrize("text", ["", 'a"\\\n\r\t\x00\x1f', "ü🙂", "a\u0085b\u2028c\u2029d\x0b\x0c\x1c"])
def test_a_text_is_one_line_of_json(text: str) -> None:
    encoded = encode_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


def test_a_text_stream(model: ServedModel) -> None:
    writer = text_writer(model)
    raw = writer.delta(delta(0, "a", 5)) + writer.delta(delta(1, "b", 6, 7)) + writer.finish(finish(3)) + writer.last()
    chunks = [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "b", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"},
    ]
    assert events_of(raw) == [*({**HEAD, "object": "text_completion", "choices": [c]} for c in chunks), "[DONE]"]


def test_a_chat_stream_names_the_role_with_each_answers_first_token(model: ServedModel) -> None:
    writer = StreamWriter(style(model), ChatChoices(model.tokenizer), UsageCount(2), None)
    raw = b"".join(
        [
            writer.delta(delta(0, "", 5)),
            writer.delta(delta(0, "x", 5, answer=1)),
            writer.delta(delta(1, "y", 5, answer=1)),
            writer.finish(finish(2, answer=1, reason="stop")),
        ]
    )
    events = events_of(raw)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["choices"][0] for event in events] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 1, "delta": {"role": "assistant", "content": "x"}, "logprobs": None, "finish_reason": None},
        {"index": 1, "delta": {"content": "y"}, "logprobs": None, "finish_reason": None},
        {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"},
    ]


def test_the_last_token_and_the_end_are_one_chunk_where_the_end_is_known(model: ServedModel) -> None:
    writer = text_writer(model, max_tokens=2)
    assert len(events_of(writer.delta(delta(0, "a", 5)))) == 1
    assert writer.delta(delta(1, "b", 6)) == b""
    choices = [event["choices"][0] for event in events_of(writer.finish(finish(2)))]
    assert choices == [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "length"}]


def test_text_that_was_held_back_comes_with_the_end(model: ServedModel) -> None:
    writer = text_writer(model, max_tokens=2)
    assert writer.delta(delta(1, "b", 6)) == b""
    first = events_of(writer.delta(delta(2, "tail")))
    last = events_of(writer.finish(finish(2)))
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in first + last] == [
        ("b", None),
        ("tail", "length"),
    ]


def test_what_waits_is_let_go_before_an_error(model: ServedModel) -> None:
    writer = text_writer(model, max_tokens=1)
    assert writer.delta(delta(0, "a", 5)) == b""
    assert [event["choices"][0]["text"] for event in events_of(writer.flush())] == ["a"]
    assert writer.flush() == b""


def test_usage_comes_alone_at_the_end_and_is_null_before(model: ServedModel) -> None:
    writer = text_writer(model, include_usage=True)
    events = events_of(writer.delta(delta(0, "a", 5)) + writer.finish(finish(1, cached=4)) + writer.last())
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 1,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert [event["usage"] for event in events[:2]] == [None, None]
    assert events[2:] == [{**HEAD, "object": "text_completion", "choices": [], "usage": usage}, "[DONE]"]


def test_usage_with_every_chunk(model: ServedModel) -> None:
    writer = text_writer(model, include_usage=True, continuous_usage=True)
    raw = writer.delta(delta(0, "a", 5)) + writer.delta(delta(1, "b", 6, 7)) + writer.finish(finish(3)) + writer.last()
    counted = [(e["usage"]["prompt_tokens"], e["usage"]["completion_tokens"]) for e in events_of(raw)[:-1]]
    assert counted == [(10, 1), (10, 3), (10, 3), (10, 3)]


def test_the_prompt_comes_before_each_answer_that_echoes_it(model: ServedModel) -> None:
    writer = text_writer(model, echoes=("P0 ", "P1 "))
    raw = writer.delta(delta(0, "a", 5)) + writer.delta(delta(0, "b", 5, answer=1)) + writer.delta(delta(1, "c", 5))
    assert [event["choices"][0]["text"] for event in events_of(raw)] == ["P0 a", "P1 b", "c"]


def test_usage_counts_a_prompt_once_and_the_least_that_was_cached() -> None:
    usage = UsageCount(2)
    for answer, (num_tokens, cached) in enumerate([(3, 8), (4, 0), (5, 8), (6, 8)]):
        usage.end(finish(num_tokens, answer, cached))
    assert json.loads(usage.encode()) == {
        "prompt_tokens": 20,
        "completion_tokens": 18,
        "total_tokens": 38,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_a_whole_chat(model: ServedModel) -> None:
    writer = AnswerWriter(style(model, with_logprobs=True), ChatChoices(model.tokenizer), UsageCount(2))
    token = model.tokenizer.encode_text("a", special=False)[0]
    for event in (
        Delta(0, (token,), "x", (TokenLogprobs(-1.0),), 1),
        Delta(0, (token,), "a", (TokenLogprobs(-2.0),), 0),
        finish(1, 1),
        Delta(1, (token,), "b", (TokenLogprobs(-3.0),), 0),
        finish(2, 0, reason="stop"),
    ):
        writer.add(event)
    answer = json.loads(writer.encode())
    assert {key: answer[key] for key in ("id", "object", "created", "model")} == {**HEAD, "object": "chat.completion"}
    choices = answer["choices"]
    assert [choice["message"] for choice in choices] == [
        {"role": "assistant", "content": "ab", "refusal": None},
        {"role": "assistant", "content": "x", "refusal": None},
    ]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert [[t["logprob"] for t in choice["logprobs"]["content"]] for choice in choices] == [[-2.0, -3.0], [-1.0]]
    assert answer["usage"]["completion_tokens"] == 3


def test_logprobs_of_a_text_stream_go_on_for_each_answer(model: ServedModel) -> None:
    writer = StreamWriter(style(model, with_logprobs=True), TextChoices(model.tokenizer), UsageCount(2), None)
    token = model.tokenizer.encode_text("a", special=False)[0]
    raw = b"".join(
        writer.delta(Delta(first, (token,), "a", (TokenLogprobs(-1.0),), answer))
        for first, answer in [(0, 0), (0, 1), (1, 0)]
    )
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events_of(raw)] == [[0], [0], [1]]


def test_offsets_skip_text_that_has_no_tokens(model: ServedModel) -> None:
    """A guardrail put it there: in a stream, and in a whole answer."""
    a, b = model.tokenizer.encode_text("ab")[1:]
    one = (TokenLogprobs(-1.0, (), ()),)
    events: list[Delta] = [
        Delta(0, (a,), "a", one, num_prompt_tokens=10),
        Delta(1, (), "###", num_prompt_tokens=10),
        Delta(3, (b,), "b", one, num_prompt_tokens=10, skipped=((0, 3),)),
    ]
    writer = text_writer(model, with_logprobs=True)
    raw = b"".join(writer.delta(event) for event in events) + writer.finish(finish(4, reason="content_filter"))
    choices = [event["choices"][0] for event in events_of(raw)]
    assert [choice["text"] for choice in choices] == ["a", "###", "b", ""]
    assert [choice["logprobs"]["text_offset"] for choice in choices if choice["logprobs"]] == [[0], [4]]
    assert choices[-1]["finish_reason"] == "content_filter"
    whole = AnswerWriter(style(model, with_logprobs=True), TextChoices(model.tokenizer), UsageCount(1))
    for event in events:
        whole.add(event)
    whole.add(finish(4, reason="content_filter"))
    (choice,) = json.loads(whole.encode())["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a###b", [0, 4])
