"""What the CPU of this machine computes fastest in, for programs that do without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from disagg.kernels.cpu_dtype import CpuDtype as CpuDtype
from disagg.kernels.cpu_dtype import find_cpu_dtype
from disagg.proto.errors import ConfigError


def cpu_dtype_here(environ: Mapping[str, str] = os.environ) -> CpuDtype:
    """What is fastest on the CPU of this machine. Compiles the C++ kernels if that was not done yet, which takes
    seconds. Raises `ConfigError` where the environment asks for kernels that cannot be."""
    try:
        return find_cpu_dtype(environ)
    except ValueError as error:
        raise ConfigError(str(error)) from error
