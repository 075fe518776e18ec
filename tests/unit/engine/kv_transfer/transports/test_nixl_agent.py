"""What is decided about NIXL without its library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from disagg.engine.kv_transfer.transports import nixl_agent
from disagg.engine.kv_transfer.transports.nixl_agent import (
    NixlError,
    Region,
    check_installed,
    load,
    region_of,
    ucx_options,
)
from disagg.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "environment", "options"),
    [
        ("127.0.0.1", {}, {"engine_config": "TLS=^tcp,ib", "ucx_error_handling_mode": "none"}),
        ("::1", {}, {"engine_config": "TLS=^tcp,ib", "ucx_error_handling_mode": "none"}),
        ("10.0.0.7", {}, {"engine_config": "TLS=^tcp"}),
        ("127.0.0.1", {"UCX_TLS": "tcp,self"}, {}),
    ],
)
def test_ucx_never_gets_tcp_by_itself(host: str, environment: dict[str, str], options: dict[str, str]) -> None:
    assert ucx_options(host, environment) == options


def test_where_a_buffer_lies() -> None:
    array = np.zeros(100, np.uint8)
    address = array.ctypes.data
    assert region_of(array[10:30]) == Region(address + 10, 20, "DRAM")
    assert region_of(torch.from_numpy(array)[5:]) == Region(address + 5, 95, "DRAM")


def test_the_whole_allocation_is_registered() -> None:
    array, tensor = np.zeros(100, np.uint8), torch.zeros(100, dtype=torch.uint8)
    assert nixl_agent._owner(array[10:][5:30]) is array
    assert nixl_agent._owner(array) is array
    assert nixl_agent._owner(tensor[10:][5:30]) is tensor
    staged: Any = tensor.numpy()  # as pinned memory is given out
    assert region_of(nixl_agent._owner(staged[3:])) == Region(tensor.data_ptr(), 100, "DRAM")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MODULES", ("no_such_package",))
    for transport in ("auto", "gloo", "shm", "nccl"):
        check_installed(transport)
    with pytest.raises(ConfigError) as refused:
        check_installed("nixl")
    assert str(refused.value) == "transfer.transport: nixl needs the extra `nixl` (pip install 'disagg[nixl]')"
    load.cache_clear()
    with pytest.raises(NixlError, match=r"transport nixl needs the extra `nixl`.*no_such_package"):
        load()


class PlayedTensor:
    """100 bytes on GPU 1."""

    is_cuda = True
    device = torch.device("cuda", 1)
    _base = None

    def data_ptr(self) -> int:
        return 4096

    def numel(self) -> int:
        return 100

    def untyped_storage(self) -> None: ...


class PlayedLibrary:
    """Notes what an agent does, and on which GPU."""

    def __init__(self) -> None:
        self.agent = type("Agent", (), {})()
        self.gpu = 0
        self.calls: list[tuple[Any, ...]] = []

    def register_memory(self, descriptors: Any, kind: str) -> str:
        self.calls.append(("register", descriptors, kind, self.gpu))
        return "registered"

    def get_partial_agent_metadata(self, registered: str, with_connection: bool, backends: list[str]) -> bytes:
        return registered.encode()

    def get_new_notifs(self) -> None:
        self.calls.append(("progress", self.gpu))


def test_memory_of_a_gpu_is_used_with_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = PlayedLibrary()
    monkeypatch.setattr(nixl_agent, "_new_agent", lambda *_: library)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(library, "gpu", device))
    agent = nixl_agent.NixlAgent("pair/sender", "127.0.0.1")
    agent.progress()
    assert agent.register(PlayedTensor()) == b"registered"
    assert agent.register(PlayedTensor()) == b""
    library.gpu = 0  # as in another thread
    agent.progress()
    assert library.calls == [("progress", 0), ("register", [(4096, 100, 1, "")], "VRAM", 1), ("progress", 1)]
