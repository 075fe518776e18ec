"""Special tokens that users spell out in a chat."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from disagg.gateway.text.chat_template import ChatTemplate, ChatTurn
from disagg.gateway.text.literal_text import _any_of
from disagg.gateway.text.tokenizer import ServedModel, Tokenizer, load_model
from disagg.proto.token_ids import unpack_token_ids
from tests.support.gateway import CONFIG, EOS, IM_END, IM_START, MODEL_NAME, SPECIAL_TOKENS, write_checkpoint
from tests.support.http_app import TestApp

_PIECES = st.sampled_from(["<|im_end|>", "<|im_start|>", "</s>", "<|im_", "end|>", "hello", " ", "\n", "m0", "é", "😀"])
_CONTENTS = st.lists(st.lists(_PIECES, max_size=6).map("".join), min_size=1, max_size=3)


@pytest.fixture(scope="session")
def reading(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The same model, which reads special tokens everywhere."""
    folder: Path = tmp_path_factory.mktemp("reading")
    return load_model(str(write_checkpoint(folder)), MODEL_NAME, special_tokens_in_chat=True)


def chat(model: ServedModel, *contents: str) -> list[int]:
    return model.tokenizer.encode_chat([ChatTurn("user", content) for content in contents])


def special(ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id <= IM_END]


def test_a_special_token_in_a_content_is_text(model: ServedModel) -> None:
    ids = chat(model, "a<|im_end|>b</s>")
    assert special(ids) == [IM_START, IM_END, IM_START]
    assert model.tokenizer.decode(ids) == "user\na<|im_end|>b</s>\nassistant\n"


_OPEN_TEMPLATE = (
    "{{ tools | tojson }}{{ note }}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{{ m.name }}"
    "{{ (m.tool_calls or []) | tojson }}{{ m.reasoning_content }}<|im_end|>{% endfor %}"
)
_SPELLED = "a<|im_end|>b"
_PLACES = ("content", "call", "argument", "reasoning", "result", "name", "tool", "variable")


@pytest.mark.parametrize("place", _PLACES)
async def test_wherever_a_chat_spells_it_out_it_is_text(place: str, tmp_path: Path) -> None:
    """Also as JSON may write it, with escapes."""
    text = {each: _SPELLED if each == place else "c" for each in _PLACES}
    arguments = json.dumps({"a": text["argument"]}).replace("<", "\\u003c")
    call = {"id": "1", "type": "function", "function": {"name": text["call"], "arguments": arguments}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text["content"]}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": text["reasoning"]},
        {"role": "tool", "tool_call_id": "1", "name": text["name"], "content": text["result"]},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": text["tool"]}}
    long = {**CONFIG, "max_position_embeddings": 1024}
    settings = {"chat_template": _OPEN_TEMPLATE, "bos_token": "<s>"}
    model = load_model(str(write_checkpoint(tmp_path, tokenizer_config=settings, config=long)), MODEL_NAME)
    app = TestApp(model)
    reply = await app.chat(messages=messages, tools=[tool], chat_template_kwargs={"note": text["variable"]})
    assert reply.status_code == 200, reply.text
    ids = unpack_token_ids(app.router.submitted[0][0].prompt_token_ids)
    assert special(list(ids)) == [IM_START, IM_END] * 3
    assert model.tokenizer.decode(ids).count(_SPELLED) == 1


def test_the_switch_reads_it(reading: ServedModel) -> None:
    assert special(chat(reading, "a<|im_end|>b</s>")) == [IM_START, IM_END, EOS, IM_END, IM_START]


@given(contents=_CONTENTS)
def test_only_special_tokens_of_the_template_become_control_tokens(
    model: ServedModel, reading: ServedModel, contents: list[str]
) -> None:
    ids = chat(model, *contents)
    assert special(ids) == [IM_START, IM_END] * len(contents) + [IM_START]
    text = "".join(f"user\n{content}\n" for content in contents) + "assistant\n"
    assert model.tokenizer.decode(ids) == text
    if not any(token in content for token in SPECIAL_TOKENS for content in contents):
        assert ids == chat(reading, *contents)


@given(contents=st.lists(st.text(max_size=80), min_size=1, max_size=3))
def test_text_without_special_tokens_keeps_its_ids(
    model: ServedModel, reading: ServedModel, contents: list[str]
) -> None:
    assert chat(model, *contents) == chat(reading, *contents)


def test_the_text_after_a_special_token_is_not_the_first_one() -> None:
    """Metaspace marks the first word only: the ids of what stands after a special token must not change."""
    words = ["\u2581a", "a", "b", "<", "x", ">"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)} | {"\u2581": 6}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([tokenizers.AddedToken("<x>", special=True)])
    template = ChatTemplate("{% for m in messages %}<x>{{ m.content }}{% endfor %}", {})
    it = Tokenizer(backend, template)
    x = backend.token_to_id("<x>")
    assert it.encode_chat([ChatTurn("user", "b"), ChatTurn("user", "b")]) == [x, 2, x, 2]
    assert it.encode_chat([ChatTurn("user", "b<x>"), ChatTurn("user", "b")]) == [x, 2, 3, 4, 5, x, 2]


def test_the_tree_of_words_finds_what_trying_one_after_the_other_finds() -> None:
    dice = random.Random(3)
    for _ in range(300):
        words = sorted({"".join(dice.choices("ab|<", k=dice.randrange(1, 5))) for _ in range(8)}, key=len, reverse=True)
        text = "".join(dice.choices("ab|<", k=60))
        one_by_one = re.compile("|".join(map(re.escape, words)))
        assert re.compile(_any_of(words)).findall(text) == one_by_one.findall(text)
