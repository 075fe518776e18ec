"""The document as one web page without scripts: its operations with their parameters and fields. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from disagg.gateway.openapi.operation import EVENTS, JSON

Object = Mapping[str, Any]
_PREFIX: Final = "#/components/schemas/"
_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: .5rem 0 }}
td, th {{ border-bottom: 1px solid #8884; padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }}
code {{ font-family: ui-monospace, monospace }}
</style></head><body><h1>{title} {version}</h1>
<p>{description} The same for programs: <a href="openapi.json">openapi.json</a>.</p>
"""


def web_page(document: Object) -> str:
    """The HTML of a document that `make_document` made."""
    return "".join(_parts(document))


def _parts(document: Object) -> Iterator[str]:
    info = document["info"]
    yield _HEAD.format(**{name: escape(info[name]) for name in ("title", "version", "description")})
    for url, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(url, method, operation)
    yield "<h2>Objects</h2>\n"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>\n'
        yield from _fields(schema)
    yield "</body></html>\n"


def _operation(url: str, method: str, operation: Object) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(url)}</code></h2><p>{escape(operation['summary'])}</p>\n"
    rows = [
        (f"{parameter['name']} ({parameter['in']})", _type(parameter["schema"]), parameter.get("description", ""))
        for parameter in operation["parameters"]
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append((f"body, {media_type}", _type(content["schema"]), ""))
    for status, answer in operation["responses"].items():
        for media_type, content in answer.get("content", {}).items():
            shown = content.get("schema", {})
            if media_type == EVENTS:
                shown = shown["properties"]["data"]
            rows.append((status if media_type == JSON else f"{status}, {media_type}", _type(shown), ""))
    yield from _table(rows)


def _fields(schema: Object) -> Iterator[str]:
    required = schema.get("required", ())
    yield from _table(
        [
            (name, _type(field), "required" if name in required else field.get("description", ""))
            for name, field in schema.get("properties", {}).items()
        ]
    )


def _table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        yield "<table>"
        for name, shown, note in rows:
            yield f"<tr><td><code>{escape(name)}</code></td><td>{shown}</td><td>{escape(note)}</td></tr>\n"
        yield "</table>\n"


def _type(schema: Object) -> str:
    """The HTML of a type: its name, or a link to its object."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f'<a href="#{name}">{name}</a>'
    if "contentSchema" in schema:
        return _type(schema["contentSchema"])
    if "const" in schema:
        return escape(str(schema["const"]))
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return escape(" or ".join(str(value) for value in schema["enum"]))
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    return escape(str(kind))
