"""What clients sent and got is for the gateway's user alone, whatever was there before."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from disagg.gateway.batches.store import Answer, BatchStore, File
from disagg.gateway.config import StoreLimits
from disagg.gateway.private_files import check_folder, create_private, make_folder, make_private
from disagg.gateway.sqlite import open_database
from disagg.gateway.usage.counts import Batch, Counts, Key
from disagg.gateway.usage.store import UsageStore


def modes_in(folder: Path) -> dict[str, int]:
    """Of files and folders below."""
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")}


@pytest.fixture(autouse=True)
def usual_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_stores_in_a_folder_that_was_there_can_be_read_by_their_user_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    usage, batches = UsageStore(tmp_path, 9, 0.0), BatchStore(tmp_path, StoreLimits())
    usage.write(Batch({Key("a", 1, "m"): Counts(1)}), 86_400.0)
    with create_private(tmp_path / "upload") as target:
        target.write(b"{}\n")
    batches.add_file(File("file-1", "a", "in", "batch", 3, 0.0), tmp_path / "upload")
    batches.create("b", "a", "/v1/completions", "file-1", 0.0, 9.0)
    batches.claim("me", 0.0)
    batches.answer("b", "me", [Answer(0, True, b"x")])
    batches.finish("b", "me", "completed", 1.0)
    found = modes_in(tmp_path)
    assert set(found) == {
        *(f"{name}.sqlite{suffix}" for name in ("usage", "batches") for suffix in ("", "-wal", "-shm")),
        "files",
        "files/file-1",
        "files/file-b-output",
    }
    assert {name for name, mode in found.items() if mode & 0o077} == set()


def test_a_file_of_an_earlier_version_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").touch(mode=0o644)
    first = open_database(tmp_path / "x.sqlite", "CREATE TABLE t(a)", "NORMAL", 0.0)
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    second = open_database(tmp_path / "x.sqlite", "", "NORMAL", 0.0)
    second.execute("INSERT INTO t VALUES (1)")
    assert set(modes_in(tmp_path).values()) == {0o600}
    first.close()
    second.close()


def test_a_further_connection_takes_no_locks_of_the_first(tmp_path: Path) -> None:
    """POSIX: who closes a file loses all locks that his process has of it. Without them another process truncates what
    SQLite has mapped."""
    first = UsageStore(tmp_path, 9, 0.0)
    first.write(Batch({Key("a", 1, "m"): Counts(1)}), 86_400.0)
    held = locks_of_this_process(tmp_path)
    assert held
    second = UsageStore(tmp_path, 9, 0.0)
    assert held <= locks_of_this_process(tmp_path)
    second.close()
    first.close()


def locks_of_this_process(folder: Path) -> set[tuple[str, ...]]:
    """Inode and range of each."""
    inodes = {str(path.stat().st_ino) for path in folder.iterdir()}
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {
        (row[5].split(":")[2], *row[6:8])
        for row in rows
        if row[4] == str(os.getpid()) and row[5].split(":")[2] in inodes
    }


def test_files_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        make_private(tmp_path / "link")
    (tmp_path / "theirs").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(PermissionError, match=r"theirs belongs to another user \(\d+\)"):
        make_private(tmp_path / "theirs")


def test_a_folder_that_others_can_use_is_refused_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(
        PermissionError, match=rf"everybody can put files there \(mode 0777\); next: chmod 700 {folder}"
    ):
        make_folder(folder)
    folder.chmod(0o1777)  # only their owners can take files away
    make_folder(folder)
    folder.chmod(0o755)
    os.chown(folder, 12_345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    monkeypatch.setattr(os, "access", lambda *_: True)
    with caplog.at_level(logging.WARNING):
        make_folder(folder)
    assert "belongs to another user" in caplog.text


def test_a_folder_is_checked_without_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="it is not a folder"):
        check_folder(tmp_path / "file")
    with pytest.raises(PermissionError, match=f"it is not there, and nothing can be made in {tmp_path / 'file'}"):
        check_folder(tmp_path / "file" / "below")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="cannot write into it"):
        check_folder(tmp_path)
    with pytest.raises(PermissionError, match=f"it is not there, and nothing can be made in {tmp_path}"):
        check_folder(tmp_path / "new")
