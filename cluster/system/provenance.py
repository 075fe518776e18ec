"""Provenance of figures in a report: the commit and the machine of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def commit() -> str:
    """The commit of the source that runs, with `-dirty` when it was changed; `unknown` outside a git checkout. The
    environment variable `DISAGG_COMMIT` takes precedence, because a copy of the source may lack git."""
    if given := os.environ.get("DISAGG_COMMIT"):
        return given
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def machine(*packages: str) -> dict[str, str]:
    """The processor, the system and Python under `cpu`, `system`, `python`; and the version of each of the packages."""
    return {
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions(*packages),
    }


def versions(*packages: str) -> dict[str, str]:
    """Package -> its version, or `not installed`."""
    return {package: _version(package) for package in packages}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
