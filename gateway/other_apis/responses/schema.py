"""The body of `POST /v1/responses`, as it is typed on the wire."""

from __future__ import annotations

import msgspec

from disagg.gateway.openai.schema import ABSENT, ContentPart, Integer
from disagg.gateway.other_apis.shared.bodies import SamplingFields


class Item(msgspec.Struct, frozen=True):
    """One of `input`: a message (also without `type`), a call or its result, or reasoning, of which `content` is
    read."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """JSON of an object."""
    output: str | list[ContentPart] | None = None


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    stop: str | list[str] | None = None
    """Not OpenAI's."""
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    """Nothing is kept either way, and every answer says so."""

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
    """`tool_choice`, where it is a function."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """What a text must be: anything, JSON, or JSON by a schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None
    """Answers follow the schema either way."""


class TextConfig(msgspec.Struct, frozen=True):
    """How texts are written. A verbosity may stand beside the format, and means nothing here."""

    format: TextFormat | None = None
