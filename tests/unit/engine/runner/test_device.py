"""CUDA devices by name, with torch's view of the machine replaced: no device is there."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch

from disagg.engine.runner import collectives
from disagg.engine.runner.device import NCCL_CALLS, torch_device
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError
from tests.support.secret import SECRET


@pytest.fixture
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize(("name", "index"), [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_cuda_device_has_an_index(name: str, index: int) -> None:
    assert torch_device(name) == torch.device("cuda", index)


@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize(("name", "reason"), [("cuda:2", "sees 2 CUDA devices"), ("gpu", "is not a torch device")])
def test_what_is_no_device_here_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        torch_device(name)


class PlayedGroup:
    """Keeps communicators by the raw index of the device, as torch's `ProcessGroupNCCL` does, with -1 for none."""

    communicators: ClassVar[list[int]] = []
    moved: ClassVar[list[tuple[str, int, int, bool]]] = []

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.name = f"{store} {rank}/{size}"

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.communicators.append(-1 if device.index is None else device.index)

    def allreduce(self, tensors: list[torch.Tensor]) -> MagicMock:
        assert NCCL_CALLS.locked()
        tensors[0] += 1
        return MagicMock()

    def gather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], _: Any) -> MagicMock:
        assert NCCL_CALLS.locked()
        for part in outputs[0]:
            part.copy_(tensors[0])
        return MagicMock()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> MagicMock:
        self.moved.append((f"send {self.name}", to, tag, NCCL_CALLS.locked()))
        return MagicMock()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> MagicMock:
        self.moved.append((f"receive {self.name}", source, tag, NCCL_CALLS.locked()))
        return MagicMock()


@pytest.mark.usefixtures("_two_devices")
def test_ranks_connect_by_the_index_that_their_tensors_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", PlayedGroup, raising=False)
    monkeypatch.setattr(collectives, "rank_store", lambda *_: contextlib.nullcontext())
    PlayedGroup.communicators.clear()
    for rank, name in enumerate(("cuda:0", "cuda")):  # of rank 0, and of a follower that sees one device
        collectives.make_collective(name, "", SECRET, Shard(rank, 2), "127.0.0.1")
    assert PlayedGroup.communicators == [0, 1]


@pytest.mark.usefixtures("_two_devices")
def test_exchanges_of_ranks_are_queued_while_no_other_thread_calls_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", PlayedGroup, raising=False)
    monkeypatch.setattr(collectives, "rank_store", lambda *_: contextlib.nullcontext())
    collective = collectives.make_collective("cuda:0", "", SECRET, Shard(0, 2), "127.0.0.1")
    assert collective.captures
    assert collective.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    gathered = collective.gather_columns(torch.ones((1, 2)))
    assert gathered is not None
    assert gathered.shape == (1, 4)
    assert not NCCL_CALLS.locked()


@pytest.mark.usefixtures("_two_devices")
def test_each_lane_between_stages_has_a_communicator_that_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two stages of two; what is sent while others may call NCCL holds the lock."""

    def store_of(address: str, secret: Any, rank: int, size: int, timeout_s: float, name: str) -> Any:
        return contextlib.nullcontext(name)

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", PlayedGroup, raising=False)
    monkeypatch.setattr(collectives, "rank_store", store_of)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: torch.ones(1))
    PlayedGroup.moved.clear()
    collective = collectives.make_collective("cuda:0", "", SECRET, Shard.of_number(0, 2, 2), "127.0.0.1")
    assert not collective.captures
    rows, results = "ranks/rows 0/4", "ranks/results 0/4"
    assert PlayedGroup.moved == [
        (f"send {rows}", 2, 1, False),
        (f"receive {results}", 2, 2, False),
        (f"receive {results}", 3, 2, False),
    ]
    PlayedGroup.moved.clear()
    collective.send(torch.ones(3), 2, "rows")
    collective.receive(torch.ones(3), 3, "results").wait()
    assert PlayedGroup.moved == [(f"send {rows}", 2, 1, True), (f"receive {results}", 3, 2, True)]
    assert collective.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
