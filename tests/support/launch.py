"""A cluster for the length of a measurement, started the way a user starts it.

launched(mode) -> `disagg up --config FILE` as a child -> address, once it lists its model -> Ctrl-C, wait
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import yaml

from disagg.cluster.system.process_tools import sigterm_raises
from tests.support.inference_stub import channel, only_model, service
from tests.support.ports import free_port

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
        chosen = {**base, "gateway": {"http_port": free_port(), **base.get("gateway", {})}}  # the next one may be taken
        config = Path(folder) / "cluster.yaml"
        config.write_text(yaml.safe_dump(cluster_config(chosen, mode, port)), encoding="utf-8")
        log = Path(folder) / "up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "disagg.cli", "up", "--config", str(config), "--launcher", launcher],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is ours; the cluster gets one signal, below
            )
        try:
            address = f"127.0.0.1:{port}"
            wait_ready(process, lambda: asyncio.run(_answers(address)), log, "the cluster", START_TIMEOUT_S)
            yield address
        finally:
            stop(process, process.send_signal)


def wait_ready(
    process: subprocess.Popen[bytes], answers: Callable[[], bool], log: Path, name: str, timeout_s: float
) -> None:
    """Wait until a server answers. Raises `LaunchError`, which names it, where it ends first or takes longer."""
    deadline = time.monotonic() + timeout_s
    while not answers():
        if process.poll() is not None:
            raise LaunchError(f"{name} ended with status {process.returncode}:\n{log_tail(log)}")
        if time.monotonic() > deadline:
            raise LaunchError(f"{name} was not ready after {timeout_s:g} s:\n{log_tail(log)}")
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


def stop(process: subprocess.Popen[bytes], send_signal: Callable[[int], None]) -> None:
    """End a server by SIGINT, or by SIGKILL after `STOP_TIMEOUT_S`; `send_signal` reaches it, or its group too."""
    if process.poll() is None:
        send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        send_signal(signal.SIGKILL)
        process.wait()
