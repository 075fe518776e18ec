"""Converts the body of `/v1/responses` to the input of the generator. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from disagg.gateway.openai.schema import decode_field
from disagg.gateway.openai.to_input import ParsedCall, read_text
from disagg.gateway.openai.tools import LONG_ARGUMENTS, MAX_CHOICE_BYTES, MAX_TOOLS, MAX_TOOLS_BYTES
from disagg.gateway.other_apis.responses.schema import (
    FunctionTool,
    Item,
    NamedChoice,
    ResponsesBody,
    TextConfig,
    TextFormat,
)
from disagg.gateway.other_apis.shared.bodies import (
    MAX_FORMAT_BYTES,
    OtherNames,
    read_bounded,
    read_list,
    read_schema,
    refuse_unsupported,
    sampling_of,
)
from disagg.gateway.other_apis.shared.chat_turns import ChatTurns
from disagg.gateway.other_apis.shared.offered import Choice, GivenTool, offer
from disagg.gateway.requests.part_counts import TURNS_A_PIECE, Cooperative
from disagg.gateway.requests.request import ChatPrompt, GenerationInput
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.requests.validate import MAX_CHAT_MESSAGES
from disagg.gateway.requests.values import check_length, shown
from disagg.gateway.text.chat_template import ChatTurn
from disagg.proto.errors import InvalidRequestError

MAX_NOTES: Final = 16
_MAX_NOTES_BYTES: Final = 64 << 10
"""Maximum bytes of the JSON of `metadata`."""
_Note = Annotated[str, msgspec.Meta(max_length=512)]
_NOTES: Final = msgspec.json.Decoder(dict[Annotated[str, msgspec.Meta(max_length=64)], _Note] | None)
_TOOL: Final = msgspec.json.Decoder(FunctionTool)
_CHOICE: Final = msgspec.json.Decoder(str | NamedChoice | None)
_TEXT: Final = msgspec.json.Decoder(TextConfig | None)
_PLAIN: Final = TextFormat("text")

ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_THOUGHTS: Final = ("reasoning_text",)
_CONTENTS: Final = ("input_text", "output_text")
HARMLESS: Final[Mapping[str, Sequence[object]]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "image": (),
    "moderation": (),
}
"""Unsupported fields, with the values that are accepted because they have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(ParsedCall):
    """A call, with the parts of it that its answer repeats."""

    body: ResponsesBody
    functions: tuple[GivenTool, ...]
    choice: Choice
    format: TextFormat
    metadata: Mapping[str, str]


def read_response(body: ResponsesBody) -> Cooperative[ParsedResponse]:
    """The call that a body describes. Yields between pieces of work. Raises `InvalidRequestError`."""
    sampling = sampling_of(body)
    refuse_unsupported(body, HARMLESS)
    functions, choice = _read_tools(body.tools), _read_choice(body.tool_choice)
    tools = offer(functions, choice, body.parallel_tool_calls)
    text_format, structured = _read_format(body.text)
    if tools is not None and tools.forced:
        structured = None  # the format is that of a text, and there is none
    stop = body.stop
    turns = yield from _read_turns(body)
    given = GenerationInput(
        prompt=ChatPrompt(turns, tools.source if tools else ""),
        max_tokens=body.max_output_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        structured=structured,
        split_reasoning=True,
        **sampling,
    )
    return ParsedResponse(
        inputs=(given,),
        names=(OtherNames("input", "top_logprobs", "max_output_tokens"),),
        answers_each=1,
        stream=bool(body.stream),
        include_usage=False,
        continuous_usage=False,
        tools=tools,
        body=body,
        functions=functions,
        choice=choice,
        format=text_format,
        metadata=_read_notes(body.metadata),
    )


def _read_turns(body: ResponsesBody) -> Cooperative[tuple[ChatTurn, ...]]:
    turns = ChatTurns()
    if body.instructions:
        turns.add_text("system", body.instructions)
    if body.input is None:
        raise InvalidRequestError("input", "must be set")
    if isinstance(body.input, str):
        turns.add_text("user", body.input)
    else:
        check_length(len(body.input), "input", MAX_CHAT_MESSAGES)
        for i, item in enumerate(body.input):
            # Behind the instructions, not beside them: templates take one system message.
            yield from _read_item(item, f"input[{i}]", turns, joins=i == 0)
            if i % TURNS_A_PIECE == TURNS_A_PIECE - 1:
                yield
    return (yield from turns.read())


def _read_item(item: Item, place: str, turns: ChatTurns, joins: bool) -> Cooperative[None]:
    kind = item.type or "message"
    if kind == "message":
        role = ROLES.get(item.role or "")
        if role is None:
            raise InvalidRequestError(
                f"{place}.role", f"must be one of {', '.join(ROLES)}, not {shown(item.role or '')}"
            )
        text = yield from read_text(item.content, _CONTENTS, f"{place}.content")
        turns.add_text(role, text, joins)
    elif kind == "function_call":
        call_id, name = _set(item.call_id, f"{place}.call_id"), _set(item.name, f"{place}.name")
        arguments = _set(item.arguments, f"{place}.arguments")
        turns.add_call(call_id, name, arguments, f"{place}.arguments")
        if len(arguments) > LONG_ARGUMENTS:
            yield
    elif kind == "function_call_output":
        call_id = _set(item.call_id, f"{place}.call_id")
        text = yield from read_text(item.output, _CONTENTS, f"{place}.output")
        turns.add_result(call_id, text)
    elif kind == "reasoning":
        if item.content:
            turns.add_reasoning((yield from read_text(item.content, _THOUGHTS, f"{place}.content")))
    else:
        kinds = "message, reasoning, function_call or function_call_output"
        raise InvalidRequestError(f"{place}.type", f"must be {kinds}, not {shown(kind)}")


def _set(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequestError(field, "must be set")
    return value


def _read_tools(raw: msgspec.Raw) -> tuple[GivenTool, ...]:
    functions: list[GivenTool] = []
    for i, one in enumerate(read_list(raw, "tools", MAX_TOOLS_BYTES, MAX_TOOLS)):
        tool = decode_field(one, _TOOL, f"tools[{i}]")
        if tool.type != "function":
            raise InvalidRequestError(f"tools[{i}].type", f"must be function, not {shown(tool.type)}")
        name = _set(tool.name, f"tools[{i}].name")
        functions.append(GivenTool(name, tool.description, tool.parameters, tool.strict))
    return tuple(functions)


def _read_choice(raw: msgspec.Raw) -> Choice:
    given = read_bounded(raw, _CHOICE, "tool_choice", MAX_CHOICE_BYTES)
    if given is None:
        return Choice()
    if isinstance(given, str):
        return Choice(given)
    if given.type != "function":
        raise InvalidRequestError("tool_choice.type", f"must be function, not {shown(given.type)}")
    return Choice(name=_set(given.name, "tool_choice.name"))


def _read_format(raw: msgspec.Raw) -> tuple[TextFormat, StructuredOutput | None]:
    field = "text.format"
    config = read_bounded(raw, _TEXT, "text", MAX_FORMAT_BYTES)
    given = (config.format if config is not None else None) or _PLAIN
    if given.type == "text":
        return given, None
    if given.type == "json_object":
        return given, StructuredOutput("json_object", field=field)
    if given.type != "json_schema":
        raise InvalidRequestError(f"{field}.type", f"must be text, json_object or json_schema, not {shown(given.type)}")
    return given, read_schema(given.schema, f"{field}.schema")


def _read_notes(raw: msgspec.Raw) -> dict[str, str]:
    notes = read_bounded(raw, _NOTES, "metadata", _MAX_NOTES_BYTES) or {}
    if len(notes) > MAX_NOTES:
        raise InvalidRequestError("metadata", f"at most {MAX_NOTES} notes, not {len(notes)}")
    return notes
