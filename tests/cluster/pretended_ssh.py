"""`ssh` and `rsync` for a test: each host is a folder of this machine, whose commands run here.

    write_programs(folder) -> a folder for PATH; a host's home is `<folder>/hosts/<host>`

`ray stop` ends what was started on that host, and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from disagg.cluster.system.process_tools import ProcessRef, end_processes

HOST_MARK = "DISAGG_PRETENDED_HOST"
HOSTS = "DISAGG_PRETENDED_HOSTS"
OPTIONS_WITH_VALUE = ("-o", "-i", "-L")


def write_programs(folder: Path) -> Path:
    """Programs that call `main`, in a folder for PATH."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("ssh", "rsync"):
        program = programs / name
        root = Path(__file__).resolve().parents[2]
        program.write_text(
            f'#!/bin/sh\ncd {root} && exec {sys.executable} -m tests.cluster.pretended_ssh {name} "$@"\n'
        )
        program.chmod(0o755)
    return programs


def home_of(host: str) -> Path:
    """A host's home folder."""
    home = Path(os.environ[HOSTS]) / host
    home.mkdir(parents=True, exist_ok=True)
    return home


def host_processes(hosts: Path, host: str) -> list[ProcessRef]:
    """What was started on a host."""
    return ProcessRef.family(f"{HOST_MARK}={hosts}/{host}")


def ssh(arguments: list[str]) -> int:
    """`ssh [options] user@host command...`: the command's words are joined, and a shell takes them apart again."""
    rest = list(arguments)
    while rest[0].startswith("-"):
        del rest[: 2 if rest[0] in OPTIONS_WITH_VALUE else 1]
    host, command = rest[0].partition("@")[2], " ".join(rest[1:])
    if "ray stop" in command:
        end_processes(host_processes(Path(os.environ[HOSTS]), host), grace_s=0)
        return 0
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    home = home_of(host)
    environment = {**kept, "HOME": str(home), HOST_MARK: str(home), "PRETENDED_IP": host}
    return subprocess.run(
        ["bash", "-c", command], env=environment, cwd=home, stdin=subprocess.DEVNULL, start_new_session=True
    ).returncode


def rsync(arguments: list[str]) -> int:
    """`rsync [options] source user@host:target`, one file or folder."""
    source, (where, _, target) = Path(arguments[-2]), arguments[-1].partition(":")
    path = home_of(where.partition("@")[2]) / target.removeprefix("~/")
    path.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, path, dirs_exist_ok=True)
    else:
        shutil.copy2(source, path)
    return 0


if __name__ == "__main__":
    sys.exit({"ssh": ssh, "rsync": rsync}[sys.argv[1]](sys.argv[2:]))
