"""Answers of OpenAI's responses."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str


class OutputMessage(Struct, forbid_unknown_fields=True, tag_field="type", tag="message"):
    """A message of the answer."""

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning"):
    """The reasoning before the answer."""

    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Struct, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseFailure(Struct, forbid_unknown_fields=True):
    """Why an answer failed."""

    code: str
    message: str


class IncompleteDetails(Struct, forbid_unknown_fields=True):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens", "content_filter"]


class Reasoning(Struct, forbid_unknown_fields=True):
    """Settings of the reasoning, which this API does not have."""

    effort: None
    summary: None


class TextFormatPlain(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class TextFormatObject(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any object of JSON."""


class TextFormatSchema(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON by a schema."""

    name: str | None
    description: str | None
    schema: Any
    strict: bool


class ResponseText(Struct, forbid_unknown_fields=True):
    """The format of the text."""

    format: TextFormatPlain | TextFormatObject | TextFormatSchema


class ResponseTool(Struct, forbid_unknown_fields=True):
    """A function that the request offered."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool


class ResponseToolChoice(Struct, forbid_unknown_fields=True):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class InputTokensDetails(Struct, forbid_unknown_fields=True):
    """Number of input tokens that no worker had to compute."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokensDetails(Struct, forbid_unknown_fields=True):
    """Number of output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, forbid_unknown_fields=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class Response(Struct, forbid_unknown_fields=True):
    """An answer with its state."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Reasoning
    store: Literal[False]
    temperature: float
    text: ResponseText
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice
    tools: list[ResponseTool]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(Struct):
    """An event of a response's stream; which fields it has depends on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
