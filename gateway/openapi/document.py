"""The document of the HTTP API, in OpenAPI 3.1, from the table of its operations. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from disagg.gateway.openapi.operation import EVENTS, JSON, Operation, Parameter
from disagg.gateway.openapi.shapes import Shapes
from disagg.gateway.requests.headers import REQUEST_ID

Object = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_SECURITY: Final[Mapping[str, Object]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_RETRY_HEADERS: Final = ("retry-after-ms", "retry-after", "x-should-retry")
_HEADERS: Final[Mapping[str, Object]] = {
    REQUEST_ID: {"description": "Id of the request, which `disagg explain` takes.", "schema": {"type": "string"}},
    "retry-after-ms": {"description": "When to try again, in milliseconds.", "schema": {"type": "integer"}},
    "retry-after": {"description": "When to try again, in seconds.", "schema": {"type": "integer"}},
    "x-should-retry": {"description": "`false` where to try again is pointless.", "schema": {"enum": ["false"]}},
}
_INTRODUCTION: Final = (
    "The HTTP API of a gateway. Fields of bodies that are not listed are ignored where the object allows them. Where "
    "the gateway has no keys, none is needed. The schema of an event stream is that of each of its events, whose "
    "`data` is JSON."
)


def make_document(operations: Sequence[Operation], shapes: Shapes, version: str) -> Object:
    """The document of these operations.

    Args:
        operations: that are served.
        shapes: of the structs of bodies.
        version: of the gateway.
    """
    schema = _Schemas(operations, shapes)
    paths: dict[str, Object] = {}
    for operation in operations:
        paths.setdefault(operation.url, {})[operation.method.lower()] = _described(operation, schema.of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "disagg", "version": version, "description": _INTRODUCTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schema.components,
            "headers": dict(_HEADERS),
            "securitySchemes": dict(_SECURITY),
        },
    }


class _Schemas:
    """The schemas of all types, which msgspec makes together so that each struct is described once."""

    def __init__(self, operations: Sequence[Operation], shapes: Shapes) -> None:
        self._kinds: list[Any] = []
        for operation in operations:
            for kind in _types(operation):
                if kind not in self._kinds:
                    self._kinds.append(kind)
        shown = [shapes.of(kind) for kind in self._kinds]
        self._schemas, self.components = msgspec.json.schema_components(shown, ref_template=_REFERENCE)

    def of(self, kind: Any) -> Object:
        """The schema of a type of one of the operations; of several types, that of any of them."""
        if isinstance(kind, tuple):
            return {"anyOf": [self.of(one) for one in kind]}
        return self._schemas[self._kinds.index(kind)]


def _types(operation: Operation) -> Iterable[Any]:
    for kind in (
        operation.body,
        operation.answer,
        operation.events,
        operation.errors,
        *operation.other_answers.values(),
    ):
        if kind is not None:
            yield from kind if isinstance(kind, tuple) else (kind,)


def _described(operation: Operation, schema: Callable[[Any], Object]) -> Object:
    error = _answer("An error.", {JSON: {"schema": schema(operation.errors)}}, _RETRY_HEADERS)
    answers = {
        str(status): _answer(HTTPStatus(status).phrase, {} if kind is None else {JSON: {"schema": schema(kind)}})
        for status, kind in operation.other_answers.items()
    }
    if operation.content_type:
        answers["200"] = _answer("The answer.", _contents(operation, schema))
    described: Object = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": [*map(_path_parameter, operation.path_parameters), *map(_parameter, operation.parameters)],
        "responses": {**dict(sorted(answers.items())), "4XX": error, "5XX": error},
        "security": [] if operation.is_open else [*({name: []} for name in _SECURITY), {}],
    }
    if operation.body is not None:
        content: Object = {"schema": schema(operation.body)}
        if operation.examples:
            content["examples"] = {name: {"value": body} for name, body in operation.examples.items()}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    return described


def _answer(description: str, content: Object, headers: Sequence[str] = ()) -> Object:
    shown = {name: {"$ref": f"#/components/headers/{name}"} for name in (REQUEST_ID, *headers)}
    return {"description": description, "headers": shown, **({"content": content} if content else {})}


def _contents(operation: Operation, schema: Callable[[Any], Object]) -> Object:
    shown = {} if operation.answer is None else {"schema": schema(operation.answer)}
    contents: Object = dict.fromkeys((operation.content_type, *operation.other_content_types), shown)
    if operation.events is not None:
        contents[EVENTS] = {"schema": _event(operation, schema)}
    return contents


def _event(operation: Operation, schema: Callable[[Any], Object]) -> Object:
    """The schema of one event: OpenAPI 3.1 has none for a stream of them."""
    content = {"anyOf": [schema(operation.events), schema(operation.errors)]}
    data: Object = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    if operation.last_data:
        data = {"anyOf": [data, {"const": operation.last_data}]}
    text = {"type": "string"}
    return {"type": "object", "properties": {"data": data, "event": text, "id": text}, "required": ["data"]}


def _path_parameter(name: str) -> Object:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _parameter(parameter: Parameter) -> Object:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": False,
        "schema": dict(parameter.schema),
        "description": parameter.description,
    }
