"""How a chat becomes a prompt: variables, no beginning of an answer, a last turn that goes on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.gateway.openai.schema import ChatBody, Message
from disagg.gateway.openai.template_options import read_template_options
from disagg.gateway.text.chat_template import ChatTemplate, ChatTurn, TemplateOptions
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import InvalidRequestError
from tests.support.gateway import BOS, IM_END
from tests.support.http_app import TestApp, error_of

USER, ASSISTANT = ChatTurn("user", "u"), ChatTurn("assistant", "a ")


def options(
    turns: tuple[ChatTurn, ...] = (USER, ASSISTANT), effort: str | None = None, **fields: Any
) -> TemplateOptions:
    if "chat_template_kwargs" in fields:
        fields["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode(fields["chat_template_kwargs"]))
    return read_template_options(ChatBody(messages=[Message("user", "u")], **fields), turns, effort)


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


def test_what_is_chosen() -> None:
    assert options() == options(chat_template_kwargs=None) == options(chat_template_kwargs={}) == TemplateOptions()
    assert options(add_generation_prompt=False) == TemplateOptions("", False)
    assert options(continue_final_message=True) == TemplateOptions("", False, True)
    assert options(continue_final_message=True, add_generation_prompt=False) == TemplateOptions("", False, True)
    assert options(chat_template_kwargs={"a": [deep(7)], "_b1": None}).variables == '{"a":[[[[[[[[1]]]]]]]],"_b1":null}'
    assert options(effort="low").variables == '{"reasoning_effort":"low"}'
    assert options(effort="low", chat_template_kwargs={"reasoning_effort": 5}).variables == '{"reasoning_effort":5}'


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * (16 << 10)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a" * 65: 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": deep(9)}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs.add_generation_prompt"),
        ({"effort": "much"}, "reasoning_effort"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "turns": (ASSISTANT, USER)}, "continue_final_message"),
        (
            {"continue_final_message": True, "turns": (ASSISTANT._replace(extra='{"tool_calls":[]}'),)},
            "continue_final_message",
        ),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        options(**fields)
    assert caught.value.field == field


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (TemplateOptions(), "[user]u[end][assistant]a[end][a]"),
        (TemplateOptions(begins_answer=False), "[user]u[end][assistant]a[end]"),
        (TemplateOptions("", False, True), "[user]u[end][assistant]a "),
    ],
)
def test_the_end_of_the_prompt(chosen: TemplateOptions, text: str) -> None:
    assert ChatTemplate(TEMPLATE, {}).render([USER, ASSISTANT], "", chosen) == text


def test_a_turn_goes_on_even_where_it_is_empty_or_its_text_comes_again() -> None:
    template = ChatTemplate(TEMPLATE, {})
    chosen = TemplateOptions("", False, True)
    assert template.render([USER, ChatTurn("assistant", "")], "", chosen) == "[user]u[end][assistant]"
    assert template.render([ChatTurn("user", "[end]"), ChatTurn("assistant", "[end]")], "", chosen) == (
        "[user][end][end][assistant][end]"
    )


def test_variables_reach_the_template_and_only_it() -> None:
    source = "{{ template }}|{{ self_name }}|{{ num_turns }}|{{ extra.a[0] }}|{{ bos_token }}"
    variables = '{"template":"t","num_turns":2,"extra":{"a":[true]},"self_name":null}'
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([USER], "", TemplateOptions(variables))
    assert text == "t|None|2|True|<s>"


def test_a_template_without_the_last_turn_cannot_go_on() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate("{{ messages[0].content }}", {}).render([USER, ASSISTANT], "", TemplateOptions("", False, True))
    assert caught.value.field == "chat.continue_final_message"


async def test_over_http(model: ServedModel) -> None:
    app = TestApp(model)
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "the cat"}]
    body: dict[str, Any] = {"messages": turns, "continue_final_message": True}
    goes_on = (await app.client.post("/tokenize", json=body)).json()["tokens"]
    ended = (await app.client.post("/tokenize", json={"messages": turns, "add_generation_prompt": False})).json()
    begun = (await app.client.post("/tokenize", json={"messages": turns})).json()["tokens"]
    assert ended["tokens"][: len(goes_on)] == goes_on
    assert ended["tokens"][len(goes_on)] == IM_END
    assert begun[: ended["count"]] == ended["tokens"]
    assert len(begun) > ended["count"]
    assert BOS not in begun
    await app.chat(**body)
    assert app.router.submitted[0][0].num_prompt_tokens == len(goes_on)
    wrong = await app.chat(messages=turns[:1], continue_final_message=True)
    assert error_of(wrong)[:2] == (400, "continue_final_message")
    wrong = await app.client.post("/tokenize", json={"messages": turns[:1], "continue_final_message": True})
    assert error_of(wrong)[:2] == (400, "continue_final_message")
