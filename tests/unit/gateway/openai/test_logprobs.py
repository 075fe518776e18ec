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


def test_parts_of_a_character_have_their_bytes_as_names(model: ServedModel) -> None:
    first, second = model.tokenizer.encode_text("🙂", special=False)[:2]
    piece = CompletionLogprobs(model.tokenizer).piece([first], [TokenLogprobs(-2.0, (second, first), (-1.0, -2.0))])
    assert piece["tokens"] == ["bytes:\\xf0"]
    assert piece["top_logprobs"] == [{"bytes:\\x9f": -1.0, "bytes:\\xf0": -2.0}]


def test_a_token_stands_where_the_characters_before_it_end(model: ServedModel) -> None:
    """An emoji is four tokens here; special tokens have a text only where the prompt spells them."""
    tokenizer, never = model.tokenizer, TokenLogprobs(-1.0)
    ids = tokenizer.encode_text("a🙂b")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b"a", b"\xf0", b"\x9f", b"\x99", b"\x82", b"b"]
    found = CompletionLogprobs(tokenizer).prompt(ids, [never] * 6, "a🙂b")
    assert found["text_offset"] == [0, 0, 1, 1, 1, 1, 2]
    assert found["token_logprobs"] == [None] + [-1.0] * 6
    spelled = CompletionLogprobs(tokenizer)
    ids = tokenizer.encode_text("</s>a</s>b")
    assert spelled.prompt(ids, [never] * 4, "</s>a</s>b")["text_offset"] == [0, 0, 4, 5, 9]
    assert spelled.piece([2, *ids[2:3]], [never] * 2)["text_offset"] == [10, 10]
    answer = CompletionLogprobs(tokenizer)
    ids = tokenizer.encode_text("a🙂b", special=False)
    pieces = [answer.piece([token_id], [never])["text_offset"] for token_id in ids]
    assert pieces == [[0], [1], [1], [1], [1], [2]]
