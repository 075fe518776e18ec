"""An answer as OpenAI's response object, and as the events of its stream, in their order.

    created, in_progress
    reasoning:  output_item.added, content_part.added, reasoning_text.delta*, reasoning_text.done, content_part.done,
                output_item.done
    a message:  output_item.added, content_part.added, output_text.delta*, output_text.done, content_part.done,
                output_item.done
    a call:     output_item.added, function_call_arguments.delta, function_call_arguments.done, output_item.done
    completed | incomplete | failed

Each event has the next `sequence_number`. A call is found when it is complete, so its arguments are one delta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.gateway.http.errors import short_message
from disagg.gateway.openai.chunks import encode_text
from disagg.gateway.other_apis.responses.to_input import ParsedResponse
from disagg.gateway.other_apis.shared.answers import AnswerWriter, Part, PartReader, one_line, typed_event
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.segments import ToolCall
from disagg.proto.errors import DisaggError


@dataclass(frozen=True, slots=True)
class _Form:
    """The fields and names that an item of text has, for messages or for reasoning."""

    prefix: str
    """Prefix of the item's id."""
    head: dict[str, Any]
    """Fields of the item."""
    event: str
    """Prefix of the names of the text's events, such as `response.output_text`."""
    part: dict[str, Any]
    """Fields of its part beside the text."""
    shared: dict[str, Any]
    """Further fields of the events of its text."""


ID_PREFIX: Final = "resp_"
"""Begins the id of a response."""
_NO_LOGPROBS: Final[dict[str, Any]] = {"logprobs": []}
_MESSAGE: Final = _Form(
    "msg",
    {"type": "message", "role": "assistant"},
    "response.output_text",
    {"type": "output_text", "annotations": [], "logprobs": []},
    _NO_LOGPROBS,
)
_REASONING: Final = _Form(
    "rs", {"type": "reasoning", "summary": []}, "response.reasoning_text", {"type": "reasoning_text"}, {}
)
_EMPTY: Final = {"type": "object", "properties": {}}
"""Arguments of a function without parameters."""


class ResponseWriter(AnswerWriter):
    """Writes one response.

    Args:
        parsed: the call.
        request_id: ids begin with it.
        created: seconds since 1970.
        reader: of its deltas.
    """

    def __init__(self, parsed: ParsedResponse, request_id: str, created: int, reader: PartReader) -> None:
        self._id = request_id
        self._reader = reader
        head = {"id": f"{ID_PREFIX}{request_id}", "object": "response", "created_at": created}
        self._shared = head | _repeated(parsed)
        self._output: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Pieces of text of the item that is being written."""
        self._form: _Form | None = None
        """The form of that item; `None` if none is being written."""
        self._delta_head = b""
        """Bytes of a delta event of that item up to the sequence number."""
        self._number = 0
        self._ending: dict[str, Any] = {"status": "in_progress"}

    @override
    def begin(self, num_prompt_tokens: int) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response()) for kind in kinds)

    @override
    def delta(self, delta: Delta) -> bytes:
        reasoning = self._text(delta.reasoning, _REASONING) if delta.reasoning else b""
        return reasoning + b"".join(map(self._part, self._reader.read(delta)))

    @override
    def finish(self, finish: Finish) -> bytes:
        is_whole = finish.reason == "stop"
        rest = b"" if self._output else self._open(_MESSAGE)
        rest += self._close("completed" if is_whole else "incomplete")
        self._ending = {"status": "completed", "usage": _usage(finish)}
        if not is_whole:
            reason = "max_output_tokens" if finish.reason == "length" else "content_filter"
            self._ending |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
        return rest + self._event(f"response.{self._ending['status']}", response=self._response())

    @override
    def failed(self, error: DisaggError) -> bytes:
        self._ending = {"status": "failed", "error": {"code": error.code, "message": short_message(error)}}
        return self._event("response.failed", response=self._response())

    @override
    def whole(self) -> bytes:
        return one_line(self._response())

    def _response(self) -> dict[str, Any]:
        return {**self._shared, "output": self._output, **self._ending}

    def _part(self, part: Part) -> bytes:
        return self._call(part) if isinstance(part, ToolCall) else self._text(part)

    def _text(self, text: str, form: _Form = _MESSAGE) -> bytes:
        opened = b"" if self._form is form else self._open(form)
        self._texts.append(text)
        self._number += 1
        numbered = b'%b"sequence_number":%d,"delta":%b}\n\n' % (self._delta_head, self._number - 1, encode_text(text))
        return opened + numbered

    def _open(self, form: _Form) -> bytes:
        """Begin an item of text, after closing the one that is being written."""
        closed, index = self._close("completed"), len(self._output)
        item = {"id": f"{form.prefix}_{self._id}_{index}", **form.head, "status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=index, item=item)
        self._output.append(item)
        at, kind = self._at_item(), f"{form.event}.delta"
        head = one_line({"type": kind, **at, **form.shared})[:-1]
        self._form, self._delta_head = form, b"event: %b\ndata: %b," % (kind.encode(), head)
        return closed + added + self._event("response.content_part.added", **at, part={**form.part, "text": ""})

    def _close(self, status: str) -> bytes:
        form, self._form = self._form, None
        if form is None:
            return b""
        item, text, at = self._output[-1], "".join(self._texts), self._at_item()
        self._texts.clear()
        part = {**form.part, "text": text}
        item |= {"status": status, "content": [part]}
        return (
            self._event(f"{form.event}.done", **at, text=text, **form.shared)
            + self._event("response.content_part.done", **at, part=part)
            + self._event("response.output_item.done", output_index=at["output_index"], item=item)
        )

    def _call(self, call: ToolCall) -> bytes:
        closed = self._close("completed")
        index, name = len(self._output), f"{self._id}_{len(self._output)}"
        item = {
            "id": f"fc_{name}",
            "type": "function_call",
            "call_id": f"call_{name}",
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        at = {"item_id": item["id"], "output_index": index}
        added = self._event("response.output_item.added", output_index=index, item=item)
        item = {**item, "arguments": call.arguments, "status": "completed"}
        self._output.append(item)
        return (
            closed
            + added
            + self._event("response.function_call_arguments.delta", **at, delta=call.arguments)
            + self._event("response.function_call_arguments.done", **at, name=call.name, arguments=call.arguments)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _at_item(self) -> dict[str, Any]:
        index = len(self._output) - 1
        return {"item_id": self._output[index]["id"], "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return typed_event(kind, {"sequence_number": self._number - 1, **fields})


def _usage(finish: Finish) -> dict[str, Any]:
    prompt, output = finish.num_prompt_tokens, finish.num_output_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": finish.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": finish.num_reasoning_tokens},
        "total_tokens": prompt + output,
    }


def _repeated(parsed: ParsedResponse) -> dict[str, Any]:
    """The fields that a response repeats of its request, and those that are always the same here."""
    body, choice = parsed.body, parsed.choice
    named = {"type": "function", "name": choice.name}
    return {
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": parsed.metadata,
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _format(parsed)},
        "tool_choice": choice.mode if choice.name is None else named,
        "tools": [_tool(tool._asdict()) for tool in parsed.functions],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    parameters = msgspec.json.decode(given["schema"])
    return {
        "type": "function",
        "name": given["name"],
        "description": given["description"],
        "parameters": _EMPTY if parameters is None else parameters,
        "strict": bool(given["strict"]),
    }


def _format(parsed: ParsedResponse) -> dict[str, Any]:
    given = parsed.format
    if given.type != "json_schema":
        return {"type": given.type}
    return {
        "type": given.type,
        "name": given.name,
        "description": given.description,
        "schema": msgspec.json.decode(given.schema),
        "strict": bool(given.strict),
    }
