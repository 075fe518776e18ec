"""Recordings are bounded in bytes and never block; where one ends, it says why."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from disagg.router.config import RecordingOptions, RouterConfig
from disagg.router.recording.entries import Entry, Handled, encode
from disagg.router.recording.recording_file import RecordingReader, file_start
from disagg.router.requests.events import Tick
from disagg.router.shell import recorder as recorder_module
from disagg.router.shell.recorder import Recorder, start_recording
from tests.support.recordings import GATEWAY_ID, header_of

CONFIG = RouterConfig()
HEADER = header_of(CONFIG)
LONG_S = 10.0


def entry(index: int) -> Handled:
    """Ones that hardly compress."""
    return Handled(float(index), Tick(), index, os.urandom(1000))


def read(file: Path) -> tuple[list[Entry], str | None]:
    with file.open("rb") as opened:
        reader = RecordingReader(opened)
        return list(reader.entries()), reader.ended


def test_all_entries_of_a_router_that_stops_are_in_a_file_for_its_owner(tmp_path: Path) -> None:
    recorder = start_recording(RecordingOptions(folder=str(tmp_path / "new" / "events")), CONFIG, GATEWAY_ID, 7.5)
    assert recorder is not None
    entries = [entry(index) for index in range(1000)]
    for each in entries:
        recorder.put(encode(each))
    recorder.close()
    recorder.put(encode(entry(1000)))
    recorder.close()
    assert read(recorder.file) == (entries, "stopped")
    assert recorder.file.name.endswith("-g0.events")
    assert stat.S_IMODE(recorder.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorder.file.parent.stat().st_mode) == 0o700
    with recorder.file.open("rb") as opened:
        header = RecordingReader(opened).header
    assert (header.config, header.gateway_id, header.clock) == (CONFIG, "g0", 7.5)


def test_a_recording_ends_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "_FRAME_BYTES", 10_000)
    file = tmp_path / "a.events"
    recorder = Recorder(file, 100_000, HEADER)
    entries = [entry(index) for index in range(600)]
    with caplog.at_level(logging.WARNING):
        for each in entries:
            recorder.put(encode(each))
        recorder._thread.join(LONG_S)
    assert not recorder.is_open
    recorder.put(encode(entry(0)))
    recorder.close()
    assert 80_000 < file.stat().st_size <= 100_000
    found, ended = read(file)
    assert (found, ended) == (entries[: len(found)], "full")
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} has its 100000 bytes; what follows is not recorded"
    ]


def test_a_disk_that_is_too_slow_ends_it_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_WAITING_BYTES", 20_000)
    recorder = Recorder(tmp_path / "a.events", 1 << 20, HEADER)
    is_free, write = threading.Event(), recorder._write
    monkeypatch.setattr(recorder, "_write", lambda data: (is_free.wait(LONG_S), write(data)))
    entries = [entry(index) for index in range(30)]
    for each in entries:
        recorder.put(encode(each))
    assert not recorder.is_open
    is_free.set()
    recorder.close()
    found, ended = read(recorder.file)
    assert (found, ended) == (entries[: len(found)], "too_slow")
    assert 15 <= len(found) < 30
    assert [record.getMessage() for record in caplog.records] == [
        f"{recorder.file}: the disk is too slow; what follows is not recorded"
    ]


def test_an_error_of_the_disk_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "a.events", 1 << 20, HEADER)
    monkeypatch.setattr(recorder, "_write", full)
    recorder.put(encode(entry(0)))
    recorder._thread.join(LONG_S)
    assert not recorder.is_open
    recorder.close()
    assert read(recorder.file) == ([], None)
    assert "No space left on device; what follows is not recorded" in caplog.records[0].getMessage()


def test_what_cannot_be_recorded_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "a.events", 1 << 20, HEADER)
    recorder.put(encode(entry(0)))
    recorder.fail(TypeError("of no use"))
    recorder.close()
    found, ended = read(recorder.file)
    assert (len(found), ended) == (1, "failed")
    assert "an event cannot be recorded" in caplog.records[0].getMessage()


def test_recordings_of_one_folder_have_one_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RecordingOptions(folder=str(tmp_path), max_bytes=5000)
    (tmp_path / "earlier.events").write_bytes(bytes(4000 - len(file_start(HEADER))))
    (tmp_path / "notes.txt").write_bytes(bytes(100_000))
    recorder = start_recording(options, CONFIG, GATEWAY_ID, 0.0)
    assert recorder is not None
    for index in range(20):
        recorder.put(encode(entry(index)))
    recorder._thread.join(LONG_S)
    assert read(recorder.file)[1] == "full"
    (tmp_path / "another.events").write_bytes(bytes(1000))
    assert start_recording(options, CONFIG, GATEWAY_ID, 0.0) is None
    assert caplog.messages[-1] == f"events are not recorded: the recordings in {tmp_path} have 5000 bytes"


def test_a_folder_that_cannot_be_used_keeps_no_gateway_from_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert start_recording(RecordingOptions(folder=str(tmp_path / "file")), CONFIG, GATEWAY_ID, 0.0) is None
    assert caplog.messages[-1].startswith("events are not recorded: ")
