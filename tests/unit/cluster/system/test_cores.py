"""Workers of one machine that take cores from one another."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest

from disagg.cluster.system.cores import CoreClaims, num_cuda_devices, shared_folder


def test_each_takes_cores_that_nobody_has(tmp_path: Path) -> None:
    first, second, third = (CoreClaims(tmp_path) for _ in range(3))
    assert first.take(2, [2, 3, 5, 7]) == (2, 3)
    assert second.take(1, [2, 3, 5, 7]) == (5,)
    first.close()
    assert third.take(2, [2, 3, 5, 7]) == (2, 3)
    for claims in (first, second, third):
        claims.close()


def test_what_is_missing_is_shared_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = CoreClaims(tmp_path), CoreClaims(tmp_path)
    assert first.take(2, [0, 1, 2]) == (0, 1)
    with caplog.at_level(logging.WARNING):
        assert second.take(2, [0, 1, 2]) == (2, 0)
    assert "cores [0] are shared" in caplog.text
    first.close()
    second.close()


def test_a_machine_with_fewer_cores_gives_what_it_has(tmp_path: Path) -> None:
    claims = CoreClaims(tmp_path)
    assert claims.take(8, [0, 1]) == (0, 1)
    claims.close()


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, 2), ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, 3), ({"CUDA_VISIBLE_DEVICES": ""}, 0)],
)
def test_devices_are_counted_without_cuda(tmp_path: Path, environment: dict[str, str], count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_cuda_devices(environment, tmp_path) == count
    assert num_cuda_devices({}, tmp_path / "none") is None


def test_the_folder_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = shared_folder()
    assert (folder.parent, folder.stat().st_mode & 0o777, shared_folder()) == (tmp_path, 0o700, folder)
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(PermissionError, match="is not a folder of this user"):
        shared_folder()
