"""Answers of the HTTP API against its own document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from disagg.gateway.app import HttpApp
from disagg.gateway.openapi.document import make_document
from disagg.gateway.openapi.fields import body_shapes
from disagg.gateway.openapi.operation import EVENTS, JSON


class Described:
    """A document, with which answers are compared.

    Args:
        document: of the gateway.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        longest_first = sorted(document["paths"].items(), key=lambda path: -len(path[0]))
        self._paths = [(re.compile(_pattern(url)), methods) for url, methods in longest_first]
        self._validators: dict[str, Draft202012Validator] = {}

    def check(self, method: str, path: str, status: int, content_type: str, body: bytes) -> None:
        """Fail if the document does not allow this answer. Answers to what is no operation are not described."""
        operation = self._find(method, path)
        if operation is None:
            return
        answers = operation["responses"]
        answer = answers.get(str(status)) or answers.get(f"{status // 100}XX")
        assert answer is not None, f"{method} {path}: no answer {status} is described"
        if "content" not in answer:
            assert body == b"", f"{method} {path}: no body is described for {status}"
            return
        media_type = content_type.split(";", 1)[0]
        assert media_type in answer["content"], f"{method} {path}: no {media_type} is described for {status}"
        content = answer["content"][media_type]
        if media_type == EVENTS:
            schema = content["schema"]["properties"]["data"]
            data = schema.get("anyOf", [schema])[0]["contentSchema"]
            for event in _events(body):
                self._validator(data).validate(event)
        elif media_type == JSON:
            self._validator(content["schema"]).validate(json.loads(body))

    def _find(self, method: str, path: str) -> Mapping[str, Any] | None:
        for pattern, methods in self._paths:
            if pattern.fullmatch(path) and method.lower() in methods:
                found: Mapping[str, Any] = methods[method.lower()]
                return found
        return None

    def _validator(self, schema: Mapping[str, Any]) -> Draft202012Validator:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self._document["components"]}
            self._validators[key] = Draft202012Validator(whole)
        return self._validators[key]


_MADE: dict[tuple[tuple[str, str], ...], Described] = {}
"""The documents of applications that serve the same operations are the same."""


def described(app: HttpApp) -> Described:
    """The document of what an application serves."""
    operations = [operation for operation, _ in app.served]
    key = tuple((operation.method, operation.path) for operation in operations)
    if key not in _MADE:
        _MADE[key] = Described(make_document(operations, body_shapes(), "0"))
    return _MADE[key]


def _pattern(url: str) -> str:
    return "".join("(.+)" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", url))


def _events(body: bytes) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]
