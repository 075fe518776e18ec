"""Resource limits of the process that converts a GGUF file. The file is untrusted: sizes that it claims must not fill a
machine's memory or occupy its cores."""

from __future__ import annotations

import resource
from typing import Final, NamedTuple

GIB: Final = 1 << 30
KILL_AFTER_S: Final = 5
"""Seconds of processor time between SIGXCPU and SIGKILL."""


class Limits(NamedTuple):
    """Resource limits of one conversion."""

    memory_bytes: int
    """Private memory: libraries, and a few pieces of a tensor in fp32."""
    cpu_s: int
    file_bytes: int
    """Maximum size of a file that the conversion writes."""


def limits_for(source_bytes: int) -> Limits:
    """Limits for a file of this size: weights of two bits become eight times as large."""
    return Limits(
        memory_bytes=8 * GIB,
        cpu_s=600 + 120 * (source_bytes // GIB),
        file_bytes=GIB + 10 * source_bytes,
    )


def limit_this_process(limits: Limits) -> None:
    """Set the limits. Beyond them allocations raise `MemoryError`, writes `OSError`, and SIGXCPU ends the process."""
    for kind, value, more in (
        (resource.RLIMIT_DATA, limits.memory_bytes, 0),
        (resource.RLIMIT_CPU, limits.cpu_s, KILL_AFTER_S),
        (resource.RLIMIT_FSIZE, limits.file_bytes, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, most = resource.getrlimit(kind)
        hard = value + more if most == resource.RLIM_INFINITY else min(value + more, most)
        resource.setrlimit(kind, (min(value, hard), hard))
