"""The lines of a batch's input: where each begins, whether all can be run, and the lines of its answers."""

from __future__ import annotations

import codecs
import hashlib
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

MAX_LINES: Final = 50_000
MAX_BLANK_LINES: Final = 50_000
"""Maximum number of lines of a file without a request in them, which are skipped."""
MAX_LINE_BYTES: Final = 1 << 20
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

MAX_ANSWERS: Final = 128
"""Maximum number of answers to a line: its prompts times the larger of `n` and `best_of`."""
MAX_ID_BYTES: Final = 512
"""Maximum bytes of a `custom_id` in UTF-8."""
NO_MODEL: Final = (1 << 16) - 1
"""Stands for the position of a model where a line names none, or one that was never served."""
_DIGEST_BYTES: Final = 16
_EMPTY_ANSWER_BYTES: Final = 640
"""Estimated bytes of an output line without the answer's text."""
_TOKEN_BYTES: Final = 6
_GUESSED_TOKENS: Final = 256
"""Estimated tokens of an answer whose length is not limited."""
_MAX_EXPECTED_TOKENS: Final = 99_999
"""A larger token limit is ignored: the answer is estimated like one without a limit."""
_MAX_NAME_BYTES: Final = 4096
"""Maximum bytes of a model's name in JSON; a longer name is no served model's."""


_AT_LINE: Final = re.compile(r"line (\d+): ")


class InputError(Exception):
    """The input cannot be run; says which line, counted from 1, and why. A batch is stored with its text."""


def line_of(error: str) -> int | None:
    """The line that the text of an `InputError` names."""
    found = _AT_LINE.match(error)
    return None if found is None else int(found[1])


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input."""

    custom_id: str
    """The client's name for the line, unique in the batch; at most `MAX_ID_BYTES`."""
    method: str
    url: str
    body: msgspec.Raw
    """The request body, which the endpoint checks when the line is run."""


class Index(NamedTuple):
    """What is known of all lines before they run; each array is indexed by line."""

    offsets: array[int]
    models: array[int]
    """Position of the line's model in the list that `index` was given, or `NO_MODEL`."""
    num_answers: array[int]
    """Number of answers that the line asks for, each of which takes a decode place. 1 where the line cannot be run."""
    num_bytes: array[int]
    expected_bytes: int = 0
    """Estimated bytes of all answers, from the token limits of the lines that have one."""


class LineDemand(NamedTuple):
    """The model and the number and size of answers that a body asks for."""

    model: str
    """Name of the model; empty if the body has none."""
    num_answers: int
    expected_bytes: int
    """Estimated bytes of all answers to the line, see `Index`."""


class _Fields(msgspec.Struct, frozen=True):
    """The fields of a body that tell its model and the number and length of its answers."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    n: msgspec.Raw = msgspec.Raw(b"null")
    best_of: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    max_tokens: msgspec.Raw = msgspec.Raw(b"null")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"null")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"null")


_DECODER: Final = msgspec.json.Decoder(Line)
_FIELDS: Final = msgspec.json.Decoder(_Fields)
_TEXTS: Final = msgspec.json.Decoder(list[str])
_NAME: Final = msgspec.json.Decoder(str)


def index(path: Path, endpoint: str, models: Sequence[str], is_stopped: Callable[[], bool] = lambda: False) -> Index:
    """Check all lines and return what is known of each. Blank lines, and the byte-order mark that some editors write
    before the first one, are skipped. Only one line at a time is in memory, with the returned arrays
    and a digest of each earlier `custom_id`. Blocks on the disk.

    Args:
        path: of the input.
        endpoint: of the batch.
        models: names of those that are served, or were.
        is_stopped: asked before each line: whether nobody waits for the result any more.

    Raises:
        InputError: for an empty file, too many or too long lines, and lines that are no requests to `endpoint`; also
            once it was stopped.
    """
    found = Index(array("Q"), array("H"), array("H"), array("I"))
    offsets, names, places = found.offsets, set[bytes](), {name: place for place, name in enumerate(models)}
    at = expected_bytes = number = 0
    with path.open("rb") as source:
        if source.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            at = len(codecs.BOM_UTF8)
        source.seek(at)
        while raw := source.readline(MAX_LINE_BYTES + 1):
            if is_stopped():
                raise InputError("nobody waits for it")
            number += 1
            at, begin = at + len(raw), at
            where = f"line {number}"
            if len(raw) > MAX_LINE_BYTES:
                raise InputError(f"{where}: has more than {MAX_LINE_BYTES} bytes")
            if not raw.strip():
                if number - len(offsets) > MAX_BLANK_LINES:
                    raise InputError(f"{where}: a batch has at most {MAX_BLANK_LINES} blank lines")
                continue
            offsets.append(begin)
            if len(offsets) > MAX_LINES:
                raise InputError(f"{where}: a batch has at most {MAX_LINES} lines")
            line = _check(raw, endpoint, where)
            name = hashlib.blake2b(line.custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
            if name in names:
                raise InputError(f"{where}: custom_id: an earlier line has the same")
            names.add(name)
            demand = demand_of(line.body)
            found.models.append(places.get(demand.model, NO_MODEL))
            found.num_answers.append(demand.num_answers)
            expected_bytes += demand.expected_bytes
            found.num_bytes.append(len(raw))
    if not offsets:
        raise InputError("the file has no line")
    return found._replace(expected_bytes=expected_bytes)


def demand_of(body: msgspec.Raw) -> LineDemand:
    """The demand of a body. An invalid body is not reported here, but when its line is run."""
    try:
        fields = _FIELDS.decode(body)
        model = bytes(fields.model)
        name = _NAME.decode(model) if model.startswith(b'"') and len(model) <= _MAX_NAME_BYTES else ""
        most = max(_count(fields.n, MAX_ANSWERS), _count(fields.best_of, MAX_ANSWERS))
        num_answers = _num_prompts(bytes(fields.prompt)) * most
    except (msgspec.DecodeError, UnicodeDecodeError):
        return LineDemand("", 1, _EMPTY_ANSWER_BYTES)
    num_answers = num_answers if num_answers <= MAX_ANSWERS else 1
    limits = (fields.max_tokens, fields.max_completion_tokens, fields.max_output_tokens)
    num_tokens = max(_count(limit, _MAX_EXPECTED_TOKENS) for limit in limits)
    num_tokens = num_tokens if num_tokens > 1 else _GUESSED_TOKENS
    return LineDemand(name, num_answers, _EMPTY_ANSWER_BYTES + num_answers * num_tokens * _TOKEN_BYTES)


def _count(raw: msgspec.Raw, most: int) -> int:
    """The number in `raw` if it is at least 1; 1 for anything else and for a number with more digits than `most`."""
    text = bytes(raw)
    return max(1, int(text)) if text.isdigit() and len(text) <= len(str(most)) else 1


def _num_prompts(raw: bytes) -> int:
    """Number of prompts: a list of texts or of lists has several; a text or a list of token ids is one."""
    first = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
    if first == b"[":
        return raw.count(b"[") - 1
    return len(_TEXTS.decode(raw)) if first == b'"' else 1


def _check(raw: bytes, endpoint: str, where: str) -> Line:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{where}: is UTF-16; save the file as UTF-8")
    try:
        line = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: {error}") from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply") from None
    try:
        num_bytes = len(line.custom_id.encode())
    except UnicodeEncodeError:
        raise InputError(f"{where}: custom_id: is not Unicode") from None
    if num_bytes > MAX_ID_BYTES:
        raise InputError(f"{where}: custom_id: must have at most {MAX_ID_BYTES} bytes, not {num_bytes}")
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
