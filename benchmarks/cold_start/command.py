"""From the start of `disagg up` to ready and to a first answer, and how long a killed worker is missing.

    disagg up ── ready: gRPC health is SERVING ── one answer ── SIGKILL of a worker ── one answer again ── Ctrl-C

Times are of the clock of this process, which does nothing else but try again every 10 ms. The phases are those that
the processes report themselves (`disagg status`); the longest silence is that of `disagg up` until it is ready.
`--source` runs the cluster from another checkout, in turns with this one. The model is in the cache, and its files in
the system's: the first start of each checkout is not counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.client import Client
from disagg.proto.errors import UnavailableError
from tests.support.launch import LAUNCHERS, log_tail, stop
from tests.support.ports import free_port
from tests.support.reports import REPOSITORY, percentile, positive, print_table, report, write_json

POLL_S = 0.01
LIMIT_S = 120.0
PROMPT = "The capital of France is"
KILLED = ("decode-0", "prefill-0")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--runs", type=positive, default=5, help="starts of each checkout that count")
    parser.add_argument("--source", type=Path, action="append", default=[], help="another checkout; may be repeated")
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster; the defaults without")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="processes")
    parser.add_argument("--no-recovery", action="store_true", help="kill no worker")
    options = parser.parse_args(argv)
    base = yaml.safe_load(options.config.read_text(encoding="utf-8")) if options.config else {}
    killed = () if options.no_recovery else KILLED
    sources = [*options.source, REPOSITORY]
    rows: list[dict[str, Any]] = []
    for run in range(options.runs + 1):
        for source in sources:
            measured = _start(source.resolve(), base or {}, options.launcher, killed if run else ())
            if run:
                rows.append({"source": _name(source), "run": run, **measured})
    names = [_name(source) for source in sources]
    medians = {name: _medians([row for row in rows if row["source"] == name]) for name in names}
    figures = sorted({figure for each in medians.values() for figure in each}, key=_order)
    print_table(
        f"median of {options.runs} starts, seconds",
        ["", *names],
        [[figure, *(_cell(medians[name].get(figure)) for name in names)] for figure in figures],
    )
    if options.json:
        summary: dict[str, float | None] = dict(medians[_name(REPOSITORY)])
        summary |= {f"{name}.{figure}": value for name in names[:-1] for figure, value in medians[name].items()}
        write_json(options.json, report(rows, summary))
    return 0


def _name(source: Path) -> str:
    return "this" if source == REPOSITORY else source.resolve().name


def _order(figure: str) -> tuple[bool, str]:
    return "." in figure, figure


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    figures = {figure for row in rows for figure, value in row.items() if isinstance(value, float)}
    return {figure: percentile([row[figure] for row in rows if figure in row], 50) for figure in sorted(figures)}


def _start(source: Path, base: Mapping[str, Any], launcher: str, killed: Sequence[str]) -> dict[str, float]:
    """One cluster, from its start to its end; seconds by figure."""
    with _launched(source, base, launcher) as (process, address, began_s, log), Client(address) as client:
        silence = _Silence(log, began_s)
        _wait(process, lambda: silence.look() or _is_serving(address), log)
        found = {"ready_s": time.monotonic() - began_s, "longest_silence_s": silence.longest_s}
        next(iter(client.stream(PROMPT, max_tokens=2, temperature=0.0)))
        found["first_token_s"] = time.monotonic() - began_s
        _wait(process, lambda: _is_settled(client), log)
        found |= _phases(client)
        for worker_id in killed:
            before = _pids(client)
            os.kill(before[worker_id], signal.SIGKILL)
            killed_s = time.monotonic()

            def is_back(name: str = worker_id, pid: int = before[worker_id]) -> bool:
                return _pids(client).get(name, pid) != pid

            _wait(process, is_back, log)
            _wait(process, lambda: _is_answered(client), log)
            found[f"{worker_id}_back_s"] = time.monotonic() - killed_s
        return found


@contextmanager
def _launched(
    source: Path, base: Mapping[str, Any], launcher: str
) -> Iterator[tuple[subprocess.Popen[bytes], str, float, Path]]:
    """The process of `disagg up`, the gateway's address, when it was started, and its log."""
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
        port, config, log = free_port(), Path(folder) / "cluster.yaml", Path(folder) / "up.log"
        gateway = {"http_port": free_port(), **base.get("gateway", {}), "host": "127.0.0.1", "port": port}
        config.write_text(yaml.safe_dump({**base, "gateway": gateway}), encoding="utf-8")
        command = [sys.executable, "-m", "disagg.cli", "up", "--config", str(config), "--launcher", launcher]
        environment = {**os.environ, "PYTHONPATH": str(source / "src")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with log.open("wb") as output:
            began_s = time.monotonic()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            yield process, f"127.0.0.1:{port}", began_s, log
        finally:
            stop(process, process.send_signal)


class _Silence:
    """The longest time in which nothing was printed into a log, so far. `began_s`: when the process was started."""

    def __init__(self, log: Path, began_s: float) -> None:
        self._log, self._num_bytes, self._last_s = log, 0, began_s
        self.longest_s = 0.0

    def look(self) -> bool:
        """To be called all the time; false."""
        now, num_bytes = time.monotonic(), self._log.stat().st_size
        self.longest_s = max(self.longest_s, now - self._last_s)
        if num_bytes != self._num_bytes:
            self._num_bytes, self._last_s = num_bytes, now
        return False


def _wait(process: subprocess.Popen[bytes], condition: Any, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the cluster is not there:\n{log_tail(log)}")
        time.sleep(POLL_S)


def _is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _is_settled(client: Client) -> bool:
    state = client.cluster_state()
    return bool(state.pools) and all(pool.ready == pool.desired for pool in state.pools)


def _is_answered(client: Client) -> bool:
    try:
        client.generate(PROMPT, max_tokens=2, temperature=0.0)
    except UnavailableError:
        return False
    return True


def _pids(client: Client) -> dict[str, int]:
    """Process ids of the workers that are ready."""
    return {w.worker_id: w.pid for w in client.cluster_state().workers if w.phase == "ready"}


def _phases(client: Client) -> dict[str, float]:
    """`<process>.<phase>` -> seconds. An older cluster reports none."""
    state = client.cluster_state()
    phases = {(w.worker_id, phase.name): phase.seconds for w in state.workers for phase in w.start_phases}
    phases |= {("gateway", phase.name): phase.seconds for phase in state.gateway_start_phases}
    return {f"{name}.{phase}_s": seconds for (name, phase), seconds in phases.items()}
