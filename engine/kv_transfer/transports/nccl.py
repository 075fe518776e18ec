"""Bytes between two GPUs, by NCCL: a communicator of two ranks (0 is P, 1 is D) per pair.

On one GPU, through sockets, it has served (`docs/benchmarks/gpu.md`); between two GPUs no byte was moved by it yet
(`make gpu-check` does). Importable everywhere.

The pair meets as in `gloo.py`: NCCL's unique id, without which it takes no connection, goes to processes of the cluster
only. Buffers are flat uint8 CUDA tensors, and what fills or reads them must be complete
before `send`, and after `done`. NCCL has no tags and wants all calls of a device from one thread, so one thread posts
the operations of all pairs in order and polls their completion. Each pair has a stream of its own: on a common one an
operation would wait for those of other pairs, and workers that serve each other in another order for ever. A receive
that waits spins on the GPU, so the peer may send when it is on its way to the thread.

NCCL connects two ranks at their first exchange, and the call that starts it blocks until the other side makes its own.
On the one thread of a device that would hold up all pairs, and two workers that serve each other for ever. So the pair
exchanges a byte while both sides are in `accept` and `connect`.

A dead peer, or a receive that waits long, is for the state machines to judge. Torch's own watchdog would end the
process for either, so it is switched off (`engine/device_environment.py`).

Torch has 32 pooled streams for each device and priority, and hands them out in turn; its sends and receives run on one
of them, which later pairs would share. Its collectives run on the current stream where they are not asynchronous (torch
>= 2.8), and of two ranks a broadcast is a send on one side and a receive on the other. So a pair has one stream, ours.

NCCL forbids calls for one device from several threads at once, whatever the communicators. The calls of this module and
those of the engine (`engine/runner/collectives.py`) share a lock, but for the set-up of a pair, which waits for its
peer.

An error that the device gives for ever, or a bug, ends the thread and with it the process: without the thread all pairs
would wait for ever.

Only a communicator that is gone proves that nothing writes to a buffer any more. Where `abort` does not return in time,
no timeout gives that evidence, and a worker that went on could answer with other requests' KV: the process ends
(`return_or_exit`), and is started again.
"""

from __future__ import annotations

import ctypes
import datetime
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from typing_extensions import override

from disagg.engine.device_environment import GPU_ENVIRONMENT
from disagg.engine.io.rendezvous import MemberStore, member_store
from disagg.engine.kv_transfer.transport import (
    CLOSED,
    RANK_OF,
    Checksum,
    Done,
    PairTransport,
    Posted,
    Received,
    TransportError,
    ignore_posted,
    with_checksum,
)
from disagg.engine.kv_transfer.transports.digest import digest
from disagg.engine.kv_transfer.transports.process_end import exit_process, return_or_exit
from disagg.engine.kv_transfer.transports.settings import ServerConnector, ServerRendezvous, TransportSettings
from disagg.engine.plan import Buffer, is_fatal
from disagg.engine.runner.device import NCCL_CALLS
from disagg.proto.handover import Side

logger = logging.getLogger(__name__)

_dist: Any = torch.distributed
_cuda: Any = torch.cuda

_POLL_S = 50e-6


def _require_nccl() -> None:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise RuntimeError("transport nccl needs a CUDA device and a torch that was built with NCCL; use gloo")
    for name, value in GPU_ENVIRONMENT.items():  # all there in a worker's process
        os.environ.setdefault(name, value)


class NcclRendezvous(ServerRendezvous["NcclTransport"]):
    """D's end of the set-up: the two ranks of a pair's communicator find each other at its server.

    Raises:
        RuntimeError: without a CUDA device or NCCL.
    """

    def __init__(self, settings: TransportSettings) -> None:
        _require_nccl()
        super().__init__(settings, _form)


class NcclConnector(ServerConnector["NcclTransport"]):
    """P's way to any D, or that of a rank of D to the ranks of P. NCCL chooses its interface by NCCL_SOCKET_IFNAME, not
    by the host.

    Raises:
        RuntimeError: without a CUDA device or NCCL.
    """

    def __init__(self, settings: TransportSettings, side: Side = "sender") -> None:
        _require_nccl()
        super().__init__(settings, _form, side)


def _form(settings: TransportSettings, pair_name: str, address: str, side: Side) -> NcclTransport:
    rank = RANK_OF[side]
    device = torch.device("cuda", torch.cuda.current_device())
    thread = _device_thread(device.index)
    stream: OwnStream | None = None
    group: Any = None
    try:
        stream = thread.new_stream()
        with member_store(pair_name, address, settings.secret, rank, 2, settings.set_up_timeout_s) as store:
            group = _new_group(store, rank)
            group.eager_connect_single_device(device)
            _exchange_a_byte(group, rank, device, stream.torch_stream, settings.set_up_timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        if is_fatal(error):
            thread.end_process(error)
        if group is not None:
            group.abort()  # waits as long as torch still tries, which holds up this pair alone
        if stream is not None:
            stream.destroy()
        raise TransportError(f"could not form the pair {pair_name!r} at {address!r}: {error}") from error
    return NcclTransport(group, store, 1 - rank, thread, stream, settings.checksum)


_NEVER = datetime.timedelta(days=1)
"""When the watchdog would call an operation late: the state machines are quicker."""
_MAX_CTAS = 4
"""Blocks of a send or receive: while it waits it keeps as many processors from the engine."""


def _new_group(store: Any, rank: int) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options.config.blocking = False
    options.config.max_ctas = _MAX_CTAS
    options.is_high_priority_stream = True
    options._timeout = _NEVER
    return _dist.ProcessGroupNCCL(store, rank, 2, options)


def _exchange_a_byte(group: Any, rank: int, device: torch.device, stream: Any, timeout_s: float) -> None:
    """From rank 0 to rank 1, in the direction in which KV goes. RuntimeError where it does not arrive in time."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    stream.wait_stream(_cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _start(group, byte, root=0)
        event = _cuda.Event()
        event.record(stream)
    ends_at = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > ends_at:
            raise RuntimeError(f"no byte came through in {timeout_s:.0f} s")
        time.sleep(_POLL_S)


def _start(group: Any, tensor: torch.Tensor, root: int) -> None:
    """Queue the move of a tensor from rank `root` to the other one, on the current stream."""
    options = _dist.BroadcastOptions()
    options.rootRank = root
    options.asyncOp = False
    work = group.broadcast([tensor], options)
    if work is not None:
        work.wait()  # the stream, not the thread


class OwnStream:
    """A CUDA stream of our own, which waits for no other one.

    Raises:
        RuntimeError: if the driver has none.
    """

    _NON_BLOCKING = 1

    def __init__(self, device: int) -> None:
        self._device = device
        self._handle = ctypes.c_void_p()
        _bind_context(device)
        self._check(_driver().cuStreamCreate(ctypes.byref(self._handle), self._NON_BLOCKING), "cuStreamCreate")
        self.torch_stream: Any = _cuda.ExternalStream(self._handle.value, device=device)

    def destroy(self) -> None:
        """Give it back; nothing may use it any more. A failure is logged: it costs one unused stream."""
        try:
            _bind_context(self._device)
            self._check(_driver().cuStreamDestroy_v2(self._handle), "cuStreamDestroy")
        except RuntimeError:
            logger.warning("a stream of CUDA device %d was not given back", self._device, exc_info=True)

    def _check(self, status: int, call: str) -> None:
        if status:
            raise RuntimeError(f"{call} on CUDA device {self._device} failed with error {status}")


def _bind_context(device: int) -> None:
    """Make the device's CUDA context that of this thread, as driver calls and Triton's launches require. The guard
    `torch.cuda.device` does not where the index is the current one already, as 0 is on every new thread."""
    torch.cuda.set_device(device)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@dataclass(slots=True, eq=False)
class _Operation:
    transport: NcclTransport
    tensor: torch.Tensor
    sends: bool
    done: Done
    event: Any = None
    error: str = ""

    def is_over(self) -> bool:
        """Raises what the device raises, where that is fatal. While the pair is aborted nothing is: an operation whose
        kernel the abort has ended looks like one that moved its bytes."""
        if self.error or self.transport.closed:
            return True
        try:
            is_done = bool(self.event.query())
        except RuntimeError as error:
            self.fail(error)
            return True
        return is_done and self.transport.group is not None

    def fail(self, error: Exception) -> None:
        """Answer with `error`, unless that ends the process."""
        if is_fatal(error):
            raise error
        self.error = str(error) or type(error).__name__


class _DeviceThread:
    """The one thread that makes the NCCL calls of a device. Runs as long as the process, which ends with it."""

    def __init__(self, device: int, exit_process: Callable[[], None] = exit_process) -> None:
        self._device = device
        self._exit_process = exit_process
        self._queue: deque[_Operation] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"kv-nccl-{device}", daemon=True)
        self._thread.start()

    def new_stream(self) -> OwnStream:
        """A new stream of the device, for one pair."""
        return OwnStream(self._device)

    def submit(self, operation: _Operation) -> None:
        with self._changed:
            self._queue.append(operation)
            self._changed.notify()

    def end_process(self, error: BaseException) -> None:
        """The device cannot be used any more, or this thread cannot go on."""
        logger.critical("NCCL on CUDA device %d: ending the process", self._device, exc_info=error)
        self._exit_process()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.end_process(error)

    def _serve(self) -> None:
        _bind_context(self._device)
        under_way: list[_Operation] = []
        while True:
            with self._changed:
                if not self._queue:
                    self._changed.wait(_POLL_S if under_way else None)
                fresh = list(self._queue)
                self._queue.clear()
            for operation in fresh:
                with torch.cuda.stream(operation.transport.stream):
                    self._post(operation)
            under_way += fresh
            finished = [operation for operation in under_way if operation.is_over()]
            under_way = [operation for operation in under_way if operation not in finished]
            for operation in finished:
                error = operation.error or (CLOSED if operation.transport.closed else "")
                with torch.cuda.stream(operation.transport.stream):  # a checksum does not wait for the engine's step
                    operation.done(not error, error)

    def _post(self, operation: _Operation) -> None:
        group = operation.transport.group
        if group is None:
            operation.error = CLOSED
            return
        peer = operation.transport.peer
        try:
            with NCCL_CALLS:
                _start(group, operation.tensor, root=1 - peer if operation.sends else peer)
            operation.event = _cuda.Event()
            operation.event.record(operation.transport.stream)
        except Exception as error:
            operation.fail(error)


_threads: dict[int, _DeviceThread] = {}
_threads_lock = threading.Lock()


def _device_thread(device: int) -> _DeviceThread:
    with _threads_lock:
        if device not in _threads:
            _threads[device] = _DeviceThread(device)
        return _threads[device]


class NcclTransport(PairTransport):
    """An NCCL communicator of two ranks, with a CUDA stream of its own, used on its device's thread."""

    name = "nccl"

    def __init__(
        self,
        group: Any,
        store: MemberStore,
        peer: int,
        thread: _DeviceThread,
        stream: OwnStream,
        checksum: Checksum,
    ) -> None:
        self.group: Any = group
        self._store = store
        """The group's C++ side calls it, and does not keep it alive."""
        self._checksum = checksum
        self.peer = peer
        self.closed = False
        self._own_stream = stream
        self.stream: Any = stream.torch_stream
        self._thread = thread
        self._close_lock = threading.Lock()

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        self._thread.submit(_Operation(self, buffer[:nbytes], True, done))

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        received = with_checksum(done, buffer, nbytes, lambda payload: digest(payload, self._checksum))
        if self.group is not None:
            posted()
        self._thread.submit(_Operation(self, buffer[:nbytes], False, received))

    @override
    def close(self) -> None:
        """The communicator is aborted, after which nothing writes to its buffers."""
        with self._close_lock:
            group, self.group = self.group, None
            if group is not None:
                return_or_exit(lambda: self._abort(group), "the abort of an NCCL communicator")

    def _abort(self, group: Any) -> None:
        """Returns when the thread has answered what was submitted before, all of which is over."""
        group.abort()
        self.closed = True
        answered = threading.Event()
        last = _Operation(self, torch.empty(0), True, lambda *_: answered.set())
        self._thread.submit(last)
        answered.wait()
        self._own_stream.destroy()
