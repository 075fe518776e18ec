"""Tools of a chat: what a body offers, checked and bounded; and calls, in the answers and in earlier turns.

Where calls must happen (`tool_choice: required` or a named function), a grammar of calls makes the model write them.
With `auto` answers are not constrained, also those of functions with `strict`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from disagg.gateway.openai.schema import ABSENT, Message, decode_field, wrong_value
from disagg.gateway.requests.exact_numbers import check_numbers
from disagg.gateway.requests.part_counts import MAX_JSON_PARTS, count_json
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.requests.values import is_deeper
from disagg.gateway.text.tool_calls import MAX_CALLS, Function, ToolFormat, call_grammar
from disagg.gateway.text.written_json import compact, read_json
from disagg.proto.errors import InvalidRequestError

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 256 << 10
"""Largest size of the JSON of all tools of a call."""
MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_SCHEMA_DEPTH: Final = 32
MAX_CHOICE_BYTES: Final = 1024
"""Largest size of the JSON of `tool_choice`."""
LONG_ARGUMENTS: Final = 2048
"""Characters of calls after which other work of the event loop has its turn."""
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES: Final = ("auto", "none", "required")


class OfferedFunction(msgspec.Struct, frozen=True):
    """The function of a tool."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """One of `tools`. Only functions are supported."""

    type: str
    function: OfferedFunction


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call, with the JSON of its arguments."""

    name: str
    arguments: str


class Call(msgspec.Struct, frozen=True):
    """One of the `tool_calls` of an earlier turn."""

    id: str
    function: CalledFunction
    type: str = "function"


class NamedFunction(msgspec.Struct, frozen=True):
    """The function of a choice."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """The `tool_choice` that names a function."""

    type: str
    function: NamedFunction


_CHOICE: Final = msgspec.json.Decoder(str | NamedChoice | None)
_TOOLS: Final = msgspec.json.Decoder(list[Tool] | None)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)
_ANY: Final = msgspec.json.Decoder()


class OfferedTools(NamedTuple):
    """What a model may call in one answer."""

    names: frozenset[str]
    source: str
    """JSON for the chat template."""
    parallel: bool
    """Whether an answer may have several calls; else the first one counts."""
    forced: tuple[Function, ...] = ()
    """Where the answer must be calls: of which functions."""
    forced_field: str = "tools"
    """What errors name where their grammar cannot be used."""

    def structure(self, tool_format: ToolFormat) -> StructuredOutput | None:
        """What an answer must be; `None` where it may be text."""
        if not self.forced:
            return None
        grammar = call_grammar(tool_format, self.forced, single=not self.parallel)
        return StructuredOutput("grammar", grammar, self.forced_field)


def read_tools(tools: msgspec.Raw, choice: msgspec.Raw, parallel: bool | None) -> OfferedTools | None:
    """The tools of a body; `None` where the model may call none. Raises `InvalidRequestError` naming the field."""
    num_bytes = memoryview(tools).nbytes
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequestError("tools", f"at most {MAX_TOOLS_BYTES} bytes of JSON, not {num_bytes}")
    num_tools = len(decode_field(tools, _LIST, "tools") or ())
    if num_tools > MAX_TOOLS:
        raise InvalidRequestError("tools", f"at most {MAX_TOOLS}, not {num_tools}")
    chosen = _read_choice(choice)
    given = decode_field(tools, _TOOLS, "tools") or []
    offered = [_checked(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = frozenset(tool.function.name for tool in given)
    if len(names) < len(given):
        raise InvalidRequestError("tools", "two functions have the same name")
    named = chosen.function.name if isinstance(chosen, NamedChoice) else None
    if named is not None and named not in names:
        raise InvalidRequestError("tool_choice.function.name", f"no function of tools is called {named[:64]!r}")
    if chosen == "required" and not given:
        raise InvalidRequestError("tool_choice", "required needs tools")
    if not given or chosen == "none":
        return None
    source = msgspec.json.encode(offered).decode()
    if chosen == "auto":
        return OfferedTools(names, source, parallel is not False)
    places = [i for i, tool in enumerate(given) if named is None or tool.function.name == named]
    forced = tuple(_forced(given[i].function, f"tools[{i}].function.parameters") for i in places)
    return OfferedTools(
        names=frozenset(function.name for function in forced),
        source=source,
        parallel=named is None and parallel is not False,
        forced=forced,
        forced_field=f"tools[{places[0]}].function.parameters" if len(places) == 1 else "tools",
    )


def _read_choice(raw: msgspec.Raw) -> str | NamedChoice:
    num_bytes = memoryview(raw).nbytes
    if num_bytes > MAX_CHOICE_BYTES:
        raise InvalidRequestError("tool_choice", f"at most {MAX_CHOICE_BYTES} bytes of JSON, not {num_bytes}")
    choice = decode_field(raw, _CHOICE, "tool_choice") or "auto"
    kind = choice if isinstance(choice, str) else choice.type
    if kind not in (_CHOICES if isinstance(choice, str) else ("function",)):
        raise InvalidRequestError(
            "tool_choice", f"must be auto, none, required or a function's name, not {kind[:64]!r}"
        )
    return choice


def _forced(function: OfferedFunction, place: str) -> Function:
    schema = msgspec.json.decode(function.parameters)
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    else:
        check_numbers(bytes(function.parameters).decode(), place)
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise InvalidRequestError(f"{place}.type", "must be object: arguments have names")
    return Function(function.name, schema, bool(function.strict))


def has_extra(message: Message) -> bool:
    """Whether a turn has more than role and content."""
    return bool(message.tool_calls or message.role == "tool" or message.reasoning_content or message.reasoning)


def read_extra(message: Message, index: int) -> str:
    """What a turn has beside role and content, as JSON for the chat template; empty without. Raises
    `InvalidRequestError`."""
    extra: dict[str, Any] = {}
    if message.tool_calls:
        place = f"messages[{index}].tool_calls"
        if message.role != "assistant":
            raise InvalidRequestError(place, "only the assistant calls tools")
        extra["tool_calls"] = _calls(message.tool_calls, place)
    if reasoning := message.reasoning_content or message.reasoning:
        if message.role != "assistant":
            field = "reasoning_content" if message.reasoning_content else "reasoning"
            raise InvalidRequestError(f"messages[{index}].{field}", "only the assistant reasons")
        extra["reasoning_content"] = reasoning
    if message.role == "tool":
        if message.tool_call_id is None:
            raise InvalidRequestError(f"messages[{index}].tool_call_id", "must be set")
        extra["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            extra["name"] = message.name
    return compact(extra) if extra else ""


def _checked(tool: Tool, place: str) -> dict[str, Any]:
    function = tool.function
    if tool.type != "function":
        raise InvalidRequestError(f"{place}.type", f"must be function, not {tool.type[:64]!r}")
    if not _NAME.fullmatch(function.name):
        raise InvalidRequestError(f"{place}.function.name", "must be 1 to 64 of a-z, A-Z, 0-9, _ and -")
    num_bytes = memoryview(function.parameters).nbytes
    place = f"{place}.function.parameters"
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(place, f"at most {MAX_SCHEMA_BYTES} bytes of JSON, not {num_bytes}")
    schema = decode_field(function.parameters, _ANY, place)
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise InvalidRequestError(place, "must be an object")
    _check_depth(schema, place)
    shown = {"name": function.name, "description": function.description or "", "parameters": schema}
    return {"type": "function", "function": shown}


def _check_depth(value: Any, place: str) -> None:
    if is_deeper(value, MAX_SCHEMA_DEPTH):
        raise InvalidRequestError(place, f"must not be nested more than {MAX_SCHEMA_DEPTH} deep")


def check_parts(arguments: str, field: str) -> None:
    """Raises `InvalidRequestError` if the JSON of calls' arguments has too many values, before anything is built from
    it: in a body it is one string."""
    if sum(map(arguments.count, '"[{,')) <= MAX_JSON_PARTS:
        return
    try:
        for _ in count_json(arguments.encode("utf-8", "surrogatepass"), MAX_JSON_PARTS):
            pass
    except InvalidRequestError:
        raise InvalidRequestError(field, f"arguments have more than {MAX_JSON_PARTS} values") from None


def _calls(given: Sequence[Any], place: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or len(given) > MAX_CALLS:
        raise InvalidRequestError(place, f"must be a list of at most {MAX_CALLS} calls")
    found: list[Call] = []
    for i, item in enumerate(given):
        try:
            found.append(msgspec.convert(item, Call))
        except msgspec.ValidationError as error:
            raise wrong_value(error, f"{place}[{i}]") from None
    check_parts("\n".join([call.function.arguments for call in found]), place)
    calls = []
    for i, call in enumerate(found):
        try:
            arguments = read_json(call.function.arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidRequestError(f"{place}[{i}]", f"is no call of a function: {error}") from None
        if not isinstance(arguments, dict):
            raise InvalidRequestError(f"{place}[{i}].function.arguments", "must be a JSON object")
        _check_depth(arguments, f"{place}[{i}].function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls
