"""What is prepared for a machine with a GPU: kernels that travel between caches, wheels without what is not needed."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import gpu_cubins, trim_nixl

REPOSITORY = Path(__file__).resolve().parents[3]


def filled_cache(cache: Path) -> dict[str, bytes]:
    """A kernel and a launcher, as Triton lays them down; what a launch needs of them."""
    files = {
        "AAA/_kernel.cubin": b"machine code",
        "AAA/_kernel.json": b'{"shared": 3}',
        "AAA/_kernel.ttir": b"long",
        "BBB/launcher.so": b"\x7fELF",
    }
    children = {Path(name).name: str(cache / name) for name in files if name.startswith("AAA")}
    files["AAA/__grp___kernel.json"] = json.dumps({"child_paths": children}).encode()
    for name, content in files.items():
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(content)
    return {name: content for name, content in files.items() if not name.endswith(".ttir")}


def test_kernels_travel_from_one_cache_to_another(tmp_path: Path) -> None:
    packed = filled_cache(tmp_path / "here")
    archive, there = tmp_path / "sent/cubins.txz", tmp_path / "there"
    assert gpu_cubins.pack(tmp_path / "here", archive) == 1
    assert gpu_cubins.unpack(archive, there) == 1
    found = {path.relative_to(there).as_posix(): path.read_bytes() for path in there.glob("*/*")}
    assert set(found) == set(packed)
    listed = json.loads(found.pop("AAA/__grp___kernel.json"))["child_paths"]
    assert listed["_kernel.cubin"] == str(there / "AAA/_kernel.cubin")
    assert all(Path(path).parent == there / "AAA" for path in listed.values())
    assert found == {name: content for name, content in packed.items() if name in found}


def test_the_same_cache_is_the_same_archive(tmp_path: Path) -> None:
    filled_cache(tmp_path / "here")
    for name in ("one", "two"):
        gpu_cubins.pack(tmp_path / "here", tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("name", ["../kernel.cubin", "kernel.cubin", "AAA/BBB/kernel.cubin", "AAA/..", "/AAA"])
def test_nothing_is_unpacked_elsewhere(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "archive", "w:xz") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))} is not a file of a kernel"):
        gpu_cubins.unpack(tmp_path / "archive", tmp_path / "cache")


# ---------------------------------------------------------------- NIXL's wheel


FILES = {
    "nixl_cu13/__init__.py": True,
    "nixl_cu13.libs/libucp.so.0": True,
    "nixl_cu13.libs/nixl/libplugin_UCX.so": True,
    "nixl_cu13.libs/nixl/libplugin_UCX_MO.so": True,
    "nixl_cu13.libs/nixl/libplugin_GDS.so": False,
    ".nixl_cu13.mesonpy.libs/libnixl.so": True,
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_POSIX.so": False,
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so": True,
    "nixl_cu13.scripts/nixl_example": False,
    ".nixl_cu13.scripts/nixl_example": False,
    "nixl_ep_cu13/buffer.py": False,
    "nixl_cu13-1.5.1.dist-info/METADATA": True,
    "nixl_cu13-1.5.1.dist-info/RECORD": True,
}
"""With whether they stay."""


def test_a_trimmed_wheel_is_a_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "nixl_cu13-1.5.1-cp312-cp312-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.writestr(name, f"content of {name}" * 9)
    assert trim_nixl.main([str(tmp_path)]) == 0
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == [name for name, stays in FILES.items() if stays]
        (record,) = (name for name in archive.namelist() if name.endswith("RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert [name for name, _, _ in rows] == archive.namelist()
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={wanted}", str(len(content)))
        assert rows[-1] == [record, "", ""]
    before = wheel.read_bytes()
    assert trim_nixl.main([str(tmp_path)]) == 0
    assert wheel.read_bytes() == before
    assert list(tmp_path.iterdir()) == [wheel]
    assert capsys.readouterr().out.count("nixl_cu13-1.5.1-cp312-cp312") == 2


def test_without_a_wheel_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trim_nixl.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path}: there is no nixl_*.whl\n"


def versions(text: str) -> dict[str, str]:
    return dict(line.split("==") for line in text.splitlines() if re.fullmatch(r"[\w.-]+==[\w.]+", line))


def test_wheels_that_are_carried_have_the_versions_that_are_tested() -> None:
    """Those of the image are the image's; needs of the others are pinned by them alone."""
    carried = versions((REPOSITORY / "deploy/gpu-machine.txt").read_text(encoding="utf-8").partition("# Carried")[2])
    pinned = versions((REPOSITORY / "constraints.txt").read_text(encoding="utf-8"))
    assert {name: version for name, version in carried.items() if pinned.get(name, version) != version} == {}
    assert set(carried) - set(pinned) == {"googleapis-common-protos", "cffi"}
