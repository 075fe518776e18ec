"""Triton's driver for NVIDIA on a driver library that computes nothing: `cuda_stub.c`.

    library = build(folder)
    launches = install(library)       from now on kernels are compiled for an H100 and launched into nothing

Tensors lie in host memory, which the kernels take for a device's. The environment has to say `DISAGG_KERNELS=triton`
where ops are called through `dispatch`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

from disagg.kernels.triton import attention, ops

NUM_MULTIPROCESSORS = 132
SHARED_BYTES = 232448
"""Shared memory that a program can have, as in `cuda_stub.c`."""


class StubDriver(CudaDriver):  # type: ignore[misc]  # untyped
    """Triton's driver for NVIDIA, on whatever libcuda was loaded, without torch's view of the device."""

    def __init__(self) -> None:
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher
        self.get_current_device = lambda: 0
        self.set_current_device = lambda _: None
        self.get_current_stream = lambda _: 0
        self.get_device_capability = lambda _: (9, 0)

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


class Launches:
    """The stub's counts."""

    def __init__(self, library: Path) -> None:
        self._stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._stub.stub_name.restype = ctypes.c_char_p

    def counts(self) -> Counter[str]:
        stub = self._stub
        found: Counter[str] = Counter()
        for at in range(stub.stub_num_functions()):
            found[stub.stub_name(at).decode()] += stub.stub_launches(at)
        return found

    def of(self, run: Callable[[], object]) -> dict[str, int]:
        """By kernel, those of the second of two runs: the first one compiles."""
        run()
        before = self.counts()
        run()
        return dict(self.counts() - before)

    @property
    def descriptors(self) -> int:
        return int(self._stub.stub_descriptors())


def build(folder: Path) -> Path:
    """The driver library, compiled against the header that Triton ships."""
    header = Path(triton.__file__).parent / "backends/nvidia/include"
    library, source = folder / "libcuda.so.1", Path(__file__).with_name("cuda_stub.c")
    options = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{header}"]
    subprocess.run(["gcc", *options, "-o", library, source], check=True)
    return library


def install(library: Path) -> Launches:
    """For all kernels of this process."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    launches = Launches(library)
    triton.runtime.driver.set_active(StubDriver())
    ops._takes = lambda _: True  # type: ignore[assignment]  # tensors in host memory
    attention._num_multiprocessors = lambda _: NUM_MULTIPROCESSORS  # type: ignore[assignment]
    attention._shared_bytes = lambda _: SHARED_BYTES  # type: ignore[assignment]
    return launches
