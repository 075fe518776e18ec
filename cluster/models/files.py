"""The files of an imported model: `manifest.json` lists the files that an import wrote, and the present ones can be
compared with it.

write_manifest SHA-256, size and time of each file check_files at a start: sizes and times, which costs nothing; what
has another time is hashed changed_files `disagg model verify`: everything is hashed
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from disagg.cluster.system.program import command
from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

MANIFEST: Final = "manifest.json"
FICLONE: Final = 0x40049409
"""Linux ioctl that lets a file share the blocks of another one until one of them is written."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The file system's attributes of a file when its content was verified."""

    size: int
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Files that an import wrote."""

    source: str
    """Source of the model, as the user named it."""
    sha256: dict[str, str]
    """SHA-256 of each file by name."""
    stamps: dict[str, Stamp] = {}
    """Stamps of the files by name; empty in manifests of earlier versions."""
    revision: str = ""
    """Commit of the hub's repository; empty for other sources."""


def write_manifest(folder: Path, source: str, revision: str = "") -> Manifest:
    """Hash every file of the folder and write `manifest.json`."""
    files = {name: folder / name for name in _names(folder)}
    manifest = Manifest(
        source=source,
        sha256={name: file_sha256(path) for name, path in files.items()},
        stamps={name: _stamp(path) for name, path in files.items()},
        revision=revision,
    )
    _write(folder, manifest)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder. Raises `ConfigError` for one that cannot be read."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"model: {folder / MANIFEST} cannot be read ({error}); import the model again") from None


def check_files(folder: Path) -> None:
    """Check before a model is loaded that its files are those that were imported. Does nothing for a folder that no
    import wrote.

    Raises:
        ConfigError: naming the files.
    """
    if not (folder / MANIFEST).is_file():
        return
    manifest = read_manifest(folder)
    suspects = [name for name, stamp in manifest.stamps.items() if _found(folder / name) != stamp]
    _refuse(folder, list(_wrong(folder, manifest, suspects)))
    if suspects:  # copied, or touched: the content is the same
        stamps = manifest.stamps | {name: _stamp(folder / name) for name in suspects}
        try:
            _write(folder, msgspec.structs.replace(manifest, stamps=stamps))
        except OSError as error:  # a cache that only others may write: it is hashed again the next time
            logger.warning(
                "%s: the times of its files cannot be saved (%s); the next start reads them again",
                folder,
                error.strerror,
            )


def changed_files(folder: Path) -> list[str]:
    """Hash all files of an imported model; returns what is wrong with each file that is not as it was imported."""
    manifest = read_manifest(folder)
    found = list(_wrong(folder, manifest, list(manifest.sha256)))
    others = [name for name in _names(folder) if name not in manifest.sha256]
    return found + [f"{name} was not imported" for name in others]


def _names(folder: Path) -> list[str]:
    """The files of a model, those in folders below it included, in order; without the manifest."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]
    return sorted(name for name in names if name != MANIFEST)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; on file systems that can, without using the space twice. Never a hard link, because a change of the
    source would then change the served model."""
    with source.open("rb") as read, target.open("xb") as written:
        try:
            fcntl.ioctl(written.fileno(), FICLONE, read.fileno())
        except OSError:  # another file system, or one that cannot
            shutil.copyfileobj(read, written, 1 << 20)


def _wrong(folder: Path, manifest: Manifest, names: list[str]) -> Iterator[str]:
    for name in names:
        found, stamp = _found(folder / name), manifest.stamps.get(name)
        if found is None:
            yield f"{name} is missing"
        elif stamp is not None and found.size != stamp.size:
            yield f"{name} has {found.size} bytes instead of {stamp.size}"
        elif file_sha256(folder / name) != manifest.sha256.get(name):
            yield f"{name} has another content"


def _refuse(folder: Path, wrong: list[str]) -> None:
    if wrong:
        raise ConfigError(
            f"model: {folder} is not what was imported: {', '.join(wrong)}; next: {command('model import --force')}"
        )


def _found(path: Path) -> Stamp | None:
    try:
        return _stamp(path)
    except OSError:
        return None


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return Stamp(size=status.st_size, mtime_ns=status.st_mtime_ns)


def _write(folder: Path, manifest: Manifest) -> None:
    new = folder / f".{MANIFEST}-{os.getpid()}"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    new.replace(folder / MANIFEST)
