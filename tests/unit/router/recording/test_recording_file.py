"""A recording is read up to its last whole frame; what is no recording, or damaged, is said to be."""

from __future__ import annotations

import io
import struct
import zlib

import pytest

from disagg.router.config import RouterConfig
from disagg.router.recording.entries import Entry, Handled, Header, Refunded, encode
from disagg.router.recording.recording_file import (
    FORMAT_VERSION,
    MAGIC,
    MAX_FRAME_BYTES,
    RecordingError,
    RecordingReader,
    file_start,
    pack_frame,
)
from disagg.router.requests.events import Tick
from tests.support.recordings import file_of, header_of, read

HEADER = header_of(RouterConfig(ttft_slo_s=0.25))
ENTRIES: list[Entry] = [*(Handled(float(i), Tick(), i, b"digest") for i in range(5)), Refunded(9.5, "a", 7, 1)]
ENCODED = [encode(entry) for entry in ENTRIES]
START = len(file_start(HEADER))


def test_what_is_written_is_read() -> None:
    reader, entries = read(file_of(HEADER, ENCODED, in_frame=2))
    assert (reader.header, entries, reader.ended) == (HEADER, ENTRIES, "stopped")
    reader, entries = read(file_of(HEADER, []))
    assert (entries, reader.ended) == ([], "stopped")


def test_a_file_that_is_cut_off_anywhere_has_its_whole_frames() -> None:
    frames = [pack_frame(ENCODED[first : first + 2]) for first in (0, 2, 4)]
    data = file_of(HEADER, ENCODED, in_frame=2, is_ended=False)
    ends = [START + sum(map(len, frames[:count])) for count in range(4)]
    assert ends[-1] == len(data)
    for size in range(START, len(data) + 1):
        reader, entries = read(data[:size])
        assert entries == ENTRIES[: 2 * sum(size >= end for end in ends[1:])]
        assert reader.ended is None
    for size in range(START):
        with pytest.raises(
            RecordingError, match=r"^(not a recording of a router's events|cut off in its first bytes)$"
        ):
            read(data[:size])


def test_a_damaged_byte_is_found_after_what_came_before_it() -> None:
    data = file_of(HEADER, ENCODED, in_frame=2)
    second = START + len(pack_frame(ENCODED[:2]))
    for position in range(second, second + len(pack_frame(ENCODED[2:4]))):
        damaged = bytearray(data)
        damaged[position] ^= 0x20
        reader = RecordingReader(io.BytesIO(bytes(damaged)))
        entries: list[Entry] = []
        problem = ""
        try:
            entries.extend(reader.entries())
        except RecordingError as error:
            problem = str(error)
        assert (entries, reader.ended) == (ENTRIES[:2], None)
        seems_cut_off = problem == ""  # a frame that would be longer than the file
        assert seems_cut_off or problem.startswith(f"damaged at byte {second}: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a recording of a router's events"),
        (b"gateway: {port: 8470}\n" * 9, "not a recording of a router's events"),
        (
            MAGIC + struct.pack("<H", FORMAT_VERSION + 1) + file_of(HEADER, [])[len(MAGIC) + 2 :],
            f"a recording of version {FORMAT_VERSION + 1} of the format, this is version {FORMAT_VERSION}",
        ),
        (
            MAGIC + struct.pack("<H", FORMAT_VERSION) + pack_frame([b"\x80"]),
            "its header cannot be read (Object missing required field `config`)",
        ),
        (
            MAGIC + struct.pack("<H", FORMAT_VERSION) + pack_frame([]),
            "its header cannot be read (not enough values to unpack (expected 1, got 0))",
        ),
    ],
)
def test_what_is_no_recording_is_said_to_be_none(data: bytes, message: str) -> None:
    with pytest.raises(RecordingError) as caught:
        read(data)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (struct.pack("<III", MAX_FRAME_BYTES + 1, 1, 0), "no frame is that large"),
        (struct.pack("<III", 1, MAX_FRAME_BYTES + 1, 0), "no frame is that large"),
        (struct.pack("<III", 3, 1, zlib.crc32(b"abc")) + b"abc", "Error -3 while decompressing data: "),
        (
            struct.pack("<III", len(zlib.compress(bytes(1 << 20))), 9, zlib.crc32(zlib.compress(bytes(1 << 20))))
            + zlib.compress(bytes(1 << 20)),
            "a frame of another size",
        ),
    ],
)
def test_a_frame_that_lies_about_its_size_costs_no_memory(frame: bytes, message: str) -> None:
    reader = RecordingReader(io.BytesIO(file_start(HEADER) + frame))
    with pytest.raises(RecordingError) as caught:
        list(reader.entries())
    assert str(caught.value).startswith(f"damaged at byte {START}: {message}")


def test_an_entry_of_another_version_names_that() -> None:
    reader = RecordingReader(io.BytesIO(file_of(HEADER, [b"\x92\x07\xc0"])))
    with pytest.raises(RecordingError, match=rf"^at byte {START}: an entry cannot be read, recorded by disagg 0 \(.*7"):
        list(reader.entries())


def test_a_header_has_all_of_the_configuration() -> None:
    assert isinstance(HEADER, Header)
    assert read(file_of(HEADER, []))[0].header.config == RouterConfig(ttft_slo_s=0.25)
