"""The thread of the files: orders go in, commands come out, and a failing folder fails nothing else."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.commands import (
    TierAnswer,
    TierFailed,
    TierForgotten,
    TierFull,
    TierRead,
    TierScanned,
    TierWritten,
)
from disagg.engine.config import DiskTier, TierOptions, WorkerConfig
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer
from disagg.engine.shell.extent_files import ExtentFiles
from disagg.engine.shell.tier_disk import TierDisk, open_tier_disk
from disagg.engine.tiers.extent_file import file_name
from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.engine.tiers.store import MOST_WRITES
from disagg.proto.ids import BlockHash
from tests.unit.engine.tiers.test_extent_file import FIRST, NUM_BYTES, SECOND, format_of, payload

WAIT_S = 10.0


class Answers:
    """A disk tier and what it answered."""

    def __init__(self, files: ExtentFiles, most_files: int = 64, *, is_shared: bool = False) -> None:
        self.disk = TierDisk(files, most_files, is_shared=is_shared)
        self._answers: queue.SimpleQueue[TierAnswer] = queue.SimpleQueue()
        self.disk.start(self._answers.put)

    def next(self) -> TierAnswer:
        return self._answers.get(timeout=WAIT_S)

    def next_written(self) -> tuple[int, bool]:
        """Number and result of a write, which took some time."""
        answer = self.next()
        assert isinstance(answer, TierWritten)
        assert min(answer.ms, answer.cpu_ms) >= 0.0
        return answer.number, answer.ok

    def next_read(self) -> tuple[int, bool]:
        """Number and result of a read, which took some time."""
        answer = self.next()
        assert isinstance(answer, TierRead)
        assert answer.ms >= 0.0
        return answer.number, answer.ok


@pytest.fixture
def files(tmp_path: Path) -> ExtentFiles:
    files = ExtentFiles(tmp_path / "own", format_of(), is_shared=False)
    files.open()
    return files


@pytest.fixture
def answers(files: ExtentFiles) -> Iterator[Answers]:
    answers = Answers(files)
    yield answers
    assert answers.disk.stop(WAIT_S)


def test_orders_are_answered(answers: Answers) -> None:
    answers.disk.scan(anew=True)
    assert answers.next() == TierScanned(())
    answers.disk.write(1, FIRST, payload())
    assert answers.next_written() == (1, True)
    answers.disk.read(2, FIRST, payload(0))
    assert answers.next_read() == (2, True)
    answers.disk.delete([FIRST])
    answers.disk.scan(anew=True)
    assert answers.next() == TierScanned(())
    answers.disk.read(3, FIRST, payload())
    assert answers.next_read() == (3, False)


def test_a_damaged_file_is_no_fault_of_the_folder(answers: Answers, tmp_path: Path) -> None:
    answers.disk.write(1, FIRST, payload())
    answers.next()
    (path,) = tmp_path.rglob("*.kv")
    path.write_bytes(b"x" * path.stat().st_size)
    answers.disk.read(2, FIRST, payload())
    answers.disk.scan(anew=True)
    assert answers.next_read() == (2, False)
    assert answers.next() == TierScanned((FIRST,))


def extents_of(number: int) -> list[Extent]:
    """Extents that begin so many chains."""
    return [Extent(BlockHash(bytes([each]) * 16), NO_PARENT) for each in range(number)]


def test_a_shared_folder_has_no_more_files_than_one_worker_may_keep(tmp_path: Path) -> None:
    """Two workers write to it, two files each, of the three that it may have."""
    many, opened = extents_of(4), [ExtentFiles(tmp_path, format_of(), is_shared=True) for _ in range(2)]
    for each in opened:
        each.open()
    first, second = [Answers(each, 3, is_shared=True) for each in opened]
    for number, extent in enumerate(many):
        answers = first if number < 2 else second
        answers.disk.write(number, extent, payload())
        assert answers.next_written() == (number, True)
        (path,) = tmp_path.rglob(file_name(extent))
        os.utime(path, (number, number))
    first.disk.read(9, many[0], payload(0))  # from now on it is the one that was used last
    assert first.next_read() == (9, True)
    first.disk.scan(anew=False)
    assert first.next() == TierScanned((many[3], many[2]), (many[1].key,))
    assert len(list(tmp_path.rglob("*.kv"))) == 3
    second.disk.scan(anew=False)
    assert second.next() == TierScanned((many[0],), ())
    second.disk.scan(anew=True)
    assert second.next() == TierScanned((many[0], many[3], many[2]), ())
    assert first.disk.stop(WAIT_S)
    assert second.disk.stop(WAIT_S)


def test_what_is_in_no_chain_is_left_in_a_shared_folder_that_is_not_full(tmp_path: Path) -> None:
    files = ExtentFiles(tmp_path, format_of(), is_shared=True)
    files.open()
    answers = Answers(files, 4, is_shared=True)
    answers.disk.write(1, SECOND, payload())
    answers.next_written()
    answers.disk.scan(anew=True)
    assert answers.next() == TierScanned((), ())
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    assert answers.disk.stop(WAIT_S)


def test_a_scan_looks_at_so_many_files_and_says_that_there_are_more(
    files: ExtentFiles, caplog: pytest.LogCaptureFixture
) -> None:
    for extent in extents_of(7):
        files.write(extent, payload())
    answers = Answers(files, 2)
    answers.disk.scan(anew=True)
    scanned = answers.next()
    assert isinstance(scanned, TierScanned)
    assert len(scanned.extents) == 2
    assert len(list(files.folder.rglob("*.kv"))) == 7 - 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{files.folder} has more than 2 files of KV; the others are looked at later"
    ]
    answers.disk.scan(anew=False)
    scanned = answers.next()
    assert isinstance(scanned, TierScanned)
    assert len(list(files.folder.rglob("*.kv"))) == 2
    assert answers.disk.stop(WAIT_S)


def test_all_files_of_a_tenant_are_deleted_whether_they_are_known_or_not(answers: Answers, tmp_path: Path) -> None:
    answers.disk.write(1, FIRST, payload())
    answers.disk.write(2, SECOND, payload())
    answers.disk.forget(SECOND.tag)
    assert [answers.next_written(), answers.next_written()] == [(1, True), (2, True)]
    assert answers.next() == TierForgotten(SECOND.tag, True)
    assert [path.name for path in tmp_path.rglob("*.kv")] == [file_name(FIRST)]


def test_an_own_folder_that_was_read_is_only_looked_at(answers: Answers, files: ExtentFiles) -> None:
    answers.disk.scan(anew=True)
    assert answers.next() == TierScanned(())
    files.write(FIRST, payload())
    answers.disk.scan(anew=False)
    assert answers.next() == TierScanned(())
    files.folder.rename(files.folder.with_name("moved"))
    answers.disk.scan(anew=False)
    assert answers.next() == TierFailed("No such file or directory", of_scan=True)
    answers.disk.scan(anew=True)
    assert answers.next() == TierScanned(())


class FullFiles(ExtentFiles):
    """A folder on a full disk."""

    def write(self, extent: Extent, payload: Buffer) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, extent: Extent, payload: Buffer) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_folder_that_fails_says_why(tmp_path: Path) -> None:
    answers = Answers(FullFiles(tmp_path / "own", format_of(), is_shared=False))
    answers.disk.write(1, FIRST, payload())
    assert (answers.next_written(), answers.next()) == ((1, False), TierFull("No space left on device"))
    answers.disk.read(2, SECOND, payload())
    assert [answers.next(), answers.next()] == [TierRead(2, False), TierFailed("Input/output error")]
    assert answers.disk.stop(WAIT_S)


class BrokenFiles(ExtentFiles):
    """Files whose reads have a fault that nobody thought of."""

    def read(self, extent: Extent, payload: Buffer) -> str:
        raise MemoryError


def test_the_thread_outlives_every_error(tmp_path: Path) -> None:
    files = BrokenFiles(tmp_path / "own", format_of(), is_shared=False)
    files.open()
    answers = Answers(files)
    answers.disk.read(1, FIRST, payload())
    assert [answers.next(), answers.next()] == [TierRead(1, False), TierFailed("MemoryError")]
    answers.disk.scan(anew=True)
    assert answers.next() == TierScanned(())
    assert answers.disk.stop(WAIT_S)


def test_a_folder_that_others_may_read_is_logged_once(
    answers: Answers, files: ExtentFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.folder.chmod(0o755)
    for _ in range(2):
        answers.disk.scan(anew=True)
        assert answers.next() == TierFailed("the folder is not this worker's alone", of_scan=True)
    assert len(caplog.records) == 1


def test_so_many_writes_wait_at_a_time(files: ExtentFiles) -> None:
    disk = TierDisk(files, 64)
    for number in range(MOST_WRITES):
        assert disk.has_room
        disk.write(number, FIRST, payload())
    assert not disk.has_room
    assert disk.stop(WAIT_S)


def test_the_folder_is_free_when_the_thread_has_ended(files: ExtentFiles) -> None:
    answers = Answers(files)
    assert answers.disk.stop(WAIT_S)
    again = ExtentFiles(files.folder, format_of(), is_shared=False)
    again.open()
    again.close()


def test_a_worker_without_a_folder_has_no_thread(tmp_path: Path) -> None:
    runner, secret = FakeModelRunner(48, 16, 384), ClusterSecret(b"s" * 32)
    config = WorkerConfig(worker_id="w", roles=("prefill",), model_path="fake")
    assert open_tier_disk(config, runner, secret) is None
    tiers = TierOptions(host_bytes=1 << 20)
    config = WorkerConfig(worker_id="w", roles=("prefill",), model_path="fake", tiers=tiers)
    assert open_tier_disk(config, runner, secret) is None
    tiers = TierOptions(disk=DiskTier(path=str(tmp_path / "own"), bytes=1 << 20))
    config = WorkerConfig(worker_id="w", roles=("prefill",), model_path="fake", tiers=tiers)
    disk = open_tier_disk(config, runner, secret)
    assert disk is not None
    assert disk.stop(WAIT_S)


class OtherRunner(FakeModelRunner):
    """Computes the same with other bits, as another processor may."""

    arithmetic = "another"


def test_workers_of_another_arithmetic_do_not_share_files(tmp_path: Path) -> None:
    tiers = TierOptions(disk=DiskTier(path=str(tmp_path / "shared"), bytes=1 << 20, shared=True))
    config = WorkerConfig(worker_id="w", roles=("prefill",), model_path="fake", tiers=tiers)
    disks = [
        open_tier_disk(config, runner, ClusterSecret(b"s" * 32))
        for runner in (FakeModelRunner(48, 16, 384), FakeModelRunner(48, 16, 384), OtherRunner(48, 16, 384))
    ]
    found: list[TierAnswer] = []
    for disk in disks:
        assert disk is not None
        answers: queue.SimpleQueue[TierAnswer] = queue.SimpleQueue()
        disk.start(answers.put)
        if not found:
            disk.write(1, FIRST, np.zeros(NUM_BYTES, dtype=np.uint8))
            answers.get(timeout=WAIT_S)
        disk.scan(anew=True)
        found.append(answers.get(timeout=WAIT_S))
        assert disk.stop(WAIT_S)
    assert found == [TierScanned((FIRST,)), TierScanned((FIRST,)), TierScanned(())]
