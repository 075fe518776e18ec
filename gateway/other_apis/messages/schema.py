"""The body of `POST /v1/messages`, as it is typed on the wire."""

from __future__ import annotations

from typing import Final

import msgspec

from disagg.gateway.openai.schema import ABSENT, ContentPart, Integer
from disagg.gateway.other_apis.shared.bodies import SamplingFields

MAX_MODELS: Final = 1000
"""Maximum number of models of a page."""


class Block(msgspec.Struct, frozen=True):
    """A piece of a turn: text, reasoning (`thinking`), a call (`tool_use`) or its result (`tool_result`).
    `cache_control` and the signature of reasoning have no effect: every prefix is cached."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, frozen=True):
    """One turn of the conversation in `messages`."""

    role: str
    content: str | list[Block]


class MessagesBody(SamplingFields, frozen=True, kw_only=True):
    """`POST /v1/messages` and, without `max_tokens`, `/v1/messages/count_tokens`."""

    messages: list[Turn] | None = None
    max_tokens: Integer | None = None
    system: str | list[ContentPart] | None = None
    stop_sequences: list[str] | None = None

    # Read by `to_input`, which looks at their sizes first.
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT

    # Not supported: they need state, or change the answer.
    container: msgspec.Raw = ABSENT
    context_management: msgspec.Raw = ABSENT
    mcp_servers: msgspec.Raw = ABSENT
    output_format: msgspec.Raw = ABSENT
    speed: msgspec.Raw = ABSENT


class Tool(msgspec.Struct, frozen=True):
    """One of `tools`. Only those of the client are supported."""

    type: str = "custom"
    name: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools must be called, and which."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """`thinking`: whether the model may reason before it answers, and whether that is shown."""

    type: str
    budget_tokens: Integer | None = None
    """Has no effect: reasoning is limited by `max_tokens`, like the rest."""
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The object `output_config.format`: a JSON schema."""

    type: str
    schema: msgspec.Raw = ABSENT


class OutputConfig(msgspec.Struct, frozen=True):
    """The format of the answer. An effort may stand beside it and has no effect."""

    format: OutputFormat | None = None
