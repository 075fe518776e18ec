"""One side of pairs that hand KV over: `python -m benchmarks.gpu.handover_peer SIDE DEVICE`.

It reads a line of JSON for each transport to try, the sender with the receiver's address, which that says first, and
answers with a line about what it saw. A channel is closed at the next line, or at the end: to close it earlier would
cut what the other side waits for. With `bytes_only` buffers move without a cache.

Several passes over the same tokens are moved in chunks, as many at a time as there are staging slots; the time is that
of all passes but the first.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections import deque
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.handover import TensorSizes, shape_for
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.commands import Gathered, GatherFailed, Gathering
from disagg.engine.config import STAGED_ON_DEVICE, TransportName
from disagg.engine.kv_transfer.transport import Checksum, PairTransport
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.plan import Buffer
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import HostStaging
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.engine.shell.copy_watch import CopyWatch
from disagg.proto.ids import AttemptKey, RequestId
from disagg.proto.messages import ONE_RANK

SLOTS = 4
PASSES = 3
WAIT_S = 30.0
HOST = "127.0.0.1"
SECRET = ClusterSecret(bytes(32))
CHECKSUM = Checksum.of_secret(SECRET)
KEY = AttemptKey(RequestId("handover"), 1)


class Side:
    """Cache, staging slots and chunks of one process."""

    def __init__(self, shape: TensorSizes, device: torch.device, name: TransportName, *, bytes_only: bool) -> None:
        self.bytes_only = bytes_only
        self._staging = HostStaging.of(device, name)
        num_blocks = -(-shape.pair_tokens // shape.block_size)
        num_made = 1 if bytes_only else num_blocks + 1
        self.cache = KvCache(shape.layout, num_made, shape.block_size, device, host_staging=self._staging)
        self.cache.tensor_NL2KBD.normal_()
        self.table = torch.randperm(num_blocks).tolist()
        self.chunk_bytes = shape.chunk_tokens * shape.layout.bytes_per_token
        self._on_device = device if name in STAGED_ON_DEVICE and device.type == "cuda" else None
        self.buffers = [self._new_buffer() for _ in range(SLOTS)]
        starts = range(0, shape.pair_tokens, shape.chunk_tokens)
        self.chunks = [(start, start + shape.chunk_tokens) for start in starts] * PASSES

    def _new_buffer(self) -> Buffer:
        if self._on_device is not None:
            return torch.empty(self.chunk_bytes, dtype=torch.uint8, device=self._on_device)
        if self._staging is not None:
            return self._staging.new_buffer(self.chunk_bytes)
        return np.empty(self.chunk_bytes, dtype=np.uint8)


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """Without a copy."""
    return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)


def send_all(side: Side, transport: PairTransport) -> dict[str, Any]:
    """A chunk is gathered when its slot is free, and sent when its copy is over."""
    digests: dict[int, int] = {}
    free: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for slot in range(SLOTS):
        free.put((slot, ""))
    slot_of: dict[int, int] = {}

    def send(gathered: Gathered) -> None:
        slot = slot_of[gathered.seq]
        digests[gathered.seq] = gathered.checksum
        transport.send(side.buffers[slot], side.chunk_bytes, lambda ok, error: free.put((slot, "" if ok else error)))

    def fail(failed: GatherFailed) -> None:
        free.put((-1, f"gather: {failed.error}"))

    watch = CopyWatch(send, fail, time.monotonic)
    for seq, (start, end) in enumerate(side.chunks):
        slot = taken(free)
        slot_of[seq] = slot
        if side.bytes_only:
            send(Gathered(KEY, seq, ok=True))
            continue
        out = tensor_of(side.buffers[slot])
        part = side.cache.start_gather(side.table, start, end, out, ONE_RANK, CHECKSUM, digests=True)
        watch.watch(Gathering(KEY, seq, part))
    for _ in range(SLOTS):
        taken(free)
    watch.stop(WAIT_S)
    return {"digests": [digests[seq] for seq in range(len(side.chunks))]}


def taken(free: queue.SimpleQueue[tuple[int, str]]) -> int:
    """A free slot. Raises RuntimeError where an operation failed, and queue.Empty."""
    slot, error = free.get(timeout=WAIT_S)
    if error:
        raise RuntimeError(error)
    return slot


def receive_all(side: Side, transport: PairTransport) -> dict[str, Any]:
    """A chunk is scattered when its bytes are there; its slot receives again when they were read."""
    transport.skip_checksums()
    arrived: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    found: list[int] = []
    under_way: deque[tuple[int, DigestSums | None, Mark]] = deque()
    num_posted = 0
    times: dict[int, float] = {}

    def post(slot: int) -> None:
        nonlocal num_posted
        if num_posted < len(side.chunks):
            num_posted += 1
            transport.recv(
                side.buffers[slot],
                side.chunk_bytes,
                lambda ok, error, _: arrived.put((slot, "" if ok else error or "failed")),
            )

    def finish() -> None:
        slot, sums, mark = under_way.popleft()
        mark.wait()
        found.extend([0] if sums is None else sums.digests(CHECKSUM))
        times[len(found)] = time.perf_counter()
        post(slot)

    on_gpu = side.cache.tensor_NL2KBD.is_cuda
    for slot in range(SLOTS):
        post(slot)
    for start, end in side.chunks:
        slot = taken(arrived)
        sums: DigestSums | None = None
        if not side.bytes_only:
            sums = side.cache.scatter_part(side.table, start, end, tensor_of(side.buffers[slot]), ONE_RANK, CHECKSUM)
        mark = Mark(pinned=on_gpu)
        under_way.append((slot, None if sums is None else sums.to_host(), mark))
        mark.set()
        while len(under_way) > 1:
            finish()
    while under_way:
        finish()
    each = len(side.chunks) // PASSES
    nbytes = (len(side.chunks) - each) * side.chunk_bytes
    return {"digests": found, "nbytes": nbytes, "seconds": times[len(side.chunks)] - times[each]}


def move(side_name: str, device: torch.device, order: dict[str, Any], pair_name: str) -> PairTransport:
    """Move everything by one transport, and print what was seen; the transport."""
    name = cast(TransportName, order["transport"])
    side = Side(shape_for(device), device, name, bytes_only=order["bytes_only"])
    if side_name == "receiver":
        rendezvous = make_rendezvous(name, HOST, SECRET)
        say({"address": rendezvous.address})
        transport = rendezvous.accept(pair_name)
        rendezvous.close()
        found = receive_all(side, transport)
    else:
        transport = make_connector(name, HOST, SECRET)(pair_name, order["address"])
        found = send_all(side, transport)
    say({**found, "transport": transport.name})
    return transport


def say(message: dict[str, Any]) -> None:
    """To who started this process."""
    print(json.dumps(message), flush=True)


def main(side_name: str, device_name: str) -> None:
    """Either side."""
    before: PairTransport | None = None
    for number, line in enumerate(iter(sys.stdin.readline, "")):
        if before is not None:
            before.close()
        before = move(side_name, torch.device(device_name), json.loads(line), f"handover-{number}")
    if before is not None:
        before.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
