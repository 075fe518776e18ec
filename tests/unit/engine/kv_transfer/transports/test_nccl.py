"""What of the NCCL transport needs no GPU: the order of its calls, its streams, and what becomes of errors. Torch's
CUDA functions, its process group and the driver are played; the device's thread is the real one where it is tested."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from disagg.engine.device_environment import GPU_ENVIRONMENT, device_environment
from disagg.engine.kv_transfer.transport import UNKEYED, TransportError
from disagg.engine.kv_transfer.transports import nccl
from disagg.engine.kv_transfer.transports.digest import digest
from disagg.engine.kv_transfer.transports.nccl import NcclTransport
from disagg.engine.runner.device import NCCL_CALLS
from tests.support.transports import SETTINGS

WAIT_S = 30.0
POOL_SIZE = 32
"""Streams of a device that torch hands out in turn (kStreamsPerPool)."""
INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""
NOTHING: Any = None

T = TypeVar("T")


class PlayedPools:
    """Torch's two pools of streams, by priority, and the driver; a stream is a number. As on a GPU, the driver refuses
    a thread that did not set its device."""

    def __init__(self) -> None:
        self._next = {False: itertools.cycle(range(POOL_SIZE)), True: itertools.cycle(range(100, 100 + POOL_SIZE))}
        self._handles = itertools.count(1000)
        self.destroyed: list[int | None] = []
        self.destroy_status = 0
        self._context = threading.local()

    def set_device(self, device: int) -> None:
        self._context.device = device

    def take(self, is_high: bool = False) -> int:
        return next(self._next[is_high])

    def cuStreamCreate(self, handle: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1, "a stream that the default stream waits for"
        if not self._has_context():
            return INVALID_CONTEXT
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = next(self._handles)
        return 0

    def cuStreamDestroy_v2(self, handle: ctypes.c_void_p) -> int:  # noqa: N802
        if not self._has_context():
            return INVALID_CONTEXT
        if self.destroy_status == 0:
            self.destroyed.append(handle.value)
        return self.destroy_status

    def _has_context(self) -> bool:
        return hasattr(self._context, "device")


class PlayedGroup:
    """A communicator, which takes a stream when it is made."""

    made: list[PlayedGroup]
    pools: PlayedPools

    class Options:
        class Config:
            blocking = True
            max_ctas = 32

        def __init__(self) -> None:
            self.config = self.Config()
            self.is_high_priority_stream = False

    def __init__(self, *arguments: Any) -> None:
        self._options = arguments[3] if arguments else self.Options()
        self.num_aborts = 0
        self.calls: list[tuple[int, int, bool]] = []
        """(root, bytes, whether other threads' calls wait)."""
        self.error: Exception | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device.index == 0
        self.stream = self.pools.take(self._options.is_high_priority_stream)
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        if self.error is not None:
            raise self.error
        assert options.asyncOp is False, "it would run on a stream of torch's"
        self.calls.append((options.rootRank, tensors[0].numel(), NCCL_CALLS.locked()))

    def abort(self) -> None:
        self.num_aborts += 1


class PlayedEvent:
    """Of an operation that is over, or whose device gives an error."""

    error: Exception | None = None

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return True


class PlayedThread:
    """Keeps what is submitted until the transport is closed, and then answers it in order."""

    def __init__(self) -> None:
        self.operations: list[Any] = []

    def new_stream(self) -> nccl.OwnStream:
        return nccl.OwnStream(0)

    def submit(self, operation: Any) -> None:
        self.operations.append(operation)
        if operation.transport.group is None:
            answered, self.operations = self.operations, []
            for each in answered:
                each.done(False, "the channel is closed")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> PlayedPools:
    """A machine with one CUDA device and NCCL, as torch presents it."""
    played = PlayedPools()
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": played.set_device,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _: None,
        "Stream": lambda *_: PlayedStream(played.take()),
        "ExternalStream": lambda handle, device: PlayedStream(handle),
        "Event": PlayedEvent,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", PlayedGroup, raising=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **others: zeros(*shape, **others))
    monkeypatch.setattr(nccl, "member_store", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(nccl, "_driver", lambda: played)
    monkeypatch.setattr(nccl, "_threads", {0: PlayedThread()})
    PlayedGroup.made, PlayedGroup.pools, PlayedEvent.error = [], played, None
    return played


class PlayedStream:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait_stream(self, other: object) -> None: ...


class Exits(queue.SimpleQueue[None]):
    """One for each time that the process would have ended."""


@pytest.fixture
def exits() -> Exits:
    return Exits()


@pytest.fixture
def thread(pools: PlayedPools, exits: Exits) -> Iterator[Any]:
    running: Any = nccl._DeviceThread(0, lambda: exits.put(None))
    yield running
    running.submit(None)  # no operation, at which it ends like at any other bug
    running._thread.join(WAIT_S)


def transport_on(thread: Any, group: Any) -> NcclTransport:
    return NcclTransport(group, NOTHING, 1, thread, nccl.OwnStream(0), UNKEYED)


def test_a_closed_pair_is_aborted_once_and_has_answered_everything(pools: PlayedPools) -> None:
    group = PlayedGroup()
    said: list[object] = []
    thread = PlayedThread()
    transport = transport_on(thread, group)
    buffer = torch.zeros(8, dtype=torch.uint8)
    transport.recv(buffer, 8, lambda *answer: said.append(answer), lambda: said.append("posted"))
    assert said == ["posted"]
    assert [operation.tensor.numel() for operation in thread.operations] == [8]
    transport.close()
    transport.close()
    assert group.num_aborts == 1
    assert pools.destroyed == [1000]
    assert said == ["posted", (False, "the channel is closed", 0)]
    transport.recv(buffer, 8, lambda *answer: said.append(answer), lambda: said.append("posted"))
    transport.send(buffer, 4, lambda *answer: said.append(answer))
    assert said[2:] == [(False, "the channel is closed", 0), (False, "the channel is closed")]


@pytest.mark.usefixtures("pools")
def test_a_communicator_neither_blocks_nor_takes_many_processors_nor_is_ended_by_a_watchdog() -> None:
    nccl._form(SETTINGS, "p", "address", "receiver")
    (group,) = PlayedGroup.made
    assert (group._options.config.blocking, group._options.config.max_ctas) == (False, 4)
    options: Any = group._options
    assert options._timeout >= datetime.timedelta(days=1)
    # As many queues of the device as CUDA has, so that few streams wait behind a receive that waits.
    assert GPU_ENVIRONMENT["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_ucx_reads_device_memory_of_a_peer_without_nvlink() -> None:
    """Else by way of the host's memory."""
    assert GPU_ENVIRONMENT["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"


def on_new_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(WAIT_S)


def test_a_pair_is_formed_and_closed_on_threads_that_have_no_context_yet(pools: PlayedPools) -> None:
    """As in serving (`engine/io/blocking.py`)."""
    pair = on_new_thread(lambda: nccl._form(SETTINGS, "p", "address", "receiver"))
    assert pair.stream.number == 1000
    on_new_thread(pair.close)
    assert pools.destroyed == [1000]


def test_a_stream_that_cannot_be_given_back_fails_no_close(
    pools: PlayedPools, caplog: pytest.LogCaptureFixture
) -> None:
    pools.destroy_status = 700
    group = PlayedGroup()
    transport = transport_on(PlayedThread(), group)
    transport.close()
    assert (group.num_aborts, transport.closed, pools.destroyed) == (1, True, [])
    assert "cuStreamDestroy on CUDA device 0 failed with error 700" in caplog.text


def test_a_pair_that_is_formed_on_a_lost_device_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, pools: PlayedPools
) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(PlayedThread, "end_process", lambda _, error: ended.append(error), raising=False)
    monkeypatch.setattr(PlayedEvent, "error", lost())
    with pytest.raises(TransportError, match="illegal memory access"):
        nccl._form(SETTINGS, "p", "address", "receiver")
    assert [type(error) for error in ended] == [torch.AcceleratorError]


@pytest.mark.usefixtures("pools")
def test_no_stream_is_used_by_two_of_more_pairs_than_torch_has_streams() -> None:
    """Not those of torch's pools, which it hands out in turn: only our own."""
    pairs = [nccl._form(SETTINGS, f"p{number}", "address", "sender") for number in range(2 * POOL_SIZE + 1)]
    streams = [pair.stream.number for pair in pairs]
    assert streams == list(range(1000, 1000 + 2 * POOL_SIZE + 1))
    assert [group.calls for group in PlayedGroup.made] == [[(0, 1, False)]] * len(pairs)  # the byte of the set-up


@pytest.mark.parametrize(("rank", "peer"), [(0, 1), (1, 0)])
def test_bytes_go_from_the_rank_that_sends_while_no_other_thread_calls(thread: Any, rank: int, peer: int) -> None:
    said: queue.SimpleQueue[object] = queue.SimpleQueue()
    group = PlayedGroup()
    transport = NcclTransport(group, NOTHING, peer, thread, nccl.OwnStream(0), UNKEYED)
    buffer = torch.zeros(8, dtype=torch.uint8)
    transport.send(buffer, 5, lambda *answer: said.put(answer))
    assert said.get(timeout=WAIT_S) == (True, "")
    transport.recv(buffer, 8, lambda *answer: said.put(answer))
    # The checksum is the one that a kernel computes where the bytes are.
    assert said.get(timeout=WAIT_S) == (True, "", digest(buffer, UNKEYED))
    assert digest(buffer, UNKEYED) != UNKEYED(buffer)
    assert group.calls == [(rank, 5, True), (peer, 8, True)]


def test_a_receive_that_an_abort_has_ended_has_failed(monkeypatch: pytest.MonkeyPatch, thread: Any) -> None:
    """Its event is done then as well, before the abort has returned."""
    said: list[object] = []
    posted, aborting, seen, decided = (threading.Event() for _ in range(4))

    def query(_: PlayedEvent) -> bool:
        """The second look at an event that is done shows that the first one decided nothing."""
        posted.set()
        if aborting.is_set():
            (decided if seen.is_set() else seen).set()
        return aborting.is_set()

    def answered(*answer: object) -> None:
        said.append(answer)
        decided.set()

    class Aborted(PlayedGroup):
        def abort(self) -> None:
            aborting.set()
            assert decided.wait(WAIT_S)

    monkeypatch.setattr(PlayedEvent, "query", query)
    transport = transport_on(thread, Aborted())
    transport.recv(torch.zeros(8, dtype=torch.uint8), 8, answered)
    assert posted.wait(WAIT_S)
    transport.close()
    assert said == [(False, "the channel is closed", 0)]


@pytest.mark.parametrize(("destroy_status", "destroyed"), [(0, [1000]), (700, [])])
def test_a_pair_that_cannot_be_formed_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, pools: PlayedPools, destroy_status: int, destroyed: list[int]
) -> None:
    pools.destroy_status = destroy_status
    groups: list[PlayedGroup] = []

    def refuse(group: PlayedGroup, _: torch.device) -> None:
        groups.append(group)
        raise torch.distributed.DistBackendError("the peer is gone")

    monkeypatch.setattr(PlayedGroup, "eager_connect_single_device", refuse)
    in_time: list[str] = []
    monkeypatch.setattr(nccl, "return_or_exit", lambda call, what: in_time.append(what))
    with pytest.raises(TransportError, match="the peer is gone"):
        nccl._form(SETTINGS, "p", "address", "receiver")
    assert [group.num_aborts for group in groups] == [1]
    assert in_time == []  # torch may try for longer than a process has that must end a pair
    assert pools.destroyed == destroyed


# ---------------------------------------------------------------- errors on the device's thread


def lost() -> torch.AcceleratorError:
    return torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def fail_query(group: PlayedGroup, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(PlayedEvent, "error", error)


def fail_post(group: PlayedGroup, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    group.error = error


Fail = Callable[[PlayedGroup, pytest.MonkeyPatch, Exception], None]
FAILURES = [fail_query, fail_post]


@pytest.mark.parametrize("fail", FAILURES)
def test_an_error_of_one_operation_is_its_answer_and_the_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch, thread: Any, exits: Exits, fail: Fail
) -> None:
    said: queue.SimpleQueue[object] = queue.SimpleQueue()
    group, healthy = PlayedGroup(), PlayedGroup()
    buffer = torch.zeros(8, dtype=torch.uint8)
    fail(group, monkeypatch, ValueError("no such peer") if fail is fail_post else RuntimeError("no such peer"))
    transport_on(thread, group).send(buffer, 8, lambda *answer: said.put(answer))
    assert said.get(timeout=WAIT_S) == (False, "no such peer")
    monkeypatch.setattr(PlayedEvent, "error", None)
    other = transport_on(thread, healthy)
    other.send(buffer, 8, lambda *answer: said.put(answer))
    assert said.get(timeout=WAIT_S) == (True, "")
    other.close()
    assert healthy.num_aborts == 1
    assert exits.empty()


@pytest.mark.parametrize("fail", FAILURES)
def test_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch, thread: Any, exits: Exits, fail: Fail) -> None:
    group = PlayedGroup()
    fail(group, monkeypatch, lost())
    transport_on(thread, group).send(torch.zeros(8, dtype=torch.uint8), 8, lambda *_: None)
    exits.get(timeout=WAIT_S)


def test_a_checksum_that_raises_ends_the_process(thread: Any, exits: Exits) -> None:
    class Unreadable:
        def __getitem__(self, _: slice) -> Unreadable:
            return self

        def numel(self) -> int:
            raise lost()

    transport_on(thread, PlayedGroup()).recv(Unreadable(), 8, lambda *_: None)
    exits.get(timeout=WAIT_S)


def test_the_environment_is_complete_before_a_communicator_is_made(
    monkeypatch: pytest.MonkeyPatch, pools: PlayedPools
) -> None:
    for name in GPU_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    nccl.NcclConnector(SETTINGS)
    environment = {name: os.environ[name] for name in GPU_ENVIRONMENT}
    assert environment == dict(GPU_ENVIRONMENT) | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    changes: list[object] = []
    monkeypatch.setattr(os, "putenv", lambda *change: changes.append(change))
    nccl._form(SETTINGS, "p", "address", "sender")
    assert changes == []
    assert device_environment("cpu") == {}
    assert device_environment("cuda:1") == dict(GPU_ENVIRONMENT)
