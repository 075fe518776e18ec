"""Answers of a chat with tools: `tool_calls` beside the text, complete and in chunks."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.router.gateway.http.chunks import ChatChoices, encode_text, reasoning_field
from disagg.router.gateway.http.tools import OfferedTools
from disagg.router.gateway.text.tokenizer import Tokenizer
from disagg.router.gateway.text.tool_calls import Part, ToolCall, ToolParser, tool_parser

_NULL: Final = b"null"
_CALLED: Final = b'"tool_calls"'


class ToolChoices(ChatChoices):
    """Finds the calls in the text; one that is complete is one piece of a stream.

    Args:
        call_id: of the request; ids of calls begin with it, so no two are alike.
    """

    def __init__(self, tokenizer: Tokenizer, tools: OfferedTools, call_id: str) -> None:
        super().__init__(tokenizer)
        self._format = tokenizer.tool_format
        self._tools = tools
        self._call_id = call_id
        self._parsers: dict[int, ToolParser] = {}
        self._num_calls: dict[int, int] = {}

    @override
    def chunk(self, index: int, text: str, logprobs: bytes, reason: bytes, reasoning: str = "") -> bytes:
        content, calls = self._parts(index, text, reason != _NULL)
        delta = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        fields = msgspec.json.encode(delta)[1:-1]
        pieces = [fields] if fields else []
        if reasoning:
            pieces.append(reasoning_field(reasoning)[1:])
        if content or not (calls or reasoning):
            pieces.append(b'"content":' + encode_text(content))
        if calls:
            pieces.append(b'"tool_calls":[' + b",".join(_call(call, with_index=True) for call in calls) + b"]")
        return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (
            index,
            b",".join(pieces),
            logprobs,
            self._reason(index, reason),
        )

    @override
    def last_chunk(self, index: int, reason: bytes) -> bytes:
        return self.chunk(index, "", _NULL, reason)

    @override
    def answer(self, index: int, text: str, logprobs: bytes, reason: bytes, reasoning: str = "") -> bytes:
        content, calls = self._parts(index, text, True)
        shown = b"" if not calls else b',"tool_calls":[' + b",".join(_call(call) for call in calls) + b"]"
        return (
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null%b%b},"logprobs":%b,"finish_reason":%b}'
            % (
                index,
                encode_text(content) if content or not (calls or reasoning) else _NULL,
                reasoning_field(reasoning),
                shown,
                logprobs,
                self._reason(index, reason),
            )
        )

    def _parts(self, index: int, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = tool_parser(self._format, self._tools.names)
        parts: list[Part] = parser.feed(text)
        if ended:
            parts = parts + parser.finish()
        calls = []
        for part in parts:
            number = self._num_calls.get(index, 0)
            if isinstance(part, ToolCall) and (number == 0 or self._tools.parallel):
                self._num_calls[index] = number + 1
                calls.append(self._shown(part, index, number))
        return "".join(part for part in parts if isinstance(part, str)), calls

    def _shown(self, call: ToolCall, index: int, number: int) -> dict[str, Any]:
        return {
            "index": number,
            "id": f"call_{self._call_id}_{index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _reason(self, index: int, reason: bytes) -> bytes:
        return _CALLED if reason == b'"stop"' and self._num_calls.get(index) else reason


def _call(call: dict[str, Any], with_index: bool = False) -> bytes:
    return msgspec.json.encode(call if with_index else {key: call[key] for key in call if key != "index"})
