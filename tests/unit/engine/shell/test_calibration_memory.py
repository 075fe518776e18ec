"""Measured step times that are kept for the next worker of the same kind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec import structs

from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import calibrate
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.shell import calibration_memory
from disagg.engine.shell.calibration_memory import MAX_AGE_S, calibration_folder, remembered_calibration
from disagg.proto.messages import StepSample

RUNNER = FakeModelRunner(1024, 16, 4096)
CONFIG = WorkerConfig(worker_id="w", roles=("decode",), model_path="real")
SAMPLES = calibrate(RUNNER, CONFIG, lambda: 0.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    return tmp_path / "calibration"


def remember(samples: tuple[StepSample, ...] = SAMPLES, config: WorkerConfig = CONFIG) -> tuple[StepSample, ...]:
    """What was known, before this is put in its place."""
    with remembered_calibration(RUNNER, config) as memory:
        before, memory.samples = memory.samples, samples
    return before


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_the_folder_is_beside_the_models() -> None:
    assert calibration_folder({"DISAGG_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/calibration")
    assert calibration_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/disagg/calibration")
    assert calibration_folder({}) == Path.home() / ".cache/disagg/calibration"


def test_the_next_worker_of_the_kind_has_what_the_last_one_measured(folder: Path) -> None:
    assert len(SAMPLES) == 8
    assert remember() == ()
    assert remember() == SAMPLES
    assert only_file(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", [{"num_threads": 2}, {"roles": ("prefill",)}, {"token_budget": 64}])
def test_one_of_another_kind_has_not(change: dict[str, object]) -> None:
    remember()
    assert remember(config=structs.replace(CONFIG, **change)) == ()


@pytest.mark.parametrize("change", [{"model_path": "fake"}, {"device": "cuda"}, {"tp": 2}])
def test_of_some_workers_nothing_is_kept(folder: Path, change: dict[str, object]) -> None:
    remember(config=structs.replace(CONFIG, **change))
    assert not folder.exists()


def test_incomplete_measurements_are_not_kept(folder: Path) -> None:
    remember(SAMPLES[:-1])
    assert not folder.exists()


def test_what_was_measured_long_ago_or_will_be_is_not_used(folder: Path) -> None:
    remember()
    now = time.time()
    for age_s, expected in ((MAX_AGE_S - 60.0, SAMPLES), (MAX_AGE_S + 60.0, ()), (-3600.0, ())):
        os.utime(only_file(folder), (now - age_s, now - age_s))
        assert remember(()) == expected


@pytest.mark.parametrize("content", [b"", b"[", b'{"ms": 1}', b'[["a"]]', b"[" * 100_000])
def test_a_damaged_file_is_replaced(folder: Path, content: bytes) -> None:
    remember()
    only_file(folder).write_bytes(content)
    assert remember() == ()
    assert remember() == SAMPLES


def test_a_file_that_others_can_write_or_a_link_is_not_read(folder: Path) -> None:
    remember()
    file = only_file(folder)
    file.chmod(0o622)
    assert remember(()) == ()
    file.chmod(0o600)
    assert remember(()) == SAMPLES
    elsewhere = folder.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert remember(()) == ()


def test_the_oldest_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_memory, "MAX_FILES", 2)
    for threads in (1, 2, 3):
        remember(config=WorkerConfig(worker_id="w", roles=("decode",), model_path="real", num_threads=threads))
    assert len(list(folder.iterdir())) == 2


def test_where_nothing_can_be_written_the_worker_starts_all_the_same(folder: Path) -> None:
    folder.write_text("a file")
    assert remember() == ()
    assert remember() == ()
