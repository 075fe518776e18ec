"""Reasoning in front of answers does not depend on how the text was cut, and is counted by the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.gateway.text.answer_splitter import answer_splitter
from disagg.gateway.text.detokenizer import TextStream
from disagg.gateway.text.reasoning import Phase, ReasoningSplitter, first_phase, reasoning_format_of
from disagg.gateway.text.segments import parts_of
from disagg.gateway.text.tokenizer import ServedModel, fake_model, load_model
from disagg.proto.errors import ConfigError
from tests.support.gateway import MODEL_NAME, TOKENIZER_CONFIG, tokenizer_json, write_checkpoint

CASES = [
    ("<think>\na b \n</think>\n\nhi\n", "a b", "hi\n"),
    ("\n <think>a</think>b", "a", "b"),
    ("<think></think>x", "", "x"),
    ("<think>\n\n</think>\n\n", "", ""),
    ("<think> cut </thi", "cut </thi", ""),
    ("<think>a\n\n", "a\n\n", ""),
    ("<think>a < b</think></think> <think>", "a < b", "</think> <think>"),
    ("<think><think>a</think>b", "<think>a", "b"),
    ("<think>a</thin </think>b", "a</thin", "b"),
    ("<think", "", "<think"),
    (" <thi no", "", " <thi no"),
    ("\n\nhello</think>", "", "\n\nhello</think>"),
    ("say <think>a</think>", "", "say <think>a</think>"),
    ("  ", "", "  "),
    ("", "", ""),
]


def split(pieces: list[str], phase: Phase = Phase.UNDECIDED) -> tuple[str, str]:
    splitter = ReasoningSplitter(phase)
    segments = [one for piece in pieces for one in splitter.feed(piece)] + splitter.finish()
    assert "".join(one.text for one in segments) == "".join(pieces)
    return parts_of(segments)[:2]


@pytest.mark.parametrize(("text", "reasoning", "content"), CASES)
def test_every_split_gives_the_same(text: str, reasoning: str, content: str) -> None:
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            assert split([text[:i], text[i:j], text[j:]]) == (reasoning, content)
    assert split(list(text)) == (reasoning, content)


def test_a_prompt_may_have_opened_the_reasoning_or_ended_it() -> None:
    assert split(["\na\n", "\n</th", "ink>\n", "\nb"], Phase.INSIDE) == ("a", "b")
    assert split(["a"], Phase.INSIDE) == ("a", "")
    assert split(["<think>a</think>"], Phase.AFTER) == ("", "<think>a</think>")


@pytest.mark.parametrize(
    ("prompt_end", "continued", "phase"),
    [
        ("assistant\n", None, Phase.UNDECIDED),
        ("assistant\n<think>\n", None, Phase.INSIDE),
        ("<think>\n\n</think>\n\n", None, Phase.UNDECIDED),
        ("<think>so", "<think>so", Phase.INSIDE),
        ("</think>so", "<think></think>so", Phase.AFTER),
        ("<think>", "<think>", Phase.INSIDE),
        ("so", "so", Phase.AFTER),
        ("assistant\n", " ", Phase.UNDECIDED),
    ],
)
def test_where_an_answer_begins(prompt_end: str, continued: str | None, phase: Phase) -> None:
    assert first_phase(prompt_end, continued) is phase


def test_text_comes_at_once_where_no_tag_can_begin() -> None:
    splitter = ReasoningSplitter(Phase.UNDECIDED)
    found = [
        parts_of(splitter.feed(text))[:2] for text in ("\n<th", "ink> a", " <b </", "p> ", "</think> ", " b <think>")
    ]
    assert found == [("", ""), ("a", ""), (" <b", ""), (" </p>", ""), ("", ""), ("", "b <think>")]
    assert parts_of(ReasoningSplitter(Phase.UNDECIDED).feed("<think!")).content == "<think!"


@pytest.mark.parametrize("begin", ["", "<think>a"])
def test_white_space_that_is_held_is_not_looked_at_again(begin: str) -> None:
    """Quadratic work would take minutes."""
    splitter = ReasoningSplitter(Phase.UNDECIDED)
    splitter.feed(begin)
    for _ in range(300_000):
        assert splitter.feed("\n") == []
    rest = parts_of(splitter.finish())
    assert len(rest.reasoning) + len(rest.content) == 300_000


def encode(model: ServedModel, text: str) -> list[int]:
    return model.tokenizer.encode_text(text, special=False)


@pytest.mark.parametrize(
    ("phase", "text", "num_tokens"),
    [
        (Phase.UNDECIDED, "<think>ab</think>cd", len("<think>ab</think>")),
        (Phase.UNDECIDED, "<think>ab", len("<think>ab")),
        (Phase.INSIDE, "ab</think>cd", len("ab</think>")),
        (Phase.UNDECIDED, "ab</think>cd", 0),
        (Phase.AFTER, "ab</think>cd", 0),
    ],
)
def test_tokens_are_counted_up_to_the_close_tag(phase: Phase, text: str, num_tokens: int) -> None:
    model = fake_model("m", 64)  # a token is a byte
    for size in (1, 2, 7, 64):
        stream = TextStream(model.tokenizer, [], splitter=answer_splitter(phase, None))
        ids = encode(model, text)
        for begin in range(0, len(ids), size):
            stream.push(ids[begin : begin + size])
        stream.finish()
        assert stream.num_reasoning_tokens == num_tokens


def test_a_stop_string_ends_the_reasoning_too_and_lets_what_is_held_go() -> None:
    model = fake_model("m", 64)
    stream = TextStream(model.tokenizer, ["STOP"], splitter=answer_splitter(Phase.UNDECIDED, None))
    piece = stream.push(encode(model, "<think>a </STOP b"))
    assert (piece.reasoning, piece.text, piece.stopped) == ("a </", "", True)
    assert stream.num_reasoning_tokens == len("<think>a </STOP")


@pytest.mark.parametrize(
    ("source", "found"),
    [("{{ '<think>\\n' }}", "none"), ("{{ content.split('</think>')[-1] }}", "think"), ("{{ content }}", "none")],
)
def test_the_template_tells_whether_a_model_reasons(source: str, found: str) -> None:
    assert reasoning_format_of(source) == found


def test_the_parsers_can_be_chosen(tmp_path: Path) -> None:
    source = "{{ '<tool_call></think>' }}"
    write_checkpoint(tmp_path, tokenizer_config={**TOKENIZER_CONFIG, "chat_template": source})
    for tool, reasoning, formats in (
        ("auto", "auto", ("hermes", "think")),
        ("json", "none", ("json", "none")),
        ("hermes", "think", ("hermes", "think")),
    ):
        tokenizer = load_model(str(tmp_path), MODEL_NAME, tool_parser=tool, reasoning_parser=reasoning).tokenizer  # type: ignore[arg-type]
        assert (tokenizer.tool_format, tokenizer.reasoning_format) == formats


def test_tags_that_no_text_shows_cannot_be_chosen(tmp_path: Path) -> None:
    """As of models whose tags are special tokens."""
    special = tokenizer_json().replace('"<|im_end|>"', '"</think>"')
    source = "{{ '</think>' }}"
    write_checkpoint(tmp_path, tokenizer=special, tokenizer_config={**TOKENIZER_CONFIG, "chat_template": source})
    assert load_model(str(tmp_path), MODEL_NAME).tokenizer.reasoning_format == "none"
    with pytest.raises(ConfigError, match=r"^gateway\.reasoning_parser: think"):
        load_model(str(tmp_path), MODEL_NAME, reasoning_parser="think")
