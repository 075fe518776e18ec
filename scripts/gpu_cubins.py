"""Compiled Triton kernels in one archive, from the cache of one machine to that of another.

    python scripts/gpu_cubins.py pack CACHE ARCHIVE        CACHE/HASH/{*.cubin, *.json, *.so}, compressed by xz
    python scripts/gpu_cubins.py unpack ARCHIVE CACHE      into a folder, which TRITON_CACHE_DIR then names

Triton finds a kernel by a hash of its own files, of ptxas and of our source, in which no path is: with the same
versions it takes what was compiled elsewhere, and compiles the rest. Only the lists of each kernel's files
(`__grp__*.json`) name folders; `unpack` writes them anew. Needs nothing besides Python.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SUFFIXES = (".cubin", ".json", ".so")
"""Of what is needed at a launch: machine code, what Triton knows of it, and the launchers that it compiles in C."""
LIST = "__grp__"


def kept(cache: Path) -> Iterator[Path]:
    """Files of a cache that are packed, in a fixed order, relative to it."""
    return (path.relative_to(cache) for path in sorted(cache.glob("*/*")) if path.suffix in SUFFIXES and path.is_file())


def pack(cache: Path, archive: Path) -> int:
    """Write the archive; the number of kernels in it."""
    names = list(kept(cache))
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name in names:
            content = (cache / name).read_bytes()
            entry = tarfile.TarInfo(name.as_posix())
            entry.size, entry.mode = len(content), 0o755 if name.suffix == ".so" else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return sum(name.suffix == ".cubin" for name in names)


def unpack(archive: Path, cache: Path) -> int:
    """Add what the archive holds to a cache; the number of its kernels.

    Raises:
        ValueError: a name in it is not FOLDER/FILE.
    """
    cache = cache.resolve()
    num_kernels = 0
    with tarfile.open(archive) as tar:
        for entry in tar:
            folder, _, name = entry.name.partition("/")
            if not entry.isfile() or not name or "/" in name or {folder, name} & {"", ".", ".."}:
                raise ValueError(f"{archive}: {entry.name!r} is not a file of a kernel")
            source = tar.extractfile(entry)
            assert source is not None, "it is a file"
            content = source.read()
            if name.startswith(LIST):
                content = _listed_in(cache / folder, content)
            (cache / folder).mkdir(parents=True, exist_ok=True)
            (cache / folder / name).write_bytes(content)
            (cache / folder / name).chmod(entry.mode & 0o755)
            num_kernels += name.endswith(".cubin")
    return num_kernels


def _listed_in(folder: Path, content: bytes) -> bytes:
    """A kernel's list of files, as it is in another folder."""
    names = json.loads(content)["child_paths"]
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    match arguments:
        case ["pack", cache, archive]:
            print(f"{pack(Path(cache), Path(archive))} kernels, {Path(archive).stat().st_size} bytes")
        case ["unpack", archive, cache]:
            print(f"{unpack(Path(archive), Path(cache))} kernels")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
