"""Logprobs in the forms of both APIs."""

from __future__ import annotations

from disagg.gateway.openai.logprobs import CompletionLogprobs, chat_logprobs
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.messages import TokenLogprobs

NEVER = float("-inf")


def test_logprobs_of_a_chat(model: ServedModel) -> None:
    ids = model.tokenizer.encode_text("a🙂", special=False)[:2]
    given = [TokenLogprobs(-0.5, (ids[0], ids[1]), (-0.5, NEVER)), TokenLogprobs(-1.5)]
    broken = {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xF0]}
    assert chat_logprobs(ids, given, model.tokenizer) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}, broken],
            },
            {**broken, "logprob": -1.5, "top_logprobs": []},
        ]
    }


def test_logprobs_of_a_completion_go_on_from_piece_to_piece(model: ServedModel) -> None:
    hello, space, a = (model.tokenizer.encode_text(text, special=False)[0] for text in ("hello", " ", "a"))
    writer = CompletionLogprobs(model.tokenizer)
    first = writer.piece([hello, space], [TokenLogprobs(-1.0, (a,), (-0.25,)), TokenLogprobs(-2.0)])
    assert first == {
        "tokens": ["hello", " "],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -0.25, "hello": -1.0}, {" ": -2.0}],
        "text_offset": [0, 5],
    }
    assert writer.piece([a], [TokenLogprobs(NEVER, (a, hello), (NEVER, NEVER))]) == {
        "tokens": ["a"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"a": -9999.0, "hello": -9999.0}],
        "text_offset": [6],
    }


def test_of_tokens_that_read_alike_the_likeliest_counts(model: ServedModel) -> None:
    first, second = model.tokenizer.encode_text("🙂", special=False)[:2]
    piece = CompletionLogprobs(model.tokenizer).piece([first], [TokenLogprobs(-2.0, (second, first), (-1.0, -2.0))])
    assert piece["top_logprobs"] == [{"\ufffd": -1.0}]
