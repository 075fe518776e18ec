from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.token_pieces import TokenPieces
from disagg.gateway.text.tokenizer import FAKE_VOCAB_SIZE, ModelInfo, ServedModel, fake_model, load_model
from disagg.proto.errors import ConfigError, ContextLengthError, InvalidRequestError
from tests.support.gateway import (
    BOS,
    EOS,
    IM_END,
    IM_START,
    MAX_MODEL_LEN,
    MODEL_NAME,
    TEMPLATE,
    VOCAB_SIZE,
    served_model,
    tokenizer_json,
    write_checkpoint,
)

HELLO = [ChatTurn("system", "s"), ChatTurn("user", "hello")]


def load(folder: Path, **changes: str | dict[str, Any] | None) -> ServedModel:
    return load_model(str(write_checkpoint(folder, **changes)), MODEL_NAME)


def test_what_a_model_is(model: ServedModel) -> None:
    assert model.info == ModelInfo(
        name=MODEL_NAME, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=(IM_END, EOS)
    )


def test_a_text_gets_the_special_tokens_of_the_post_processor(model: ServedModel) -> None:
    ids = model.tokenizer.encode_text("hello")
    assert ids[0] == BOS
    assert BOS not in ids[1:]
    assert model.tokenizer.decode(ids) == "hello"


def test_special_tokens_spelled_out_in_a_text_are_parsed(model: ServedModel) -> None:
    ids = model.tokenizer.encode_text("a</s>b")
    assert ids[2] == EOS
    assert len(ids) == 4
    assert model.tokenizer.decode(ids) == "ab"


def test_a_chat_is_rendered_without_a_further_bos(model: ServedModel) -> None:
    ids = model.tokenizer.encode_chat(HELLO)
    assert [token_id for token_id in ids if token_id <= IM_END] == [IM_START, IM_END, IM_START, IM_END, IM_START]
    assert ids[0] == IM_START
    assert model.tokenizer.decode(ids) == "system\ns\nuser\nhello\nassistant\n"


def test_a_base_model_takes_no_chat(tmp_path: Path) -> None:
    base = load(tmp_path, tokenizer_config={})
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        base.tokenizer.encode_chat(HELLO)
    assert caught.value.field == "chat"


def test_a_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    source = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}{{ eos_token }}"
    model = load(tmp_path, chat_template=source)
    ids = model.tokenizer.encode_chat([ChatTurn("user", "x")])
    assert (ids[0], len(ids), ids[2]) == (BOS, 3, EOS)


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "x"}]
    model = load(tmp_path, tokenizer_config={"chat_template": templates})
    assert model.tokenizer.decode(model.tokenizer.encode_chat(HELLO)) == "x"


def test_special_tokens_map_goes_before_the_config(tmp_path: Path) -> None:
    model = load(tmp_path, chat_template="{{ eos_token }}", special_tokens_map={"eos_token": "<|im_end|>"})
    assert model.tokenizer.encode_chat(HELLO) == [IM_END]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    content = json.loads(tokenizer_json())
    content["truncation"] = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    content["padding"] = {
        "strategy": {"Fixed": 100},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    model = load(tmp_path, tokenizer=content)
    ids = model.tokenizer.encode_text("the quick brown zebra")
    assert model.tokenizer.decode(ids) == "the quick brown zebra"
    assert EOS not in ids


@pytest.mark.parametrize(
    ("changes", "eos"),
    [
        ({}, (IM_END, EOS)),
        ({"generation_config": {"eos_token_id": 3}}, (3,)),
        ({"generation_config": {"eos_token_id": [3, 3, 1]}}, (3, 1)),
        ({"generation_config": {}}, (EOS,)),
        ({"generation_config": None}, (EOS,)),
        ({"generation_config": None, "config": {"vocab_size": 320, "max_position_embeddings": 8}}, ()),
    ],
)
def test_the_end_of_sequence(tmp_path: Path, changes: dict[str, Any], eos: tuple[int, ...]) -> None:
    assert load(tmp_path, **changes).info.eos_token_ids == eos


@pytest.mark.parametrize(
    ("config", "vocab_size", "eos"),
    [
        ({"text_config": {"vocab_size": 330, "max_position_embeddings": 8, "eos_token_id": 3}}, 330, (3,)),
        ({"text_config": {"max_position_embeddings": 8, "eos_token_id": 3}, "eos_token_id": [1]}, 300, (1,)),
    ],
)
def test_the_text_of_a_model_of_images(
    tmp_path: Path, config: dict[str, Any], vocab_size: int, eos: tuple[int, ...]
) -> None:
    """A vocabulary whose size is not named has that of the tokenizer, here 300."""
    info = load(tmp_path, config=config, generation_config=None).info
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (vocab_size, 8, eos)


def test_a_shorter_context(tmp_path: Path) -> None:
    assert served_model(tmp_path, 50).info.max_model_len == 50
    with pytest.raises(ConfigError, match="129 is more than the 128 positions"):
        load_model(str(tmp_path), MODEL_NAME, 129)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, r"config\.json: cannot be read .*model folder"),
        ({"config": "{"}, r"config\.json: "),
        ({"config": {"max_position_embeddings": 8}}, "vocab_size"),
        ({"config": {"vocab_size": "many", "max_position_embeddings": 8}}, "vocab_size"),
        ({"config": {"vocab_size": 320}}, "no max_position_embeddings"),
        ({"generation_config": "[]"}, r"generation_config\.json: "),
        ({"generation_config": {"eos_token_id": 320}}, "eos_token_id 320 is not in the vocabulary of 320"),
        ({"generation_config": {"eos_token_id": -1}}, "eos_token_id -1"),
        ({"tokenizer": None}, r"tokenizer\.json: cannot be read"),
        ({"tokenizer": "{}"}, r"tokenizer\.json: not a tokenizer file"),
        ({"tokenizer": "not json"}, r"tokenizer\.json: not a tokenizer file"),
        ({"tokenizer_config": {"chat_template": 7}}, r"tokenizer_config\.json: .*chat_template"),
        ({"chat_template": "{% for %}"}, "chat template, line 1"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **changes)


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        load_model(str(tmp_path), MODEL_NAME)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_model(str(tmp_path), MODEL_NAME)


@given(st.text(max_size=30))
def test_the_fake_models_tokens_are_bytes(text: str) -> None:
    fake = FAKE.tokenizer
    assert fake.encode_text(text) == list(text.encode())
    assert fake.decode(fake.encode_text(text)) == text


FAKE = fake_model("fake", 64)


def test_what_the_fake_model_makes_can_be_read() -> None:
    assert FAKE.tokenizer.decode([104, 105, 256, 31_999]) == "hi t256 t31999"
    assert FAKE.info == ModelInfo(name="fake", vocab_size=FAKE_VOCAB_SIZE, max_model_len=64, eos_token_ids=())
    assert bytes(FAKE.tokenizer.encode_chat(HELLO)) == b"system: s\nuser: hello\nassistant: "
    assert load_model("fake", "x").info.max_model_len == 8192


def test_the_gateway_loads_neither_torch_nor_transformers() -> None:
    script = "import disagg.gateway.server, sys; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_texts_and_chats_read_as_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer  # slow to import

    source = TEMPLATE.replace("<|im_start|>", "{{ bos_token }}<|im_start|>", 1)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    ours = load(tmp_path, tokenizer_config=config, chat_template=source).tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("hello </s> wörld 🙂", "  two  spaces\n", "<|im_start|>user"):
        assert ours.encode_text(text) == theirs(text)["input_ids"]
    messages = [turn._asdict() for turn in HELLO]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(HELLO) == rendered
    assert ours.decode(rendered) == theirs.decode(rendered, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("normalizer", "longest"),
    [
        (None, 12),
        (normalizers.NFC(), 48),
        (normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), 12),
        (normalizers.Strip(), None),
        (normalizers.Replace("a", ""), None),
    ],
)
def test_the_most_bytes_that_a_token_stands_for(normalizer: Any, longest: int | None) -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    if normalizer is not None:
        backend.normalizer = normalizer
    assert TokenPieces(backend).max_bytes_per_token() == longest


def test_a_token_that_takes_white_space_has_no_most_bytes() -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert TokenPieces(backend).max_bytes_per_token() is None


@given(text=st.text(max_size=400), limit=st.integers(1, 40))
def test_a_limit_changes_no_ids_and_refuses_nothing_that_fits(model: ServedModel, text: str, limit: int) -> None:
    whole = model.tokenizer.encode_text(text, special=False)
    try:
        assert model.tokenizer.encode_text(text, special=False, max_tokens=limit) == whole
    except ContextLengthError:
        assert len(whole) > limit
