"""Tools of a chat: what is refused, what the template sees, and how calls are written."""

import json
from typing import Any

import msgspec
import pytest

from disagg.gateway.answers.grammars.grammars import Grammars
from disagg.gateway.auth.auth import ANONYMOUS
from disagg.gateway.calls import Origin
from disagg.gateway.event_loop.shell.turns import run_cooperatively
from disagg.gateway.openai.schema import ABSENT, ChatBody, Message
from disagg.gateway.openai.to_input import read_chat
from disagg.gateway.openai.tool_choices import ToolChoices
from disagg.gateway.openai.tools import read_extra, read_tools
from disagg.gateway.other_apis.shared.chat_turns import ChatTurns
from disagg.gateway.requests.part_counts import MAX_JSON_PARTS
from disagg.gateway.text.chat_template import ChatTemplate, ChatTurn
from disagg.gateway.text.segments import ToolCall
from disagg.gateway.text.tokenizer import ServedModel, fake_model
from disagg.gateway.text.tool_calls import call_grammar
from disagg.gateway.text.written_json import read_json, write_json
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId
from tests.support.gateway import FakeRouter
from tests.support.http_app import CHAT, TestApp

ADD = ToolCall("add", '{"a":1}')
SHOWN = {"id": "call_r_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def tool(name: str = "add", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def choices(parallel: bool = True) -> ToolChoices:
    return ToolChoices(fake_model("m", 64).tokenizer, parallel, "r")


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([tool(), tool("b"), tool("a b")], "auto", "tools[2].function.name"),
        ([tool(), tool()], "auto", "tools"),
        ([tool(parameters=[])], "auto", "tools[0].function.parameters"),
        ([tool(parameters=deep(32))], "auto", "tools[0].function.parameters"),
        ([tool(parameters={"a": "x" * (64 << 10)})], "auto", "tools[0].function.parameters"),
        ([tool(f"t{i}") for i in range(129)], "auto", "tools"),
        ([{**tool(), "type": "web"}], "auto", "tools[0].type"),
        ([], "required", "tool_choice"),
        ([tool()], "any", "tool_choice"),
        ([tool()], {"type": "allowed_tools", "function": {"name": "add"}}, "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "x" * 2000}}, "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "sub"}}, "tool_choice.function.name"),
        ([tool(), tool("b", parameters={"type": "string"})], "required", "tools[1].function.parameters.type"),
    ],
)
def test_errors_name_the_field(tools: list[Any], choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_tools(raw(tools), raw(choice), None)
    assert caught.value.field == field


def test_no_tools_are_offered_where_none_may_be_called() -> None:
    assert read_tools(ABSENT, ABSENT, None) is None
    assert read_tools(raw([tool()]), raw("none"), None) is None
    offered = read_tools(raw([tool(parameters=deep(31))]), ABSENT, False)
    assert offered is not None
    assert (set(offered.names), offered.parallel) == ({"add"}, False)


def test_calls_that_must_happen_are_a_grammar_of_what_may_be_called() -> None:
    tools = raw([tool(), tool("sub", strict=True, parameters={"properties": {}})])
    free = read_tools(tools, raw("auto"), None)
    assert free is not None
    assert free.structure("hermes") is None
    required = read_tools(tools, raw("required"), None)
    assert required is not None
    assert (required.parallel, [function.name for function in required.forced]) == (True, ["add", "sub"])
    structure = required.structure("hermes")
    assert structure is not None
    assert structure.field == "tools"
    assert structure.text == call_grammar("hermes", required.forced, single=False)
    named = read_tools(tools, raw({"type": "function", "function": {"name": "sub"}}), True)
    assert named is not None
    assert (set(named.names), named.parallel, json.loads(named.source)[0]["function"]["name"]) == (
        {"sub"},
        False,
        "add",
    )
    structure = named.structure("json")
    assert structure is not None
    assert structure.field == "tools[1].function.parameters"
    assert structure.text == call_grammar("json", named.forced, single=True)


async def test_calls_that_must_happen_contradict_another_structure() -> None:
    body = ChatBody(
        model="m",
        messages=[Message("user", "u")],
        tools=raw([tool()]),
        tool_choice=raw("required"),
        response_format=raw({"type": "json_object"}),
    )
    with pytest.raises(InvalidRequestError, match="response_format") as caught:
        await run_cooperatively(read_chat(body))
    assert caught.value.field == "tool_choice"


def test_earlier_calls_reach_the_template_with_their_arguments_as_objects() -> None:
    message = Message("assistant", None, [{"id": "c", "function": {"name": "add", "arguments": '{"a":1}'}}])
    expected = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert json.loads(read_extra(message, 0)) == {"tool_calls": [expected]}
    with pytest.raises(InvalidRequestError, match=r"messages\[3\]\.tool_call_id"):
        read_extra(Message("tool", "1"), 3)


NUMBERS = '{"a":123456789.123456789123,"b":[1.10,1e400],"c":123456789012345678901234567890,"d":0.5}'


async def test_numbers_of_earlier_calls_reach_the_template_as_they_are_written() -> None:
    """Over all APIs, for templates that write the object, a value by itself, or have no tools."""
    message = Message("assistant", None, [{"id": "c", "function": {"name": "add", "arguments": NUMBERS}}])
    turns = ChatTurns()
    turns.add_call("c", "add", NUMBERS, "input")
    (other,) = await run_cooperatively(turns.read())
    spaced = NUMBERS.replace(":", ": ").replace(",", ", ")
    whole = ChatTemplate("{{ tools and messages[0].tool_calls[0].function.arguments | tojson }}", {})
    source = "{{ tools }}{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ v }};{% endfor %}"
    single = ChatTemplate(source, {})
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    for turn in (ChatTurn("assistant", "", read_extra(message, 0)), other):
        assert whole.render([turn], "[1]") == spaced
        values = "123456789.123456789123;[1.1, 1e400];123456789012345678901234567890;0.5;"
        assert single.render([turn], "[1]") == "[1]" + values.replace("1.1,", "1.10,")
        assert spaced in plain.render([turn])


def test_texts_that_look_like_a_number_in_the_making_stay_texts() -> None:
    given = '{"#1#": ["#1#", "##1##", "1.10", 1.10, 1e400], "a": "#"}'
    assert write_json(read_json(given), ensure_ascii=False) == given
    assert write_json(read_json(given.replace("1.10, 1e400", "1.5"))) == given.replace("1.10, 1e400", "1.5")


def test_arguments_of_earlier_calls_are_counted_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def message(*arguments: str) -> Message:
        return Message(
            "assistant", None, [{"id": "c", "function": {"name": "f", "arguments": one}} for one in arguments]
        )

    half, built = MAX_JSON_PARTS // 2 - 8, json.dumps({"code": '[{,"' * MAX_JSON_PARTS})
    assert len(read_extra(message('{"a":[%s1]}' % ("1," * half), built), 0)) > 2 * half
    monkeypatch.setattr("disagg.gateway.openai.tools.read_json", None)
    for part in ("1,", "[],", '"",'):
        arguments = '{"a":[%s1]}' % (part * (half + 20))
        with pytest.raises(InvalidRequestError, match="arguments have more than 32768 values") as caught:
            read_extra(message(arguments, arguments), 3)
        assert caught.value.field == "messages[3].tool_calls"


def test_a_template_with_tools_gets_them_and_one_without_gets_text() -> None:
    turns = [
        ChatTurn("user", "u"),
        ChatTurn("assistant", "", '{"tool_calls":[{"function":{"name":"add","arguments":{"a":1}}}]}'),
        ChatTurn("tool", "2", '{"tool_call_id":"c"}'),
    ]
    knows = ChatTemplate("{{ tools | tojson }}{{ messages[1].tool_calls[0].function.name }}", {})
    assert knows.render(turns, '[{"x": 1}]') == '[{"x": 1}]add'
    plain = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", {})
    text = plain.render(turns, '[{"x": 1}]')
    assert text.startswith("system:You may call")
    assert text.endswith(
        '<tools>\n{"x": 1}\n</tools>;user:u;'
        'assistant:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>;'
        "user:<tool_response>\n2\n</tool_response>;"
    )


def test_a_call_in_a_stream() -> None:
    it = choices()
    first = json.loads(it.chunk(0, "so", b"null", b"null"))
    assert first["delta"] == {"role": "assistant", "content": "so"}
    second = json.loads(it.chunk(0, "", b"null", b"null", "", [ADD]))
    assert second["delta"] == {"tool_calls": [{"index": 0, **SHOWN}]}
    last = json.loads(it.last_chunk(0, b'"stop"'))
    assert last["finish_reason"] == "tool_calls"


def test_a_call_in_a_complete_answer() -> None:
    answer = json.loads(choices(parallel=False).answer(0, "", b"null", b'"stop"', "", [ADD, ADD]))
    assert answer["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [SHOWN]}
    assert answer["finish_reason"] == "tool_calls"
    answer = json.loads(choices().answer(0, "no", b"null", b'"stop"'))
    assert (answer["message"]["content"], answer["finish_reason"]) == ("no", "stop")


async def test_a_body_with_tools_is_read() -> None:
    body = ChatBody(model="m", messages=[Message("user", "u")], tools=raw([tool()]))
    parsed = await run_cooperatively(read_chat(body))
    assert parsed.tools is not None
    assert json.loads(parsed.inputs[0].prompt.tools)[0]["function"]["name"] == "add"  # type: ignore[union-attr]


async def test_a_line_of_a_batch_must_be_calls_as_a_request_must(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammars, "known", lambda self, grammar: "")
    monkeypatch.setattr(model.tokenizer, "encode_chat", lambda *_: [5, 6])  # it would be too long
    app = TestApp(model, FakeRouter([[5], [5]]))
    body = {**CHAT, "tools": [tool()], "tool_choice": "required", "max_tokens": 1}
    assert (await app.client.post("/v1/chat/completions", json=body)).status_code == 200
    line = msgspec.json.encode(body)
    await app.completions.line("/v1/chat/completions", line, Origin(request_id=RequestId("line"), caller=ANONYMOUS))
    grammars = [routed.sampling.grammar for routed, _ in app.router.submitted]
    assert grammars[0] == grammars[1] != ""
