"""What this machine has: GPU, driver, packages; and whether the engine can be imported here at all.

Ends with status 3 where torch sees no CUDA device, so that whoever started it need not import torch to know.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Row, RowFile, failure

NO_DEVICE = 3
SECTION = "environment"
NEEDED = ("torch", "triton", "transformers", "safetensors", "tokenizers", "msgspec", "xxhash", "rich", "pytest")
WISHED = ("grpcio", "numpy", "pytest-xdist")
MODULES = (
    "disagg.engine.runner.model_runner",
    "disagg.engine.core.engine_core",
    "disagg.engine.kv_transfer.transports.nccl",
)


def package_rows() -> Iterator[Row]:
    """A version for each package; one that is missing is a failure where the check needs it."""
    for name in (*NEEDED, *WISHED):
        try:
            yield Row(section=SECTION, name=name, status="info", detail=version(name))
        except PackageNotFoundError:
            if name in NEEDED:
                yield failure(SECTION, name, "not installed; carry its wheel and put it on PYTHONPATH")
            else:
                yield Row(section=SECTION, name=name, status="info", detail="not installed")


def import_rows() -> Iterator[Row]:
    """Whether our own modules can be imported without Ray."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield failure(SECTION, f"import {name}", f"{type(error).__name__}: {error}")
        else:
            yield Row(section=SECTION, name=f"import {name}", status="ok")


def kernel_row() -> Row:
    """What CPU tensors would take; it compiles the C++ kernels, so that no other section waits for that."""
    from disagg.kernels import dispatch

    return Row(section=SECTION, name="CPU kernels", status="info", detail=dispatch.describe())


def device_rows(device: str) -> Iterator[Row]:
    """The GPU, or that there is none."""
    import torch

    cuda: Any = torch.cuda
    if device == "cpu":
        yield Row(section=SECTION, name="device", status="info", detail="cpu: tiny sizes, no targets")
        return
    if not torch.cuda.is_available():
        yield no_device_row(_nvidia_smi("name,driver_version"), f"torch {torch.__version__}, CUDA {torch.version.cuda}")
        return
    yield from tool_rows()
    properties = torch.cuda.get_device_properties(0)
    found = {
        "device": properties.name,
        "memory": f"{properties.total_memory / 2**30:.1f} GiB, {torch.cuda.mem_get_info()[0] / 2**30:.1f} free",
        "multiprocessors": str(properties.multi_processor_count),
        "compute capability": f"{properties.major}.{properties.minor}",
        "CUDA of torch": str(torch.version.cuda),
        "NCCL": str(cuda.nccl.version()),
        "driver and clocks": _nvidia_smi("driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"),
    }
    for name, value in found.items():
        yield Row(section=SECTION, name=name, status="info", detail=value)


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
    """The section `environment`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--ceilings", type=Path, help="not used")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    rows = RowFile(arguments.rows, SECTION, with_targets=False)
    python = Row(section=SECTION, name="python", status="info", detail=sys.version.split()[0])
    for row in (python, *package_rows()):
        rows.write(row)
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
    if is_importable:
        rows.write(kernel_row())


if __name__ == "__main__":
    main()
