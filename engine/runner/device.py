"""The device of a worker, from the name in its configuration."""

from __future__ import annotations

import threading

import torch

from disagg.proto.errors import ConfigError

NCCL_CALLS = threading.Lock()
"""Held while an NCCL operation is queued: NCCL forbids it from several threads at once on one device, and a process has
one. Waits for no peer."""


def torch_device(name: str) -> torch.device:
    """`cpu`, or a CUDA device with its index: torch keeps communicators by the index that it was given, and tensors of
    `cuda` have the one of the current device.

    Raises:
        ConfigError: it is no device, or this torch does not see it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not a torch device: {error}") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this torch sees no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device {name!r}: this process sees {count} CUDA devices")
    return torch.device("cuda", index)
