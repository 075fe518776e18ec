"""Computations that are captured once and replayed: what a decode step costs without Python between its ops.

On a CPU the calls of the compiled kernels are recorded (`kernels/cpu/program.py`), on a GPU they are a CUDA graph
(`kernels/cuda_graph.py`).
"""

from __future__ import annotations

import torch

from disagg.kernels import dispatch
from disagg.kernels.captured import Captured, CaptureError, Capturer
from disagg.kernels.cpu.calls import ProgramCapturer
from disagg.kernels.cuda_graph import GraphCapturer

__all__ = ["CaptureError", "Captured", "Capturer", "capturer"]


def capturer(device: torch.device) -> Capturer:
    """What captures computations of tensors of a device. CaptureError where nothing does."""
    if device.type == "cpu":
        library = dispatch.native_library()
        if library is None:
            raise CaptureError("the C++ kernels are not in use")
        return ProgramCapturer(library)
    if device.type == "cuda":
        return GraphCapturer(device)
    raise CaptureError(f"nothing captures what runs on a {device.type} device")
