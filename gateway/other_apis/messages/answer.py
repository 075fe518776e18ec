"""An answer as Anthropic's message, and as the events of its stream, in their order.

    message_start, ping
    each block:  content_block_start, content_block_delta*, content_block_stop
    message_delta (reason and usage), message_stop

A call is found when it is complete, so its input is one delta. What was cached is known at the end only:
`message_start` counts the whole prompt as input, and the cumulative usage of `message_delta` replaces that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.gateway.openai.chunks import encode_text
from disagg.gateway.other_apis.shared.answers import AnswerWriter, Part, PartReader, one_line, typed_event
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.segments import ToolCall
from disagg.proto.errors import DisaggError

ID_PREFIX: Final = "msg_"
"""Begins the id of a message."""
_PING: Final = typed_event("ping", {})
_STOP: Final = typed_event("message_stop", {})
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}


class MessageWriter(AnswerWriter):
    """Writes one message.

    Args:
        model: that answers.
        request_id: ids begin with it.
        reader: of its deltas.
        error_event: writes an error.
        shows_reasoning: whether reasoning is written, as blocks before the text.
    """

    def __init__(
        self,
        model: str,
        request_id: str,
        reader: PartReader,
        error_event: Callable[[DisaggError], bytes],
        shows_reasoning: bool = True,
    ) -> None:
        self._shows_reasoning = shows_reasoning
        self._id = request_id
        self._reader = reader
        self._error_event = error_event
        self._head = {"id": f"{ID_PREFIX}{request_id}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Pieces of text of the block that is being written."""
        self._kind = ""
        """Type of that block, `text` or `thinking`, which also names its text field; empty if none is being written."""
        self._delta_head = b""
        """Bytes of a delta event of that block up to the text."""
        self._ending: dict[str, Any] = {}

    @override
    def begin(self, num_prompt_tokens: int) -> bytes:
        usage = _usage(num_prompt_tokens, 0, 0)
        stop = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**self._head, "content": [], **stop, "usage": usage}
        return typed_event("message_start", {"message": message}) + _PING

    @override
    def delta(self, delta: Delta) -> bytes:
        shown = self._text(delta.reasoning, "thinking") if delta.reasoning and self._shows_reasoning else b""
        return shown + b"".join(map(self._part, self._reader.read(delta)))

    @override
    def finish(self, finish: Finish) -> bytes:
        rest = self._close_text()
        stop = {"stop_reason": self._reason(finish), "stop_sequence": finish.stop_string or None}
        usage = _usage(finish.num_prompt_tokens, finish.num_cached_tokens, finish.num_output_tokens)
        if finish.num_reasoning_tokens:
            usage["output_tokens_details"] = {"thinking_tokens": finish.num_reasoning_tokens}
        self._ending = {**stop, "usage": usage}
        return rest + typed_event("message_delta", {"delta": stop, "usage": usage}) + _STOP

    @override
    def failed(self, error: DisaggError) -> bytes:
        return self._error_event(error)

    @override
    def whole(self) -> bytes:
        return one_line({**self._head, "content": self._blocks, **self._ending})

    def _reason(self, finish: Finish) -> str:
        if finish.stop_string:
            return "stop_sequence"
        return "tool_use" if finish.reason == "stop" and self._reader.num_calls else _REASONS[finish.reason]

    def _part(self, part: Part) -> bytes:
        return self._call(part) if isinstance(part, ToolCall) else self._text(part)

    def _text(self, text: str, kind: str = "text") -> bytes:
        opened = b""
        if self._kind != kind:
            opened, index = self._close_text(), len(self._blocks)
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            opened += typed_event("content_block_start", {"index": index, "content_block": block})
            self._blocks.append(block)
            self._kind = kind
            self._delta_head = (
                b"event: content_block_delta\n"
                b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b_delta","%b":'
                % (index, kind.encode(), kind.encode())
            )
        self._texts.append(text)
        return opened + self._delta_head + encode_text(text) + b"}}\n\n"

    def _close_text(self) -> bytes:
        if not self._kind:
            return b""
        self._blocks[-1][self._kind] = "".join(self._texts)
        self._texts.clear()
        self._kind = ""
        return typed_event("content_block_stop", {"index": len(self._blocks) - 1})

    def _call(self, call: ToolCall) -> bytes:
        closed, index = self._close_text(), len(self._blocks)
        block = {"type": "tool_use", "id": f"toolu_{self._id}_{index}", "name": call.name, "input": {}}
        started = typed_event("content_block_start", {"index": index, "content_block": block})
        self._blocks.append({**block, "input": msgspec.Raw(call.arguments.encode())})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return (
            closed
            + started
            + typed_event("content_block_delta", {"index": index, "delta": delta})
            + typed_event("content_block_stop", {"index": index})
        )


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    """The usage of a message; `input_tokens` are those that were not cached."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }
