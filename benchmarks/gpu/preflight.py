"""What this machine has, and whether the engine can be imported here at all: GPU, driver, packages, loopback, memory.

Ends with status 3 where torch sees no CUDA device, and 4 where torch cannot be imported; then nothing else can run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Row, RowFile, failure

NO_DEVICE, NO_TORCH = 3, 4
SECTION = "preflight"
NEEDED = ("torch", "triton", "transformers", "safetensors", "tokenizers", "msgspec", "xxhash", "rich", "pytest")
WISHED = ("grpcio", "numpy", "pytest-xdist", "nixl-cu13")
MODULES = (
    "disagg.engine.runner.model_runner",
    "disagg.engine.core.engine_core",
    "disagg.engine.kv_transfer.transports.nccl",
)
READ_BEFORE = (
    *MODULES,
    "triton",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What tests import at the same time behind this: once it was read from a disk, it is in memory."""
LEAST_SHM_GIB, LEAST_DISK_GIB, LEAST_MEMORY_GIB = 1.5, 2.0, 8.0
"""Staging memory of a pair on both sides, with what torch needs; compiled kernels and logs; two workers and tests."""
GIB = 1 << 30


def info(name: str, detail: str) -> Row:
    """What is neither right nor wrong."""
    return Row(section=SECTION, name=name, status="info", detail=detail)


def package_rows() -> Iterator[Row]:
    """A version for each package; one that is missing is a failure where the check needs it."""
    for name in (*NEEDED, *WISHED):
        try:
            yield info(name, version(name))
        except PackageNotFoundError:
            if name in NEEDED:
                yield failure(SECTION, name, "not installed; carry its wheel and put it on PYTHONPATH")
            else:
                yield info(name, "not installed")


# ---------------------------------------------------------------- the system


SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
LOOPBACK = "lo"


def loopback_row() -> Row:
    """Workers, ranks and NCCL of one machine connect through it; it is brought up where it is down."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
            asked = struct.pack("16sh14x", LOOPBACK.encode(), 0)
            flags = struct.unpack("16sh14x", fcntl.ioctl(door, SIOCGIFFLAGS, asked))[1]
            was_down = not flags & IFF_UP
            if was_down:
                fcntl.ioctl(door, SIOCSIFFLAGS, struct.pack("16sh14x", LOOPBACK.encode(), flags | IFF_UP))
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5.0).close()
    except OSError as error:
        return failure(SECTION, "loopback", f"{error}; processes of one machine cannot connect")
    return Row(section=SECTION, name="loopback", status="ok", detail="was down, and was brought up" if was_down else "")


def space_row(name: str, free_bytes: int, least_gib: float, what: str) -> Row:
    """Whether there is enough."""
    detail = f"{free_bytes / GIB:.1f} GiB free{what}"
    if free_bytes < least_gib * GIB:
        return failure(SECTION, name, f"{detail}; at least {least_gib:g} GiB are needed")
    return info(name, detail)


def system_rows(*, is_tiny: bool) -> Iterator[Row]:
    """Loopback, memory that is shared, disk, memory, cores. Tiny sizes need next to no memory."""
    yield loopback_row()
    least = (0.1, 0.1, 0.5) if is_tiny else (LEAST_SHM_GIB, LEAST_DISK_GIB, LEAST_MEMORY_GIB)
    folders = (("/dev/shm", "/dev/shm", least[0]), ("disk", tempfile.gettempdir(), least[1]))
    for name, folder, least_gib in folders:
        try:
            yield space_row(name, shutil.disk_usage(folder).free, least_gib, f" in {folder}")
        except OSError as error:
            yield failure(SECTION, name, str(error))
    yield space_row("memory", available_memory(), least[2], "")
    yield info("cores", str(len(os.sched_getaffinity(0))))


def available_memory() -> int:
    """Bytes that processes can still take, by the kernel and by the limit of our control group."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        most = int((folder / "memory.max").read_text(encoding="utf-8"))
        found = min(found, most - int((folder / "memory.current").read_text(encoding="utf-8")))
    return found


# ---------------------------------------------------------------- torch and the device


def torch_row() -> Row:
    """Whether torch can be imported, which everything needs."""
    try:
        import torch
    except Exception as error:
        return failure(SECTION, "import torch", f"{type(error).__name__}: {error}")
    return Row(section=SECTION, name="import torch", status="ok", detail=torch.__version__)


def import_rows() -> Iterator[Row]:
    """Whether our own modules can be imported without Ray, and what they and the tests need."""
    for name in READ_BEFORE:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield failure(SECTION, f"import {name}", f"{type(error).__name__}: {error}")
        else:
            yield Row(section=SECTION, name=f"import {name}", status="ok")


def device_rows(device: str) -> Iterator[Row]:
    """The GPU, or that there is none."""
    import torch

    cuda: Any = torch.cuda
    if device == "cpu":
        yield info("device", "cpu: tiny sizes, no targets")
        return
    if not torch.cuda.is_available():
        yield no_device_row(_nvidia_smi("name,driver_version"), f"torch {torch.__version__}, CUDA {torch.version.cuda}")
        return
    properties = torch.cuda.get_device_properties(0)
    found = {
        "device": properties.name,
        "memory of the device": f"{properties.total_memory / GIB:.1f} GiB, {cuda.mem_get_info()[0] / GIB:.1f} free",
        "multiprocessors": str(properties.multi_processor_count),
        "compute capability": f"{properties.major}.{properties.minor}",
        "CUDA of torch": str(torch.version.cuda),
        "NCCL": str(cuda.nccl.version()),
        "driver": _nvidia_smi("driver_version"),
        "clocks": _nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"),
        "modes": _nvidia_smi("compute_mode,persistence_mode,mig.mode.current"),
    }
    for name, value in found.items():
        yield info(name, value)


def no_device_row(listed: str, torch: str) -> Row:
    """Without a device in torch: open, unless `nvidia-smi` lists one (`listed`, `unknown` where it does not run)."""
    if listed.startswith(UNKNOWN):
        return Row(section=SECTION, name="device", status="open", detail="no CUDA device")
    detail = f"nvidia-smi lists {listed}, and {torch} sees no device: is the driver too old for it?"
    return failure(SECTION, "device", detail)


def tool_rows() -> Iterator[Row]:
    """What the kernels need to be launched."""
    from disagg.kernels.describe import triton_lacks

    for name in triton_lacks():
        yield failure(SECTION, name, "missing; Triton cannot compile its launcher")


UNKNOWN = "unknown"


def _nvidia_smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{UNKNOWN} ({error})"
    return next(iter(done.stdout.strip().splitlines()), f"{UNKNOWN} (no device)")


def main() -> None:
    """The section `preflight`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--ceilings", type=Path, help="not used")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    rows = RowFile(arguments.rows, SECTION, with_targets=False)
    is_tiny = arguments.device == "cpu"
    for row in (info("python", sys.version.split()[0]), *package_rows(), *system_rows(is_tiny=is_tiny)):
        rows.write(row)
    if rows.write(torch_row()).status == "failed":
        sys.exit(NO_TORCH)
    has_device = True
    for row in device_rows(arguments.device):
        has_device &= row.name != "device" or row.status == "info"
        rows.write(row)
    if not has_device:
        sys.exit(NO_DEVICE)
    is_importable = True
    for row in import_rows():
        is_importable &= row.status == "ok"
        rows.write(row)
    if is_importable and not is_tiny:
        for row in tool_rows():
            rows.write(row)


if __name__ == "__main__":
    main()
