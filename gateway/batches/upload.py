"""A form with one file (`multipart/form-data`), written to a file as it comes. Nothing of it is kept in memory but the
part that arrives, and the form's few short fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from disagg.gateway.http.errors import ContentTypeError
from disagg.gateway.private_files import create_private
from disagg.proto.errors import InvalidRequestError

_MAX_PARTS: Final = 8
_MAX_FIELD_BYTES: Final = 256
_MAX_NAME_CHARS: Final = 256
_SLICE_BYTES: Final = 256 << 10
"""Bytes that are parsed in one turn of the event loop, which takes about a millisecond."""


class FormWriter:
    """Parser of a form. Pure: it returns the data that has to be written.

    Args:
        content_type: the request's header; names the boundary.
        max_file_bytes: of the file.

    Raises:
        ContentTypeError: if it is no form.
        InvalidRequestError: from every method, for a form that is broken or too large.
    """

    def __init__(self, content_type: str | None, max_file_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ContentTypeError("content-type: must be multipart/form-data with a boundary")
        self.fields: dict[str, bytes] = {}
        self.file_name: str | None = None
        """Name of the file; None until the file has begun."""
        self.num_bytes = 0
        """Bytes of the file that were parsed so far."""
        self._max_file_bytes = max_file_bytes
        self._num_parts = 0
        self._part = ""
        self._header, self._value, self._disposition = b"", b"", b""
        self._content: list[bytes] = []
        self._ended = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._name_part,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequestError("body", str(error)) from None

    def feed(self, data: bytes) -> bytes:
        """Parse the next part of the body. Returns the bytes of it that belong to the file."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError("body", f"no valid form: {error}") from None
        content = b"".join(self._content)
        self._content.clear()
        return content

    def finish(self) -> str:
        """The file's name, once the body has ended."""
        if not self._ended:
            raise InvalidRequestError("body", "ends before the form does")
        if self.file_name is None:
            raise InvalidRequestError("file", "is missing")
        return self.file_name

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequestError("body", f"a form has at most {_MAX_PARTS} parts")
        self._disposition = self._header = self._value = b""

    def _header_name(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def _header_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part = options.get(b"name", b"").decode(errors="replace")
        if self._part == "file":
            if self.file_name is not None:
                raise InvalidRequestError("file", "is there twice")
            name = options.get(b"filename", b"").decode(errors="replace")[:_MAX_NAME_CHARS]
            self.file_name = name or "file"

    def _data(self, data: bytes, begin: int, end: int) -> None:
        if self._part == "file":
            self.num_bytes += end - begin
            if self.num_bytes > self._max_file_bytes:
                raise InvalidRequestError("file", f"must have at most {self._max_file_bytes} bytes")
            self._content.append(data[begin:end])
            return
        value = self.fields.get(self._part, b"") + data[begin:end]
        if len(value) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(self._part[:_MAX_NAME_CHARS] or "body", "is too long")
        self.fields[self._part] = value

    def _end(self) -> None:
        self._ended = True


async def receive_file(form: FormWriter, parts: AsyncIterator[bytes], path: Path) -> str:
    """Write the file of the form to `path` while it arrives, and return its name. Raises what `FormWriter` and `parts`
    raise, after deleting the file."""
    target = await asyncio.to_thread(create_private, path)
    try:
        async for part in parts:
            for begin in range(0, len(part), _SLICE_BYTES):
                if content := form.feed(part[begin : begin + _SLICE_BYTES]):
                    await asyncio.to_thread(target.write, content)
        name = form.finish()
        await asyncio.to_thread(target.close)
    except BaseException:
        await asyncio.to_thread(_remove, target, path)  # a large one takes long
        raise
    return name


def _remove(target: BinaryIO, path: Path) -> None:
    target.close()
    path.unlink(missing_ok=True)
