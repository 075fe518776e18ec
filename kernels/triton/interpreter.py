"""Makes the interpreter of triton 3.6 work with numpy 2.4 and later.

The interpreter holds a scalar as an array of shape [1] and calls `int` on it for the bounds of a `range`; numpy 2.4
made that an error. Only tests import this, through `jit`.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def repair() -> None:
    """Let `range` take scalars of the interpreter. To be called once."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
