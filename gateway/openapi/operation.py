"""One operation of the HTTP API, as the routes and the document have it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from disagg.gateway.http.errors import ErrorBody

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_CONVERTER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter in the query or in a header."""

    name: str
    place: Literal["query", "header"]
    schema: Mapping[str, Any]
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path."""

    method: str
    path: str
    """Path in the form of the routes: `{name}` is one segment, `{name:path}` is the rest of the path."""
    name: str
    """Id of the operation, from which generated clients make the names of functions."""
    tag: str
    summary: str
    answer: Any = None
    """Type of the JSON of a successful answer, or a tuple of types; None for an answer that is not JSON."""
    content_type: str = JSON
    """Type of a successful answer; empty for an operation that always refuses."""
    other_content_types: tuple[str, ...] = ()
    """Further types of a successful answer, which the header `accept` asks for."""
    events: Any = None
    """Type of the JSON of an event, where the answer can be a stream."""
    last_data: str = ""
    """Data of the event that ends a stream and is no JSON; empty where there is none."""
    body: type | None = None
    """Struct of the JSON body."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    """Bodies, by what they are examples of."""
    form: Mapping[str, Any] | None = None
    """Schema of a form, where the body is `multipart/form-data`."""
    parameters: tuple[Parameter, ...] = ()
    other_answers: Mapping[int, Any] = field(default_factory=dict)
    """Types of answers with another status than 200 that are no errors, by status; None for one without a body."""
    errors: Any = ErrorBody
    """Type of the JSON of an error, or a tuple of types."""
    is_open: bool = False
    """Whether no key is needed."""

    @property
    def url(self) -> str:
        """The path in the form of OpenAPI."""
        return _CONVERTER.sub(r"{\1}", self.path)

    @property
    def path_parameters(self) -> tuple[str, ...]:
        """Names of the parameters in the path."""
        return tuple(_CONVERTER.findall(self.path))
