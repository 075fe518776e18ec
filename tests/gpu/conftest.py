"""On which device the tests of this folder run: `DISAGG_GPU_CHECK_DEVICE`, `cuda` unless it says `cpu`.

On a CPU Triton's interpreter plays the GPU (`TRITON_INTERPRET=1`, set by whoever starts pytest, because Triton reads it
when a kernel is defined). What cannot be played is marked `gpu` and skipped there. Nothing here needs Ray, a network or
a pytest plugin.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.report import Row, RowFile, Status, failure
from disagg.engine.device_environment import device_environment

DEVICE_VARIABLE = "DISAGG_GPU_CHECK_DEVICE"


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
    if apart:
        return common
    return common | {"NCCL_HOSTID": f"gpu-check-{name}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}


# ---------------------------------------------------------------- rows for scripts/gpu_check.py


class RowReporter:
    """Writes each failed test when it fails, and the counts at the end, where the check can read them after a crash."""

    def __init__(self, path: Path, section: str) -> None:
        self._rows = RowFile(path, section, with_targets=False)
        self._section = section
        self._counts = {"passed": 0, "failed": 0, "skipped": 0}
        self._skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's set-up, call or tear-down ended."""
        if report.failed:
            self._counts["failed"] += 1
            reason = report.longreprtext.strip().splitlines()
            self._rows.write(failure(self._section, report.nodeid, reason[-1] if reason else "failed"))
        elif report.skipped:
            self._counts["skipped"] += 1
            self._skipped.add(str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "skipped")
        elif report.when == "call":
            self._counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failed test."""
        if report.failed:
            self._counts["failed"] += 1
            self._rows.write(failure(self._section, report.nodeid, str(report.longrepr).strip().splitlines()[-1]))

    def pytest_sessionfinish(self) -> None:
        """All tests are done."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self._counts.items())
        ran = self._counts["passed"] + self._counts["failed"]
        reasons = f" ({'; '.join(sorted(self._skipped))})" if self._skipped else ""
        status: Status = "failed" if self._counts["failed"] else "ok" if ran else "open"
        self._rows.write(Row(section=self._section, name="tests", status=status, detail=counts + reasons[:200]))


def pytest_configure(config: pytest.Config) -> None:
    """Report where the check asks for it; of several processes the one that hears of all tests."""
    path = os.environ.get("DISAGG_GPU_CHECK_ROWS")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RowReporter(Path(path), os.environ["DISAGG_GPU_CHECK_SECTION"]))
