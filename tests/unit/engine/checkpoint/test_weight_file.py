"""A file of tensors gives back what was written, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from disagg.engine.checkpoint.weight_file import UnusableFileError, map_tensors, write_tensors

TENSORS = {
    "a": torch.arange(35, dtype=torch.float32).view(5, 7).to(torch.bfloat16),
    "b": torch.linspace(-1, 1, 3),
    "c": torch.arange(130, dtype=torch.uint8).view(2, 65)[:, :33],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with (tmp_path / "file").open("wb") as stream:
        write_tensors(stream, "key", TENSORS)
    return tmp_path / "file"


def test_tensors_come_back(file: Path) -> None:
    found = map_tensors(file, "key")
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert found[name].is_contiguous()
        assert found[name].data_ptr() % 64 == 0


def test_a_mapping_outlives_the_file(file: Path) -> None:
    found = map_tensors(file, "key")
    file.unlink()
    assert torch.equal(found["a"], TENSORS["a"])


def _flip(offset: int) -> Callable[[bytes], bytes]:
    def flipped(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[offset] ^= 1
        return bytes(changed)

    return flipped


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"", "cut short"),
        (lambda data: data[:20], "cut short"),
        (lambda data: data[:-1], "of another kind"),
        (lambda data: data[64:], "bytes, not those of its index"),
        (lambda data: b"x" * len(data), "of another kind"),
        (lambda data: data + bytes(64), "of another kind"),
        (_flip(3), "tensors have changed"),
        (_flip(-60), "index has changed"),
        (_flip(-40), "of another kind"),
        (_flip(-1), "index has changed"),
    ],
)
def test_what_was_changed_is_not_used(file: Path, change: Callable[[bytes], bytes], reason: str) -> None:
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UnusableFileError, match=reason):
        map_tensors(file, "key")


def test_another_key_is_not_used(file: Path) -> None:
    with pytest.raises(UnusableFileError, match="something else"):
        map_tensors(file, "other")


def test_a_file_without_tensors_is_not_used(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as stream:
        write_tensors(stream, "key", {})
    with pytest.raises(UnusableFileError, match="no tensors"):
        map_tensors(tmp_path / "file", "key")


def test_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        map_tensors(tmp_path / "file", "key")
