"""Where kernels write that are told where."""

from __future__ import annotations

from torch import Tensor


def can_hold(out: Tensor | None, like: Tensor) -> bool:
    """Whether a kernel can write what is of the dtype and the shape of `like` into `out`; None is a new tensor."""
    return out is None or (out.dtype == like.dtype and out.shape == like.shape and out.is_contiguous())
