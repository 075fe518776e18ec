"""The dtype in which a CPU computes fastest, of those that are exact for bf16 weights: bf16 itself, or fp32 where the
products of bf16 are slow. Without torch.

The C++ kernels are as fast in bf16 at every level of processors from AVX2 on; below it they take twice as long as in
fp32 for prompts and batches. Where they cannot be used, torch's products of bf16 are those of oneDNN: quick where the
processor has instructions for them, else 2 to 8 times as slow as those of fp32 (docs/benchmarks/cold-start.md has the
figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from disagg.kernels.cpu import build
from disagg.kernels.settings.switches import switches

_MULTIPLIES_BF16: Final = frozenset({"avx512_bf16", "amx_bf16"})
"""Processor features with which oneDNN has products of bf16."""
_VECTORS: Final = ("avx512", "avx2", "neon")
"""Vector instructions with which the C++ kernels are fast in bf16."""


class CpuDtype(NamedTuple):
    """The chosen dtype, and the reason."""

    dtype: Literal["bfloat16", "float32"]
    kernels: str
    """Name of what computes, such as `C++ for avx512`."""
    slow_because: str = ""
    """Reason why it is several times slower than it could be; empty where it is not."""


def find_cpu_dtype(environ: Mapping[str, str]) -> CpuDtype:
    """Find the dtype for this machine, after compiling the C++ kernels where that was not done yet, which takes
    seconds. Raises `ValueError` where `environ` asks for kernels that are not possible."""
    features = build._features()
    if switches(environ).mode == "reference":
        return choose("", "DISAGG_KERNELS=reference", features)
    try:
        return choose(build.library(environ).simd, "", features)
    except build.BuildError as error:
        return choose("", str(error), features)


def choose(simd: str, lacks: str, features: frozenset[str]) -> CpuDtype:
    """Choose the dtype. Pure.

    Args:
        simd: what the C++ kernels were compiled for; empty where there are none.
        lacks: why there are none.
        features: features of the processor, as Linux names them.
    """
    if not simd:
        return CpuDtype("bfloat16" if features & _MULTIPLIES_BF16 else "float32", "torch", lacks)
    kernels = f"C++ for {simd}"
    if simd.split(" ", maxsplit=1)[0] in _VECTORS:
        return CpuDtype("bfloat16", kernels)
    return CpuDtype("float32", kernels, "it has no vectors of 256 bits or more, by which bf16 is widened")
