"""A conversation as it is read from another API's items or blocks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from disagg.gateway.openai.tools import MAX_SCHEMA_DEPTH, check_parts
from disagg.gateway.requests.part_counts import TURNS_A_PIECE, Cooperative
from disagg.gateway.requests.values import is_deeper
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tool_calls import MAX_CALLS
from disagg.gateway.text.written_json import compact, read_json
from disagg.proto.errors import InvalidRequestError


@dataclass(slots=True)
class _Turn:
    role: str
    texts: list[str]
    reasoning: list[str] = field(default_factory=list)
    """Pieces of reasoning, which come before the turn's text."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    answered_call: str | None = None
    """Id of the call whose result this turn is."""

    def read(self) -> ChatTurn:
        extra: dict[str, Any] = {}
        if self.calls:
            extra["tool_calls"] = self.calls
        if self.reasoning:
            extra["reasoning_content"] = "\n".join(self.reasoning)
        if self.answered_call is not None:
            extra["tool_call_id"] = self.answered_call
        return ChatTurn(self.role, "\n".join(self.texts), compact(extra) if extra else "")


class ChatTurns:
    """The turns of a conversation in their order, while it is read."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def add_text(self, role: str, text: str, joins: bool = False) -> None:
        """Add a turn of text. It continues the last turn if that has the same role and only reasoning, or, with
        `joins`, only reasoning and text."""
        last = self._turns[-1] if self._turns else None
        is_open = last is not None and last.role == role and not last.calls and last.answered_call is None
        if last is not None and is_open and (joins or not last.texts):
            last.texts.append(text)
            return
        self._turns.append(_Turn(role, [text]))

    def add_reasoning(self, text: str) -> None:
        """Add reasoning of the assistant, before the text or call that follows."""
        last = self._turns[-1] if self._turns else None
        if last is None or last.role != "assistant" or last.texts or last.calls:
            last = _Turn("assistant", [])
            self._turns.append(last)
        last.reasoning.append(text)

    def add_call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Add a call of a function to the assistant's last turn, or to a new one after another role's turn.

        Args:
            call_id: which its result names.
            name: of the function.
            arguments: JSON of an object, or empty for one without any.
            place: what errors call it.

        Raises:
            InvalidRequestError: for too many calls in a turn, and arguments that are no object or too deep.
        """
        if not self._turns or self._turns[-1].role != "assistant":
            self._turns.append(_Turn("assistant", []))
        calls = self._turns[-1].calls
        if len(calls) >= MAX_CALLS:
            raise InvalidRequestError(place, f"at most {MAX_CALLS} calls in a turn")
        function = {"name": name, "arguments": _arguments(arguments, place)}
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a call as a turn of its own."""
        self._turns.append(_Turn("tool", [text], answered_call=call_id))

    @property
    def last_role(self) -> str:
        """Role of the last turn; empty if there is none."""
        return self._turns[-1].role if self._turns else ""

    def read(self) -> Cooperative[tuple[ChatTurn, ...]]:
        """All turns as the chat template takes them. Yields between pieces of work."""
        turns: list[ChatTurn] = []
        for turn in self._turns:
            if len(turns) % TURNS_A_PIECE == TURNS_A_PIECE - 1:
                yield
            turns.append(turn.read())
        return tuple(turns)


def _arguments(given: str, place: str) -> dict[str, Any]:
    check_parts(given, place)
    try:
        value = read_json(given or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(place, f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(place, "must be a JSON object")
    if is_deeper(value, MAX_SCHEMA_DEPTH):
        raise InvalidRequestError(place, f"must not be nested more than {MAX_SCHEMA_DEPTH} deep")
    return value
