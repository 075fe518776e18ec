"""NIXL's library, as far as one pair uses it: an agent with a UCX backend, memory that a peer may read, and reads.

    P    agent.register(buffer) ──> metadata for D
    D    agent.add_peer(metadata of P); number = agent.read(buffer, nbytes, remote); agent.is_done(number)

NIXL is the package `nixl-cu13` (or `nixl-cu12`), our extra `nixl`. Here it has no thread: without a call such as
`progress` an agent costs nothing, and helps no peer. UCX reads memory of the same host by a system call that needs no
help (CMA), and that of other hosts by RDMA.

UCX lets whoever reaches one of its TCP ports read and write the memory of the process. So it gets no TCP: within a host
shared memory and CMA, which are for processes of one user, between hosts RDMA. `UCX_TLS` in the environment overrides
that, for private networks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import ipaddress
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from disagg.proto.errors import ConfigError

if TYPE_CHECKING:  # The controller asks whether the package is there, and needs nothing of the engine.
    from disagg.engine.plan import Buffer

MODULES = ("nixl_cu13", "nixl_cu12")
MemoryKind = Literal["DRAM", "VRAM"]

WITHIN_A_HOST: Mapping[str, str] = MappingProxyType(
    {"engine_config": "TLS=^tcp,ib", "ucx_error_handling_mode": "none"}  # shared memory has no other mode
)
BETWEEN_HOSTS: Mapping[str, str] = MappingProxyType({"engine_config": "TLS=^tcp"})

P = ParamSpec("P")
T = TypeVar("T")


class NixlError(RuntimeError):
    """A call of NIXL failed, or it is not installed."""


NOT_INSTALLED = "nixl needs the extra `nixl` (pip install 'disagg[nixl]')"


def check_installed(transport: str, path: str = "transfer.") -> None:
    """Refuse a transport whose package is missing on this machine; does not load it. `path` leads to the field in the
    user's file.

    Raises:
        ConfigError: for `nixl` without its extra.
    """
    if transport == "nixl" and not any(importlib.util.find_spec(name) for name in MODULES):
        raise ConfigError(f"{path}transport: {NOT_INSTALLED}")


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a process."""

    address: int
    nbytes: int
    kind: MemoryKind
    device: int = 0


def region_of(buffer: Buffer) -> Region:
    """Region in which a flat uint8 numpy array or tensor lies."""
    if hasattr(buffer, "data_ptr"):
        is_on_gpu = bool(buffer.is_cuda)
        device = buffer.device.index if is_on_gpu else 0
        return Region(buffer.data_ptr(), buffer.numel(), "VRAM" if is_on_gpu else "DRAM", device)
    return Region(buffer.__array_interface__["data"][0], buffer.nbytes, "DRAM")


def ucx_options(host: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Options of the UCX backend of a worker that binds to `host`."""
    if "UCX_TLS" in environment:
        return {}
    return dict(WITHIN_A_HOST if ipaddress.ip_address(host).is_loopback else BETWEEN_HOSTS)


@functools.cache
def load() -> Any:
    """The Python API of NIXL.

    Raises:
        NixlError: if it is not installed.
    """
    errors = []
    for name in MODULES:
        try:
            api = importlib.import_module(f"{name}._api")
        except ImportError as error:
            errors.append(str(error))
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # two lines for each agent, else
        return api
    raise NixlError(f"transport {NOT_INSTALLED}: {errors[0]}")


def _ours(call: Callable[P, T]) -> Callable[P, T]:
    """Raises `NixlError` for what NIXL raises, whose errors have no common class. It is a new one, so that no traceback
    keeps the agent alive."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except NixlError as error:
            text = str(error)
        except Exception as error:
            text = f"NIXL: {str(error) or type(error).__name__}"
        raise NixlError(text)

    return called


class NixlAgent:
    """An agent for one peer. Thread-safe; the first GPU whose memory is registered becomes the current one of threads
    that call it.

    Args:
        name: unique among the agents of both processes.
        host: the address that the worker binds to.

    Raises:
        NixlError: if NIXL is not installed, or UCX has no way to reach a peer.
    """

    def __init__(self, name: str, host: str) -> None:
        self._lock = threading.Lock()
        self._owners: dict[int, Buffer] = {}
        """Registered allocations by their address; they are not freed while they are registered."""
        self._peer = ""
        self._reads: dict[int, Any] = {}
        """Reads that are not over, by their number."""
        self._numbers = itertools.count()
        self._gpu: int | None = None
        self._agent: Any = _new_agent(name, host)

    @property
    @_ours
    def plugins(self) -> list[str]:
        """Names of NIXL's backends that are installed; only UCX is used."""
        with self._lock:
            return list(self._open.get_plugin_list())

    @property
    @_ours
    def metadata(self) -> bytes:
        """How the peer reaches this agent, and the memory that is registered so far."""
        with self._lock:
            return bytes(self._open.get_agent_metadata())

    @_ours
    def add_peer(self, metadata: bytes) -> None:
        """Take the peer's metadata, or that of more memory of it."""
        with self._lock:
            self._peer = self._open.add_remote_agent(metadata)

    @_ours
    def register(self, buffer: Buffer) -> bytes:
        """Let the peer read the allocation that `buffer` lies in; metadata for it, empty where that was done before."""
        owner = _owner(buffer)
        region = region_of(owner)
        with self._lock:
            if region.address in self._owners:
                return b""
            if region.kind == "VRAM" and self._gpu is None:
                self._gpu = region.device
            self._use_gpu()
            descriptors = [(region.address, region.nbytes, region.device, "")]
            registered = self._open.register_memory(descriptors, region.kind)
            self._owners[region.address] = owner
            return bytes(self._open.get_partial_agent_metadata(registered, False, ["UCX"]))

    @_ours
    def read(self, buffer: Buffer, nbytes: int, remote: Region) -> int:
        """Begin to copy `nbytes` of the peer's memory into the head of `buffer`, which is registered; the number of
        this read."""
        local = region_of(buffer)
        with self._lock:
            self._use_gpu()
            ours = self._open.get_xfer_descs([(local.address, nbytes, local.device)], local.kind)
            theirs = self._open.get_xfer_descs([(remote.address, nbytes, remote.device)], remote.kind)
            number = next(self._numbers)
            self._reads[number] = self._open.initialize_xfer("READ", ours, theirs, self._peer)
            _is_over(self._open.transfer(self._reads[number]))
            return number

    @_ours
    def is_done(self, number: int) -> bool:
        """Whether a read is over; asked no more afterwards.

        Raises:
            NixlError: if it failed.
        """
        with self._lock:
            if not _is_over(self._open.check_xfer_state(self._reads[number])):
                return False
            self._open.release_xfer_handle(self._reads.pop(number))
            return True

    @_ours
    def progress(self) -> None:
        """Let UCX do what the peer waits for."""
        with self._lock:
            self._use_gpu()
            self._open.get_new_notifs()

    def close(self) -> None:
        """End the agent: afterwards no read writes to a buffer any more, and no buffer is registered. Idempotent.

        Raises:
            NixlError: if the agent lives on.
        """
        with self._lock:
            if self._agent is None:
                return
            library_agent = weakref.ref(self._agent.agent)
            while self._reads:
                with contextlib.suppress(Exception):  # what cannot be cancelled ends with the agent
                    self._reads.popitem()[1].release()
            self._agent = None  # the last reference: the library ends UCX's worker with all it was doing
            if library_agent() is not None:
                raise NixlError("NIXL: the agent cannot be ended")
            self._owners.clear()

    def _use_gpu(self) -> None:
        """UCX works in the CUDA context of its caller's thread."""
        if self._gpu is not None:
            import torch

            torch.cuda.set_device(self._gpu)

    @property
    def _open(self) -> Any:
        if self._agent is None:
            raise NixlError("the agent is closed")
        return self._agent


@_ours
def _new_agent(name: str, host: str) -> Any:
    api = load()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    try:
        agent.create_backend("UCX", ucx_options(host))
    except Exception as error:
        raise NixlError(
            f"UCX has no way to other workers for one that binds to {host} ({error}). Between hosts it takes RDMA "
            "only; where the network is private, the environment's UCX_TLS names others"
        ) from error
    return agent


def _is_over(state: str) -> bool:
    if state == "ERR":
        raise NixlError("NIXL: the read failed")
    return state == "DONE"


def _owner(buffer: Buffer) -> Buffer:
    """The whole allocation of a buffer that is a part of it."""
    if hasattr(buffer, "untyped_storage"):
        return buffer if buffer._base is None else buffer._base
    while type(buffer.base) is type(buffer):
        buffer = buffer.base
    return buffer
