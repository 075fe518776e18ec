"""A real `disagg up` for a row of the faults benchmark, and what is known of it from outside.

    async with Up(config) as up:
        up.kill(await up.pid("decode-0"), SIGKILL);  await up.settled();  await up.emptied()

Everything is read over public ports, but for the audits, for which the benchmark has the cluster's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc.aio
import yaml

from disagg.client import AsyncClient
from disagg.cluster.system.process_tools import ProcessRef
from disagg.connections.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE
from disagg.proto.errors import DisaggError
from disagg.proto.messages import AuditReport, AuditRequest, decoder, encode
from disagg.proto.services import AUDIT, CHANNEL_OPTIONS
from disagg.v1 import inference_pb2 as pb
from tests.acceptance.faults.up import SECRET_VARIABLE
from tests.support.launch import LaunchError, log_tail
from tests.support.ports import free_port
from tests.support.process_figures import children
from tests.support.reports import REPOSITORY

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.02
MARK = "DISAGG_BENCH_CLUSTER"
OPERATOR = "operator"
"""The tenant of the benchmark itself, where there are keys."""
MEMORIES = ("tombstones",)
"""Counts of an audit that fade by time and hold nothing."""

State = dict[str, pb.WorkerState]


class Up:
    """One cluster, from the start to the end of a block.

    Args:
        config: as in the user's YAML file; ports are chosen here.
        launcher: `processes` or `ray`.
        step_ms: how much longer each step of a worker takes, so that a tiny model leaves the processor idle as a
            device of its own would.
        failpoints: other faults of workers, before those of `step_ms`: the first that fits an opportunity happens.
        environment: on top of this process's own.
        prepare_logs: called with the folder of the logs before anything starts; without Ray only.
        keys: of tenants, by name; then the gateway requires one, and the benchmark itself has `OPERATOR`'s.
        key: an admin's, where `config` has a file of keys of its own.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        launcher: str = "processes",
        step_ms: float = 0.0,
        failpoints: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prepare_logs: Callable[[Path], None] | None = None,
        keys: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        self.launcher = launcher
        self._prepare_logs = prepare_logs
        self._secret = ClusterSecret(secrets.token_bytes(NUM_BYTES))
        self._port, http_port = free_port(), free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="disagg-faults-")
        gateway = {**config.get("gateway", {}), "port": self._port, "http_port": http_port}
        self.keys = dict(keys or {})
        if self.keys:
            gateway["api_keys"] = str(self._write_keys())
        recovery = {**config.get("recovery", {}), "failpoints": True}
        self._config = {**config, "gateway": gateway, "recovery": recovery}
        mark = secrets.token_hex(8)
        self._mark = f"{MARK}={mark}"
        """In the environment of all its processes."""
        self.environment = {
            **os.environ,
            SECRET_VARIABLE: self._secret.value.hex(),
            MARK: mark,
            **(environment or {}),
        }
        if faults := [*failpoints, *([f"engine.step=hang(ms={step_ms:g})"] if step_ms else [])]:
            self.environment[FAILPOINTS_VARIABLE] = "; ".join(faults)
        self.logs = Path(self._folder.name) / "logs"
        self.output = Path(self._folder.name) / "up.log"
        self.address = f"127.0.0.1:{self._port}"
        self.http_address = f"127.0.0.1:{http_port}"
        self.client = AsyncClient(self.address, self.keys.get(OPERATOR, key))
        self.process: subprocess.Popen[bytes] | None = None

    def _write_keys(self) -> Path:
        path = Path(self._folder.name) / "keys.yaml"
        path.touch(mode=0o600)
        self.keys[OPERATOR] = secrets.token_hex(16)
        entries = [{"tenant": name, "key": key, "admin": name == OPERATOR} for name, key in self.keys.items()]
        path.write_text(yaml.safe_dump(entries), encoding="utf-8")
        return path

    def launch(self) -> subprocess.Popen[bytes]:
        """Start `disagg up` and do not wait."""
        config = Path(self._folder.name) / "cluster.yaml"
        config.write_text(yaml.safe_dump(self._config), encoding="utf-8")
        arguments = ["up", "--config", str(config), "--launcher", self.launcher]
        if self.launcher == "processes":
            self.logs.mkdir()
            if self._prepare_logs is not None:
                self._prepare_logs(self.logs)
            arguments += ["--log-dir", str(self.logs)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.faults.up", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is ours; the cluster gets one signal, below
                cwd=REPOSITORY,
                env=self.environment,
            )
        return self.process

    async def __aenter__(self) -> Self:
        process = self.launch()
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not await self.is_settled():
                if process.poll() is not None:
                    raise LaunchError(f"it ended with status {process.returncode}:\n{log_tail(self.output)}")
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"the cluster was not ready after {START_TIMEOUT_S:g} s:\n{log_tail(self.output)}"
                    )
                await asyncio.sleep(0.1)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the cluster, and wait."""
        await self.client.close()
        process = self.process
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    # ------------------------------------------------------------ what is there

    async def state(self) -> State:
        """The workers by name; empty while the gateway does not answer."""
        try:
            found = await asyncio.wait_for(self.client.cluster_state(), 5.0)
        except (DisaggError, grpc.aio.AioRpcError, TimeoutError):
            return {}
        return {worker.worker_id: worker for worker in found.workers}

    async def is_settled(self) -> bool:
        """Whether every worker of every pool can be used."""
        try:
            found = await asyncio.wait_for(self.client.cluster_state(), 5.0)
        except (DisaggError, grpc.aio.AioRpcError, TimeoutError):
            return False
        pools_met = bool(found.pools) and all(pool.ready == pool.desired for pool in found.pools)
        return pools_met and all(worker.phase == "ready" for worker in found.workers)

    async def settled(self, timeout_s: float = 60.0) -> float:
        """Wait for that; the seconds it took. Raises `TimeoutError`."""
        return await until(self.is_settled, timeout_s)

    async def pid(self, name: str) -> int:
        """The process of a worker. Raises `KeyError`."""
        return int((await self.state())[name].pid)

    def processes(self) -> list[ProcessRef]:
        """All of them, those of Ray too."""
        return ProcessRef.family(self._mark)

    def gateway_pid(self) -> int:
        """The gateway's process: a child of `disagg up`, or of a template that is one. Raises `LookupError`."""
        assert self.process is not None, "it was started"
        below = children(self.process.pid)
        for pid in [*below, *(pid for template in below for pid in children(template))]:
            with contextlib.suppress(OSError):
                started = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"gateway_host" in started or Path(f"/proc/{pid}/comm").read_bytes() == b"gateway\n":
                    return pid
        raise LookupError("there is no gateway")

    # ------------------------------------------------------------ what is held

    async def held(self) -> dict[str, int]:
        """Blocks, leases and all else that any worker holds, and what the router has: name -> count, where not 0."""
        found = await self.client.cluster_state()
        left = {"requests": found.queued_requests + found.running_requests}
        for worker in found.workers:
            report = await self.audit(worker.address)
            left |= {f"{report.worker_id}.{name}": n for name, n in report.counts.items() if name not in MEMORIES}
            left[f"{report.worker_id}.problems"] = len(report.problems)
        return {name: count for name, count in left.items() if count}

    async def emptied(self, timeout_s: float = 10.0) -> tuple[float, dict[str, int]]:
        """Wait until nothing is held: the seconds it took, and what is left after `timeout_s` all the same."""
        started = time.monotonic()
        while True:
            left = await self.held()
            taken_s = time.monotonic() - started
            if not left or taken_s > timeout_s:
                return taken_s, left
            await asyncio.sleep(POLL_S)

    async def audit(self, address: str) -> AuditReport:
        """What the worker at an address holds."""
        return await audit(address, self._secret)

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 where it is not there."""
        text = await asyncio.to_thread(_fetch, f"http://{self.http_address}/metrics", self.keys.get(OPERATOR))
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(part in head for part in wanted):
                return float(value)
        return 0.0


async def audit(address: str, secret: ClusterSecret) -> AuditReport:
    """What the worker at an address holds."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary(AUDIT, None, None)
        frame = await call(encode(AuditRequest()), metadata=secret.metadata, timeout=10.0)
    report: AuditReport = decoder(AuditReport).decode(frame)
    return report


async def until(condition: Callable[[], Any], timeout_s: float) -> float:
    """Wait for an asynchronous condition; the seconds it took. Raises `TimeoutError`."""
    started = time.monotonic()
    while not await condition():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"it did not come to that within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started


def _fetch(url: str, key: str | None) -> str:
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    question = urllib.request.Request(url, headers={} if key is None else {"authorization": f"Bearer {key}"})
    with opener.open(question, timeout=5.0) as answer:
        return str(answer.read().decode())
