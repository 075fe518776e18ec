"""Environment variables of a process that computes on a GPU.

Torch, NCCL, UCX and the CUDA runtime read them at their start or whenever a communicator is made. Changing the
environment is not safe beside threads that read it, so a process gets them when it is started, or before its first
communicator.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from disagg.proto.errors import ConfigError

NCCL_SET_UP_TIMEOUT_S: Final = 20
"""How long a call on a communicator that is being made may wait for the peer's half of it."""

GPU_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Torch's watchdog would end the process for a dead peer, and after an error holds a lock that new operations
        # and the end of a group need: a hang is for the state machines and the controller to judge.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(NCCL_SET_UP_TIMEOUT_S),
        # A receive is a kernel that waits on the device; streams that share a hardware queue with it would wait, too.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # UCX reads a peer's device memory by CUDA IPC only where it sees NVLink, else through the host's memory, at
        # 0.6 GB/s between two processes on an H100 of a virtual machine. They reach each other's memory all the same.
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "UCX_WARN_UNUSED_ENV_VARS": "n",  # where it finds no CUDA it would warn of the one above
    }
)


ONE_GPU_VARIABLE: Final = "DISAGG_NCCL_ONE_GPU"
"""Set to 1, workers that share a GPU may use transport nccl, see `one_gpu_environment`."""


def device_environment(device: str) -> dict[str, str]:
    """What a worker's process on this device (`cpu`, `cuda`, `cuda:1`) has besides; nothing on a CPU."""
    return dict(GPU_ENVIRONMENT) if device.partition(":")[0] == "cuda" else {}


def nccl_shares_gpus(environ: Mapping[str, str]) -> bool:
    """Whether `ONE_GPU_VARIABLE` is set in this environment.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    value = environ.get(ONE_GPU_VARIABLE, "") or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{ONE_GPU_VARIABLE}: expected 0 or 1; got {value!r}")
    return value == "1"


def one_gpu_environment(worker_id: str) -> dict[str, str]:
    """What the process of a worker has besides, where workers that share a GPU use NCCL. NCCL joins no two processes of
    one host on one GPU, so each worker is a host to it, and bytes go through sockets of the loopback: right, not
    fast."""
    return {"NCCL_HOSTID": worker_id, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def worker_environment(worker_id: str, device: str, transport: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What the process of a worker has besides `environ`, that of the process that starts it.

    Raises:
        ConfigError: as `nccl_shares_gpus`.
    """
    given = device_environment(device)
    if given and transport == "nccl" and nccl_shares_gpus(environ):
        given |= one_gpu_environment(worker_id)
    return given
