"""The body of `POST /v1/responses`, as it is typed on the wire."""

from __future__ import annotations

import msgspec

from disagg.gateway.openai.schema import ABSENT, ContentPart, Integer
from disagg.gateway.other_apis.shared.bodies import SamplingFields


class Item(msgspec.Struct, frozen=True):
    """One item of `input`: a message (also without `type`), a call or its result, or reasoning, of which only `content`
    is read."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """Arguments of the call, as the JSON of an object."""
    output: str | list[ContentPart] | None = None


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    """The JSON body of `POST /v1/responses`."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    stop: str | list[str] | None = None
    """Stop strings, an extension of OpenAI's API."""
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    """Has no effect: nothing is stored, and every answer says so."""

    # Read by `to_input`, which looks at their sizes first.
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    metadata: msgspec.Raw = ABSENT

    # Not supported: they need state, or change the answer.
    previous_response_id: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    background: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    include: msgspec.Raw = ABSENT
    top_logprobs: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT
    context_management: msgspec.Raw = ABSENT
    image: msgspec.Raw = ABSENT
    moderation: msgspec.Raw = ABSENT


class FunctionTool(msgspec.Struct, frozen=True):
    """One of `tools`. Only functions are supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class NamedChoice(msgspec.Struct, frozen=True):
    """The value of `tool_choice` that names a function."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """The format of a text: any, JSON, or JSON by a schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None
    """Has no effect on the answer, which always follows the schema."""


class TextConfig(msgspec.Struct, frozen=True):
    """The format of the answer's text. A verbosity may stand beside it and has no effect."""

    format: TextFormat | None = None
