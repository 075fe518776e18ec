"""Compiles the C++ kernels once per (sources, flags, compiler, processor), into the user's cache folder.

By default they are for this processor. `DISAGG_CPU_LEVEL` names a level of processors (`LEVELS`) in its place, such as
`x86-64-v3` for AVX2: so a newer machine tests and measures what the older ones compute.

A bare compiler is enough: the sources have a plain C ABI and include nothing of Python or torch. Workers that start
together take a file lock, so that one compiles and the others load its result; the library appears under its name in
one piece. The files are compiled side by side, on as many cores as there are.

    python -m disagg.kernels.cpu.build               does it now, for this machine

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
from concurrent.futures import ThreadPoolExecutor
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
    "-ffp-contract=off",
    "-Wno-psabi",
)
"""No -ffast-math: NaN and infinity must go through, and sums keep the order that the source gives them. Nothing is
fused but what the source fuses (`vec.h`), so that all compilers and levels round alike."""


PREBUILT: Final = "DISAGG_PREBUILT_KERNELS"
"""Environment variable with the folder of libraries that were compiled before."""
LEVEL: Final = "DISAGG_CPU_LEVEL"
"""Environment variable with the name of a level."""


@dataclass(frozen=True, slots=True)
class Level:
    """A level of processors for which libraries are compiled."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags that select the level."""
    simd: str
    """Name of the widest vector instructions."""
    features: frozenset[str] = frozenset()
    """Features that Linux reports for such a processor."""


NATIVE: Final = Level("native", ("-march=native",), "")
"""The level of the processor that the compiler runs on."""
_V3 = frozenset({"sse2", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16, _AMX = {"avx512_bf16", "avx512vbmi"}, {"amx_tile", "amx_bf16"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi")
LEVELS: Final[Mapping[str, tuple[Level, ...]]] = {
    "x86_64": (
        Level("amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), "avx512", _V4 | _BF16 | _AMX),
        Level("avx512-bf16", _BF16_FLAGS, "avx512", _V4 | _BF16),
        Level("x86-64-v4", ("-march=x86-64-v4",), "avx512", _V4),
        Level("x86-64-v3", ("-march=x86-64-v3",), "avx2", _V3),
        Level("x86-64", ("-march=x86-64",), "sse2", frozenset({"sse2"})),
    ),
    "aarch64": (
        Level("armv8.2-a+bf16", ("-march=armv8.2-a+bf16",), "neon", frozenset({"asimd", "bf16"})),
        Level("armv8-a", ("-march=armv8-a",), "neon", frozenset({"asimd"})),
    ),
}
"""Levels by machine, the best first."""


class BuildError(Exception):
    """There is no usable compiler, the build failed, or its result cannot be kept; the message says which."""


@dataclass(frozen=True, slots=True)
class Library:
    """Path of a compiled library, and what it was compiled for."""

    path: Path
    simd: str
    """Name of the widest vector instructions that it was compiled for, and its level unless that is `NATIVE`."""


def sources() -> list[Path]:
    """The C++ files and headers of this folder, sorted."""
    folder = Path(__file__).resolve().parent
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def cache_folder() -> Path:
    """Folder of the compiled libraries: `$XDG_CACHE_HOME/disagg/kernels`, or `~/.cache/disagg/kernels`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "disagg" / "kernels"


def find_compiler() -> str:
    """The first C++ compiler on PATH; BuildError if there is none."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")


def build(files: Sequence[Path], folder: Path, compiler: str, level: Level = NATIVE) -> Library:
    """Compile `files` into `folder`, or find the result of an earlier call there. Raises BuildError if neither is
    possible."""
    flags = (*FLAGS, *level.flags)
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    path = folder / f"{_digest(files, flags, macros)}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if not _is_ours(path):  # else nobody waits for who compiles another one
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_ours(path):
                    path.unlink(missing_ok=True)
                    _compile(files, path, [compiler, *flags])
    except OSError as error:
        raise BuildError(f"{folder}: {error}") from error
    return Library(path, _described(level) if level.simd else _simd(macros))


def library(environ: Mapping[str, str]) -> Library:
    """The kernels for this machine, or for the level that `environ` names: made before, where `environ` says so, else
    compiled or found.

    Raises:
        BuildError: there are none.
        ValueError: there is no such level, or this processor is below it.
    """
    level = level_of(environ)
    if folder := environ.get(PREBUILT):
        return find_prebuilt(Path(folder), platform.machine(), _features(), level)
    return build(sources(), cache_folder(), find_compiler(), level)


def level_of(environ: Mapping[str, str]) -> Level:
    """The level that `environ` names for this processor, else `NATIVE`. Raises ValueError as `chosen_level` does."""
    return chosen_level(environ, platform.machine(), _features())


def chosen_level(environ: Mapping[str, str], machine: str, features: frozenset[str]) -> Level:
    """The level that `environ` names for a processor with these features (none where they are not known), else
    `NATIVE`.

    Raises:
        ValueError: there is no such level, or the processor lacks what it has.
    """
    name = environ.get(LEVEL, "")
    if not name:
        return NATIVE
    levels = LEVELS.get(machine, ())
    found = next((level for level in levels if level.name == name), None)
    if found is None:
        names = ", ".join(level.name for level in levels) or "none"
        raise ValueError(f"{LEVEL}: {name!r} is not a level of {machine}; there are: {names}")
    if features and (lacks := found.features - features):
        raise ValueError(f"{LEVEL}: this processor is below {name}: it lacks {', '.join(sorted(lacks))}")
    return found


def levels_here() -> tuple[Level, ...]:
    """The levels that this processor supports, the best first."""
    features = _features()
    return tuple(level for level in LEVELS.get(platform.machine(), ()) if features.issuperset(level.features))


def prebuild(folder: Path, compiler: str, machine: str) -> list[Path]:
    """Compile for each level of a kind of machine, and return the libraries. Raises `BuildError`."""
    levels = LEVELS.get(machine)
    if levels is None:
        raise BuildError(f"there are no levels of processors for {machine}; there are for {', '.join(LEVELS)}")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for level in levels:
        path = _prebuilt_path(folder, level)
        _compile(sources(), path, [compiler, *FLAGS, *level.flags])
        path.chmod(0o755)  # others may run it, and nobody change it
        made.append(path)
    return made


def find_prebuilt(folder: Path, machine: str, features: frozenset[str], wanted: Level = NATIVE) -> Library:
    """The library for the best level that a processor with these features has, or for the one that is wanted. Raises
    `BuildError`."""
    levels = LEVELS.get(machine, ()) if wanted is NATIVE else (wanted,)
    fitting = [level for level in levels if features.issuperset(level.features)]
    if not fitting:
        raise BuildError(f"{PREBUILT}: no level of processors fits this {machine}")
    for level in fitting:
        path = _prebuilt_path(folder, level)
        if _is_ours(path):
            return Library(path, _described(level))
    names = " or ".join(level.name for level in fitting)
    raise BuildError(f"{PREBUILT}: {folder} has no library of these sources for {names}")


def _described(level: Level) -> str:
    return f"{level.simd} ({level.name})"


def _prebuilt_path(folder: Path, level: Level) -> Path:
    return folder / f"{_digest(sources(), FLAGS, '')}-{level.name}.so"


def _features() -> frozenset[str]:
    """Features of this processor, as Linux names them; none where they cannot be read."""
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
        objects = {file: Path(scratch) / f"{file.stem}.o" for file in files if file.suffix == ".cpp"}
        longest_first = sorted(objects, key=lambda file: file.stat().st_size, reverse=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
            commands = [[*compiler, "-c", str(file), "-o", str(objects[file])] for file in longest_first]
            list(compilers.map(_run, commands))
        _run([*compiler, *(str(file) for file in objects.values()), "-o", str(made)])
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
    """Whether the library exists and is a plain file of this user (or root) that no other user can write."""
    try:
        status = library.lstat()
    except FileNotFoundError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) and not status.st_mode & _OTHERS_WRITE
    return is_plain and status.st_uid in (os.geteuid(), ROOT)


def _run(command: list[str]) -> str:
    """Run a command and return its output; BuildError with the end of its error output when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _digest(files: Sequence[Path], flags: Sequence[str], macros: str) -> str:
    """Hash of sources, flags, compiler version and processor: the last two are among the predefined macros."""
    digest = hashlib.sha256("\n".join((*flags, macros)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _simd(macros: str) -> str:
    for macro, name in (("__AVX512F__", "avx512"), ("__AVX2__", "avx2"), ("__ARM_NEON", "neon"), ("__SSE2__", "sse2")):
        if f"#define {macro} " in macros:
            return name
    return "generic"


def main(folders: Sequence[str]) -> None:
    """Print the libraries of each level, made in a folder; or the one of this machine, or the reason why there is none,
    which is no error: workers run without it."""
    if folders:
        for made in prebuild(Path(folders[0]), find_compiler(), platform.machine()):
            print(made)
        return
    try:
        print(library(os.environ).path)
    except (BuildError, ValueError) as error:
        print(f"no CPU kernels: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
