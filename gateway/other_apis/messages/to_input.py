"""Converts the body of `/v1/messages` to the input of the generator. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from disagg.gateway.openai.schema import decode_field
from disagg.gateway.openai.to_input import ParsedCall, read_text
from disagg.gateway.openai.tools import (
    LONG_ARGUMENTS,
    MAX_CHOICE_BYTES,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    OfferedTools,
)
from disagg.gateway.other_apis.messages.schema import (
    Block,
    MessagesBody,
    OutputConfig,
    Thinking,
    Tool,
    ToolChoice,
    Turn,
)
from disagg.gateway.other_apis.shared.bodies import (
    MAX_FORMAT_BYTES,
    OtherNames,
    is_null,
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
from disagg.gateway.text.chat_template import NO_OPTIONS, TemplateOptions
from disagg.proto.errors import InvalidRequestError

_TOOL: Final = msgspec.json.Decoder(Tool)
_CHOICE: Final = msgspec.json.Decoder(ToolChoice | None)
_THINKING: Final = msgspec.json.Decoder(Thinking | None)
_OUTPUT: Final = msgspec.json.Decoder(OutputConfig | None)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
ROLES: Final = ("user", "assistant")
_TEXT: Final = ("text",)
_ERROR: Final = "Error: "
"""Prefix of the result of a failed call: templates have no other place for it."""
HARMLESS: Final[Mapping[str, Sequence[object]]] = {
    "container": (),
    "context_management": ({"edits": []},),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
}
"""Unsupported fields, with the values that are accepted because they have no effect."""


_THINKS: Final = ("enabled", "adaptive", "disabled")
_DISPLAYS: Final = ("summarized", "omitted")
_MAX_THINKING_BYTES: Final = 4096
"""Maximum bytes of the JSON of `thinking`."""
_NO_THINKING: Final = TemplateOptions('{"enable_thinking":false}')
"""Turns reasoning off in templates that use this variable; others ignore it."""


class Conversation(NamedTuple):
    """The prompt of a body, and the names of its fields for errors."""

    prompt: ChatPrompt
    tools: OfferedTools | None
    names: OtherNames
    shows_reasoning: bool


def read_messages(body: MessagesBody) -> Cooperative[ParsedCall]:
    """The call that a body describes. Yields between pieces of work. Raises `InvalidRequestError`."""
    sampling = sampling_of(body)
    refuse_unsupported(body, HARMLESS)
    if body.max_tokens is None:
        raise InvalidRequestError("max_tokens", "must be set")
    structured = _read_format(body.output_config)
    prompt, tools, names, shows_reasoning = yield from read_conversation(body)
    if tools is not None and tools.forced:
        structured = None  # the format is that of a text, and there is none
    given = GenerationInput(
        prompt=prompt,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        structured=structured,
        split_reasoning=True,
        **sampling,
    )
    return ParsedCall(
        inputs=(given,),
        names=(names,),
        answers_each=1,
        stream=bool(body.stream),
        include_usage=False,
        continuous_usage=False,
        tools=tools,
        shows_reasoning=shows_reasoning,
    )


def read_conversation(body: MessagesBody) -> Cooperative[Conversation]:
    """The prompt of a body, to be counted or answered. Yields between pieces of work. Raises `InvalidRequestError`."""
    if body.messages is None:
        raise InvalidRequestError("messages", "must be set")
    check_length(len(body.messages), "messages", MAX_CHAT_MESSAGES)
    tools, (options, shows_reasoning) = _read_tools(body.tools, body.tool_choice), _read_thinking(body.thinking)
    turns = ChatTurns()
    if body.system:
        turns.add_text("system", (yield from read_text(body.system, _TEXT, "system")))
    for i, turn in enumerate(body.messages):
        yield from _read_turn(turn, f"messages[{i}]", turns)
        if i % TURNS_A_PIECE == TURNS_A_PIECE - 1:
            yield
    if turns.last_role == "assistant":
        place = f"messages[{len(body.messages) - 1}].role"
        raise InvalidRequestError(place, "the last turn must be the user's: to continue an answer is not supported")
    read = yield from turns.read()
    names = OtherNames("messages", "", stop_field="stop_sequences")
    return Conversation(ChatPrompt(read, tools.source if tools else "", options), tools, names, shows_reasoning)


def _read_turn(turn: Turn, place: str, turns: ChatTurns) -> Cooperative[None]:
    if turn.role not in ROLES:
        raise InvalidRequestError(f"{place}.role", f"must be {' or '.join(ROLES)}, not {shown(turn.role)}")
    if isinstance(turn.content, str):
        turns.add_text(turn.role, turn.content, joins=True)
        return
    for i, block in enumerate(turn.content):
        yield from _read_block(block, turn.role, f"{place}.content[{i}]", turns)
        if i % TURNS_A_PIECE == TURNS_A_PIECE - 1:
            yield


def _read_block(block: Block, role: str, place: str, turns: ChatTurns) -> Cooperative[None]:
    if block.type == "text":
        turns.add_text(role, _set(block.text, f"{place}.text"), joins=True)
    elif block.type == "thinking" and role == "assistant":
        turns.add_reasoning(_set(block.thinking, f"{place}.thinking"))
    elif block.type == "tool_use" and role == "assistant":
        call_id, name = _set(block.id, f"{place}.id"), _set(block.name, f"{place}.name")
        arguments = bytes(block.input).decode()
        turns.add_call(call_id, name, "" if arguments == "null" else arguments, f"{place}.input")
        if len(arguments) > LONG_ARGUMENTS:
            yield
    elif block.type == "tool_result" and role == "user":
        call_id = _set(block.tool_use_id, f"{place}.tool_use_id")
        content = "" if block.content is None else block.content
        text = yield from read_text(content, _TEXT, f"{place}.content")
        turns.add_result(call_id, _ERROR + text if block.is_error else text)
    else:
        kinds = f"text or {'thinking, tool_use' if role == 'assistant' else 'tool_result'} in a turn of the {role}"
        raise InvalidRequestError(f"{place}.type", f"must be {kinds}, not {shown(block.type)}")


def _set(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequestError(field, "must be set")
    return value


def _read_tools(raw: msgspec.Raw, raw_choice: msgspec.Raw) -> OfferedTools | None:
    functions: list[GivenTool] = []
    for i, one in enumerate(read_list(raw, "tools", MAX_TOOLS_BYTES, MAX_TOOLS)):
        tool = decode_field(one, _TOOL, f"tools[{i}]")
        if tool.type != "custom":
            raise InvalidRequestError(f"tools[{i}].type", f"must be custom, not {shown(tool.type)}")
        if is_null(tool.input_schema):
            raise InvalidRequestError(f"tools[{i}].input_schema", "must be set")
        name = _set(tool.name, f"tools[{i}].name")
        functions.append(GivenTool(name, tool.description, tool.input_schema, tool.strict))
    given = read_bounded(raw_choice, _CHOICE, "tool_choice", MAX_CHOICE_BYTES) or ToolChoice("auto")
    if given.type == "tool":
        choice = Choice(name=_set(given.name, "tool_choice.name"))
    elif given.type in _CHOICES:
        choice = Choice(_CHOICES[given.type])
    else:
        kinds = ", ".join([*_CHOICES, "tool"])
        raise InvalidRequestError("tool_choice.type", f"must be one of {kinds}, not {shown(given.type)}")
    return offer(functions, choice, not given.disable_parallel_tool_use, "input_schema")


def _read_thinking(raw: msgspec.Raw) -> tuple[TemplateOptions, bool]:
    """The options of the template, and whether reasoning is shown."""
    given = read_bounded(raw, _THINKING, "thinking", _MAX_THINKING_BYTES)
    if given is None:
        return NO_OPTIONS, True
    if given.type not in _THINKS:
        raise InvalidRequestError("thinking.type", f"must be one of {', '.join(_THINKS)}, not {shown(given.type)}")
    if given.type == "enabled" and (given.budget_tokens is None or given.budget_tokens < 1):
        raise InvalidRequestError("thinking.budget_tokens", "must be set, to a positive number")
    if given.display is not None and given.display not in _DISPLAYS:
        displays = " or ".join(_DISPLAYS)
        raise InvalidRequestError("thinking.display", f"must be {displays}, not {shown(given.display)}")
    if given.type == "disabled":
        return _NO_THINKING, False
    return NO_OPTIONS, given.display != "omitted"


def _read_format(raw: msgspec.Raw) -> StructuredOutput | None:
    config = read_bounded(raw, _OUTPUT, "output_config", MAX_FORMAT_BYTES)
    if config is None or config.format is None:
        return None
    field = "output_config.format"
    if config.format.type != "json_schema":
        raise InvalidRequestError(f"{field}.type", f"must be json_schema, not {shown(config.format.type)}")
    return read_schema(config.format.schema, f"{field}.schema")
