"""How a chat becomes a prompt: `chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from disagg.gateway.openai.schema import ChatBody, TokenizeBody, decode_field
from disagg.gateway.requests.values import is_deeper
from disagg.gateway.text.chat_template import RESERVED, ChatTurn, TemplateOptions
from disagg.proto.errors import InvalidRequestError

MAX_VARIABLES: Final = 32
MAX_VARIABLES_BYTES: Final = 16 << 10
"""Largest size of the variables as JSON."""
MAX_VARIABLE_DEPTH: Final = 8
_FIELD: Final = "chat_template_kwargs"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_VARIABLES: Final = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")


def read_template_options(
    body: ChatBody | TokenizeBody, turns: Sequence[ChatTurn], effort: str | None = None
) -> TemplateOptions:
    """The options in `body`, for a conversation. `effort` is `reasoning_effort`, which templates know as a variable.
    Raises `InvalidRequestError`."""
    variables = _read_variables(body.chat_template_kwargs)
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidRequestError("reasoning_effort", f"must be one of {', '.join(EFFORTS)}, not {effort[:64]!r}")
        variables.setdefault("reasoning_effort", effort)
    continues = bool(body.continue_final_message)
    if continues:
        _check_last(body, turns)
    begins = not continues and body.add_generation_prompt is not False
    return TemplateOptions(msgspec.json.encode(variables).decode() if variables else "", begins, continues)


def _check_last(body: ChatBody | TokenizeBody, turns: Sequence[ChatTurn]) -> None:
    if body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message", "contradicts add_generation_prompt: no other turn begins where one goes on"
        )
    if turns and turns[-1].role != "assistant":
        raise InvalidRequestError(
            "continue_final_message",
            f"the last message must be the assistant's, not of the role {turns[-1].role[:64]!r}",
        )
    if turns and '"tool_calls"' in turns[-1].extra and "tool_calls" in msgspec.json.decode(turns[-1].extra):
        raise InvalidRequestError("continue_final_message", "the last message has tool_calls, which end it")


def _read_variables(raw: msgspec.Raw) -> dict[str, Any]:
    num_bytes = memoryview(raw).nbytes
    if num_bytes > MAX_VARIABLES_BYTES:
        raise InvalidRequestError(_FIELD, f"at most {MAX_VARIABLES_BYTES} bytes of JSON, not {num_bytes}")
    given = decode_field(raw, _VARIABLES, _FIELD) or {}
    if len(given) > MAX_VARIABLES:
        raise InvalidRequestError(_FIELD, f"at most {MAX_VARIABLES}, not {len(given)}")
    variables: dict[str, Any] = {}
    for name, value in given.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(_FIELD, f"{name[:64]!r} is no name of a variable")
        if name in RESERVED:
            raise InvalidRequestError(f"{_FIELD}.{name}", "is set by the gateway or by a field of its own")
        variables[name] = decode_field(value, _ANY, f"{_FIELD}.{name}")
        if is_deeper(variables[name], MAX_VARIABLE_DEPTH):
            raise InvalidRequestError(f"{_FIELD}.{name}", f"must not be nested more than {MAX_VARIABLE_DEPTH} deep")
    return variables


_ANY: Final = msgspec.json.Decoder(Any)
