"""An answer as OpenAI's response object, and as the events of its stream, in their order.

    created, in_progress
    a message:  output_item.added, content_part.added, output_text.delta*, output_text.done, content_part.done,
                output_item.done
    a call:     output_item.added, function_call_arguments.delta, function_call_arguments.done, output_item.done
    completed | incomplete | failed

Each event has the next `sequence_number`. A call is found when it is complete, so its arguments are one delta.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.proto.errors import DisaggError
from disagg.router.gateway.answers.generation import Delta, Finish
from disagg.router.gateway.http.chunks import encode_text
from disagg.router.gateway.http.foreign.answers import AnswerWriter, PartReader, one_line, typed_event
from disagg.router.gateway.http.responses.to_input import ParsedResponse
from disagg.router.gateway.http.transport.errors import short_message
from disagg.router.gateway.text.tool_calls import Part, ToolCall

_DELTA: Final = "response.output_text.delta"
_EMPTY: Final = {"type": "object", "properties": {}}
"""Arguments of a function without parameters."""


class ResponseWriter(AnswerWriter):
    """Writes one response.

    Args:
        parsed: the call.
        request_id: ids begin with it.
        created: seconds since 1970.
        reader: finds the calls.
    """

    def __init__(self, parsed: ParsedResponse, request_id: str, created: int, reader: PartReader) -> None:
        self._id = request_id
        self._reader = reader
        self._shared = {"id": f"resp_{request_id}", "object": "response", "created_at": created} | _repeated(parsed)
        self._output: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Of the message that is written."""
        self._delta_head = b""
        """Of the events of its text, up to their number; empty where none is written."""
        self._number = 0
        self._ending: dict[str, Any] = {"status": "in_progress"}

    @override
    def begin(self, num_prompt_tokens: int) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response()) for kind in kinds)

    @override
    def delta(self, delta: Delta) -> bytes:
        return b"".join(map(self._part, self._reader.feed(delta.text)))

    @override
    def finish(self, finish: Finish) -> bytes:
        rest = b"".join(map(self._part, self._reader.finish()))
        is_whole = finish.reason == "stop"
        if not self._output:
            rest += self._open_message()
        rest += self._close_message("completed" if is_whole else "incomplete")
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

    def _text(self, text: str) -> bytes:
        opened = b"" if self._delta_head else self._open_message()
        self._texts.append(text)
        self._number += 1
        numbered = b'%b"sequence_number":%d,"delta":%b}\n\n' % (self._delta_head, self._number - 1, encode_text(text))
        return opened + numbered

    def _open_message(self) -> bytes:
        index = len(self._output)
        item = {
            "id": f"msg_{self._id}_{index}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        added = self._event("response.output_item.added", output_index=index, item=item)
        self._output.append(item)
        at = self._at_message()
        head = one_line({"type": _DELTA, **at, "logprobs": []})[:-1]
        self._delta_head = b"event: %b\ndata: %b," % (_DELTA.encode(), head)
        return added + self._event("response.content_part.added", **at, part=_text_part(""))

    def _close_message(self, status: str) -> bytes:
        if not self._delta_head:
            return b""
        item, text, at = self._output[-1], "".join(self._texts), self._at_message()
        self._texts.clear()
        self._delta_head = b""
        part = _text_part(text)
        item |= {"status": status, "content": [part]}
        return (
            self._event("response.output_text.done", **at, text=text, logprobs=[])
            + self._event("response.content_part.done", **at, part=part)
            + self._event("response.output_item.done", output_index=at["output_index"], item=item)
        )

    def _call(self, call: ToolCall) -> bytes:
        closed = self._close_message("completed")
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

    def _at_message(self) -> dict[str, Any]:
        index = len(self._output) - 1
        return {"item_id": self._output[index]["id"], "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return typed_event(kind, {"sequence_number": self._number - 1, **fields})


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(finish: Finish) -> dict[str, Any]:
    prompt, output = finish.num_prompt_tokens, finish.num_output_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": finish.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


def _repeated(parsed: ParsedResponse) -> dict[str, Any]:
    """What a response repeats of its request, and all that is always the same here."""
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
