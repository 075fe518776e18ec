"""`triton.jit` with a type that mypy knows, and where the kernels can run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are run by triton's interpreter, on CPU tensors. Read when this module is loaded, as triton does."""

if INTERPRETED:
    from disagg.kernels.triton import interpreter

    interpreter.repair()


def jit(function: Callable[..., Any], *, do_not_specialize: Sequence[str] = ()) -> Any:
    """A kernel, to be launched as `kernel[grid](...)`, or a function that kernels call.

    Triton compiles anew for an integer argument that is 1 or a multiple of 16; not for those in `do_not_specialize`.
    """
    return triton.jit(function, do_not_specialize=list(do_not_specialize))
