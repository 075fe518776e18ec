"""Files are read again when they change, and only then."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from disagg.gateway.auth.shell.file_watch import FileWatch, Watched
from disagg.proto.errors import ConfigError


def test_a_changed_a_replaced_and_a_broken_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file, read = tmp_path / "keys", []
    file.write_text("one")

    def reload() -> str:
        text = file.read_text() if file.exists() else "bad"
        if text == "bad":
            raise ConfigError("it is bad")
        read.append(text)
        return f"{text} it is"

    watch = FileWatch([Watched("the.key", (str(file), str(tmp_path / "other")), reload)], lambda: 1_800_000_000.0)
    watch.look()
    assert read == []
    file.write_text("two, longer")
    watch.look()
    watch.look()
    (tmp_path / "new").write_text("TWO, LONGER")
    stamp = file.stat()
    os.utime(tmp_path / "new", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (tmp_path / "new").replace(file)  # another file with the same size and time
    watch.look()
    file.write_text("bad")
    watch.look()
    watch.look()
    file.unlink()
    watch.look()
    file.write_text("three")
    watch.look()
    assert read == ["two, longer", "TWO, LONGER", "three"]
    bad = (
        "the.key: changed files cannot be used, what was read at 2027-01-15T08:00:00+00:00 stays in use until they "
        "change again: it is bad"
    )
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, "the.key: files changed and were read again: two, longer it is"),
        (logging.INFO, "the.key: files changed and were read again: TWO, LONGER it is"),
        (logging.ERROR, bad),
        (logging.ERROR, bad),
        (logging.INFO, "the.key: files changed and were read again: three it is"),
    ]


def test_without_files_there_is_no_thread() -> None:
    watch = FileWatch([])
    watch.start()
    watch.look()
    watch.stop()
    assert vars(watch)["_thread"] is None
