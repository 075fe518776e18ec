"""The fields of a JSON body that ask for structured output, as one `StructuredOutput`.

`response_format` is OpenAI's, `structured_outputs` and the older `guided_*` are vLLM's. At most one may be used.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from disagg.gateway.openai.schema import ABSENT, GenerationBody, decode_field
from disagg.gateway.requests.structured import Kind, StructuredOutput
from disagg.proto.errors import InvalidRequestError
from disagg.proto.grammars import MAX_GRAMMAR_BYTES


class NamedSchema(msgspec.Struct, frozen=True):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None
    """Answers follow the schema either way."""


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's way to ask for JSON."""

    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's way to constrain an answer; one of them is set."""

    json: msgspec.Raw = ABSENT
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = ABSENT


_FORMAT: Final = msgspec.json.Decoder(ResponseFormat | None)
_OUTPUTS: Final = msgspec.json.Decoder(StructuredOutputs | None)
_TEXT: Final = msgspec.json.Decoder(str | None)
_CHOICE: Final = msgspec.json.Decoder(list[str] | None)
_MAX_BYTES: Final = 2 * MAX_GRAMMAR_BYTES
"""Largest size of the JSON, which with its escapes is longer than the schema in it."""


def read_structured(body: GenerationBody) -> StructuredOutput | None:
    """What the body asks for; `None` for plain text. Raises `InvalidRequestError`, also where two fields ask."""
    found = [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs), *_guided(body)]
    if len(found) > 1:
        raise InvalidRequestError(
            found[1].field, f"contradicts {found[0].field}: an answer can have one structure only"
        )
    return found[0] if found else None


def _read(raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any], field: str) -> Any:
    _check_size(raw, field)
    return decode_field(raw, decoder, field)


def _check_size(raw: msgspec.Raw, field: str) -> None:
    num_bytes = memoryview(raw).nbytes
    if num_bytes > _MAX_BYTES:
        raise InvalidRequestError(field, f"at most {_MAX_BYTES} bytes of JSON, not {num_bytes}")


def _response_format(raw: msgspec.Raw) -> list[StructuredOutput]:
    field = "response_format"
    given = _read(raw, _FORMAT, field)
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [StructuredOutput("json_object", field=field)]
    if given.type != "json_schema":
        raise InvalidRequestError(f"{field}.type", f"must be text, json_object or json_schema, not {given.type[:64]!r}")
    schema = None if given.json_schema is None else _text(given.json_schema.schema)
    if schema is None:
        raise InvalidRequestError(f"{field}.json_schema.schema", "must be set")
    return [StructuredOutput("json_schema", schema, f"{field}.json_schema.schema")]


def _structured_outputs(raw: msgspec.Raw) -> list[StructuredOutput]:
    field = "structured_outputs"
    given = _read(raw, _OUTPUTS, field)
    if given is None:
        return []
    if _text(given.structural_tag) is not None:
        raise InvalidRequestError(f"{field}.structural_tag", "this is not supported")
    texts: dict[Kind, tuple[str, str | None]] = {
        "json_schema": ("json", _schema_text(given.json, f"{field}.json")),
        "regex": ("regex", given.regex),
        "choice": ("choice", None if given.choice is None else msgspec.json.encode(given.choice).decode()),
        "grammar": ("grammar", given.grammar),
        "json_object": ("json_object", "" if given.json_object else None),
    }
    assert set(texts) == set(get_args(Kind))
    found = [
        StructuredOutput(kind, text, f"{field}.{name}") for kind, (name, text) in texts.items() if text is not None
    ]
    if not found:
        raise InvalidRequestError(field, "one of json, regex, choice, grammar and json_object must be set")
    return found


def _guided(body: GenerationBody) -> list[StructuredOutput]:
    choice = _read(body.guided_choice, _CHOICE, "guided_choice")
    texts: dict[Kind, tuple[str, str | None]] = {
        "json_schema": ("guided_json", _schema_text(body.guided_json, "guided_json")),
        "regex": ("guided_regex", _read(body.guided_regex, _TEXT, "guided_regex")),
        "choice": ("guided_choice", None if choice is None else msgspec.json.encode(choice).decode()),
        "grammar": ("guided_grammar", _read(body.guided_grammar, _TEXT, "guided_grammar")),
    }
    return [StructuredOutput(kind, text, name) for kind, (name, text) in texts.items() if text is not None]


def _schema_text(raw: msgspec.Raw, field: str) -> str | None:
    """A schema is an object, or its text as a string."""
    _check_size(raw, field)
    text = _text(raw)
    return _read(raw, _TEXT, field) if text is not None and text.startswith('"') else text


def _text(raw: msgspec.Raw) -> str | None:
    """The JSON itself; `None` for null."""
    text = bytes(raw).strip()
    return None if text == bytes(ABSENT) else text.decode("utf-8", "replace")
