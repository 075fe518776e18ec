"""Files of extents: what is in their names and headers, and that only whole files of this cluster are used."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer
from disagg.engine.shell import extent_files
from disagg.engine.shell.extent_files import GONE, ExtentFiles
from disagg.engine.tiers.extent_file import ExtentFormat, extent_format, extent_of, file_name
from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.proto.errors import ConfigError
from disagg.proto.ids import BlockHash

FIRST = Extent(BlockHash(b"a" * 16), NO_PARENT, b"")
SECOND = Extent(BlockHash(b"b" * 16), FIRST.key, b"tenant-8")
NUM_BYTES = 1024


def format_of(*, secret: bytes = b"s" * 32, fingerprint: str = "model", num_bytes: int = NUM_BYTES) -> ExtentFormat:
    layout = FakeModelRunner(4, 16, 64).layout
    return extent_format(fingerprint, layout, 1, num_bytes, ClusterSecret(secret))


def payload(value: int = 7) -> Buffer:
    return np.full(NUM_BYTES, value, dtype=np.uint8)


def files_in(folder: Path, format_: ExtentFormat | None = None, *, is_shared: bool = False) -> ExtentFiles:
    files = ExtentFiles(folder, format_ or format_of(), is_shared=is_shared)
    files.open()
    return files


def path_of(folder: Path, extent: Extent = FIRST) -> Path:
    (path,) = folder.rglob(file_name(extent))
    return path


@pytest.mark.parametrize("extent", [FIRST, SECOND])
def test_the_name_of_a_file_tells_the_extent(extent: Extent) -> None:
    assert extent_of(file_name(extent)) == extent


@pytest.mark.parametrize(
    "name",
    ["", "x.kv", "a-b-c.kv", f"{'61' * 16}-root.kv", f"{'61' * 15}-root-none.kv", f"{'61' * 16}-root-none.kv.tmp"],
)
def test_other_names_tell_none(name: str) -> None:
    assert extent_of(name) is None


def test_what_was_written_is_read_and_found_by_the_next_process(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload(1))
    files.write(SECOND, payload(2))
    files.close()
    files = files_in(tmp_path / "own")
    assert set(files.scan(64).extents) == {FIRST, SECOND}
    out = payload(0)
    assert files.read(SECOND, out) == ""
    assert out.tolist() == payload(2).tolist()
    assert files.read(Extent(BlockHash(b"c" * 16), NO_PARENT), out) == GONE
    files.delete([FIRST, FIRST])
    assert files.scan(64).extents == [SECOND]
    files.close()


@pytest.mark.parametrize("where", [0, 9, 20, 60, 100, 140, -1])
def test_a_file_with_one_wrong_byte_is_refused(tmp_path: Path, where: int) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload())
    data = bytearray(path_of(tmp_path).read_bytes())
    data[where] ^= 1
    path_of(tmp_path).write_bytes(data)
    assert files.read(FIRST, payload()) in ("no KV", "another header", "another checksum")
    files.close()


@pytest.mark.parametrize("length", [0, 50, 200, -1])
def test_a_short_file_is_refused(tmp_path: Path, length: int) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload())
    path_of(tmp_path).write_bytes(path_of(tmp_path).read_bytes()[:length])
    assert files.read(FIRST, payload()) == "another length"
    files.close()


def test_a_longer_file_is_refused(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload())
    with path_of(tmp_path).open("ab") as file:
        file.write(b"x")
    assert files.read(FIRST, payload()) == "another length"
    files.close()


def test_a_file_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload())
    path = path_of(tmp_path)
    path.rename(path.with_name(file_name(SECOND)))
    assert files.read(SECOND, payload()) == "another header"
    files.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_files_of_another_secret_are_not_announced_and_deleted_in_an_own_folder(
    tmp_path: Path, is_shared: bool
) -> None:
    files = files_in(tmp_path / "own", format_of(secret=b"t" * 32))
    files.write(FIRST, payload())
    files.close()
    files = ExtentFiles(tmp_path / "own", format_of(), is_shared=is_shared)
    files.open()
    assert files.scan(64).extents == []
    assert len(list(tmp_path.rglob("*.kv"))) == is_shared
    files.close()
    again = files_in(tmp_path / "own", format_of(secret=b"t" * 32))
    assert again.scan(64).extents == [FIRST] * is_shared
    again.close()


def test_a_file_that_was_moved_to_another_cluster_is_refused(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own", format_of(secret=b"t" * 32))
    files.write(FIRST, payload())
    files.close()
    files = files_in(tmp_path / "other")
    next(tmp_path.rglob("*.kv")).rename(tmp_path / "other" / format_of().store.hex() / file_name(FIRST))
    assert files.scan(64).extents == [FIRST]
    assert files.read(FIRST, payload()) == "another header"
    files.close()


def test_a_folder_that_was_removed_or_replaced_is_seen(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    files.look()
    (tmp_path / "own").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        files.look()
    files_in(tmp_path / "own").close()
    with pytest.raises(FileNotFoundError, match="another folder is in its place"):
        files.look()
    files.close()


def test_files_of_another_model_are_removed_from_an_own_folder_only(tmp_path: Path) -> None:
    for name, is_shared in (("own", False), ("shared", True)):
        before = files_in(tmp_path / name, format_of(fingerprint="earlier"), is_shared=is_shared)
        before.write(FIRST, payload())
        before.close()
        files = files_in(tmp_path / name, is_shared=is_shared)
        assert files.scan(64).extents == []
        files.close()
    assert [path.parts[-3] for path in tmp_path.rglob("*.kv")] == ["shared"]


def test_leftovers_are_removed_and_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload())
    folder = path_of(tmp_path).parent
    (folder / "x.123.tmp").write_bytes(b"half")
    (folder / "strange.kv").write_bytes(b"?")
    (folder / "readme").write_bytes(b"theirs")
    (tmp_path / "own" / "photos").mkdir()
    assert files.scan(64).extents == [FIRST]
    assert {path.name for path in folder.iterdir()} == {file_name(FIRST), "readme"}
    assert (tmp_path / "own" / "photos").is_dir()
    files.close()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload())
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "own", path_of(tmp_path))]
    assert modes == [0o700, 0o600]
    files.close()
    (tmp_path / "own").chmod(0o755)
    with pytest.raises(ConfigError, match=r"kv_cache.tiers.disk.path: .*own must be for its owner alone"):
        files_in(tmp_path / "own")


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    for written, named in ((None, f", {holder}"), ("", ""), ("\x1b[2J", ""), ("x" * 1000, ", " + "x" * 200)):
        if written is not None:
            (tmp_path / "own" / ".lock").write_text(written)
        with pytest.raises(ConfigError) as refused:
            files_in(tmp_path / "own")
        folder = tmp_path / "own"
        assert str(refused.value) == f"kv_cache.tiers.disk.path: {folder} is used by another worker{named}"
    files.close()
    files_in(tmp_path / "own").close()
    assert (tmp_path / "own" / ".lock").read_text() == f"{holder}\n"
    with_others = [files_in(tmp_path / "shared", is_shared=True) for _ in range(2)]
    with_others[0].write(FIRST, payload())
    assert with_others[1].scan(64).extents == [FIRST]


def test_a_worker_waits_for_the_end_of_its_last_process(tmp_path: Path) -> None:
    last, waited = files_in(tmp_path / "own"), list[float]()

    def ends(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            last.close()

    files = ExtentFiles(tmp_path / "own", format_of(), is_shared=False)
    files.open(1.0, ends)
    with pytest.raises(ConfigError, match="used by another worker"):
        ExtentFiles(tmp_path / "own", format_of(), is_shared=False).open(0.35, waited.append)
    assert waited == [0.1] * (3 + 4)
    files.close()


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"kv_cache.tiers.disk.path: .*cannot be used"):
        files_in(tmp_path / "file" / "own")


def test_a_full_disk_does_not_keep_a_worker_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(path: Path, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", is_full)
    files = files_in(tmp_path / "own")
    with pytest.raises(OSError, match="No space left"):
        files.scan(64)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_file_system_that_became_read_only_does_not_keep_a_worker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """The superuser may write wherever a file system lets it, so the file system is played."""
    files_in(tmp_path / "own", is_shared=is_shared).close()
    status = os.statvfs(tmp_path)
    read_only = os.statvfs_result([*status[:8], status.f_flag | os.ST_RDONLY, *status[9:]])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="nothing can be written there"):
        files_in(tmp_path / "own", is_shared=is_shared)
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    files = files_in(tmp_path / "own", is_shared=is_shared)
    with pytest.raises(OSError, match="Read-only file system"):
        files.scan(64)
    files.close()


def test_workers_with_equal_process_ids_write_the_same_extent_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [files_in(tmp_path / "shared", is_shared=True) for _ in range(2)]
    write_all, meanwhile = extent_files._write_all, [lambda: second.write(FIRST, payload())]

    def interrupted(file: int, data: memoryview) -> None:
        if meanwhile:
            meanwhile.pop()()
        write_all(file, data)

    monkeypatch.setattr(extent_files, "_write_all", interrupted)
    first.write(FIRST, payload())
    assert first.read(FIRST, payload(0)) == ""


def test_only_files_of_extents_are_removed_with_another_model(tmp_path: Path) -> None:
    """Other programs name folders by hashes, too, and a link may lead to one of them."""
    files = files_in(tmp_path / "own")
    other, cache = tmp_path / "own" / ("0" * 32), tmp_path / "cache"
    for folder in (other, cache):
        folder.mkdir()
        (folder / "photo").write_bytes(b"theirs")
        (folder / file_name(FIRST)).write_bytes(b"old")
    (tmp_path / "own" / ("1" * 32)).symlink_to(cache)
    assert files.scan(64).extents == []
    assert sorted(path.name for path in other.iterdir()) == ["photo"]
    assert sorted(path.name for path in cache.iterdir()) == sorted([file_name(FIRST), "photo"])
    files.close()


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path / "own")

    def is_full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", is_full)
    with pytest.raises(OSError, match="No space left"):
        files.write(FIRST, payload())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
    files.close()


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    files = files_in(tmp_path / "own")
    files.write(FIRST, payload())
    for path in [path_of(tmp_path), path_of(tmp_path).parent, tmp_path / "own" / ".lock", tmp_path / "own"]:
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(FileNotFoundError):
        files.write(FIRST, payload())
    assert files.scan(64).extents == []
    files.write(FIRST, payload())
    assert files.scan(64).extents == [FIRST]
    with pytest.raises(ConfigError, match="used by another worker"):
        files_in(tmp_path / "own")
    files.close()
