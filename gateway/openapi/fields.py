"""The fields of bodies that are not read with their struct, as they are finally read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from disagg.gateway.batches.lines import ENDPOINTS
from disagg.gateway.batches.schema import WINDOW, BatchBody
from disagg.gateway.openai.order import MAX_PRIORITY, TIERS
from disagg.gateway.openai.schema import (
    ChatBody,
    CompletionBody,
    ContentPart,
    EmbeddingBody,
    Message,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)
from disagg.gateway.openai.structured import NamedSchema, ResponseFormat, StructuredOutputs
from disagg.gateway.openai.template_options import EFFORTS
from disagg.gateway.openai.to_input import HARMLESS, HARMLESS_IN_CHAT
from disagg.gateway.openai.tools import Call, CalledFunction, NamedChoice, NamedFunction, OfferedFunction, Tool
from disagg.gateway.openai.vectors import FORMATS, HARMLESS_IN_EMBEDDINGS, HARMLESS_IN_PAIRS, NORMALIZING
from disagg.gateway.openapi.shapes import Shapes
from disagg.gateway.other_apis.messages import schema as messages
from disagg.gateway.other_apis.messages.to_input import HARMLESS as HARMLESS_IN_MESSAGES
from disagg.gateway.other_apis.messages.to_input import ROLES as ROLES_IN_MESSAGES
from disagg.gateway.other_apis.responses import schema as responses
from disagg.gateway.other_apis.responses.to_input import HARMLESS as HARMLESS_IN_RESPONSES
from disagg.gateway.requests.sampling import FLOAT_RANGES, MAX_LOGPROBS
from disagg.gateway.requests.validate import MAX_ANSWERS, ROLES, SPECULATION
from disagg.gateway.requests.values import FloatRange

Object = dict[str, Any]
Schema = Object | str
"""A JSON schema, or its text."""


class CountTokensBody(messages.MessagesBody, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: a body of messages without `max_tokens`."""


def _only(values: Sequence[object]) -> Any:
    """The type of a field that is not supported: the values that have no effect."""
    allowed = {"enum": [None, *(value for value in values if value is not None)]}
    return Annotated[Any, msgspec.Meta(description="Not supported.", extra_json_schema=allowed)]


def one_of(values: Sequence[str]) -> Any:
    """The type of a text that is one of `values`."""
    return Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(values)})]


def _within(allowed: FloatRange) -> Any:
    low, high = allowed.low, allowed.high
    meta = msgspec.Meta(gt=low, le=high) if allowed.low_is_open else msgspec.Meta(ge=low, le=high)
    return Annotated[float, meta] | None


def _from(least: int, most: int = (1 << 63) - 1) -> Any:
    return Annotated[int, msgspec.Meta(ge=least, le=most)] | None


_SAMPLING: Final[Mapping[str, Any]] = {
    **{name: _within(allowed) for name, allowed in FLOAT_RANGES.items()},
    "top_k": _from(-1),
    "min_tokens": _from(0),
    "speculation": one_of(SPECULATION) | None,
}
_GENERATION: Final[Mapping[str, Any]] = {
    **_SAMPLING,
    "max_tokens": _from(1),
    "service_tier": one_of(tuple(TIERS)) | None,
    "priority": _from(-MAX_PRIORITY, MAX_PRIORITY),
    "n": _from(1, MAX_ANSWERS),
    "stop_token_ids": list[Annotated[int, msgspec.Meta(ge=0)]] | None,
    "prompt_logprobs": _from(0, MAX_LOGPROBS),
    "logit_bias": dict[str, float] | None,
    "response_format": ResponseFormat | None,
    "structured_outputs": StructuredOutputs | None,
    "guided_json": Schema | None,
    "guided_regex": str | None,
    "guided_choice": list[str] | None,
    "guided_grammar": str | None,
}
_CHAT: Final[Mapping[str, Any]] = {
    "tools": list[Tool] | None,
    "tool_choice": Literal["auto", "none", "required"] | NamedChoice | None,
    "chat_template_kwargs": Object | None,
    "max_completion_tokens": _from(1),
    "top_logprobs": _from(0, MAX_LOGPROBS),
    "reasoning_effort": one_of(EFFORTS) | None,
}
_MESSAGES: Final[Mapping[str, Any]] = {
    **_SAMPLING,
    "max_tokens": _from(1),
    "tools": list[messages.Tool] | None,
    "tool_choice": messages.ToolChoice | None,
    "output_config": messages.OutputConfig | None,
    "thinking": messages.Thinking | None,
    **{name: _only(values) for name, values in HARMLESS_IN_MESSAGES.items()},
}
_RESPONSES: Final[Mapping[str, Any]] = {
    **_SAMPLING,
    "max_output_tokens": _from(1),
    "tools": list[responses.FunctionTool] | None,
    "tool_choice": Literal["auto", "none", "required"] | responses.NamedChoice | None,
    "text": responses.TextConfig | None,
    "metadata": dict[str, str] | None,
    **{name: _only(values) for name, values in HARMLESS_IN_RESPONSES.items()},
}
_PAIRS: Final = {
    "truncate_prompt_tokens": _from(-1),
    **{name: _only(values) for name, values in HARMLESS_IN_PAIRS.items()},
}
_REFUSED: Final = {name: _only(values) for name, values in HARMLESS.items()}
_BY_BODY: Final[Mapping[type[msgspec.Struct], Mapping[str, Any]]] = {
    ChatBody: {
        **_GENERATION,
        **_CHAT,
        **_REFUSED,
        **{name: _only(values) for name, values in HARMLESS_IN_CHAT.items()},
    },
    CompletionBody: {**_GENERATION, **_REFUSED},
    TokenizeBody: _CHAT,
    EmbeddingBody: {
        "encoding_format": one_of(FORMATS) | None,
        "dimensions": _from(1),
        "truncate_prompt_tokens": _from(-1),
        **{name: _only(values) for name, values in HARMLESS_IN_EMBEDDINGS.items()},
        **dict.fromkeys(NORMALIZING, _only([True, False])),
    },
    RerankBody: {"top_n": _from(0), **_PAIRS},
    ScoreBody: _PAIRS,
    Message: {
        "role": one_of((*ROLES, "developer", "tool")),
        "tool_calls": list[Call] | None,
        "function_call": _only([[]]),
    },
    messages.MessagesBody: _MESSAGES,
    CountTokensBody: _MESSAGES,
    responses.ResponsesBody: _RESPONSES,
    messages.Turn: {"role": one_of(ROLES_IN_MESSAGES)},
    messages.Block: {"input": Object | None},
    messages.Tool: {"type": Literal["custom"], "input_schema": Object},
    messages.ToolChoice: {"type": Literal["auto", "any", "tool", "none"]},
    messages.OutputFormat: {"type": Literal["json_schema"], "schema": Object},
    responses.FunctionTool: {"type": Literal["function"], "parameters": Object | None},
    responses.NamedChoice: {"type": Literal["function"]},
    responses.TextFormat: {"type": Literal["text", "json_object", "json_schema"], "schema": Object | None},
    Tool: {"type": Literal["function"]},
    OfferedFunction: {"parameters": Object | None},
    NamedChoice: {"type": Literal["function"]},
    ResponseFormat: {"type": Literal["text", "json_object", "json_schema"]},
    NamedSchema: {"schema": Object | bool | None},
    StructuredOutputs: {"json": Schema | None, "structural_tag": _only([])},
    BatchBody: {"endpoint": one_of(ENDPOINTS), "completion_window": one_of([WINDOW])},
}
_MODEL: Final = "model"
_REQUIRED: Final[Mapping[type, Sequence[str]]] = {
    ChatBody: (_MODEL,),
    CompletionBody: (_MODEL,),
    responses.ResponsesBody: (_MODEL, "input"),
    responses.FunctionTool: ("name",),
    responses.NamedChoice: ("name",),
    messages.MessagesBody: (_MODEL, "messages", "max_tokens"),
    messages.Tool: ("name", "input_schema"),
    messages.OutputFormat: ("schema",),
    CountTokensBody: (_MODEL, "messages"),
    ContentPart: ("text",),
}
_NAMES: Final[Mapping[type, str]] = {
    Tool: "ChatTool",
    Call: "ChatToolCall",
    OfferedFunction: "ChatFunction",
    CalledFunction: "ChatCalledFunction",
    NamedChoice: "ChatToolChoice",
    NamedFunction: "ChatNamedFunction",
    Message: "ChatMessage",
    messages.Tool: "MessagesTool",
    messages.ToolChoice: "MessagesToolChoice",
    messages.Turn: "MessagesTurn",
    messages.Block: "MessagesBlock",
    responses.FunctionTool: "ResponsesTool",
    responses.NamedChoice: "ResponsesToolChoice",
    responses.Item: "ResponsesItem",
}
"""Names of structs in the document whose classes have names that only their modules explain."""


TYPES: Final = {
    (kind, name): shown
    for kind, fields in _BY_BODY.items()
    for name, shown in fields.items()
    if name in kind.__struct_fields__
}


def body_shapes() -> Shapes:
    """The structs of bodies as the document shows them."""
    return Shapes(TYPES, _REQUIRED, _NAMES)
