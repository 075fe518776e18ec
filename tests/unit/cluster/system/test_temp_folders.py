"""Folders of killed processes are removed by the next one, and no others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from disagg.cluster.system.temp_folders import MARK, TempFolder, remove_abandoned, temp_folder

PREFIX = "disagg-test-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def killed(prefix: str = PREFIX) -> Path:
    """The folder of a process that was killed: its lock is gone with it."""
    folder = TempFolder(prefix)
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "worker.log").write_text("x")
    assert folder._lock is not None
    os.close(folder._lock)
    return folder.path


def test_the_next_one_removes_what_a_killed_process_left(temporary: Path) -> None:
    left = killed()
    with temp_folder(PREFIX) as path:
        assert not left.exists()
        assert {each.name for each in path.iterdir()} == {MARK}
        with temp_folder(PREFIX) as other:
            assert path.exists()
            assert other != path
        assert not other.exists()
    assert list(temporary.iterdir()) == []


def test_what_belongs_to_somebody_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = killed("other-")
    (temporary / f"{PREFIX}unmarked").mkdir()
    (temporary / f"{PREFIX}file").touch()
    theirs = temporary / f"{PREFIX}theirs"
    theirs.symlink_to(others)
    used = TempFolder(PREFIX)
    before = set(temporary.iterdir())
    assert remove_abandoned(temporary, PREFIX) == []
    used.remove()
    used.remove()
    assert set(temporary.iterdir()) == before - {used.path}
    of_another = killed()
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert remove_abandoned(temporary, PREFIX) == []
    assert of_another.exists()


def test_a_folder_into_which_something_is_still_written_is_removed_later(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, remove = killed(), shutil.rmtree

    def remove_late(path: Path) -> None:
        remove(path)
        (left / "more").touch()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_late)
        assert remove_abandoned(temporary, PREFIX) == []
    assert {path.name for path in left.iterdir()} == {MARK, "more"}
    assert remove_abandoned(temporary, PREFIX) == [left]
    assert list(temporary.iterdir()) == []


def test_a_place_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert remove_abandoned(tmp_path / "none", PREFIX) == []
