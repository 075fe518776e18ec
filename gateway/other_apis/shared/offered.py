"""Tools of another API as those of a chat: one check and one grammar for all. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from disagg.gateway.openai.tools import OfferedTools, read_tools
from disagg.proto.errors import InvalidRequestError

_PARAMETERS: Final = "parameters"
_FIELD: Final = re.compile(r"(?P<tool>tools\[\d+\])\.function(?P<rest>.*)")


class GivenTool(NamedTuple):
    """A function as a client describes it, in any API."""

    name: str
    description: str | None
    schema: msgspec.Raw
    """JSON schema of the function's arguments."""
    strict: bool | None


class Choice(NamedTuple):
    """The client's choice of the calls that an answer may have."""

    mode: str = "auto"
    """`auto`, `none` or `required`; ignored if `name` is set."""
    name: str | None = None
    """Name of the function that must be called."""


def offer(
    tools: Sequence[GivenTool], choice: Choice, parallel: bool | None, schema_field: str = _PARAMETERS
) -> OfferedTools | None:
    """The tools that a chat offers its model; `None` if no call is possible.

    Args:
        tools: few, and bounded in size.
        choice: among them.
        parallel: whether an answer may have several calls.
        schema_field: what the API calls the schema of the arguments.

    Raises:
        InvalidRequestError: naming the field of that API.
    """
    chosen: Any = choice.mode if choice.name is None else {"type": "function", "function": {"name": choice.name}}
    functions = [{"type": "function", "function": _as_in_chats(tool)} for tool in tools]
    try:
        offered = read_tools(_raw(functions), _raw(chosen), parallel)
    except InvalidRequestError as error:
        message = error.message.removeprefix(f"{error.field}: ")
        raise type(error)(_renamed(error.field, schema_field), message) from None
    return None if offered is None else offered._replace(forced_field=_renamed(offered.forced_field, schema_field))


def _as_in_chats(tool: GivenTool) -> dict[str, Any]:
    shown = {"name": tool.name, "description": tool.description, _PARAMETERS: tool.schema, "strict": tool.strict}
    return {key: value for key, value in shown.items() if value is not None}


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _renamed(field: str, schema_field: str) -> str:
    if field.startswith("tool_choice."):
        return "tool_choice.name"
    found = _FIELD.fullmatch(field)
    if found is None:
        return field
    rest = found["rest"]
    prefix = f".{_PARAMETERS}"
    return found["tool"] + (f".{schema_field}{rest.removeprefix(prefix)}" if rest.startswith(prefix) else rest)
