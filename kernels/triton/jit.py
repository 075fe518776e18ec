"""`triton.jit` with a type that mypy knows, and where the kernels can run: compiled, or in triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are run by triton's interpreter, on CPU tensors. Read when this module is loaded, as triton does."""


def _repair_interpreter() -> None:
    """Make the interpreter of triton 3.6 work with numpy 2.4 and later. To be called once.

    The interpreter holds a scalar as an array of shape [1] and calls `int` on it for the bounds of a `range`; numpy 2.4
    made that an error.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED:
    _repair_interpreter()


def jit(function: Callable[..., Any], *, do_not_specialize: Sequence[str] = ()) -> Any:
    """A kernel, to be launched as `kernel[grid](...)`, or a function that kernels call.

    Triton compiles anew for an integer argument that is 1 or a multiple of 16; not for those in `do_not_specialize`.
    """
    return triton.jit(function, do_not_specialize=list(do_not_specialize))
