"""Bytes between two GPUs, by NCCL: a communicator of two ranks (0 is P, 1 is D) per pair.

NOT VERIFIED: written from the documentation, on a machine without a GPU; no byte was moved by it yet (`make gpu-check`
does). Importable everywhere.

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
process for either, so it is switched off.

Only a communicator that is gone proves that nothing writes to a buffer any more. Where `abort` does not return in time,
no timeout gives that evidence, and a worker that went on could answer with other requests' KV: the process ends
(`return_or_exit`), and is started again.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from typing_extensions import override

from disagg.engine.io.rendezvous import MemberStore, RendezvousServer, member_store
from disagg.engine.kv_transfer.transports.gloo import RANK_OF, check_open
from disagg.engine.kv_transfer.transports.transport import (
    CLOSED,
    SET_UP_TIMEOUT_S,
    Checksum,
    Done,
    PairTransport,
    Posted,
    Received,
    Rendezvous,
    TransportError,
    ignore_posted,
    with_checksum,
)
from disagg.engine.plan import Buffer
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.handover import Side

logger = logging.getLogger(__name__)

_dist: Any = torch.distributed
_cuda: Any = torch.cuda

_POLL_S = 50e-6
ABORT_TIMEOUT_S = 5.0
EXIT_STATUS = 3
"""Of a process that ends because an abort did not return."""


def _require_nccl() -> None:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise RuntimeError("transport nccl needs a CUDA device and a torch that was built with NCCL; use gloo")


class NcclRendezvous(Rendezvous):
    """A rendezvous server on D, as with gloo, through which the two ranks of a pair's communicator find each other.

    Raises:
        RuntimeError: without a CUDA device or NCCL.
    """

    def __init__(self, host: str, secret: ClusterSecret) -> None:
        _require_nccl()
        self._secret = secret
        self._point = RendezvousServer(host, secret)

    @property
    @override
    def address(self) -> str:
        return self._point.address

    @override
    def accept(self, pair_name: str) -> NcclTransport:
        check_open(self._point)
        return _join(pair_name, self._point.address, self._secret, "receiver")

    @override
    def close(self) -> None:
        self._point.close()


class NcclConnector:
    """P's way to any D, or that of a rank of D to the ranks of P. NCCL chooses its interface by NCCL_SOCKET_IFNAME, not
    by `host`.

    Raises:
        RuntimeError: without a CUDA device or NCCL.
    """

    def __init__(self, secret: ClusterSecret, side: Side = "sender") -> None:
        _require_nccl()
        self._secret = secret
        self._side: Side = side

    def __call__(self, pair_name: str, address: str) -> NcclTransport:
        """Join D's rendezvous at `address`; blocks until D accepts the pair. Raises `TransportError` if it does not in
        time."""
        return _join(pair_name, address, self._secret, self._side)


def _join(pair_name: str, address: str, secret: ClusterSecret, side: Side) -> NcclTransport:
    rank = RANK_OF[side]
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with member_store(pair_name, address, secret, rank, 2, SET_UP_TIMEOUT_S) as store:
            group = _new_group(store, rank)
            group.eager_connect_single_device(device)
            _exchange_a_byte(group, rank, device)
    except (OSError, RuntimeError, ValueError) as error:
        raise TransportError(f"could not form the pair {pair_name!r} at {address!r}: {error}") from error
    return NcclTransport(group, store, 1 - rank, _device_thread(device.index), Checksum.of_secret(secret))


_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Torch takes these from the environment only, when a group is made. Its watchdog thread runs all the same, and at an
error waits four times the last one, with a lock that new operations and the end of the group need."""
_NEVER = datetime.timedelta(days=1)
"""When the watchdog would call an operation late: the state machines are quicker."""
_environment_lock = threading.Lock()


def _new_group(store: Any, rank: int) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options.config.blocking = False
    options._timeout = _NEVER
    with _environment_lock:
        # How long a call may wait for the peer's half of it; read once in a process, at the first such wait.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(SET_UP_TIMEOUT_S)))
        with _environment(_WATCHDOG_OFF):
            return _dist.ProcessGroupNCCL(store, rank, 2, options)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """With these variables, and as it was again afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _exchange_a_byte(group: Any, rank: int, device: torch.device) -> None:
    """From rank 0 to rank 1, in the direction in which KV goes. RuntimeError where it does not arrive in time."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    stream = _cuda.Stream(device)
    stream.wait_stream(_cuda.current_stream(device))
    with torch.cuda.stream(stream):
        (group.send if rank == 0 else group.recv)([byte], 1 - rank, 0).wait()
        event = _cuda.Event()
        event.record(stream)
    ends_at = time.monotonic() + SET_UP_TIMEOUT_S
    while not event.query():
        if time.monotonic() > ends_at:
            group.abort()
            raise RuntimeError(f"no byte came through in {SET_UP_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


@dataclass(slots=True, eq=False)
class _Operation:
    transport: NcclTransport
    tensor: torch.Tensor
    sends: bool
    done: Done
    event: Any = None
    error: str = ""

    @property
    def over(self) -> bool:
        return bool(self.error) or self.transport.closed or self.event.query()


class _DeviceThread:
    """The one thread that makes the NCCL calls of a device. Runs as long as the process."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._queue: deque[_Operation] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"kv-nccl-{device}", daemon=True).start()

    def new_stream(self) -> Any:
        return _cuda.Stream(self._device)

    def submit(self, operation: _Operation) -> None:
        with self._changed:
            self._queue.append(operation)
            self._changed.notify()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
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
            finished = [operation for operation in under_way if operation.over]
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
        start = group.send if operation.sends else group.recv
        try:
            work = start([operation.tensor], operation.transport.peer, 0)
            work.wait()  # Makes the stream wait, not the thread.
            operation.event = _cuda.Event()
            operation.event.record(operation.transport.stream)
        except RuntimeError as error:
            operation.error = str(error)


_threads: dict[int, _DeviceThread] = {}
_threads_lock = threading.Lock()


def _device_thread(device: int) -> _DeviceThread:
    with _threads_lock:
        if device not in _threads:
            _threads[device] = _DeviceThread(device)
        return _threads[device]


class NcclTransport(PairTransport):
    """An NCCL communicator of two ranks, with a CUDA stream of its own, used on its device's thread."""

    def __init__(self, group: Any, store: MemberStore, peer: int, thread: _DeviceThread, checksum: Checksum) -> None:
        self.group: Any = group
        self._store = store
        """The group's C++ side calls it, and does not keep it alive."""
        self._checksum = checksum
        self.peer = peer
        self.closed = False
        self.stream: Any = thread.new_stream()
        self._thread = thread
        self._close_lock = threading.Lock()

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        self._thread.submit(_Operation(self, buffer[:nbytes], True, done))

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        received = with_checksum(done, buffer, nbytes, self._checksum)
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


def _exit_process() -> None:
    logging.shutdown()
    os._exit(EXIT_STATUS)


def return_or_exit(
    call: Callable[[], object],
    what: str,
    timeout_s: float = ABORT_TIMEOUT_S,
    exit_process: Callable[[], None] = _exit_process,
) -> None:
    """Make a call that must return in time; otherwise the process ends, from another thread. The call must not hold
    the interpreter's lock while it hangs."""

    def give_up() -> None:
        logger.critical(
            "%s did not return in %g s; it may still write to KV buffers: ending the process", what, timeout_s
        )
        exit_process()

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        call()
    finally:
        timer.cancel()
