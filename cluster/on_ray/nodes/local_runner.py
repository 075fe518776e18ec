"""Runs the commands of a cluster file on this machine, for a node that is only a set of processes (`LoopbackProvider`).

Each node has a home folder of its own, so that `~` in file mounts and commands is another place for each, as it is on
different machines. As over ssh, nothing of the caller's Ray environment gets there. A command sees:

    HOME                the node's own folder
    DISAGG_RAY_DIR      where the node's Ray keeps its sockets and logs (`ray start --temp-dir=$DISAGG_RAY_DIR`)
    DISAGG_HEAD_PORT    of Ray's head (`ray start --head --port=$DISAGG_HEAD_PORT`)
    DISAGG_NODE_IP      the node's own address, one of 127.0.0.0/8
    RAY_ADDRESS         of this cluster, so that `auto` finds no other one of this machine
    RAY_AUTH_MODE       `token`, unless the caller has set another
    PATH                with this Python's folder first
    DISAGG_RAY_NODE     the mark by which the node's processes are found
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from ray.autoscaler.command_runner import CommandRunnerInterface
from typing_extensions import override

NODE_MARK: Final = "DISAGG_RAY_NODE"
STOP_EVERY_RAY: Final = "ray stop"


@dataclass(frozen=True, kw_only=True)
class LocalNode:
    """Properties of one node."""

    node_id: str
    ip: str
    home: Path
    ray_dir: Path
    head_ip: str
    head_port: int


class LocalCommandRunner(CommandRunnerInterface):  # type: ignore[misc]  # Ray has no types
    """Commands and copies for one node."""

    def __init__(self, node: LocalNode) -> None:
        self.node = node

    def run(
        self,
        cmd: str | None = None,
        timeout: int = 120,
        exit_on_fail: bool = False,
        port_forward: object = None,
        with_output: bool = False,
        environment_variables: Mapping[str, object] | None = None,
        **_: object,
    ) -> str:
        """Run a command in a shell in the node's home; returns what it printed, `with_output`.

        `ray stop` alone is left out: `ray down` runs it before it terminates the nodes.

        Raises:
            click.ClickException: if it fails, which Ray prints; or if it would end every Ray of this machine.
        """
        if cmd is None or cmd.strip() == STOP_EVERY_RAY:
            return ""
        if STOP_EVERY_RAY in cmd:
            raise click.ClickException(
                f"{self.node.node_id}: `ray stop` ends every Ray of this machine; take it out: {cmd}"
            )
        done = subprocess.run(
            ["bash", "-c", exports(environment_variables or {}) + cmd],
            cwd=self.node.home,
            env=node_environment(os.environ, self.node),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if with_output else None,
            start_new_session=True,  # a Ctrl-C for `ray up` is not one for the processes that the command leaves
            text=True,
        )
        if done.returncode:
            raise click.ClickException(f"{self.node.node_id}: exit status {done.returncode}: {cmd}")
        return done.stdout or ""

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Copy a file or a folder to the node; `~` in `target` is the node's home."""
        copy(Path(source), self._inside(target))

    def run_rsync_down(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Copy a file or a folder from the node."""
        copy(self._inside(source), Path(target).expanduser())

    @override
    def remote_shell_command_str(self) -> str:
        return f"cd {shlex.quote(str(self.node.home))} && HOME=$PWD bash"

    def _inside(self, path: str) -> Path:
        """A path of the node; raises `ValueError` if it is neither below `~` nor absolute."""
        if path == "~" or path.startswith("~/"):
            return self.node.home / path[2:]
        if not path.startswith("/"):
            raise ValueError(f"{path}: expected a path that starts with ~/ or /")
        return Path(path)


def node_environment(environ: Mapping[str, str], node: LocalNode) -> dict[str, str]:
    """The environment of a node's commands, see above. Caches stay shared: they are this machine's."""
    kept = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    caches = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return {
        **kept,
        "HOME": str(node.home),
        "XDG_CACHE_HOME": caches,
        "PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', os.defpath)}",
        "RAY_AUTH_MODE": environ.get("RAY_AUTH_MODE", "token"),
        "RAY_ADDRESS": f"{node.head_ip}:{node.head_port}",
        "DISAGG_RAY_DIR": str(node.ray_dir),
        "DISAGG_NODE_IP": node.ip,
        "DISAGG_HEAD_PORT": str(node.head_port),
        NODE_MARK: str(node.home),
    }


def exports(variables: Mapping[str, object]) -> str:
    """Shell commands that set variables; what is no string becomes JSON, as Ray expects of resources and labels."""
    values = {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in variables.items()
    }
    return "".join(f"export {name}={shlex.quote(value)};" for name, value in values.items())


def copy(source: Path, target: Path) -> None:
    """Copy like `rsync -a`: modes and times too, and a folder's content into a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)
