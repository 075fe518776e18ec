"""Structured output, from a client's schema, expression or grammar to the one grammar text that workers need. Pure.

    response_format, structured_outputs, guided_*, gRPC `structured` ──> StructuredOutput ──check_structured──> grammar

Only what is cheap is checked here: sizes, nesting and conflicts. `Grammars` (`grammars.py`) compiles the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec

from disagg.gateway.requests.exact_numbers import check_embedded_numbers, check_numbers
from disagg.gateway.requests.values import check_length, check_unicode, is_deeper
from disagg.gateway.text.answer_schemas import bound_schema
from disagg.proto.errors import InvalidRequestError
from disagg.proto.grammars import MAX_GRAMMAR_BYTES

MAX_SCHEMA_DEPTH = 64
"""Maximum depth of nested objects and arrays of a schema."""
MAX_CHOICES = 1024
_FRAME_BYTES: Final = 160
"""Bytes of a grammar around a client's text: the form of the library, and the options of `answer_schemas`."""

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an answer must be.

    For example `StructuredOutput("json_schema", '{"type": "integer"}')`.
    """

    kind: Kind
    text: str = ""
    """A JSON schema, a regular expression, a JSON array of strings, or a Lark grammar; nothing for `json_object`."""
    field: str = "structured"
    """The client's field that errors name."""


class Constrained(Protocol):
    """The part of a `GenerationInput` that structured output depends on."""

    @property
    def structured(self) -> StructuredOutput | None:
        """What the answer must be; None for any text."""

    @property
    def min_tokens(self) -> int | None:
        """Output tokens before which no stop id is sampled."""

    @property
    def ignore_eos(self) -> bool:
        """Whether an end-of-sequence token ends nothing."""


def check_structured(given: Constrained) -> str:
    """The grammar of `given.structured`, not compiled yet; empty for none. Raises `InvalidRequestError` for what is too
    large, is no JSON, or contradicts another field."""
    wanted = given.structured
    if wanted is None:
        return ""
    if given.min_tokens:
        raise InvalidRequestError(
            "stopping.min_tokens", "contradicts structured output, which ends where its grammar does"
        )
    if given.ignore_eos:
        raise InvalidRequestError(
            "stopping.ignore_eos", "contradicts structured output, which ends where its grammar does"
        )
    num_bytes = check_unicode(wanted.text, wanted.field)
    check_length(num_bytes, wanted.field, MAX_GRAMMAR_BYTES, "bytes")
    grammar = msgspec.json.encode({"grammars": [_grammar(wanted)]}).decode()
    check_length(len(grammar.encode()), wanted.field, MAX_GRAMMAR_BYTES + _FRAME_BYTES, "bytes of grammar")
    return grammar


def _grammar(wanted: StructuredOutput) -> dict[str, Any]:
    text = wanted.text
    if wanted.kind == "json_object":
        return {"json_schema": bound_schema({"type": "object"})}
    if wanted.kind == "json_schema":
        schema = _decoded(text, wanted.field)
        if not isinstance(schema, dict):
            raise InvalidRequestError(wanted.field, "must be a JSON schema, which is an object")
        check_numbers(text, wanted.field)
        return {"json_schema": bound_schema(schema)}
    if wanted.kind == "choice":
        return {"lark_grammar": _choice(_decoded(text, wanted.field), wanted.field)}
    if not text:
        raise InvalidRequestError(wanted.field, "must not be empty")
    if wanted.kind == "regex":
        return {"lark_grammar": f"start: {_regex(text)}"}
    check_embedded_numbers(text, wanted.field)
    return {"lark_grammar": text}


def _decoded(text: str, field: str) -> Any:
    try:
        value = msgspec.json.decode(text)
        is_deep = is_deeper(value, MAX_SCHEMA_DEPTH)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(field, f"is no JSON: {error}") from None
    except RecursionError:
        is_deep = True
    if is_deep:
        raise InvalidRequestError(field, f"at most {MAX_SCHEMA_DEPTH} levels of objects and arrays")
    return value


def _choice(choices: Any, field: str) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequestError(field, "must be a list of texts, none empty")
    check_length(len(choices), field, MAX_CHOICES, "choices")
    return "start: " + " | ".join(msgspec.json.encode(one).decode() for one in choices)


def _regex(text: str) -> str:
    """The expression as Lark writes it, between slashes."""
    escaped, out = False, []
    for char in text:
        out.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return f"/{''.join(out)}/"
