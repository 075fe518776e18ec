"""The lines of a batch's input: where each begins, whether all can be run, and the lines of its answers."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, Final

import msgspec

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 1 << 20
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")


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


_DECODER: Final = msgspec.json.Decoder(Line)


def index(path: Path, endpoint: str) -> array[int]:
    """The offset of each line, after all were checked; one line at a time is in memory. Blocks on the disk.

    Raises:
        InputError: for an empty file, too many or too long lines, and lines that are no requests to `endpoint`.
    """
    offsets, names = array("Q"), set[str]()
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
            name = _check(raw, endpoint, where).custom_id
            if name in names:
                raise InputError(f"{where}: custom_id: an earlier line has the same")
            names.add(name)
    if not offsets:
        raise InputError("the file has no line")
    return offsets


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
