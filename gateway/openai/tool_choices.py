"""Answers of a chat with tools: `tool_calls` beside the text, complete and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.gateway.openai.chunks import ChatChoices, encode_text, reasoning_field
from disagg.gateway.text.segments import ToolCall
from disagg.gateway.text.tokenizer import Tokenizer

_NULL: Final = b"null"
_CALLED: Final = b'"tool_calls"'


class ToolChoices(ChatChoices):
    """A call is one piece of a stream.

    Args:
        tokenizer: of the model.
        is_parallel: whether an answer may have several calls; else those after the first one are left out.
        call_id: of the request; ids of calls begin with it, so no two are alike.
    """

    def __init__(self, tokenizer: Tokenizer, is_parallel: bool, call_id: str) -> None:
        super().__init__(tokenizer)
        self._is_parallel = is_parallel
        self._call_id = call_id
        self._num_calls: dict[int, int] = {}

    @override
    def chunk(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        shown = self._shown(index, calls)
        delta = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        fields = msgspec.json.encode(delta)[1:-1]
        pieces = [fields] if fields else []
        if reasoning:
            pieces.append(reasoning_field(reasoning)[1:])
        if text or not (shown or reasoning):
            pieces.append(b'"content":' + encode_text(text))
        if shown:
            pieces.append(b'"tool_calls":[' + b",".join(_call(call, with_index=True) for call in shown) + b"]")
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
    def answer(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        shown = self._shown(index, calls)
        tool_calls = b"" if not shown else b',"tool_calls":[' + b",".join(map(_call, shown)) + b"]"
        return (
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null%b%b},"logprobs":%b,"finish_reason":%b}'
            % (
                index,
                encode_text(text) if text or not (shown or reasoning) else _NULL,
                reasoning_field(reasoning),
                tool_calls,
                logprobs,
                self._reason(index, reason),
            )
        )

    def _shown(self, index: int, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """The calls that the client gets, as it gets them."""
        shown = []
        for call in calls:
            number = self._num_calls.get(index, 0)
            if number and not self._is_parallel:
                break
            self._num_calls[index] = number + 1
            shown.append(
                {
                    "index": number,
                    "id": f"call_{self._call_id}_{index}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            )
        return shown

    def _reason(self, index: int, reason: bytes) -> bytes:
        return _CALLED if reason == b'"stop"' and self._num_calls.get(index) else reason


def _call(call: dict[str, Any], with_index: bool = False) -> bytes:
    return msgspec.json.encode(call if with_index else {key: call[key] for key in call if key != "index"})
