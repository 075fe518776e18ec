"""Compiles the C++ kernels once per (sources, flags, compiler, processor), into the user's cache folder.

A bare compiler is enough: the sources have a plain C ABI and include nothing of Python or torch. Workers that start
together take a file lock, so that one compiles and the others load its result; the library appears under its
name in one piece.

Where there shall be no compiler, such as in an image, the libraries are made before, one for each level of processors:

    python -m disagg.kernels.cpu.build FOLDER        and at run time DISAGG_PREBUILT_KERNELS=FOLDER
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-psabi",
)
"""No -ffast-math: NaN and infinity must go through, and sums keep the order that the source gives them."""


PREBUILT: Final = "DISAGG_PREBUILT_KERNELS"
"""The variable that names the folder of libraries that were made before."""
_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
LEVELS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "x86_64": {
        "x86-64-v4": (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "x86-64-v3": _V3,
    },
    "aarch64": {"armv8-a": ("asimd",)},
}
"""Machine -> what its compiler calls a level of processors, the best first -> the features that Linux shows for it."""
_SIMD_OF_LEVEL: Final = {"x86-64-v4": "avx512", "x86-64-v3": "avx2", "armv8-a": "neon"}


class BuildError(Exception):
    """There is no usable compiler, the build failed, or its result cannot be kept; the message says which."""


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled library."""

    path: Path
    simd: str
    """The widest vector instructions that it was compiled for."""


def sources() -> list[Path]:
    """The C++ files and headers of this folder, sorted."""
    folder = Path(__file__).resolve().parent
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def cache_folder() -> Path:
    """Where libraries are kept: `$XDG_CACHE_HOME/disagg/kernels`, or `~/.cache/disagg/kernels`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "disagg" / "kernels"


def find_compiler() -> str:
    """The first C++ compiler on PATH; BuildError if there is none."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")


def build(files: Sequence[Path], folder: Path, compiler: str, processor: str = "native") -> Library:
    """Compile `files` into `folder`, or find there what an earlier call made. BuildError when that cannot be done.

    `processor` is what the compiler calls the one to compile for.
    """
    flags = (*FLAGS, f"-march={processor}")
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    path = folder / f"{_digest(files, flags, macros)}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_ours(path):
                path.unlink(missing_ok=True)
                _compile(files, path, [compiler, *flags])
    except OSError as error:
        raise BuildError(f"{folder}: {error}") from error
    return Library(path, _simd(macros))


def library(environ: Mapping[str, str]) -> Library:
    """The kernels for this machine: made before, where `environ` says so, else compiled or found. Raises
    `BuildError`."""
    if folder := environ.get(PREBUILT):
        return find_prebuilt(Path(folder), platform.machine(), _features())
    return build(sources(), cache_folder(), find_compiler())


def prebuild(folder: Path, compiler: str, machine: str) -> list[Path]:
    """Compile for each level of a kind of machine; the libraries. Raises `BuildError`."""
    levels = LEVELS.get(machine)
    if levels is None:
        raise BuildError(f"there are no levels of processors for {machine}; there are for {', '.join(LEVELS)}")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for level in levels:
        path = _prebuilt_path(folder, level)
        _compile(sources(), path, [compiler, *FLAGS, f"-march={level}"])
        path.chmod(0o755)  # others may run it, and nobody change it
        made.append(path)
    return made


def find_prebuilt(folder: Path, machine: str, features: frozenset[str]) -> Library:
    """The library for the best level that a processor with these features has. Raises `BuildError`."""
    fitting = [level for level, needed in LEVELS.get(machine, {}).items() if features.issuperset(needed)]
    if not fitting:
        raise BuildError(f"{PREBUILT}: no level of processors fits this {machine}")
    for level in fitting:
        path = _prebuilt_path(folder, level)
        if _is_ours(path):
            return Library(path, f"{_SIMD_OF_LEVEL[level]} ({level})")
    raise BuildError(f"{PREBUILT}: {folder} has no library of these sources for {' or '.join(fitting)}")


def _prebuilt_path(folder: Path, level: str) -> Path:
    return folder / f"{_digest(sources(), FLAGS, '')}-{level}.so"


def _features() -> frozenset[str]:
    """Of this processor, as Linux names them; none where that cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return next((frozenset(v.split()) for k, _, v in lines if k.strip() in ("flags", "Features")), frozenset())


def _compile(files: Sequence[Path], path: Path, compiler: Sequence[str]) -> None:
    logger.info("compiling the CPU kernels with %s into %s: once, a few seconds", compiler[0], path)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / "kernels.so"
        _run([*compiler, *(str(file) for file in files if file.suffix == ".cpp"), "-o", str(made)])
        made.chmod(0o700)
        made.replace(path)


def _check_owner(folder: Path) -> None:
    """Code is loaded from there: only this user (or root) may have put it there. BuildError where the folder is
    another user's; one that others may write is closed to them."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), ROOT):
        raise BuildError(
            f"{folder} belongs to another user (uid {status.st_uid}); set XDG_CACHE_HOME to a folder of yours"
        )
    if status.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)


def _is_ours(library: Path) -> bool:
    """Whether it is there, a plain file of this user (or root) that no other user can write."""
    try:
        status = library.lstat()
    except FileNotFoundError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) and not status.st_mode & _OTHERS_WRITE
    return is_plain and status.st_uid in (os.geteuid(), ROOT)


def _run(command: list[str]) -> str:
    """The command's output; BuildError with the end of its complaint when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _digest(files: Sequence[Path], flags: Sequence[str], macros: str) -> str:
    """Names sources, flags, compiler version and processor: the last two are among the predefined macros."""
    digest = hashlib.sha256("\n".join((*flags, macros)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _simd(macros: str) -> str:
    for macro, name in (("__AVX512F__", "avx512"), ("__AVX2__", "avx2"), ("__ARM_NEON", "neon"), ("__SSE2__", "sse2")):
        if f"#define {macro} " in macros:
            return name
    return "generic"


if __name__ == "__main__":
    for _made in prebuild(Path(sys.argv[1]), find_compiler(), platform.machine()):
        print(_made)
