"""What of the NCCL transport needs no GPU: the order of its calls, with a communicator and a device thread that the
test plays."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from disagg.engine.kv_transfer.transports import nccl
from disagg.engine.kv_transfer.transports.nccl import NcclTransport
from disagg.engine.kv_transfer.transports.transport import UNKEYED


class PlayedGroup:
    def __init__(self) -> None:
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


class PlayedThread:
    """Keeps what is submitted until the transport is closed, and then answers it in order."""

    def __init__(self) -> None:
        self.operations: list[Any] = []

    def new_stream(self) -> None:
        return None

    def submit(self, operation: Any) -> None:
        self.operations.append(operation)
        if operation.transport.group is None:
            answered, self.operations = self.operations, []
            for each in answered:
                each.done(False, "the channel is closed")


def test_a_closed_pair_is_aborted_once_and_has_answered_everything() -> None:
    group = PlayedGroup()
    said: list[object] = []
    thread: Any = PlayedThread()
    store: Any = None
    transport = NcclTransport(group, store, 1, thread, UNKEYED)
    buffer = torch.zeros(8, dtype=torch.uint8)
    transport.recv(buffer, 8, lambda *answer: said.append(answer), lambda: said.append("posted"))
    assert said == ["posted"]
    assert [operation.tensor.numel() for operation in thread.operations] == [8]
    transport.close()
    transport.close()
    assert group.num_aborts == 1
    assert said == ["posted", (False, "the channel is closed", 0)]
    transport.recv(buffer, 8, lambda *answer: said.append(answer), lambda: said.append("posted"))
    transport.send(buffer, 4, lambda *answer: said.append(answer))
    assert said[2:] == [(False, "the channel is closed", 0), (False, "the channel is closed")]


def test_the_watchdog_is_off_for_the_groups_of_pairs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    with nccl._environment(nccl._WATCHDOG_OFF):
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
