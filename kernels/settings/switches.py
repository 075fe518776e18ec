"""`DISAGG_KERNELS`: the choice of the kernels that compute. Pure.

`auto` (or unset): the C++ kernels for CPU tensors, the Triton kernels for CUDA tensors. `reference`: torch everywhere.
`triton`: CPU tensors take the Triton kernels as well, which then need Triton's interpreter; that is for tests. Behind
`auto` or `triton`, `-OP` gives single Triton kernels' work to torch, as in `auto,-paged_prefill_attention,-draw_rows`:
a kernel that is wrong on a new device costs its own speed only, and a wrong result that stays is not that kernel's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

VARIABLE = "DISAGG_KERNELS"

Mode = Literal["auto", "reference", "triton"]

TRITON_OPS = (
    "add",
    "add_rms_norm",
    "argmax_rows",
    "digest_sums",
    "draw_rows",
    "embed",
    "gather_kv",
    "gelu_tanh_mul",
    "head_squares",
    "latent_rope_write",
    "lora_add",
    "moe_ffn",
    "paged_decode_attention",
    "paged_prefill_attention",
    "pointwise",
    "qkv_rope_write",
    "quantize_rows",
    "rms_norm",
    "scatter_kv",
    "silu_mul",
)
"""Ops that have a Triton kernel, which can be switched off."""


@dataclass(frozen=True, slots=True)
class Switches:
    """Value of the variable."""

    mode: Mode = "auto"
    without: tuple[str, ...] = ()
    """Ops of `TRITON_OPS`, in their order, that torch computes instead."""

    def has_kernel(self, op: str) -> bool:
        """Whether `op` takes its Triton kernel where tensors take those."""
        return self.mode != "reference" and op not in self.without

    def __str__(self) -> str:
        """Note on what is switched off, such as `without draw_rows (DISAGG_KERNELS)`; empty if nothing is."""
        return f"without {', '.join(self.without)} ({VARIABLE})" if self.without else ""


def switches(environ: Mapping[str, str]) -> Switches:
    """The switches in an environment.

    Raises:
        ValueError: it names a mode or an op that is not known.
    """
    return parse(environ.get(VARIABLE, "auto"))


@functools.cache
def parse(text: str) -> Switches:
    """Parse the value of the variable. Raises `ValueError`, which quotes the part that is wrong."""
    mode, *offs = (part.strip() for part in text.split(","))
    if mode not in get_args(Mode):
        raise ValueError(f"{VARIABLE}: {mode!r} is not one of {', '.join(map(repr, get_args(Mode)))}")
    for off in offs:
        if not off.startswith("-"):
            raise ValueError(f"{VARIABLE}: {off!r}: what follows the mode is switched off, as in 'auto,-draw_rows'")
        if off[1:] not in TRITON_OPS:
            raise ValueError(f"{VARIABLE}: {off[1:]!r} is not one of {', '.join(TRITON_OPS)}")
    return Switches(cast(Mode, mode), tuple(op for op in TRITON_OPS if f"-{op}" in offs))
