"""On which device the tests of this folder run: `DISAGG_GPU_CHECK_DEVICE`, `cuda` unless it says `cpu`.

On a CPU Triton's interpreter plays the GPU (`TRITON_INTERPRET=1`, set by whoever starts pytest, because Triton reads it
when a kernel is defined). What cannot be played is marked `gpu` and skipped there. Nothing here needs Ray, a network or
a pytest plugin.
"""

from __future__ import annotations

import faulthandler
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.isolation import CONTEXT_LOST
from benchmarks.gpu.report import Row, RowFile, Status, failure
from disagg.engine.device_environment import device_environment

_cuda: Any = torch.cuda

DEVICE_VARIABLE = "DISAGG_GPU_CHECK_DEVICE"
STACKS_S = 30.0


def _device_name() -> str:
    return os.environ.get(DEVICE_VARIABLE, "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    has_cuda = torch.cuda.is_available()
    for item in items:
        if _device_name() == "cuda" and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="this torch sees no CUDA device"))
        elif _device_name() == "cpu" and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of a test live."""
    return torch.device(_device_name())


@pytest.fixture(params=["one device", pytest.param("two devices", marks=pytest.mark.gpu)])
def layout(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """Where two processes are: both on the device of the tests, or from device 0 on each on its own."""
    if request.param == "one device":
        return device
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two CUDA devices, there is {count}")
    return torch.device("cuda", 0)


def nccl_environment(name: str, *, apart: bool) -> dict[str, str]:
    """Of a process that uses NCCL: a worker's, and what NCCL says goes to a file where the check keeps its logs.
    Processes that are not `apart` share a device, which NCCL takes from different hosts only."""
    folder = os.environ.get("DISAGG_GPU_CHECK_LOGS")
    log = f"{folder}/nccl-{name}-%p.log" if folder else "/dev/stderr"
    common = device_environment("cuda") | {"NCCL_DEBUG": "INFO" if folder else "WARN", "NCCL_DEBUG_FILE": log}
    common["NCCL_DEBUG_TIMESTAMP_LEVELS"] = "WARN,INFO"
    if folder:
        common["UCX_LOG_FILE"] = f"{folder}/ucx-{name}-%p.log"  # standard output is for the answers
    if apart:
        return common
    return common | {"NCCL_HOSTID": f"gpu-check-{name}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}


def dump_stacks_later(name: str) -> None:
    """Every half a minute the stacks of this process go to a file where the check keeps its logs: a peer that hangs is
    ended with the test."""
    if folder := os.environ.get("DISAGG_GPU_CHECK_LOGS"):
        file = Path(folder, f"stacks-{name}-{os.getpid()}.log").open("w", encoding="utf-8")  # noqa: SIM115
        faulthandler.dump_traceback_later(STACKS_S, repeat=True, file=file)


# ---------------------------------------------------------------- rows for benchmarks.gpu.contact


class RowReporter:
    """Writes a row for each test when it ends, and the counts at the end. Those that have begun are in a file beside
    it, so that one which never ends has a name."""

    def __init__(self, path: Path, section: str) -> None:
        self._rows = RowFile(path, section, with_targets=False)
        self._begun = path.with_suffix(".begun")
        self._section = section
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._statuses: dict[str, Status] = {}
        self._skipped: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        with self._begun.open("a", encoding="utf-8") as file:
            file.write(f"{nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's set-up, call or tear-down ended. A failure is told at once; what follows it may not come."""
        name = report.nodeid
        self._seconds[name] += report.duration
        if self._statuses.get(name) == "failed":
            return
        if report.failed:
            self._statuses[name] = "failed"
            reason = report.longreprtext.strip().splitlines()
            told = failure(self._section, name, reason[-1] if reason else "failed")
            self._rows.write(replace(told, value=self._seconds[name], unit="s"))
        elif report.skipped:
            self._skipped[name] = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "skipped"
        if report.when == "teardown" and report.passed:
            status: Status = "info" if name in self._skipped else "ok"
            self._statuses[name] = status
            detail, seconds = self._skipped.get(name, ""), self._seconds[name]
            self._rows.write(
                Row(section=self._section, name=name, status=status, value=seconds, unit="s", detail=detail[:200])
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failed test."""
        if report.failed and self._statuses.setdefault(report.nodeid, "failed") == "failed":
            reason = str(report.longrepr).strip().splitlines()[-1]
            self._rows.write(failure(self._section, f"import {report.nodeid}", reason))

    def pytest_sessionfinish(self) -> None:
        """All tests are done."""
        found = Counter(self._statuses.values())
        counts = f"{found['ok']} passed, {found['failed']} failed, {len(self._skipped)} skipped"
        reasons = f" ({'; '.join(sorted(set(self._skipped.values())))})" if self._skipped else ""
        status: Status = "failed" if found["failed"] else "ok" if found["ok"] else "open"
        self._rows.write(Row(section=self._section, name="tests", status=status, detail=counts + reasons[:200]))


class ContextGuard:
    """Ends a process whose CUDA context a failed test has lost: all that follow would fail for it."""

    def __init__(
        self, path: Path, section: str, synchronize: Callable[[], object], leave: Callable[[int], object] = os._exit
    ) -> None:
        self._rows = RowFile(path, section, with_targets=False)
        self._section, self._synchronize, self._leave = section, synchronize, leave

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Behind those who report the failure."""
        if not report.failed:
            return
        try:
            self._synchronize()
        except Exception as error:
            self._rows.write(failure(self._section, "context lost", f"in {report.nodeid}: {error}"))
            self._leave(CONTEXT_LOST)


def synchronize() -> None:
    """Wait for the device, if this process uses it."""
    if _cuda.is_initialized():
        torch.cuda.synchronize()


def register(config: pytest.Config, wait: Callable[[], object]) -> None:
    """Report where that is asked for. Of several processes one hears of all tests, and the others run them."""
    path, is_worker = os.environ.get("DISAGG_GPU_CHECK_ROWS"), hasattr(config, "workerinput")
    if not path:
        return
    section = os.environ["DISAGG_GPU_CHECK_SECTION"]
    if not is_worker:
        config.pluginmanager.register(RowReporter(Path(path), section))
    if is_worker or not config.getoption("numprocesses", default=None):
        config.pluginmanager.register(ContextGuard(Path(path), section, wait))


def pytest_configure(config: pytest.Config) -> None:
    register(config, synchronize)
