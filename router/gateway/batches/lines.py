"""The lines of a batch's input: where each begins, whether all can be run, and the lines of its answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 1 << 20
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

MAX_ANSWERS: Final = 128
"""To a line that can be run: prompts times `n`, or times `best_of`."""
NO_MODEL: Final = (1 << 16) - 1
"""In place of a position: the model of a line that names none, or one that was never served."""
_MAX_NAME_BYTES: Final = 4096
"""Of a model's name in JSON, where it may be one of the served ones."""


class InputError(Exception):
    """The input cannot be run; says which line, counted from 1, and why."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input."""

    custom_id: str
    """The client's name of it, once in a batch."""
    method: str
    url: str
    body: msgspec.Raw
    """For the endpoint, which checks it when the line is run."""


class Index(NamedTuple):
    """What is known of all lines before they run, each list by line."""

    offsets: array[int]
    models: array[int]
    """Position of its model among those that `index` was given; else `NO_MODEL`."""
    num_answers: array[int]
    """How many it asks for: each takes a place. 1 where the line cannot be run."""


class _Shape(msgspec.Struct, frozen=True):
    """Fields of a body that say where it runs and how many answers it asks for."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    n: msgspec.Raw = msgspec.Raw(b"null")
    best_of: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_DECODER: Final = msgspec.json.Decoder(Line)
_SHAPE: Final = msgspec.json.Decoder(_Shape)
_TEXTS: Final = msgspec.json.Decoder(list[str])
_NAME: Final = msgspec.json.Decoder(str)


def index(path: Path, endpoint: str, models: Sequence[str]) -> Index:
    """What is known of each line, after all were checked; one line at a time is in memory. Blocks on the disk.

    Args:
        path: of the input.
        endpoint: of the batch.
        models: names of those that are served, or were.

    Raises:
        InputError: for an empty file, too many or too long lines, and lines that are no requests to `endpoint`.
    """
    found = Index(array("Q"), array("H"), array("H"))
    offsets, names, places = found.offsets, set[str](), {name: place for place, name in enumerate(models)}
    at = 0
    with path.open("rb") as source:
        while raw := source.readline(MAX_LINE_BYTES + 1):
            offsets.append(at)
            at += len(raw)
            where = f"line {len(offsets)}"
            if len(raw) > MAX_LINE_BYTES:
                raise InputError(f"{where}: has more than {MAX_LINE_BYTES} bytes")
            if len(offsets) > MAX_LINES:
                raise InputError(f"{where}: a batch has at most {MAX_LINES} lines")
            line = _check(raw, endpoint, where)
            if line.custom_id in names:
                raise InputError(f"{where}: custom_id: an earlier line has the same")
            names.add(line.custom_id)
            model, num_answers = shape_of(line.body)
            found.models.append(places.get(model, NO_MODEL))
            found.num_answers.append(num_answers)
    if not offsets:
        raise InputError("the file has no line")
    return found


def shape_of(body: msgspec.Raw) -> tuple[str, int]:
    """The model that a body names, empty for none, and how many answers it asks for. Whatever is wrong with it is found
    when it is run."""
    try:
        shape = _SHAPE.decode(body)
        model = bytes(shape.model)
        name = _NAME.decode(model) if model.startswith(b'"') and len(model) <= _MAX_NAME_BYTES else ""
        num_answers = _num_prompts(bytes(shape.prompt)) * max(_count(shape.n), _count(shape.best_of))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", 1
    return name, num_answers if num_answers <= MAX_ANSWERS else 1


def _count(raw: msgspec.Raw) -> int:
    text = bytes(raw)
    return max(1, int(text)) if text.isdigit() and len(text) <= len(str(MAX_ANSWERS)) else 1


def _num_prompts(raw: bytes) -> int:
    """A list of texts or of lists is several prompts; a text, or a list of token ids, is one."""
    first = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
    if first == b"[":
        return raw.count(b"[") - 1
    return len(_TEXTS.decode(raw)) if first == b'"' else 1


def _check(raw: bytes, endpoint: str, where: str) -> Line:
    try:
        line = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: {error}") from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply") from None
    if line.method != "POST":
        raise InputError(f"{where}: method: must be POST")
    if line.url != endpoint:
        raise InputError(f"{where}: url: must be {endpoint}, as of the batch")
    return line


def read(path: Path, offset: int) -> Line:
    """A line that `index` has checked. Blocks on the disk."""
    with path.open("rb") as source:
        source.seek(offset)
        return _DECODER.decode(source.readline(MAX_LINE_BYTES))


def answer(batch_id: str, number: int, custom_id: str, status: int, body: bytes) -> bytes:
    """The line of the output file, or of the error file for a status above 399. `body` is JSON."""
    response = {"status_code": status, "request_id": f"{batch_id}-{number}", "body": msgspec.Raw(body)}
    made: dict[str, Any] = {"id": f"batch_req_{batch_id}_{number}", "custom_id": custom_id}
    return msgspec.json.encode({**made, "response": response, "error": None})
