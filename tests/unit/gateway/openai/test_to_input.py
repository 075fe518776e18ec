"""From bodies to inputs of the generator, and fields back to the body's names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.gateway.openai.schema import ChatBody, CompletionBody
from disagg.gateway.openai.to_input import FieldNames, ParsedCall, read_chat, read_completion
from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, TextPrompt
from disagg.gateway.text.chat_template import ChatTurn
from disagg.proto.errors import ContextLengthError, InvalidRequestError
from tests.support.reports import in_one_go

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ParsedCall:
    return in_one_go(
        read_chat(msgspec.json.decode(msgspec.json.encode({"model": "m", "messages": [USER], **fields}), type=ChatBody))
    )


def text(**fields: Any) -> ParsedCall:
    return in_one_go(
        read_completion(
            msgspec.json.decode(msgspec.json.encode({"model": "m", "prompt": "hi", **fields}), type=CompletionBody)
        )
    )


def refusal(read: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    return caught.value.field


def test_the_least_of_a_chat() -> None:
    wanted = chat()
    prompt = ChatPrompt((ChatTurn("user", "hi"),))
    assert wanted.inputs == (GenerationInput(model="m", prompt=prompt, split_reasoning=True),)
    assert (wanted.stream, wanted.include_usage, wanted.continuous_usage, wanted.echo) == (False,) * 4


def test_every_field_of_a_chat() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 3,
        "n": 2,
        "min_tokens": 1,
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "cache_salt": "s",
        "speculation": "off",
        "truncate_prompt_tokens": 7,
    }
    wanted = chat(
        **fields,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
        prompt_cache_key="c",
        max_tokens=5,
        max_completion_tokens=6,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert wanted.inputs == (
        GenerationInput(
            model="m",
            prompt=ChatPrompt((ChatTurn("user", "hi"),)),
            stop=("a", "b"),
            stop_token_ids=(1, 2),
            logit_bias={5: -100.0},
            logprobs=3,
            max_tokens=6,
            split_reasoning=True,
            session_id="c",
            **fields,
        ),
    )
    assert (wanted.stream, wanted.include_usage, wanted.continuous_usage) == (True,) * 3
    assert wanted.names[0].name("stopping.max_tokens") == "max_completion_tokens"
    assert chat(max_tokens=5).names[0].name("stopping.max_tokens") == "max_tokens"
    assert chat(logprobs=True).inputs[0].logprobs == 0
    assert chat(logprobs=False).inputs[0].logprobs is None


def test_roles_and_parts_of_messages() -> None:
    wanted = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": []},
            {"role": "user", "content": []},
        ]
    )
    assert wanted.inputs[0].prompt == ChatPrompt(
        (ChatTurn("system", "be brief"), ChatTurn("user", "a\nb"), ChatTurn("assistant", "c"), ChatTurn("user", ""))
    )


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "function", "content": "x"}, "role"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "tool_calls[0].id"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "function_call"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
    ],
)
def test_messages_that_are_refused(message: dict[str, Any], field: str) -> None:
    assert refusal(chat, messages=[USER, message]) == f"messages[1].{field}"


HARMLESS: list[dict[str, Any]] = [
    {"tools": None, "tool_choice": "none", "functions": [], "function_call": None},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"response_format": {"type": "text"}, "modalities": ["text"], "audio": None},
    {"store": False, "metadata": {"a": "b"}, "service_tier": None, "user": "u", "logprobs": False},
    {"priority": 0, "include_reasoning": True, "reasoning_effort": None, "truncate_prompt_tokens": None},
    {"add_generation_prompt": True, "continue_final_message": False, "echo": False, "use_beam_search": False},
    {"bad_words": [], "skip_special_tokens": True, "include_stop_str_in_output": False, "chat_template_kwargs": {}},
    {"stream": False, "stream_options": None, "stop": None, "stop_token_ids": None, "logit_bias": None},
]


@pytest.mark.parametrize("fields", HARMLESS)
def test_harmless_fields_change_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", "text"),
        ("structured_outputs", {}),
        ("regex", "a+"),
        ("modalities", ["audio"]),
        ("echo", True),
        ("chat_template", "{{ x }}"),
        ("continue_final_message", True),
        ("use_beam_search", True),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("documents", [{}]),
    ],
)
def test_what_would_change_the_answer_is_refused(field: str, value: Any) -> None:
    assert refusal(chat, **{field: value}) == field


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [IdsPrompt((1, 2))]),
        ([[1], [2, 3]], [IdsPrompt((1,)), IdsPrompt((2, 3))]),
    ],
)
def test_prompts_of_a_completion(prompt: Any, prompts: list[Any]) -> None:
    wanted = text(prompt=prompt)
    assert [given.prompt for given in wanted.inputs] == prompts
    assert {given.max_tokens for given in wanted.inputs} == {16}
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [names.prompt for names in wanted.names] == (["prompt[0]", "prompt[1]"] if several else ["prompt"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, 2, [3]]}, "prompt[2]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 43, "n": 3}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": -1}, "n"),
        ({"best_of": 3, "n": 0}, "n"),
        ({"best_of": 3, "n": 129}, "n"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2**62}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 43, "best_of": 3}, "best_of"),
        ({"echo": True, "truncate_prompt_tokens": 5}, "echo"),
        ({"echo": True, "logprobs": 0, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 21: 1}}, "logit_bias"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_completions_that_are_refused(fields: dict[str, Any], field: str) -> None:
    assert refusal(text, **fields) == field


def test_best_of_may_say_what_n_says() -> None:
    assert text(best_of=1) == text()
    assert text(best_of=2, n=2) == text(n=2)
    assert len(text(prompt=["a"] * 64, n=2).inputs) == 64


def test_top_logprobs_need_logprobs() -> None:
    assert refusal(chat, top_logprobs=1) == "top_logprobs"
    assert chat(top_logprobs=0) == chat(top_logprobs=0, logprobs=False) == chat()


@pytest.mark.parametrize(
    ("given", "seed"),
    [
        (0, 0),
        (-1, (1 << 64) - 1),
        (-(1 << 63), 1 << 63),
        (-(1 << 63) - 1, -(1 << 63) - 1),
        (1 << 64, 1 << 64),
        (None, None),
    ],
)
def test_a_negative_seed_is_the_one_with_the_same_bits(given: int | None, seed: int | None) -> None:
    assert chat(seed=given).inputs[0].seed == text(seed=given).inputs[0].seed == seed


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.top_p", "top_p"),
        ("sampling.logit_bias[17]", "logit_bias[17]"),
        ("sampling.logprobs", "top_logprobs"),
        ("stopping.max_tokens", "max_tokens"),
        ("stopping.min_tokens", "min_tokens"),
        ("stopping.stop[1]", "stop[1]"),
        ("stopping.stop_token_ids[3]", "stop_token_ids[3]"),
        ("chat.messages[0].role", "messages[0].role"),
        ("chat.messages", "messages"),
        ("chat", "messages"),
        ("n", "n"),
        ("x-slo-ttft-ms", "x-slo-ttft-ms"),
    ],
)
def test_fields_have_the_names_of_a_chat(field: str, name: str) -> None:
    assert FieldNames("messages", "top_logprobs").name(field) == name


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("prompt", "prompt[2]"),
        ("prompt.text", "prompt[2]"),
        ("prompt.token_ids", "prompt[2]"),
        ("prompt.token_ids[3]", "prompt[2][3]"),
        ("stopping.stop[0]", "stop"),
        ("sampling.logprobs", "logprobs"),
    ],
)
def test_fields_have_the_names_of_a_completion(field: str, name: str) -> None:
    assert FieldNames("prompt[2]", "logprobs", "max_tokens", "stop").name(field) == name


def test_a_renamed_error_stays_what_it_is() -> None:
    error = FieldNames("prompt", "logprobs").rename(ContextLengthError("stopping.max_tokens", "at most 3"))
    assert (type(error), error.field, error.message) == (ContextLengthError, "max_tokens", "at most 3")


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"5": "x"}, "logit_bias: expected `float`, got `str`"),
        (5, "logit_bias: expected `object | null`, got `int`"),
        ({str(i): 1 for i in range(1025)}, "logit_bias: at most 1024 tokens, not 1025"),
        ({str(i): 1 for i in range(9000)}, "logit_bias: at most 65536 bytes of JSON, not 79891"),
    ],
    ids=["value", "kind", "tokens", "bytes"],
)
def test_biases_are_read_within_their_limits(biases: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        text(logit_bias=biases)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", "", "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}},
            ("json_schema", '{"a":1}', "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": '{"a": 1}'}}, ("json_schema", '{"a": 1}', "structured_outputs.json")),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", '["a"]', "structured_outputs.choice")),
        ({"guided_regex": "a+"}, ("regex", "a+", "guided_regex")),
    ],
)
def test_fields_of_structured_output(fields: dict[str, Any], expected: tuple[str, str, str]) -> None:
    found = chat(**fields).inputs[0].structured
    assert found is not None
    assert (found.kind, found.text.replace(": ", ":"), found.field) == (
        expected[0],
        expected[1].replace(": ", ":"),
        expected[2],
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {"a": "x" * 200_000}}, "guided_json"),
    ],
)
def test_structured_output_that_is_refused(fields: dict[str, Any], field: str) -> None:
    assert refusal(chat, **fields) == field
