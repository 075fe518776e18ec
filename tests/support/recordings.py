"""Recordings in memory, for tests."""

from __future__ import annotations

import io
from collections.abc import Sequence

from disagg.proto.ids import GatewayId
from disagg.router.config import RouterConfig
from disagg.router.recording.entries import Ended, Entry, Header, encode
from disagg.router.recording.recording_file import RecordingReader, file_start, pack_frame
from disagg.router.recording.replay import Replay, Replayed

GATEWAY_ID = GatewayId("g0")


class ListSink:
    """Keeps all entries; a fault while one is made fails the test."""

    def __init__(self) -> None:
        self.is_open = True
        self.entries: list[bytes] = []

    def put(self, entry: bytes) -> None:
        self.entries.append(entry)

    def fail(self, error: Exception) -> None:
        raise error


def header_of(config: RouterConfig, gateway_id: GatewayId = GATEWAY_ID) -> Header:
    return Header(config=config, gateway_id=gateway_id, disagg="0", python="3", clock=0.0, epoch_s=1000.0)


def file_of(header: Header, entries: Sequence[bytes], *, in_frame: int = 100, is_ended: bool = True) -> bytes:
    """The bytes of a whole file."""
    frames = [pack_frame(entries[first : first + in_frame]) for first in range(0, len(entries), in_frame)]
    last = [pack_frame([encode(Ended("stopped"))])] if is_ended else []
    return b"".join([file_start(header), *frames, *last])


def read(data: bytes) -> tuple[RecordingReader, list[Entry]]:
    reader = RecordingReader(io.BytesIO(data))
    return reader, list(reader.entries())


def replayed(header: Header, entries: Sequence[Entry]) -> list[Replayed]:
    """What each entry gave, up to the first difference."""
    replay = Replay(header)
    found: list[Replayed] = []
    for entry in entries:
        found.append(replay.apply(entry))
        if not found[-1].is_same:
            break
    return found
