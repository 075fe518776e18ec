"""A cluster for the length of a benchmark, started the way a user starts it.

launched(mode) -> `disagg up --config FILE` as a child -> address, once it lists its model -> Ctrl-C, wait
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import yaml

from benchmarks.clients.load import channel, only_model, service
from disagg.cluster.system.process_tools import sigterm_raises

LAUNCHERS = ("ray", "processes")
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 30


class LaunchError(RuntimeError):
    """The cluster did not come up; the message has the end of its output."""


def cluster_config(base: dict[str, Any], mode: str, port: int) -> dict[str, Any]:
    """The user's configuration with mode and port set.

    A colocated pool without a size of its own gets as many workers as the two pools have together: equal means on both
    sides of the comparison.
    """
    config = {**base, "mode": mode, "gateway": {**base.get("gateway", {}), "host": "127.0.0.1", "port": port}}
    pools = base.get("pools", {})
    sizes = [pools.get(name, {}).get("size", 1) for name in ("prefill", "decode")]
    config["pools"] = {**pools, "colocated": {"size": sum(sizes), **pools.get("colocated", {})}}
    return config


@contextmanager
def launched(mode: str, base: dict[str, Any], launcher: str) -> Iterator[str]:
    """A running cluster's address. Raises `LaunchError`. Ends the cluster also when this process gets a SIGTERM."""
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
        port = free_port()
        config = Path(folder) / "cluster.yaml"
        config.write_text(yaml.safe_dump(cluster_config(base, mode, port)), encoding="utf-8")
        log = Path(folder) / "up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [_program(), "up", "--config", str(config), "--launcher", launcher],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is ours; the cluster is told once, below
            )
        try:
            address = f"127.0.0.1:{port}"
            _wait_ready(process, address, log)
            yield address
        finally:
            _stop(process)


def _program() -> str:
    """The `disagg` program of this environment."""
    return str(Path(sysconfig.get_path("scripts")) / "disagg")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not asyncio.run(_answers(address)):
        if process.poll() is not None:
            raise LaunchError(f"the cluster ended with status {process.returncode}:\n{log_tail(log)}")
        if time.monotonic() > deadline:
            raise LaunchError(f"the cluster was not ready after {START_TIMEOUT_S:g} s:\n{log_tail(log)}")
        time.sleep(0.2)


async def _answers(address: str) -> bool:
    async with channel(address) as connection:
        try:
            await asyncio.wait_for(only_model(service(connection)), timeout=2.0)
        except (grpc.aio.AioRpcError, TimeoutError):
            return False
    return True


def log_tail(log: Path) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
