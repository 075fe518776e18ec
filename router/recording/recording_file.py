"""The file of a recording.

    magic | version u16 | frame*                 frame   size u32 | size unpacked u32 | crc32 u32 | zlib(entry*)
                                                 entry   size u32 | msgpack
    numbers are little-endian; the first frame has the header alone

A frame is whole or does not count, so that what a killed process wrote can be read up to its last whole frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final

import msgspec

from disagg.proto.errors import ConfigError
from disagg.router.recording.entries import Ended, EndReason, Entry, Header, decode, decode_header, encode

MAGIC: Final = b"disagg events\0"
FORMAT_VERSION: Final = 1
"""Version of the layout and of the entries' contents, to be raised with any change of an event."""
MAX_FRAME_BYTES: Final = 64 << 20
"""Most bytes of a frame's entries, unpacked."""

_VERSION = struct.Struct("<H")
_FRAME = struct.Struct("<III")
_SIZE = struct.Struct("<I")
_LEVEL = 1


class RecordingError(ConfigError):
    """A file that is no recording, has another version, or is damaged."""


def file_start(header: Header) -> bytes:
    """The first bytes of a file."""
    return MAGIC + _VERSION.pack(FORMAT_VERSION) + pack_frame([encode(header)])


def pack_frame(entries: Sequence[bytes]) -> bytes:
    """A frame of encoded entries, which have at most `MAX_FRAME_BYTES` together."""
    raw = b"".join(part for entry in entries for part in (_SIZE.pack(len(entry)), entry))
    packed = zlib.compress(raw, _LEVEL)
    return _FRAME.pack(len(packed), len(raw), zlib.crc32(packed)) + packed


class RecordingReader:
    """Reads a recording from the beginning, once.

    Raises (at construction):
        RecordingError: if it is none, or of another version, or ends within the header.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0
        self.ended: EndReason | None = None
        """Why the recording ends; None before its last entry, and if it is cut off."""
        if self._read(len(MAGIC)) != MAGIC:
            raise RecordingError("not a recording of a router's events")
        version = self._read(_VERSION.size)
        if len(version) < _VERSION.size:
            raise RecordingError("cut off in its first bytes")
        if version != _VERSION.pack(FORMAT_VERSION):
            (found,) = _VERSION.unpack(version)
            raise RecordingError(f"a recording of version {found} of the format, this is version {FORMAT_VERSION}")
        self.header = self._read_header()

    def entries(self) -> Iterator[Entry]:
        """All entries except `Ended`, up to the last whole frame.

        Raises:
            RecordingError: at a frame that is damaged; what came before it is good.
        """
        while True:
            begins_at = self._position
            frame = self._read_frame()
            if frame is None:
                return
            for data in _split(frame, begins_at):
                try:
                    entry = decode(data)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise RecordingError(f"at byte {begins_at}: {self._by_another(error)}") from None
                if isinstance(entry, Ended):
                    self.ended = entry.reason
                    return
                yield entry

    def _read_header(self) -> Header:
        frame = self._read_frame()
        if frame is None:
            raise RecordingError("cut off in its first bytes")
        try:
            (data,) = _split(frame, 0)
            return decode_header(data)
        except (msgspec.MsgspecError, ConfigError, ValueError) as error:
            raise RecordingError(f"its header cannot be read ({error})") from None

    def _by_another(self, error: Exception) -> str:
        return f"an entry cannot be read, recorded by disagg {self.header.disagg} ({error})"

    def _read_frame(self) -> bytes | None:
        """The unpacked contents of the next frame; None if the file ends before a whole one."""
        begins_at = self._position
        head = self._read(_FRAME.size)
        if len(head) < _FRAME.size:
            return None
        num_packed, num_raw, crc = _FRAME.unpack(head)
        if num_packed > MAX_FRAME_BYTES or num_raw > MAX_FRAME_BYTES:
            raise RecordingError(f"damaged at byte {begins_at}: no frame is that large")
        packed = self._read(num_packed)
        if len(packed) < num_packed:
            return None
        if zlib.crc32(packed) != crc:
            raise RecordingError(f"damaged at byte {begins_at}: the checksum is another one")
        try:
            unpacker = zlib.decompressobj()
            raw = unpacker.decompress(packed, num_raw + 1)
        except zlib.error as error:
            raise RecordingError(f"damaged at byte {begins_at}: {error}") from None
        if len(raw) != num_raw or not unpacker.eof:
            raise RecordingError(f"damaged at byte {begins_at}: a frame of another size")
        return raw

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._position += len(data)
        return data


def _split(frame: bytes, begins_at: int) -> Iterator[memoryview]:
    view, position = memoryview(frame), 0
    while position < len(frame):
        end = position + _SIZE.size
        if end <= len(frame):
            (size,) = _SIZE.unpack_from(frame, position)
            position, end = end, end + size
        if end > len(frame):
            raise RecordingError(f"damaged at byte {begins_at}: an entry is longer than its frame")
        yield view[position:end]
        position = end
