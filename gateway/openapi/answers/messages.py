"""Answers of Anthropic's messages."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text of the answer."""

    text: str


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """The reasoning before the answer."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(Struct, forbid_unknown_fields=True):
    """Number of output tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(Struct, forbid_unknown_fields=True):
    """Tokens of a message; `input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class AnthropicMessage(Struct, forbid_unknown_fields=True):
    """The answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Struct, forbid_unknown_fields=True, tag_field="type", tag="message_start"):
    """The first event: the message without content."""

    message: AnthropicMessage


class Ping(Struct, forbid_unknown_fields=True, tag_field="type", tag="ping"):
    """An event without meaning."""


class ContentBlockStart(Struct, forbid_unknown_fields=True, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(Struct, forbid_unknown_fields=True, tag_field="type", tag="text_delta"):
    """A piece of a text."""

    text: str


class ThinkingDelta(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking_delta"):
    """A piece of the reasoning."""

    thinking: str


class InputJsonDelta(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_json_delta"):
    """The JSON of a call's input."""

    partial_json: str


class ContentBlockDelta(Struct, forbid_unknown_fields=True, tag_field="type", tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(Struct, forbid_unknown_fields=True, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class Stop(Struct, forbid_unknown_fields=True):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, forbid_unknown_fields=True, tag_field="type", tag="message_delta"):
    """The end of the answer, with the usage of all of it."""

    delta: Stop
    usage: MessageUsage


class MessageStop(Struct, forbid_unknown_fields=True, tag_field="type", tag="message_stop"):
    """The last event."""


class AnthropicErrorDetail(Struct, forbid_unknown_fields=True):
    """Type and message of an error."""

    type: str
    message: str


class AnthropicError(Struct, forbid_unknown_fields=True, tag_field="type", tag="error"):
    """An error in the form of Anthropic's API."""

    error: AnthropicErrorDetail
    request_id: str


class InputTokens(Struct, forbid_unknown_fields=True):
    """Number of tokens of a conversation."""

    input_tokens: int


class AnthropicModel(Struct, forbid_unknown_fields=True):
    """A served model."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelPage(Struct, forbid_unknown_fields=True):
    """A page of the models that the key may use."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


MessageEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError
)
