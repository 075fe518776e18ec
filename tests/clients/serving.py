"""`disagg up` as users start it, for clients that know nothing of us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from disagg.client import AsyncClient
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from tests.support.ports import free_port

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Served:
    """Where it is, and what it serves."""

    url: str
    """Of HTTP, without a path."""
    grpc_address: str
    model: str
    tokenizer: Path
    """The model's folder."""


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """The default model on one prefill and one decode worker. Fails at the end if a request was left behind, or if it
    did not stop by itself."""
    grpc_port, http_port = free_port(), free_port()
    config = {
        "model": {"name": DEFAULT_MODEL},
        "gateway": {
            "port": grpc_port,
            "http_port": http_port,
            "batches": {"folder": str(folder / "batches")},
            "usage": {"folder": str(folder / "usage")},
        },
        "pools": {name: {"kv_cache_bytes": 256 << 20} for name in ("prefill", "decode")},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    log = folder / "up.log"
    served = Served(
        f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", DEFAULT_MODEL, Path(resolve_model(DEFAULT_MODEL))
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sysconfig.get_path("scripts")) / "disagg", "up", "--launcher", "processes", "--config", file],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, served.url, log)
        yield served
        asyncio.run(_assert_idle(served.grpc_address))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        status = process.wait(STOP_TIMEOUT_S)
    assert status == 0, _tail(log)
    assert "Traceback" not in log.read_text(encoding="utf-8", errors="replace"), _tail(log)


def client_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which a hub can only fail: nobody listens there. (`HF_HUB_OFFLINE` would do for
    most, but aiperf takes no tokenizer from a folder with it.)"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "VIRTUAL_ENV"))}
    return environment | {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"} | more


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(url):
        assert process.poll() is None, f"`disagg up` ended:\n{_tail(log)}"
        assert time.monotonic() < deadline, f"`disagg up` is not ready:\n{_tail(log)}"
        time.sleep(0.2)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


async def _assert_idle(address: str) -> None:
    async with AsyncClient(address) as client:
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            state = await client.cluster_state()
            left = (state.queued_requests, state.running_requests)
            if left == (0, 0):
                return
            assert time.monotonic() < deadline, f"queued and running requests: {left}"
            await asyncio.sleep(0.05)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
